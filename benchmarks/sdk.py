"""What the SDK costs the training thread. Each command prints a table.

    python benchmarks/sdk.py
    python benchmarks/sdk.py --before CHECKOUT [--rounds 10]

CPU time is judged where it can be, since wall time on a shared core is the scheduler's. "Between real steps" trains a
small transformer, so that the caches hold something else when the SDK's turn comes; the CPU time of each of its calls
is taken by itself and summed over the step, less what the taking costs. How cold a cache is depends on the neighbours
of the core, so NVRx's sections are measured in the same place too.

With --before, another checkout's SDK is measured alternately with this one's, each in a process of its own: in each
round one block of each. The figures are medians over all blocks, the ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

import rankwatch
from rankwatch import layout, spawn
from tests.support.trials.checkouts import alternately, serve

PHASES = ("data_wait", "forward", "backward", "collective", "optimizer", "other")
VALUES = {f"metric_{number}": 1.5 + number for number in range(16)}
ALL = "between real steps"
GOAL_US = 60
BLOCK_STEPS = 5_000, 40
"""Of a block: steps of the tight loop, and real ones."""
ALONE_RATIO = 0.97
"""CPU time over wall time of a loop that had its core to itself."""

ROW = "{:<66} {:>10} {:>10}  {}"
IMPORT = """
import os, time
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before, begun = rss(), time.process_time()
import rankwatch
print((time.process_time() - begun) * 1e3, (rss() - before) / 1e6)
"""


class CostTable:
    """Prints one row for each measured figure; `met` says whether all stayed within their goals."""

    def __init__(self) -> None:
        self.met = True
        print(ROW.format("what", "measured", "goal", ""))

    def row(self, what: str, measured: float, goal: float | None, unit: str) -> None:
        """Print one figure beside the most it may be."""
        met = goal is None or measured <= goal
        self.met &= met
        print(
            ROW.format(
                what, f"{measured:.2f}", "" if goal is None else f"{goal:g}", unit + ("" if met else "  MISSED")
            ),
            flush=True,
        )


def start(directory: Path, *, agent: bool = False) -> rankwatch.Watch:
    """A watch that records into `directory`."""
    env = {**os.environ, "RANKWATCH_DIR": str(directory), "XDG_CONFIG_HOME": str(directory)}
    return rankwatch.start("benchmark", agent=agent, env=env)


def tight(watch: rankwatch.Watch, steps: int, each: Callable[[], object] = lambda: None) -> None:
    """Steps with 6 phases and 16 values and nothing else."""
    for _ in watch.steps(steps):
        with watch.phase("data_wait"):
            pass
        with watch.phase("forward"):
            pass
        with watch.phase("backward"):
            pass
        with watch.phase("collective"):
            pass
        with watch.phase("optimizer"):
            pass
        with watch.phase("other"):
            pass
        watch.log(**VALUES)
        each()


def cpu_us(work: Callable[[], object], count: int, rounds: int = 7) -> float:
    """CPU microseconds of the thread for each of `count` pieces, the median of some rounds."""
    spent = []
    for _ in range(rounds):
        begun = time.thread_time_ns()
        work()
        spent.append((time.thread_time_ns() - begun) / count / 1e3)
    return statistics.median(spent)


def marks(phase: Callable[[str], AbstractContextManager[object]], count: int) -> None:
    """One phase, entered and left, again and again."""
    for _ in range(count):
        with phase("forward"):
            pass


def nothing(count: int) -> None:
    """The loop of `marks` around a context manager that does nothing, to be taken off."""
    empty = contextlib.nullcontext()
    for _ in range(count):
        with empty:
            pass


def training() -> list[tuple[str, Callable[[], object]]]:
    """What is done in each phase of a real step: a transformer of 3.2 million parameters on one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    values = {"batch": torch.randn(8, 64, 256), "loss": torch.zeros(())}
    work: list[Callable[[], object]] = [
        lambda: values.update(batch=torch.randn(8, 64, 256)),
        lambda: values.update(loss=model(values["batch"]).square().mean()),
        lambda: values["loss"].backward(),  # noqa: PLW0108 - the loss is another one each time
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        optimizer.step,
        optimizer.zero_grad,
    ]
    return list(zip(PHASES, work, strict=True))


def real_steps(
    steps: Iterator[int],
    phase: Callable[[str], AbstractContextManager[object]],
    log: Callable[[dict[str, float]], object],
) -> dict[str, float]:
    """CPU microseconds of each mark, the values and the boundary in a step of a real training, and of all: medians."""
    parts = training()
    clock = time.thread_time_ns
    names = [f"{edge} {name}" for name in PHASES for edge in ("enter", "leave")]
    spent: list[list[int]] = []
    while True:
        begun = clock()
        step = next(steps, None)
        taken = [clock() - begun]
        if step is None:
            medians = [statistics.median(one) / 1e3 for one in zip(*spent, strict=True)]
            total = statistics.median(map(sum, spent)) / 1e3
            return {ALL: total, **dict(zip(["boundary", *names, "16 values"], medians, strict=True))}
        for name, work in parts:
            begun = clock()
            mark = phase(name)
            mark.__enter__()
            taken.append(clock() - begun)
            work()
            begun = clock()
            mark.__exit__(None, None, None)
            taken.append(clock() - begun)
        values = {name: value + step for name, value in VALUES.items()}  # as new as a loop's own
        begun = clock()
        log(values)
        taken.append(clock() - begun)
        spent.append(taken)


def watched_steps(watch: rankwatch.Watch, steps: int) -> dict[str, float]:
    """The same for a watch with 6 phases and 16 values, less the control."""
    spent = real_steps(watch.steps(steps), watch.phase, lambda values: watch.log(**values))
    return {part: spent[part] - taking for part, taking in control(steps).items()}


def control(steps: int) -> dict[str, float]:
    """What reading the clock costs in these places, where it is as cold as what it measures."""
    empty = contextlib.nullcontext()
    return real_steps(iter(range(steps)), lambda _: empty, lambda _: None)


def rss_mb() -> float:
    """Resident memory of this process, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def nvrx_sections() -> Iterator[Callable[[str], AbstractContextManager[object]] | None]:
    """Sections of nvidia-resiliency-ext, timed on the CPU only as on a machine without a GPU; None if not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from nvidia_resiliency_ext.straggler import straggler
    except ImportError:
        yield None
        return

    class NoCupti:
        """Stands in for the GPU profiler, which needs a GPU."""

        def __init__(self, **_: object) -> None: ...
        def initialize(self) -> None: ...
        def shutdown(self) -> None: ...

    straggler.CuptiManager = NoCupti
    detector = straggler.Detector
    detector.initialize()
    yield lambda name: detector.detection_section(name, profile_cuda=False)
    detector.shutdown()


def agents_of(directory: Path) -> list[int]:
    """The processes of the agent that serves this directory: the supervisor and its worker."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if str(directory).encode() in words and any(word.startswith(b"rankwatch.agent") for word in words):
                found.append(int(entry.name))
    return found


def beside_an_agent(table: CostTable, directory: Path, steps: int) -> None:
    """The same steps while an agent reads them, is stopped, and is killed."""
    watch = start(directory, agent=True)
    deadline = time.monotonic() + 20
    while len(agents_of(directory)) < 2:
        if time.monotonic() > deadline:
            raise SystemExit("no agent came up within 20 s")
        time.sleep(0.05)
    agents = agents_of(directory)
    for state, number in (("alive", None), ("stopped (SIGSTOP)", signal.SIGSTOP), ("killed", signal.SIGKILL)):
        for pid in agents if number is not None else []:
            os.kill(pid, number)
        table.row(f"between real steps, agent {state}: CPU, median", watched_steps(watch, steps)[ALL], GOAL_US, "us")
    watch.close()


def imports(table: CostTable) -> None:
    """What `import rankwatch` costs a fresh process."""
    runs = []
    for _ in range(7):
        done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
        runs.append([float(number) for number in done.stdout.split()])
    table.row("import rankwatch: CPU", statistics.median(run[0] for run in runs), 30, "ms")
    table.row("import rankwatch: resident memory", statistics.median(run[1] for run in runs), 5, "MB")


def costs(table: CostTable, watch: rankwatch.Watch, steps: int) -> None:
    """Tight loops, phase marks and NVRx's sections."""
    tight(watch, 2_000)
    table.row("tight loop, 6 phases and 16 values: CPU per step", cpu_us(lambda: tight(watch, steps), steps), 10, "us")
    loop_us = cpu_us(lambda: nothing(steps), steps)
    mark_us = cpu_us(lambda: marks(watch.phase, steps), steps) - loop_us
    table.row("phase, entered and left: CPU (two marks)", mark_us, 1.0, "us")
    table.row("phase mark: CPU", mark_us / 2, 0.5, "us")
    with nvrx_sections() as section:
        if section is None:
            print("nvidia-resiliency-ext is not installed: no comparison")
        else:
            section_us = cpu_us(lambda: marks(section, steps), steps) - loop_us
            table.row("NVRx 0.4.1 section, same loop: CPU", section_us, None, "us")
            table.row("phase / NVRx section", mark_us / section_us, 0.2, "")
    moments: list[int] = []
    begun, begun_cpu = time.perf_counter_ns(), time.thread_time_ns()
    tight(watch, max(steps, 20_000), lambda: moments.append(time.perf_counter_ns()))
    ours = (time.thread_time_ns() - begun_cpu) / (time.perf_counter_ns() - begun)
    taken = sorted((after - before) / 1e3 for before, after in itertools.pairwise(moments))
    # On a core that others use too this is their time slice, and says nothing about us.
    goal = 1_000 if ours > ALONE_RATIO else None
    unit = "us" if ours > ALONE_RATIO else f"us; not judged: only {ours:.0%} of the core was ours"
    table.row("tight loop: wall time of a step, p99.9", taken[int(len(taken) * 0.999)], goal, unit)


def serve_blocks(directory: Path) -> None:
    """Measure a block whenever it is asked for."""
    watch = start(directory)
    tight_steps, steps = BLOCK_STEPS

    def block(_asked: None) -> dict[str, float]:
        tight_us = cpu_us(lambda: tight(watch, tight_steps), tight_steps, 3)
        return {"tight loop": tight_us, **watched_steps(watch, steps)}

    serve(block)
    watch.close()


def compare(before: str, rounds: int) -> None:
    """Print what the SDK of another checkout costs, and this one's."""
    ((earlier, now),) = alternately(before, rounds, [None], __file__)
    row = "| {:<20} | {:>9} | {:>9} | {:>5} |"
    print(row.format("CPU, median", "before us", "after us", "ratio"))
    print(row.format(*("-" * width for width in (20, 9, 9, 5))))
    for part in now[0]:
        sides = [[block[part] for block in side] for side in (earlier, now)]
        ratio = statistics.median(after / before for before, after in zip(*sides, strict=True))
        print(row.format(part, *(f"{statistics.median(side):.1f}" for side in sides), f"{ratio:.2f}"))


def main() -> int:
    """Measure everything."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=20_000, help="steps of each tight loop")
    options.add_argument("--real-steps", type=int, default=150, help="steps with work between the marks")
    options.add_argument("--long", type=int, default=1_000_000, help="steps over which the process must not grow")
    options.add_argument("--before", metavar="CHECKOUT", help="compare with another checkout's SDK, alternately")
    options.add_argument("--rounds", type=int, default=10, help="blocks of each side of a comparison")
    options.add_argument("--blocks", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.blocks:
        serve_blocks(chosen.blocks)
        return 0
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    if chosen.before:
        compare(chosen.before, chosen.rounds)
        return 0
    table = CostTable()
    with tempfile.TemporaryDirectory(dir=shared) as place:
        imports(table)
        watch = start(Path(place))
        if not watch.recording:
            raise SystemExit("there is no recorder to measure")
        costs(table, watch, chosen.steps)
        spent_us = watched_steps(watch, chosen.real_steps)[ALL]
        table.row("between real steps, no agent: CPU, median", spent_us, GOAL_US, "us")
        with nvrx_sections() as section:
            if section is not None:
                spent_us = real_steps(iter(range(chosen.real_steps)), section, lambda _: None)[ALL]
                spent_us -= control(chosen.real_steps)[ALL]
                table.row("between real steps, 6 NVRx sections and no values: CPU, median", spent_us, None, "us")
        before_mb = rss_mb()
        tight(watch, chosen.long)
        table.row(f"growth over {chosen.long:,} steps", rss_mb() - before_mb, 0.5, "MB")
        watch.close()
        beside_an_agent(table, Path(place), chosen.real_steps)
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + 40
            while spawn.lock_is_held(layout.agent_lock_path(place, "benchmark")) and time.monotonic() < deadline:
                time.sleep(0.1)
    return 0 if table.met else 1


if __name__ == "__main__":
    sys.exit(main())
