"""A rank that saves a checkpoint every 20 steps: `python saving_rank.py HOW FOLDER`, HOW for rank 0 alone.

limit: from the second save on files may have no more than a kilobyte, until there is a file `room` in the folder, and
the script goes on without them; taken: from the second save on a folder lies where the file belongs, and the script
does not catch it; retry: the second save succeeds at the second try; load: what it begins with is no checkpoint.
Rank 0 ends a save later; the other one ends when there is a file `done`.
"""

import os
import resource
import sys
import time

import torch

import rankwatch

EVERY = 20


class Saves:
    """The saves of one rank."""

    def __init__(self, watch: rankwatch.Watch, how: str, folder: str) -> None:
        self._watch = watch
        self._how = how
        self._folder = folder
        self.good = 0
        """Number of the newest save after the second that succeeded."""

    def path(self, number: int) -> str:
        return os.path.join(self._folder, f"save-{number}.{self._watch.identity.rank}.pt")

    def make(self, step: int) -> None:
        number = step // EVERY
        path = self.path(number)
        if self._how == "limit":
            small = number >= 2 and not os.path.exists(os.path.join(self._folder, "room"))
            limits = (1_000 if small else resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if number >= 2 and self._how in ("taken", "retry"):
            os.mkdir(path)
        try:
            self._save(path, step)
        except (OSError, RuntimeError):
            if self._how == "taken":
                raise
            if self._how != "retry":
                return
            os.rmdir(path)
            self._save(path, step)
        self.good = number if number > 2 else 0

    def _save(self, path: str, step: int) -> None:
        with self._watch.phase("checkpoint_save"):
            torch.save({"weight": torch.zeros(64, 64)}, path)
        self._watch.checkpoint_saved(step + 1, path)


def main(how: str, folder: str) -> None:
    is_first = os.environ["RANK"] == "0"
    watch = rankwatch.start("saves", checkpoint_roots=[folder])
    saves = Saves(watch, how if is_first else "", folder)
    if how == "load" and is_first:
        with open(saves.path(0), "wb") as file:
            file.write(b"no checkpoint")
        with watch.phase("checkpoint_load"):
            torch.load(saves.path(0), weights_only=True)
    while not (saves.good if is_first else os.path.exists(os.path.join(folder, "done"))):
        with watch.step() as step:
            watch.log(loss=1.0)
            time.sleep(0.05)
            if step and step % EVERY == 0:
                saves.make(step)
    watch.leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
