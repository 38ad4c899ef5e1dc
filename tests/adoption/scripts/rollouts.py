"""Actors that play at their own pace and learn from what they played: no rank waits for another within a step."""

import os
import random

import torch
from torch import nn

import rankwatch

STEPS = 60

rank = int(os.environ["RANK"])
dice = random.Random(rank)
torch.manual_seed(rank)
policy = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)

watch = rankwatch.start(lockstep=False)
watch.torch(policy, optimizer)

for _ in watch.steps(STEPS):
    observations, actions, rewards = [], [], []
    with torch.no_grad():
        state = torch.randn(16)
        for _ in range(dice.randint(20, 60) * (1 + rank)):
            action = torch.distributions.Categorical(logits=policy(state)).sample()
            observations.append(state)
            actions.append(action)
            state = 0.9 * state + 0.3 * torch.randn(16) + 0.1 * action
            rewards.append(-state.square().mean())
    advantages = torch.stack(rewards)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    optimizer.zero_grad()
    logits = policy(torch.stack(observations))
    loss = -(torch.distributions.Categorical(logits=logits).log_prob(torch.stack(actions)) * advantages).mean()
    loss.backward()
    optimizer.step()
    watch.log(loss=loss, reward=float(torch.stack(rewards).mean()))
