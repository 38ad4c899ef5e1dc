"""What an agent keeps of a dump of torch's flight recorder tells the same as the whole one."""

import json
from typing import Any

import pytest

from rankwatch.agent.hang.flight_dump import DUMP_CHARS_MAX, OPEN_MAX, reduced
from rankwatch_service.flight_recorder.record import RankDump, parsed
from rankwatch_service.flight_recorder.verdict import judge
from rankwatch_service.incidents.hang import flight_dumps

GROUPS = {"": list(range(4)), "1": [0, 2]}


def entry(number: int, group: str = "0", name: str = "gloo:all_reduce", *, done: bool = True, **fields: Any) -> dict:
    return {
        "process_group": [group, f"group {group}"], "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": name, "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]],
        "state": "scheduled", "retired": done, "time_created_ns": number, "thread_name": "python",
    } | fields  # fmt: skip


def message(name: str, *, done: bool = True) -> dict:
    return entry(0, "0", name, done=done, is_p2p=True, p2p_seq_id=1)


def dump(*entries: dict) -> bytes:
    config = {name: {"name": name, "desc": "", "ranks": json.dumps(ranks)} for name, ranks in GROUPS.items()}
    return json.dumps({"version": "2.10", "pg_config": config, "entries": entries}).encode()


def both(*dumps: bytes) -> tuple[list[RankDump], list[RankDump]]:
    """What the whole dumps say, and what the reduced ones say."""
    whole = [parsed("whole", rank, json.loads(one)) for rank, one in enumerate(dumps)]
    return whole, [parsed("reduced", rank, json.loads(reduced(one))) for rank, one in enumerate(dumps)]


@pytest.mark.parametrize(
    "dumps",
    [
        [[entry(n) for n in range(1, 500)] + ([entry(500, done=False)] if rank != 3 else []) for rank in range(4)],
        [
            [entry(1), entry(2, name="gloo:broadcast" if rank == 1 else "gloo:all_reduce", done=False)]
            for rank in range(4)
        ],
        [[entry(1), entry(7, "1", done=False)], [entry(1)], [entry(1)], [entry(1)]],
        [[message("gloo:send 0->1")] * 9, [message("gloo:recv 1<-0")] * 9 + [message("gloo:recv 1<-0", done=False)]],
        [[entry(1)], [entry(1)], [entry(1)], [entry(1)]],
    ],
    ids=["one did not launch", "one launched something else", "in a group", "a message", "nobody waits"],
)
def test_the_verdict_is_that_of_the_whole_dump(dumps: list[list[dict]]) -> None:
    whole, kept = both(*(dump(*entries) for entries in dumps))
    assert judge(kept) == judge(whole)
    assert sum(len(one.entries) for one in kept) <= 8


def test_what_is_sent_is_bounded() -> None:
    sizes = [[4096, number] for number in range(1_000)]
    text = reduced(dump(*(entry(n, done=False, input_sizes=sizes) for n in range(1, 2_000))))
    assert len(json.loads(text)["entries"]) == OPEN_MAX + 1
    assert len(text) < 4_096
    groups = [entry(1, f"{number}", done=False) for number in range(1_000)]
    with pytest.raises(ValueError, match="at most 16384"):
        reduced(dump(*groups))
    assert flight_dumps.DUMP_CHARS_MAX == DUMP_CHARS_MAX, "the service reads what agents send"


@pytest.mark.parametrize(
    "raw", [b"", b"\x80\x04", b"[]", b"{}", b'{"entries": [{}], "pg_config": {}}', b'{"entries": 3, "pg_config": 1}']
)
def test_what_is_no_dump_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        reduced(raw)
