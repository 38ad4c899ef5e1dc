"""Dumps of torch's flight recorder become a sentence in the evidence of a hang."""

import json
import random

import pytest

from rankwatch_service.incidents.hang.flight_dumps import (
    DUMP_CHARS_MAX,
    DUMP_MEMBERS_MAX,
    DUMPS_MAX,
    VERDICT,
    FlightDumps,
)


def dump(number: int, *, world_size: int = 4, operation: str = "gloo:all_reduce", done: bool = False) -> dict:
    entry = {"process_group": ["0", "default_pg"], "collective_seq_id": number, "profiling_name": operation,
             "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "completed" if done else "scheduled",
             "time_created_ns": number}  # fmt: skip
    groups = {"": {"name": "", "desc": "", "ranks": f"0-{world_size - 1}"}}
    return {"order": "c1", "dump": json.dumps({"pg_config": groups, "entries": [entry]}), "reason": ""}


def told(dumps: dict[int, dict]) -> str | None:
    flight = FlightDumps()
    for rank, fields in dumps.items():
        flight.add(rank, fields)
    return FlightDumps.restored(json.loads(json.dumps(flight.state()))).evidence().get(VERDICT)


@pytest.mark.parametrize("seed", range(3))
def test_who_never_launched_is_told_in_whatever_order_dumps_arrive(seed):
    ranks = list(range(4))
    random.Random(seed).shuffle(ranks)
    dumps = {rank: dump(3, done=True) if rank == 3 else dump(4) for rank in ranks}
    assert told(dumps) == "Ranks 0-2 wait in gloo:all_reduce 4 of default_pg (0), never launched by rank 3."


def test_who_launched_something_else_is_told():
    dumps = {rank: dump(4, operation="gloo:broadcast" if rank == 1 else "gloo:all_reduce") for rank in range(4)}
    assert told(dumps) == (
        'As collective 4 of default_pg (0) most launched gloo:all_reduce [[4]] ["Float"], '
        'rank 1 gloo:broadcast [[4]] ["Float"].'
    )


def test_a_rank_without_a_dump_is_not_blamed_silently():
    assert told({rank: dump(4) for rank in range(3)}) == (
        "Ranks 0-2 wait in gloo:all_reduce 4 of default_pg (0), never launched by rank 3; there is no dump of rank 3."
    )


def test_where_nobody_waits_that_is_told():
    assert told({rank: dump(4, done=True) for rank in range(4)}) == "No rank waits for another one."


@pytest.mark.parametrize(
    "fields",
    [
        {"dump": "", "reason": "ConnectionRefusedError"},
        {"dump": "x"},
        {"dump": "[]"},
        {"dump": 3},
        {},
        {"dump": "[" * 16_000},
        {"dump": json.dumps({"pg_config": {"": {"name": "", "ranks": "0-9,x"}}, "entries": []})},
        dump(4) | {"dump": dump(4)["dump"] + " " * DUMP_CHARS_MAX},
    ],
    ids=["none", "no JSON", "a list", "a number", "empty", "deep", "no ranks", "long"],
)
def test_what_cannot_be_read_is_left_out(fields):
    assert not FlightDumps().add(0, fields)
    assert told({0: fields}) is None


def test_no_more_dumps_are_kept_than_are_requested():
    flight = FlightDumps()
    assert all(flight.add(rank, dump(4)) for rank in range(DUMPS_MAX))
    assert not flight.add(DUMPS_MAX, dump(4))
    assert not flight.add(0, dump(5))


@pytest.mark.parametrize(("groups", "size", "is_read"), [(1, DUMP_MEMBERS_MAX, True), (1, 999_999, False),
                         (2, DUMP_MEMBERS_MAX // 2, True), (3, DUMP_MEMBERS_MAX // 2, False)])  # fmt: skip
def test_groups_that_are_larger_than_any_job_are_not_read(groups, size, is_read):
    names = {str(number): {"name": str(number), "desc": "", "ranks": f"0-{size - 1}"} for number in range(groups)}
    assert FlightDumps().add(0, {"dump": json.dumps({"pg_config": names, "entries": []})}) is is_read
