"""Ranks of a gloo group that hang in an all_reduce at step 300, which the last one launches once there is a file `go`.

`python hanging_rank.py`, with RANK and WORLD_SIZE; beside the recorder lie the store and `go`.
"""

import os
import time

AT_STEP = 300
FOLDER = os.environ["RANKWATCH_DIR"]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train() -> None:
    import torch
    import torch.distributed as dist

    import rankwatch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=WORLD_SIZE)
    watch = rankwatch.start("hung")
    for step in watch.steps(AT_STEP + 5):
        time.sleep(0.05)
        if step == AT_STEP and RANK == WORLD_SIZE - 1:
            wait_for_go()
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def wait_for_go() -> None:
    while not os.path.exists(f"{FOLDER}/go"):
        time.sleep(0.01)


if __name__ == "__main__":
    train()
