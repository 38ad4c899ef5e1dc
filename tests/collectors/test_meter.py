import math
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rankwatch import layout
from rankwatch.meter import StepMeter
from tests.support.clock import FakeClock
from tests.support.ranks.recorders import a_recorder, everything_in


class Bench:
    """A meter whose wall and CPU time the test moves."""

    def __init__(self, directory):
        self.wall = FakeClock(10**9)
        self.cpu = FakeClock(0)
        self.queue = FakeClock(0)
        self.recorder = a_recorder(directory, 0)
        clocks = {"cpu": self.cpu.unix_ns, "queue": self.queue.unix_ns}
        self.meter = StepMeter(self.recorder, now=self.wall.unix_ns, **clocks)

    def begin(self, step: int = 0) -> None:
        self.meter.begin(step, self.wall.now_ns, self.cpu.now_ns)

    def end(self) -> None:
        self.meter.end(self.wall.now_ns, self.cpu.now_ns)

    def work(self, wall_s: float, cpu_s: float = 0.0, queue_s: float = 0.0) -> None:
        self.wall.advance(wall_s)
        self.cpu.advance(cpu_s)
        self.queue.advance(queue_s)

    @property
    def steps(self):
        return [entry for entry in everything_in(self.recorder) if hasattr(entry, "busy_s")]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_busy_time_leaves_out_data_wait_and_collectives_and_wait_is_only_the_latter(bench):
    bench.begin()
    for name, wall_s, cpu_s in [("data_wait", 1, 0.1), ("forward", 2, 2), ("backward", 4, 3), ("collective", 8, 0.5)]:
        with bench.meter.phase(name):
            bench.work(wall_s, cpu_s)
    bench.work(16, 5)
    bench.end()
    (entry,) = bench.steps
    assert entry.step_time_s == pytest.approx(31)
    assert entry.busy_s == pytest.approx(2 + 4 + 16)
    assert entry.busy_cpu_s == pytest.approx(2 + 3 + 5)
    assert entry.wait_s == pytest.approx(8)
    assert entry.phases == pytest.approx({"data_wait": 1, "forward": 2, "backward": 4, "collective": 8})


def test_only_busy_time_counts_as_waiting_for_a_core_once_there_is_much_of_it(bench):
    bench.work(9, queue_s=7)
    for step in range(2):
        bench.begin(step)
        bench.work(4, 1, queue_s=2)
        with bench.meter.phase("collective"):
            bench.work(8, 1, queue_s=5)
        bench.work(2, 1, queue_s=1)
        bench.end()
    assert [entry.queued_s for entry in bench.steps] == pytest.approx([8, 3])


def test_steps_too_short_to_read_how_long_they_waited_for_a_core_leave_it_open_and_take_none_of_it_along(bench):
    for step, wall_s in enumerate((0.01, 0.0005, 0.01, 0.01)):
        bench.begin(step)
        bench.work(wall_s, queue_s=0.2 * wall_s)
        bench.end()
    assert [entry.queued_s for entry in bench.steps] == pytest.approx([0.002, math.nan, math.nan, 0.002], nan_ok=True)


def test_waiting_for_a_core_is_not_measured_where_torch_computes_with_several_threads(bench, monkeypatch):
    for step, threads in enumerate((4, 1)):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda threads=threads: threads))
        bench.meter.choose_clocks()
        bench.begin(step)
        bench.work(1, queue_s=0.5)
        bench.end()
    assert [entry.queued_s for entry in bench.steps] == pytest.approx([math.nan, 0.5], nan_ok=True)


def test_a_thread_that_sleeps_waits_for_no_core(tmp_path):
    recorder = a_recorder(tmp_path)
    meter = StepMeter(recorder)
    meter.begin(0, meter.now(), meter.cpu())
    time.sleep(0.2)
    meter.end(meter.now(), meter.cpu())
    (entry,) = everything_in(recorder)
    assert math.isnan(entry.queued_s) or entry.queued_s < entry.busy_s / 2


def test_waits_within_waits_count_once(bench):
    bench.begin()
    bench.meter.busy_off(bench.wall.now_ns)
    with bench.meter.phase("collective"):
        bench.work(2)
    bench.work(1)
    bench.meter.busy_on(bench.wall.now_ns)
    bench.work(4)
    bench.end()
    assert (bench.steps[0].busy_s, bench.steps[0].wait_s) == pytest.approx((4, 3))


def test_a_wait_that_was_left_open_is_forgotten_at_the_next_step(bench):
    bench.begin()
    bench.meter.busy_off(bench.wall.now_ns)
    bench.work(1)
    bench.end()
    bench.begin(1)
    bench.work(2)
    bench.meter.busy_on(bench.wall.now_ns)
    bench.end()
    assert bench.steps[1].busy_s == pytest.approx(2)


def test_a_phase_that_comes_twice_adds_up_and_one_inside_itself_counts_once(bench):
    bench.begin()
    for _ in range(2):
        with bench.meter.phase("forward"):
            bench.work(1)
            with bench.meter.phase("forward"):
                bench.work(1)
    bench.end()
    assert bench.steps[0].phases == pytest.approx({"forward": 4})


def test_phases_do_not_leak_into_the_next_step(bench):
    bench.begin()
    with bench.meter.phase("forward"):
        bench.work(1)
    bench.end()
    with bench.meter.phase("forward"):
        bench.work(5)
    bench.begin(1)
    with bench.meter.phase("backward"):
        bench.work(2)
    bench.end()
    first, second = (dict(entry.phases) for entry in bench.steps)
    assert (first, second) == (pytest.approx({"forward": 1}), pytest.approx({"backward": 2}))


def test_the_progress_block_names_the_innermost_phase_and_since_when(bench):
    words = bench.recorder.words
    bench.begin(5)
    assert words[layout.POSITION] == 6
    bench.work(1)
    with bench.meter.phase("forward"):
        outer_ns = bench.wall.now_ns
        assert words[layout.PHASE] == bench.recorder.phase("forward")
        bench.work(1)
        with bench.meter.phase("collective"):
            assert words[layout.PHASE] == bench.recorder.phase("collective")
            assert words[layout.PHASE_ENTERED] == bench.wall.now_ns
            bench.work(1)
        assert words[layout.PHASE] == bench.recorder.phase("forward")
        assert words[layout.PHASE_ENTERED] == outer_ns
    assert words[layout.PHASE] == layout.NO_PHASE
    assert words[layout.PHASE_ENTERED] == bench.wall.now_ns


@pytest.mark.parametrize(("phase", "kind"), [("forward", 0), ("eval", 1), ("checkpoint_save", 2)])
def test_a_step_with_an_evaluation_or_a_save_is_of_that_kind_and_the_next_one_is_not(bench, phase, kind):
    for step in range(2):
        bench.begin(step)
        with bench.meter.phase(phase if step == 0 else "forward"):
            bench.work(1)
        bench.end()
    assert [entry.kind for entry in bench.steps] == [kind, 0]


@pytest.mark.parametrize(
    ("phases_of_steps", "recorded", "dropped"),
    [((13, 2), [12, 2], 1), ((13, 0, 2, 0, 1), [12, 0, 2, 0, 1], 1), ((14, 14, 14), [12, 12, 12], 6)],
)
def test_from_the_thirteenth_on_phases_of_a_step_are_dropped_and_counted_and_none_is_of_the_step_before(
    bench, phases_of_steps, recorded, dropped
):
    for step, phases in enumerate(phases_of_steps):
        bench.begin(step)
        for number in range(phases):
            with bench.meter.phase(f"p{number}"):
                bench.work(1)
        bench.end()
    assert [len(entry.phases) for entry in bench.steps] == recorded
    assert bench.recorder.dropped == {"phases": dropped}


def test_the_65th_phase_name_costs_nothing_but_a_count(bench):
    bench.begin()
    for number in range(70):
        with bench.meter.phase(f"p{number}"):
            pass
    assert bench.recorder.dropped["phase_names"] == 6
    assert len(bench.meter.phases) == 64


@pytest.mark.parametrize("name", ["step", "rank", "busy_s", "phase.forward"])
def test_names_of_the_records_own_columns_are_refused(bench, name):
    assert bench.meter.metric(name) == -1
    assert bench.recorder.dropped == {"metric_names": 1}


def test_fingerprints_and_counts_are_exact_to_the_last_bit(bench):
    bench.begin()
    bench.meter.put_exact("fingerprint", 2**63 - 1)
    bench.meter.put_exact("nonfinite", 3)
    bench.end()
    assert bench.steps[0].values == {"fingerprint": 2**63 - 1, "nonfinite": 3}


def test_late_values_keep_the_step_and_k_they_belong_to(bench):
    bench.begin(9)
    bench.meter.late(7, 1, {bench.meter.metric("loss"): 0.5}, {"fingerprint": 11})
    (entry,) = everything_in(bench.recorder)
    assert (entry.step, entry.k, dict(entry.values)) == (7, 1, {"loss": 0.5, "fingerprint": 11})


def test_collectives_show_at_once(bench):
    for _ in range(3):
        bench.meter.collective()
    assert bench.recorder.words[layout.COLLECTIVES] == 3


def test_cpu_time_is_the_training_threads_whoever_reads_it(tmp_path):
    meter = StepMeter(a_recorder(tmp_path))
    deadline = time.monotonic() + 20
    while meter.cpu() < 20_000_000:
        assert time.monotonic() < deadline
    readings = []
    reader = threading.Thread(target=lambda: readings.append(meter.cpu()))
    reader.start()
    reader.join()
    assert readings[0] >= 20_000_000  # a new thread's own clock would have begun at 0


def test_where_torch_computes_with_several_threads_the_processs_cpu_time_counts(tmp_path, monkeypatch):
    meter = StepMeter(a_recorder(tmp_path))
    for threads in (4, 1):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda threads=threads: threads))
        meter.choose_clocks()
        assert (meter.cpu is time.process_time_ns) == (threads > 1)
