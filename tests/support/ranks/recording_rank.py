"""A real process with a real recorder that does what its test says, line by line, and answers each line with "ok"."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import rankwatch
from rankwatch import layout

METRICS = 12


class RecordingRank:
    """The test's side of such a process."""

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        *,
        job: str = "gpt",
        launch: str = "l",
        world_size: int = 8,
        roots: str = "/checkpoints",
        host: str = "node-1",
        output: IO[bytes] | None = None,
    ) -> None:
        """`output`: a file that gets what the training script would print as errors; None: the test's own."""
        arguments = [str(directory), job, launch, str(rank), str(world_size), roots, host]
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks.recording_rank", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
        try:
            self._answer()
        except AssertionError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, *words: object) -> None:
        """Send one line and wait until it is done."""
        self.say(*words)
        self.done()

    def done(self) -> None:
        """Wait until the line is done."""
        self._answer()

    def say(self, *words: object) -> None:
        """Say one line that has no answer, like `exit 3`."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> "RecordingRank":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> None:
        line = self.process.stdout.readline()
        assert line == "ok\n", line


class _Rank:
    """The process itself."""

    def __init__(
        self, directory: str, job: str, launch: str, rank: str, world_size: str, roots: str, host: str
    ) -> None:
        self.watch = rankwatch.start(
            job,
            launch=launch,
            rank=int(rank),
            world_size=int(world_size),
            host=host,
            agent=False,
            env={**os.environ, "RANKWATCH_DIR": directory, "RANKWATCH_CHECKPOINT_ROOTS": roots},
        )

    def do_steps(self, count: str = "1", seconds: str = "0") -> None:
        for _ in range(int(count)):
            with self.watch.step() as step:
                self.watch.log(**{f"metric_{index}": step + index / 7 for index in range(METRICS)})
                time.sleep(float(seconds))

    def do_timed(self, count: str, seconds: str, path: str) -> None:
        """The same steps; leaves in a file how long the SDK took in each of them, in seconds."""
        took_s = []
        for _ in range(int(count)):
            began_s = time.perf_counter()
            with self.watch.step() as step:
                self.watch.log(**{f"metric_{index}": step + index / 7 for index in range(METRICS)})
            took_s.append(time.perf_counter() - began_s)
            time.sleep(float(seconds))
        Path(path).write_text(json.dumps(took_s))

    def do_follow_orders(self, steps: str) -> None:
        """Steps of 10 ms with everything that an order can ask for; says "ok" before it begins."""

        @self.watch.on_checkpoint
        def save(step: int) -> str:
            return f"/checkpoints/{step}"

        @self.watch.on_rollback
        def load(checkpoint: rankwatch.Checkpoint) -> int:
            return checkpoint.step

        print("ok", flush=True)
        for _ in self.watch.steps(int(steps)):
            time.sleep(0.01)

    def do_save(self, steps: str, every: str, folder: str) -> None:
        """Steps of 10 ms and a checkpoint of its own now and then; says "ok" before it begins."""
        print("ok", flush=True)
        for step in self.watch.steps(int(steps)):
            time.sleep(0.01)
            if (step + 1) % int(every) == 0:
                path = Path(folder) / f"step-{step + 1}.pt"
                path.touch()
                self.watch.checkpoint_saved(step + 1, str(path))

    def do_keep(self, keep: str, every: str) -> None:
        """Keep captures in memory from now on, of a job without weights."""
        self.watch.state(data=itertools.count, keep=int(keep), every=int(every))

    def do_close(self) -> None:
        self.watch.close()

    def do_tear(self) -> None:
        """Break the newest entry, as a crash in the middle of a store might."""
        recorder = self.watch._recorder
        at = layout.RING_OFFSET + (recorder.words[layout.HEAD] - 1) % layout.RING_ENTRIES * layout.ENTRY_BYTES
        recorder._view[at + 100] ^= 0xFF

    def do_hang(self, phase: str) -> None:
        """An endless loop in this phase of a step; says "ok" from within it."""
        with self.watch.step(), self.watch.phase(phase):
            self._endless_loop()

    def _endless_loop(self) -> None:
        print("ok", flush=True)
        while True:
            pass

    def do_exit(self, code: str) -> None:
        os._exit(int(code))

    def do_loop_exit(self, code: str) -> None:
        for _ in self.watch.steps(10):
            sys.exit(int(code))

    def do_raise(self, text: str) -> None:
        raise ConnectionError(text)

    def do_end(self) -> None:
        sys.exit(0)


def main() -> None:
    rank = _Rank(*sys.argv[1:])
    print("ok", flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        getattr(rank, f"do_{name}")(*arguments)
        print("ok", flush=True)


if __name__ == "__main__":
    main()
