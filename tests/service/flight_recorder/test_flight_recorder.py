"""Dumps of torch's flight recorder: what is read, and who is waited for."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from rankwatch_service.flight_recorder import DumpError, WaitVerdict, evaluate, read_dumps
from tests.support.ranks.gloo import on_ranks

GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3]}


def collective(number: int, group: str = "0", name: str = "nccl:all_reduce", **fields: Any) -> dict[str, Any]:
    return {
        "process_group": [group, f"group {group}"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "time_created_ns": number,
    } | fields


def message(number: int, name: str, group: str = "0") -> dict[str, Any]:
    return collective(0, group, name, is_p2p=True, p2p_seq_id=number)


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {name: {"name": name, "desc": "", "ranks": json.dumps(ranks)} for name, ranks in GROUPS.items()}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


def verdict(tmp_path: Path, *dumps: dict[str, Any]) -> WaitVerdict:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps({str(rank): one for rank, one in enumerate(dumps)}))
    return evaluate(read_dumps([path]))


def test_a_rank_that_launched_less_is_waited_for(tmp_path: Path) -> None:
    done = collective(1, state="completed")
    found = verdict(tmp_path, *[dump(done, collective(2))] * 2, dump(done), dump(done, collective(2)))
    assert found.awaited == (2,)
    assert [(one.sequence, one.waiting, one.missing) for one in found.waiting] == [(2, (0, 1, 3), (2,))]


def test_a_wait_is_followed_through_other_groups_to_who_waits_for_nobody(tmp_path: Path) -> None:
    # 0 and 1 wait for 2, which waits for 3 in a group of theirs.
    ahead, stuck = dump(collective(5)), dump(collective(9, "2"))
    assert verdict(tmp_path, ahead, ahead, stuck, dump()).awaited == (3,)


def test_a_wait_is_followed_through_messages(tmp_path: Path) -> None:
    # Everybody waits for 1, which waits for a message that 3 has not sent.
    ahead = dump(collective(5))
    assert verdict(tmp_path, ahead, dump(message(1, "nccl:recv 1<-3")), ahead, dump()).awaited == (3,)
    both = verdict(tmp_path, ahead, dump(message(1, "nccl:recv 1<-3")), ahead, dump(message(1, "nccl:send 3->1")))
    assert both.awaited == (1, 3)


def test_where_ranks_wait_for_each_other_the_first_collective_that_was_left_out_counts(tmp_path: Path) -> None:
    found = verdict(
        tmp_path, dump(collective(1, time_created_ns=10)), dump(collective(7, "1", time_created_ns=5)), dump(), dump()
    )
    assert found.awaited == (2, 3)
    found = verdict(
        tmp_path,
        *[dump(collective(1, "1", time_created_ns=10))],
        dump(collective(3, "0", time_created_ns=5), collective(0, "1")),
        *[dump(collective(3, "0", time_created_ns=6))] * 2,
    )
    assert found.awaited == (0,)


def test_what_a_rank_launched_and_its_ring_holds_no_more_is_not_missing(tmp_path: Path) -> None:
    found = verdict(tmp_path, *[dump(collective(5))] * 3, dump(collective(9, state="completed")))
    assert found.awaited == ()


def test_another_operation_or_size_is_named(tmp_path: Path) -> None:
    usual, other = dump(collective(5)), dump(collective(5, input_sizes=[[4]]))
    (differs,) = verdict(tmp_path, usual, usual, other, usual).mismatches
    assert (differs.sequence, list(differs.others)) == (5, [2])
    barrier = dump(collective(5, name="nccl:barrier"))
    (differs,) = verdict(tmp_path, usual, barrier, usual, usual).mismatches
    assert list(differs.others) == [1]


def test_a_size_of_its_own_in_a_reduce_scatter_is_a_mismatch(tmp_path: Path) -> None:
    name = "nccl:_reduce_scatter_base"
    ranks = [dump(collective(5, name=name, input_sizes=[[size]])) for size in (8, 8, 12, 8)]
    (differs,) = verdict(tmp_path, *ranks).mismatches
    assert list(differs.others) == [2]


def test_a_message_that_was_sent_and_buffered_keeps_nobody_waiting(tmp_path: Path) -> None:
    ahead = dump(collective(5))
    sent = dump(message(1, "nccl:send 3->1") | {"state": "completed"})
    assert verdict(tmp_path, ahead, dump(message(1, "nccl:recv 1<-3")), ahead, sent).awaited == (1, 3)


def test_uneven_sizes_of_an_all_to_all_are_no_mismatch(tmp_path: Path) -> None:
    ranks = [dump(collective(5, name="nccl:all_to_all", input_sizes=[[size]])) for size in (1, 2, 3, 4)]
    assert verdict(tmp_path, *ranks).mismatches == ()


def test_a_rank_without_a_dump_is_reported(tmp_path: Path) -> None:
    found = verdict(tmp_path, *[dump(collective(5))] * 3)
    assert (found.awaited, found.without_dump) == ((3,), (3,))


def test_files_of_one_rank_each_also_compressed(tmp_path: Path) -> None:
    first, second = tmp_path / "nccl_trace_rank_0.json", tmp_path / "nccl_trace_rank_1.json.gz"
    first.write_text(json.dumps(dump(collective(1))))
    second.write_bytes(gzip.compress(json.dumps(dump()).encode()))
    assert [one.rank for one in read_dumps([second, first])] == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rank_0", pickle.dumps({"entries": []}), "a pickle, which may run code"),
        ("rank_0", b"{", "not JSON"),
        ("rank_0.gz", gzip.compress(b"{}" * 1000, mtime=0)[:20], "cut off, or damaged"),
        ("rank_0", b"[]", "no object"),
        ("rank_0", b'{"a": 1}', "neither a dump of a rank nor an object of ranks"),
        ("trace", b'{"entries": []}', "does not end in the rank"),
        ("rank_0", b'{"entries": [{}]}', "not as torch writes it"),
        ("rank_0", b'{"pg_config": {"0": {"name": "0", "ranks": "all"}}}', "not as torch writes it"),
        ("rank_0", b'{"0": {"entries": 3}}', "not as torch writes it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_dump_is_a_clear_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpError, match=message):
        read_dumps([tmp_path / name])


def test_two_dumps_of_a_rank_and_a_missing_file_are_clear_errors(tmp_path: Path) -> None:
    for name in ("a_0.json", "b_0.json"):
        (tmp_path / name).write_text(json.dumps(dump()))
    with pytest.raises(DumpError, match="another dump of rank 0"):
        read_dumps([tmp_path / "a_0.json", tmp_path / "b_0.json"])
    with pytest.raises(DumpError, match="No such file"):
        read_dumps([tmp_path / "none_0.json"])


def recorded(rank: int) -> bytes:
    """Three collectives, the last of which rank 1 launches only after the dump."""
    values = torch.ones(3)
    dist.all_reduce(values)
    dist.broadcast(values, src=0)
    work = None if rank == 1 else dist.all_reduce(values, async_op=True)
    text: bytes = torch._C._distributed_c10d._dump_fr_trace_json(True, False)
    work = work or dist.all_reduce(values, async_op=True)
    assert work is not None
    work.wait()
    return text


def test_real_recordings_of_gloo_name_the_rank_that_never_launched(tmp_path: Path) -> None:
    for rank, text in enumerate(on_ranks(3, recorded)):
        (tmp_path / f"rank_{rank}.json").write_bytes(text)
    paths = sorted(tmp_path.iterdir())
    found = evaluate(read_dumps(paths))
    assert found.awaited == (1,)
    assert "all_reduce" in found.waiting[0].operation
    done = CliRunner().invoke(app, ["flight-recorder", *map(str, paths)])
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "waited for: rank 1")
    done = CliRunner().invoke(app, ["flight-recorder", "--json", *map(str, paths)])
    assert json.loads(done.stdout)["awaited"] == [1]
