"""The part of rankwatch on training hosts: the SDK in the training process, and the agent beside it.

import rankwatch

watch = rankwatch.start(job="gpt-small")
for step in watch.steps(max_steps):
    loss = train_step()
    watch.log(loss=loss)
"""

from rankwatch.loop import Checkpoint
from rankwatch.startup import capture, restore, start
from rankwatch.state import Capture
from rankwatch.watch import Watch

__all__ = ["Capture", "Checkpoint", "Watch", "capture", "restore", "start"]
