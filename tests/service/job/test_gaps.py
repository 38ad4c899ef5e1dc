import pytest

from rankwatch_service.job.gaps import BOOTS_MAX, GAP_WAIT_S, HOSTS_MIN, INTERVALS_MAX, Arrival, Gap, GapTracker


@pytest.fixture
def gaps() -> GapTracker:
    return GapTracker()


def test_a_message_in_order_is_new_and_a_repeated_one_changes_nothing(gaps):
    told = [gaps.arrive("h", "b", seq, 0.0) for seq in (0, 1, 1, 0, 2)]
    assert [one is Arrival.NEW for one in told] == [True, True, False, False, True]
    assert told[2:4] == [Arrival.REPEATED] * 2
    assert gaps.gaps(100.0) == []


def test_a_gap_is_reported_once_and_only_after_waiting(gaps):
    gaps.arrive("h", "b", 0, 0.0)
    gaps.arrive("h", "b", 4, 1.0)
    assert gaps.gaps(1.0 + GAP_WAIT_S - 0.1) == []
    assert gaps.gaps(1.0 + GAP_WAIT_S) == [Gap("h", "b", 3)]
    assert gaps.gaps(100.0) == []


def test_a_message_that_was_only_slower_fills_its_gap(gaps):
    for seq in (0, 3):
        gaps.arrive("h", "b", seq, 0.0)
    assert gaps.arrive("h", "b", 1, 0.5) is Arrival.LATE
    assert gaps.arrive("h", "b", 1, 0.5) is Arrival.REPEATED
    assert gaps.arrive("h", "b", 2, 0.5) is Arrival.LATE
    assert gaps.gaps(100.0) == []


def test_a_message_that_comes_after_its_gap_was_reported_is_late_and_not_repeated(gaps):
    for seq in (0, 2):
        gaps.arrive("h", "b", seq, 0.0)
    assert gaps.gaps(10.0) == [Gap("h", "b", 1)]
    assert gaps.arrive("h", "b", 1, 11.0) is Arrival.LATE


def test_messages_before_the_first_that_arrived_are_no_gap(gaps):
    assert gaps.arrive("h", "b", 500, 0.0) is Arrival.NEW
    assert gaps.arrive("h", "b", 499, 0.0) is Arrival.LATE
    assert gaps.gaps(100.0) == []


def test_each_boot_counts_anew_and_the_oldest_are_forgotten(gaps):
    for boot in range(BOOTS_MAX + 1):
        assert gaps.arrive("h", f"b{boot}", 0, 0.0) is Arrival.NEW
    assert gaps.arrive("h", f"b{BOOTS_MAX}", 0, 0.0) is Arrival.REPEATED
    assert gaps.arrive("h", "b0", 0, 0.0) is Arrival.NEW


def test_memory_of_gaps_is_bounded_and_none_is_lost_silently(gaps):
    count = INTERVALS_MAX + 10
    for seq in range(0, 2 * count + 1, 2):
        gaps.arrive("h", "b", seq, 0.0)
    assert gaps.gaps(0.0) == [Gap("h", "b", 10)]
    assert gaps.gaps(GAP_WAIT_S) == [Gap("h", "b", INTERVALS_MAX)]


def test_a_huge_jump_costs_no_memory(gaps):
    gaps.arrive("h", "b", 0, 0.0)
    gaps.arrive("h", "b", 2**50, 0.0)
    assert gaps.gaps(GAP_WAIT_S) == [Gap("h", "b", 2**50 - 1)]


def test_a_restored_state_goes_on_as_before(gaps):
    for seq in (0, 3):
        gaps.arrive("h", "b", seq, 0.0)
    again = GapTracker()
    again.restore(gaps.state())
    assert again.arrive("h", "b", 1, 1.0) is Arrival.LATE
    assert again.gaps(GAP_WAIT_S) == [Gap("h", "b", 1)]


def test_names_of_hosts_that_somebody_makes_up_take_no_more_memory_than_the_jobs_own():
    tracker = GapTracker()
    for number in range(10 * HOSTS_MIN):
        assert tracker.arrive(f"made-up-{number}", "b", 0, 0.0, ranks=4) is Arrival.NEW
    assert len(tracker.state()) == HOSTS_MIN
    for number in range(1_000):
        tracker.arrive(f"node-{number}", "b", 0, 0.0, ranks=1_000)
    assert len(tracker.state()) == HOSTS_MIN + 1_000, "a job of one rank on each host has room for all"
