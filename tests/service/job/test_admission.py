"""How much state a job may have: by its cells, its size, and how many of its ranks have reported."""

import pytest

from rankwatch import wire
from rankwatch_service.job.admission import (
    CELLS_MAX,
    RANK_CELLS,
    RESERVED_CELLS,
    SILENT_CELLS_MAX,
    SMALL_CELLS,
    Admission,
    BundleAccepted,
    BundleRefused,
    BundleSplit,
    CellCount,
    CellDemand,
    CellQuota,
    Grant,
    has_room,
    limit_of,
)
from rankwatch_service.telemetry.bundle import Bundle
from rankwatch_service.telemetry.envelope import Reason
from tests.support.values.batches import batch, bundle, progress, ranks, table

LARGE = CELLS_MAX - RESERVED_CELLS


def demand(cells: int, *, reporting: bool = True) -> CellDemand:
    return CellDemand(cells, reporting)


@pytest.mark.parametrize(
    ("demanded", "others", "expected"),
    [
        (demand(LARGE), [], True),
        (demand(LARGE + 1), [], False),
        (demand(SMALL_CELLS + 1), [demand(LARGE)], False),
        (demand(SMALL_CELLS), [demand(LARGE)], True),
        (demand(SMALL_CELLS), [demand(LARGE), *[demand(SMALL_CELLS)] * 255], True),
        (demand(SMALL_CELLS), [demand(LARGE), *[demand(SMALL_CELLS)] * 256], False),
        (demand(SILENT_CELLS_MAX, reporting=False), [demand(LARGE - SILENT_CELLS_MAX)], True),
        (demand(SILENT_CELLS_MAX + 1, reporting=False), [], False),
        (demand(SMALL_CELLS + 1, reporting=False), [demand(SILENT_CELLS_MAX, reporting=False)], False),
        (demand(SMALL_CELLS, reporting=False), [demand(SILENT_CELLS_MAX, reporting=False)], True),
        (demand(SMALL_CELLS + 1), [demand(SILENT_CELLS_MAX, reporting=False)], True),
    ],
)
def test_small_jobs_have_room_and_large_ones_only_if_they_were_heard(
    demanded: CellDemand, others: list[CellDemand], expected: bool
):
    assert has_room(demanded, others) is expected


def test_the_largest_job_that_is_accepted_fits_with_sixteen_metrics():
    assert has_room(demand(131_072 * (RANK_CELLS + 16)), [])
    assert has_room(demand(131_072 * RANK_CELLS, reporting=False), []), "its first host may introduce itself"


def test_a_job_is_told_the_limit_that_holds_for_it():
    assert limit_of(demand(SMALL_CELLS, reporting=False)).limit == CELLS_MAX
    assert limit_of(demand(LARGE)).limit == LARGE
    assert limit_of(demand(LARGE, reporting=False)).limit == SILENT_CELLS_MAX


def test_a_job_is_granted_what_other_jobs_leave_it():
    beside_a_large_one = CellQuota("gpt", 7, lambda: [demand(LARGE)])
    assert beside_a_large_one.grant(demand(SMALL_CELLS)) == Grant("gpt", 7, SMALL_CELLS)
    assert beside_a_large_one.grant(demand(SMALL_CELLS + 1)) is None


def test_a_replay_grants_what_was_granted_at_that_record_whatever_other_jobs_have():
    crowded = [demand(CELLS_MAX)]
    assert CellQuota("gpt", 7, lambda: crowded, replayed_cells=20).grant(demand(10)) == Grant("gpt", 7, 20)
    assert CellQuota("gpt", 7, replayed_cells=20).grant(demand(21)) is None
    assert CellQuota("gpt", 7, replayed_cells=0).grant(demand(1)) is None


def test_a_job_takes_a_bundle_or_has_it_split_or_refuses_a_batch_for_a_reason(world):
    def admitted(*batches: wire.Batch, room: int = 20) -> Admission:
        quota = CellQuota("gpt", 0, replayed_cells=room)
        return world.job.admit(bundle(*batches), quota, world.now_s, world.effects)

    world.tick()
    rows = [batch(n, steps=table([n] * 4, range(4), loss=[1.0] * 4)) for n in (1, 2, 3, 4)]
    assert admitted(*rows[:2]) == BundleAccepted()
    assert admitted(*rows[:2]) == BundleSplit(), "they are repeated"
    new = {f"m{number}": [1.0] * 4 for number in range(100)}
    wide = [batch(n, steps=table([n] * 4, range(4), **new)) for n in (3, 4)]
    assert admitted(*wide, room=0) == BundleSplit()
    assert admitted(wide[0], room=0) == BundleAccepted(), "an attempt that runs goes on without its new metrics"
    other = batch(0, attempt="m.0", host="node-7", ranks=(wire.RankInfo(0, 131_072),))
    refused = admitted(other, room=0)
    assert isinstance(refused, BundleRefused)
    assert refused.reason is Reason.LIMIT


def counted(one: Bundle, count: CellCount | None = None) -> CellDemand:
    return (count or CellCount()).demand(one)


def test_declared_ranks_count_with_every_metric_and_few_rows_do_not_make_them_heard():
    info = (wire.RankInfo(0, 131_072),)
    forged = bundle(batch(0, ranks=info, steps=table([1], [0], a=[1.0], b=[1.0])))
    assert counted(forged) == CellDemand(131_072 * (RANK_CELLS + 2), is_reporting=False)


def test_without_infos_the_highest_rank_counts_and_those_that_were_heard():
    rows = bundle(batch(0, steps=table([1] * 8, range(8), loss=[1.0] * 8)))
    assert counted(rows) == CellDemand(8 * (RANK_CELLS + 1), is_reporting=True)
    far = bundle(batch(0, progress=(progress(131_071, 1),)))
    assert counted(far) == CellDemand(131_072 * RANK_CELLS, is_reporting=False)


def test_a_name_counts_once_for_each_family():
    count = CellCount()
    count.add(bundle(batch(0, ranks=ranks(4), steps=table([1], [0], loss=[1.0]))))
    again = bundle(batch(1, steps=table([2], [1], loss=[1.0]), values=table([2], [1], loss=[1.0], norm=[1.0])))
    assert counted(again, count).cells == 4 * (RANK_CELLS + 3)


def introduced(*reported: int, world_size: int = 256) -> Bundle:
    return bundle(batch(0, ranks=tuple(wire.RankInfo(rank, world_size) for rank in reported)))


def test_a_job_counts_as_heard_from_one_of_64_ranks_on():
    assert not counted(introduced(0, 1, 2)).is_reporting
    assert counted(introduced(0, 1, 2, 3)).is_reporting
    count = CellCount()
    count.add(introduced(0, 1))
    assert not counted(introduced(0, 1), count).is_reporting, "the same ranks again"
    assert counted(introduced(2, 3), count).is_reporting


def test_the_next_attempt_of_a_launch_has_the_same_ranks_and_other_names():
    count = CellCount()
    count.add(introduced(*range(4)))
    count.add(bundle(batch(1, steps=table([1], [0], loss=[1.0]))))
    after = count.next_attempt()
    assert counted(bundle(batch(2, attempt="l.1", progress=(progress(0, 1),))), after) == CellDemand(256 * RANK_CELLS)


def test_long_lists_of_parameter_names_count_too():
    info = (wire.RankInfo(0, 1, parameters=("x" * 1_024,) * 100),)
    assert counted(bundle(batch(0, ranks=info))).cells == RANK_CELLS + 100


def test_a_count_goes_on_from_its_state():
    count = CellCount()
    count.add(bundle(batch(0, steps=table([1] * 2, [0, 999], loss=[1.0] * 2))))
    restored = CellCount.restored(count.state())
    for reported in (range(1, 14), range(1, 15)):
        later = bundle(batch(1, steps=table([2] * len(reported), list(reported), loss=[1.0] * len(reported))))
        assert (
            counted(later, restored)
            == counted(later, count)
            == CellDemand(1_000 * (RANK_CELLS + 1), len(reported) == 14)
        )
