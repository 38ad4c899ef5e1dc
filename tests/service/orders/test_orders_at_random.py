"""Thousands of schedules of hold, do, go, in which agents fall silent, api processes stop and ranks are slow or die."""

import pytest

from tests.support.orders.training_world import World
from tests.support.trials.selection import trials

SEEDS = trials(100, 250)
ACTIONS = ("pause", "checkpoint", "rollback", "stop")


def play(action: str, seed: int) -> World:
    # 600 s are longer than every lease together: what has not come to an end by then never will.
    return World(seed, action).run(seconds=600.0)


@pytest.mark.parametrize("action", ACTIONS)
def test_ranks_never_act_at_different_steps_and_never_train_on_mixed_weights(action):
    applied = 0
    for seed in range(SEEDS):
        world = play(action, seed)
        told = f"seed {seed}: {world.command} {world.result}"
        assert not world.violations, told
        for order, steps in world.acted_steps().items():
            assert len(steps) == 1, f"{told}: {order} at steps {steps}"
        for rank in world.ranks:
            orders = [order for order, _, _ in rank.acted]
            assert len(orders) == len(set(orders)), f"{told}: rank {rank.number} acted twice on one order"
        if world.command == "applied":
            lagging = [rank.number for rank in world.ranks if not rank.acted]
            assert not lagging, f"{told}: applied without ranks {lagging}"
        assert world.over(), f"{told}: not at rest after 600 s, {[rank.mode for rank in world.ranks]}"
        applied += world.command == "applied"
    # Faults are many, but the rule must not win by never doing anything.
    assert applied > SEEDS / 2


@pytest.mark.parametrize("action", ACTIONS)
def test_without_faults_every_command_is_applied_on_all_ranks_by_its_first_order(action):
    for seed in range(40):
        world = World(seed, action, faults=False).run(seconds=60.0)
        assert (world.command, len(world.orders)) == ("applied", 1), f"seed {seed}: {world.result}"
        assert [len(rank.acted) for rank in world.ranks] == [1] * len(world.ranks)
        assert world.over()


def test_a_rank_that_did_not_act_never_trains_with_ranks_that_went_back():
    for seed in range(SEEDS):
        world = play("rollback", seed)
        trained = {rank.weights for rank in world.ranks if rank.state == "running"}
        assert len(trained) <= 1, f"seed {seed}: {trained}"
