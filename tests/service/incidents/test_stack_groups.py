"""Stacks of all ranks of a hang become few groups, whatever order they arrive in."""

import json
import random

import pytest

from rankwatch_service.incidents.hang import (
    GROUPS_MAX,
    LEFT_OUT,
    RANKS_CHARS_MAX,
    SENTENCE,
    STACK_CHARS_MAX,
    TEXTS_MAX,
    StackGroups,
    rank_ranges,
)

REDUCE = "all_reduce (distributed_c10d.py:2810), from train (train.py:41)"
LOAD = "load (data.py:12)"


def dump(place: str, text: str = "", **fields) -> dict:
    return {"place": place, "where": place, "stack": text or f"stack of {place}", "reason": "", "order": "c1"} | fields


def grouped(dumps: dict[int, dict], asked: int = 0) -> dict:
    groups = StackGroups()
    for rank, fields in dumps.items():
        assert groups.add(rank, fields)
    return StackGroups.restored(json.loads(json.dumps(groups.state()))).evidence(asked or len(dumps))


def test_the_few_that_stand_elsewhere_come_first_and_all_are_told_in_a_sentence():
    shown = grouped({rank: dump(LOAD if rank == 3 else REDUCE, os_state="S") for rank in range(8)})
    assert [(one["ranks"], one["count"], one["stack"]) for one in shown["stacks"]] == [
        ("3", 1, f"stack of {LOAD}"),
        ("0-2,4-7", 7, f"stack of {REDUCE}"),
    ]
    assert shown[SENTENCE] == f"7 of 8 ranks stand in {REDUCE}; rank 3 in {LOAD}."
    assert shown["stacks"][0]["os_state"] == "S"
    assert "order" not in shown["stacks"][0]
    assert LEFT_OUT not in shown


def test_where_all_stand_at_one_place_there_is_one_stack():
    shown = grouped({rank: dump(REDUCE) for rank in range(4)})
    assert [one["ranks"] for one in shown["stacks"]] == ["0-3"]
    assert shown[SENTENCE] == f"All 4 ranks stand in {REDUCE}."


def test_ranks_that_have_not_answered_are_told_and_counted_nowhere_else():
    shown = grouped({0: dump(REDUCE), 1: dump(REDUCE), 2: dump(LOAD)}, asked=4)
    assert shown[SENTENCE] == f"2 of 3 ranks stand in {REDUCE}; rank 2 in {LOAD}; no answer of 1 rank."


def test_a_rank_without_a_stack_says_why():
    stopped = {"stack": "", "place": "", "where": "", "reason": "stopped by a signal"}
    shown = grouped({0: dump(REDUCE), 1: stopped, 2: dump(REDUCE), 5: stopped, 6: dump(REDUCE)})
    assert shown[SENTENCE] == f"3 of 5 ranks stand in {REDUCE}; ranks 1,5 gave no stack: stopped by a signal."


def test_stacks_of_agents_that_name_no_place_are_grouped_by_their_text_without_addresses():
    def told(address: str, line: int) -> dict:
        return {"stack": f"Thread 0x{address}:\n  File a.py, line {line}", "os_state": "R", "reason": ""}

    shown = grouped({0: told("7f00", 3), 1: told("7f01", 3), 2: told("7f02", 9)})
    assert [one["ranks"] for one in shown["stacks"]] == ["2", "0-1"]
    assert shown[SENTENCE] == "2 of 3 ranks stand at one place; rank 2 elsewhere."


def test_a_rank_answers_once():
    groups = StackGroups()
    assert groups.add(3, dump(LOAD))
    assert not groups.add(3, dump(REDUCE))
    assert groups.evidence(1)[SENTENCE] == f"The rank stands in {LOAD}."


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_makes_no_difference(seed):
    where = [REDUCE, REDUCE, LOAD, REDUCE, "x (y.py:1)", LOAD, REDUCE, REDUCE]
    # On each host of two ranks only the first at a place sends the text.
    dumps = {
        rank: dump(place, f"{place} of {rank}") | ({"stack": ""} if rank % 2 and where[rank - 1] == place else {})
        for rank, place in enumerate(where)
    }
    ranks = list(dumps)
    random.Random(seed).shuffle(ranks)
    assert grouped({rank: dumps[rank] for rank in ranks}) == grouped(dumps)


def test_sixteen_thousand_ranks_at_as_many_places_stay_small():
    dumps = {rank: dump(f"f{rank} (a.py:{rank})", "x" * 65_536) for rank in range(16_384)}
    for rank in range(8_192):
        dumps[2 * rank] |= {"place": REDUCE, "where": REDUCE}
    groups = StackGroups()
    for rank, fields in dumps.items():
        groups.add(rank, fields)
    assert len(json.dumps(groups.state())) < TEXTS_MAX * (STACK_CHARS_MAX + 1_000) + 16_384 * 40
    shown = groups.evidence(16_384)
    assert len(shown["stacks"]) == GROUPS_MAX
    assert all(len(one["stack"]) == STACK_CHARS_MAX for one in shown["stacks"])
    assert shown["stacks"][-1]["count"] == 8_192
    assert len(shown["stacks"][-1]["ranks"]) < RANKS_CHARS_MAX + 20
    assert shown[SENTENCE] == (
        f"8192 of 16384 ranks stand in {REDUCE}; rank 1 in f1 (a.py:1); rank 3 in f3 (a.py:3); rank 5 in f5 (a.py:5); "
        "8,189 ranks at 8,189 other places."
    )
    assert shown[LEFT_OUT] == "8,185 ranks at 8,185 further places"


def test_ranks_are_told_as_ranges_and_how_many_more():
    assert rank_ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"
    assert rank_ranges([5]) == "5"
    text = rank_ranges(range(0, 16_384, 2))
    assert len(text) < RANKS_CHARS_MAX + 20
    listed, _, more = text.partition(" and ")
    assert len(listed.split(",")) + int(more.removesuffix(" more").replace(",", "")) == 8_192


def test_fields_that_are_not_known_are_not_kept():
    shown = grouped({0: dump(REDUCE, junk="x" * 100_000)})
    assert "junk" not in shown["stacks"][0]


def test_native_frames_stand_below_the_stack_of_their_group():
    groups = StackGroups()
    assert not groups.add_native(0, "early")
    for rank in (1, 0):
        groups.add(rank, dump(REDUCE, text=f"stack of rank {rank}"))
        assert groups.add_native(rank, "ncclGroupEnd") is (rank == 1)
    (group,) = StackGroups.restored(json.loads(json.dumps(groups.state()))).evidence(2)["stacks"]
    assert group["stack"] == "stack of rank 0\n\nWith native frames (py-spy):\n\nncclGroupEnd"
    assert "native" not in group
