from pathlib import Path

from rankwatch_service.demo.rank_files import Journal, JournalReader


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def unix_ns(self) -> int:
        self.now_ns += 100_000_000
        return self.now_ns

    def monotonic_s(self) -> float:
        raise AssertionError("a journal needs the wall clock only")

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a journal never waits")


def test_progress_is_that_of_the_slowest_rank_in_the_newest_attempt(tmp_path: Path) -> None:
    clock = FakeClock()
    journals = JournalReader(tmp_path, world_size=2)
    first, second = (Journal(tmp_path, "job-0", rank, clock) for rank in range(2))
    first.write("job-0.0", 7, 42)
    journals.look()
    assert (journals.attempt, journals.step) == ("job-0.0", -1)
    second.write("job-0.0", 7, 42)
    first.write("job-0.0", 8, 43)
    journals.look()
    assert (journals.attempt, journals.step) == ("job-0.0", 7)
    second.write("job-0.1", 5, 44)
    first.write("job-0.1", 5, 44)
    second.write("job-0.1", 6, 44)
    journals.look()
    assert (journals.attempt, journals.step) == ("job-0.1", 5)


def test_the_tenth_launch_is_newer_than_the_ninth(tmp_path: Path) -> None:
    journals = JournalReader(tmp_path, world_size=1)
    for number in (10, 9):
        Journal(tmp_path, f"job-{number}", 0, FakeClock()).write(f"job-{number}.0", number, 1)
    journals.look()
    assert journals.attempt == "job-10.0"


def test_a_step_ends_when_its_last_rank_ends_it(tmp_path: Path) -> None:
    clock = FakeClock()
    journals = JournalReader(tmp_path, world_size=2)
    ranks = [Journal(tmp_path, "job-0", rank, clock) for rank in range(2)]
    for step in range(3):
        for rank in ranks:
            rank.write("job-0.0", step, step)
    journals.look()
    assert journals.ended_unix_ns("job-0.0", 0) == 1_200_000_000
    assert journals.ended_unix_ns("job-0.0", 3) is None
    assert journals.step_time_s() == 0.2


def test_weights_that_differ_at_one_step_of_one_attempt_are_mixed(tmp_path: Path) -> None:
    journals = JournalReader(tmp_path, world_size=2)
    first, second = (Journal(tmp_path, "job-0", rank, FakeClock()) for rank in range(2))
    for journal in (first, second):
        journal.write("job-0.0", 1, 10)
    first.write("job-0.0", 2, 11)
    second.write("job-0.0", 2, 12)
    first.write("job-0.1", 2, 11)
    journals.look()
    assert journals.mixed() == [("job-0.0", 2)]


def test_a_step_that_one_rank_did_not_make_is_ragged_but_an_attempts_last_one_is_not(tmp_path: Path) -> None:
    journals = JournalReader(tmp_path, world_size=2)
    first, second = (Journal(tmp_path, "job-0", rank, FakeClock()) for rank in range(2))
    for step in (1, 2, 3):
        first.write("job-0.0", step, step)
    for step in (1, 3):
        second.write("job-0.0", step, step)
    journals.look()
    assert journals.ragged() == [("job-0.0", 2)]
    first.write("job-0.0", 4, 4)
    for journal in (first, second):
        journal.write("job-0.1", 2, 2)
    first.write("job-0.1", 3, 3)
    journals.look()
    assert journals.ragged() == [("job-0.0", 2)]
