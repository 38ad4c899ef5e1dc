from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch_service.policy.checkpoint_ledger import (
    ENTRIES_MAX,
    PROOF_STEPS,
    REFUSED_MAX,
    SURVIVES_HOSTS,
    SURVIVES_PROCESSES,
    CheckpointTier,
    Ledger,
    LedgerEntry,
    Shard,
    Verdict,
    newest_good,
    save_interval_s,
)
from rankwatch_service.policy.rollback import RollbackMode, way_back, why_none


def shard(step, rank=0, attempt="l.0", tier=CheckpointTier.LOCAL):
    return Shard(attempt, step, rank, tier, f"/at/{step}", 1.0, 100, step)


def saved(ledger, step, *, attempt="l.0", tier=CheckpointTier.LOCAL, world_size=2):
    for rank in range(world_size):
        ledger.saved(shard(step, rank, attempt, tier), world_size)
    return f"{tier}:{attempt}:{step}"


@pytest.fixture
def ledger():
    return Ledger()


def verdicts(ledger):
    return {entry.id: entry.verdict for entry in ledger.entries}


def test_a_save_is_incomplete_until_all_its_shards_are_reported(ledger):
    [entry] = ledger.saved(shard(10, rank=1), expected=2)
    assert (entry.verdict, entry.shards) == (Verdict.INCOMPLETE, (1,))
    assert ledger.saved(shard(10, rank=1), expected=2) == []
    [entry] = ledger.saved(shard(10, rank=0), expected=2)
    assert (entry.verdict, entry.shards, entry.bytes) == (Verdict.UNPROVEN, (0, 1), 200)


def test_a_save_that_only_one_rank_makes_is_complete_at_once(ledger):
    [entry] = ledger.saved(shard(10), expected=1)
    assert entry.verdict is Verdict.UNPROVEN


def test_a_later_report_cannot_lower_how_many_shards_a_save_has(ledger):
    ledger.saved(shard(10, rank=1), expected=3)
    [entry] = ledger.saved(shard(10, rank=0), expected=1)
    assert (entry.verdict, entry.shards_expected) == (Verdict.INCOMPLETE, 3)


def test_what_was_refused_is_never_loaded_and_does_not_stand_in_the_way_of_the_honest_save(ledger):
    [entry] = ledger.refused(shard(10), "elsewhere")
    assert (entry.verdict, entry.reason, entry.shards) == (Verdict.REFUSED, "elsewhere", ())
    ledger.progressed("l.0", 0, 500)
    assert ledger.newest_good() is None
    saved(ledger, 10)
    ledger.progressed("l.0", 0, 500)
    good = ledger.newest_good()
    assert (good.step, good.location, good.shards) == (10, "/at/10", (0, 1))
    assert ledger.refused(replace(shard(10), location="/evil"), "elsewhere") == []
    assert ledger.newest_good() == good


def test_refused_saves_displace_no_other(ledger):
    kept = [saved(ledger, step) for step in range(ENTRIES_MAX - REFUSED_MAX)]
    for step in range(1_000, 1_000 + 2 * ENTRIES_MAX):
        ledger.refused(shard(step), "elsewhere")
    assert [entry.id for entry in ledger.entries if entry.verdict is not Verdict.REFUSED] == kept
    newest = [saved(ledger, step) for step in range(5_000, 5_000 + REFUSED_MAX)]
    assert [entry.id for entry in ledger.entries] == kept + newest


def test_clean_steps_make_a_save_good_and_not_one_step_earlier(ledger):
    saved(ledger, 10)
    assert ledger.progressed("l.0", 0, 10 + PROOF_STEPS - 1) == []
    [entry] = ledger.progressed("l.0", 0, 10 + PROOF_STEPS)
    assert entry.verdict is Verdict.GOOD


def test_steps_after_an_onset_prove_nothing(ledger):
    saved(ledger, 10)
    assert ledger.progressed("l.0", 0, 500, onset_step=10 + PROOF_STEPS) == []
    assert ledger.progressed("l.0", 0, 500, onset_step=11 + PROOF_STEPS)


def test_saves_from_the_onset_on_are_suspect_and_earlier_ones_stay_good(ledger):
    early, late = saved(ledger, 10), saved(ledger, 40)
    ledger.progressed("l.0", 0, 100)
    ledger.mark_suspect("l.0", 40, "a bit flipped")
    assert verdicts(ledger) == {early: Verdict.GOOD, late: Verdict.SUSPECT}
    assert ledger.newest_good().id == early


def test_a_rollback_keeps_what_lies_in_memory_and_a_relaunch_does_not(ledger):
    memory, local = saved(ledger, 10, tier=CheckpointTier.MEMORY), saved(ledger, 10)
    ledger.progressed("l.0", 0, 100)
    ledger.began("l.1", 10)
    assert verdicts(ledger) == {memory: Verdict.GOOD, local: Verdict.GOOD}
    ledger.began("m.0", 10)
    assert verdicts(ledger) == {memory: Verdict.GONE, local: Verdict.GOOD}


def test_ranks_forget_what_they_kept_of_steps_that_a_rollback_has_undone(ledger):
    before, target, undone = (saved(ledger, step, tier=CheckpointTier.MEMORY) for step in (10, 20, 30))
    ledger.progressed("l.0", 0, 100)
    ledger.began("l.1", 20)
    assert verdicts(ledger) == {before: Verdict.GOOD, target: Verdict.GOOD, undone: Verdict.GONE}


def test_what_an_attempt_left_unproven_behind_it_is_not_proven_by_another_way(ledger):
    left = saved(ledger, 50)
    ledger.began("l.1", 40)
    assert verdicts(ledger)[left] is Verdict.SUSPECT
    assert ledger.progressed("l.1", 40, 500) == []


def test_a_later_attempt_proves_the_save_that_it_came_from(ledger):
    source = saved(ledger, 40)
    ledger.began("m.0", 40)
    ledger.progressed("m.0", 40, 40 + PROOF_STEPS)
    assert verdicts(ledger)[source] is Verdict.GOOD


def test_half_a_save_of_an_attempt_that_ended_is_gone(ledger):
    ledger.saved(shard(10), expected=2)
    ledger.began("l.1", 5)
    assert list(verdicts(ledger).values()) == [Verdict.GONE]


def test_the_target_is_the_newest_good_one_in_the_fastest_tier_that_survives(ledger):
    for tier in CheckpointTier:
        saved(ledger, 10, tier=tier)
        saved(ledger, 20 if tier is CheckpointTier.REMOTE else 30, tier=tier)
    ledger.progressed("l.0", 0, 100)
    assert ledger.newest_good().id == "memory:l.0:30"
    assert ledger.newest_good(SURVIVES_PROCESSES).id == "local:l.0:30"
    assert ledger.newest_good(SURVIVES_HOSTS).id == "remote:l.0:20"
    assert ledger.newest_good(before_step=30).id == "remote:l.0:20"
    assert ledger.newest_good(before_step=10) is None
    ledger.lost("memory:l.0:30", "overwritten")
    assert ledger.newest_good().id == "local:l.0:30"


def test_the_ledger_of_a_long_job_is_bounded(ledger):
    for step in range(ENTRIES_MAX + 50):
        saved(ledger, step, world_size=1)
    assert len(ledger.entries) == ENTRIES_MAX
    assert ledger.entries[0].step == 50


@given(
    st.lists(st.tuples(st.sampled_from(list(CheckpointTier)), st.integers(0, 50), st.sampled_from(list(Verdict)))),
    st.integers(0, 50),
)
def test_nothing_but_a_good_save_from_before_the_onset_is_ever_chosen(saves, onset):
    ledger = Ledger()
    entries = [
        replace(ledger.saved(shard(step, tier=tier, attempt=f"l.{index}"), 1)[0], verdict=verdict)
        for index, (tier, step, verdict) in enumerate(saves)
    ]
    chosen = newest_good(entries, before_step=onset)
    fit = [entry for entry in entries if entry.verdict is Verdict.GOOD and entry.step < onset]
    assert (chosen is None) == (not fit)
    if chosen is not None:
        assert chosen in fit
        assert chosen.step == max(entry.step for entry in fit)


def test_saving_is_advised_more_often_the_more_fails_and_the_less_it_costs():
    assert save_interval_s(30.0, 0, 86_400.0) is None
    assert save_interval_s(0.0, 3, 86_400.0) is None
    usual = save_interval_s(30.0, 2, 86_400.0)
    assert save_interval_s(30.0, 8, 86_400.0) == usual / 2
    assert save_interval_s(120.0, 2, 86_400.0) == usual * 2


def test_a_capture_that_one_rank_has_lost_is_gone_and_that_is_reported_once(ledger):
    name = saved(ledger, 10, tier=CheckpointTier.MEMORY)
    ledger.progressed("l.0", 0, 100)
    [entry] = ledger.lost(name, "rank 1: newer captures replaced it")
    assert (entry.verdict, entry.reason) == (Verdict.GONE, "rank 1: newer captures replaced it")
    assert ledger.lost(name, "rank 0: the same") == []
    assert ledger.lost("memory:l.0:999", "never saved") == []
    assert ledger.newest_good() is None


def test_with_a_process_all_that_its_launch_kept_in_memory_is_gone_and_nothing_else(ledger):
    kept = saved(ledger, 5, attempt="k.0", tier=CheckpointTier.MEMORY), saved(ledger, 7)
    lost = saved(ledger, 10, tier=CheckpointTier.MEMORY), saved(ledger, 20, attempt="l.1", tier=CheckpointTier.MEMORY)
    assert {entry.id for entry in ledger.process_ended("l", rank=1)} == set(lost)
    assert ledger.process_ended("l", rank=0) == []
    assert {name for name, verdict in verdicts(ledger).items() if verdict is not Verdict.GONE} == set(kept)


def test_saves_that_go_on_after_a_fault_never_push_the_last_good_one_out_of_the_ledger(ledger):
    good = saved(ledger, 0, tier=CheckpointTier.MEMORY)
    ledger.progressed("l.0", 0, 100)
    for step in range(100, 100 * ENTRIES_MAX * 2, 100):
        name = saved(ledger, step, tier=CheckpointTier.MEMORY)
        ledger.lost(name, "newer captures replaced it")
    assert len(ledger.entries) <= ENTRIES_MAX
    assert ledger.newest_good().id == good


WHOLE = ("rollback", "rollback_memory", "relaunch")
HOOK = ("rollback", "rollback_disk", "relaunch")
NO_DATA = ("relaunch",)


def entry(tier, step, verdict=Verdict.GOOD):
    return LedgerEntry("l.0", step, CheckpointTier(tier), "/x", 1, (0,), 1.0, 1, step, verdict)


SAVES = [entry("memory", 400), entry("memory", 500), entry("local", 300), entry("remote", 200)]


def way(can, mode="", entries=SAVES, **how):
    found = way_back(entries, can, mode, **how)
    return None if found is None else (str(found.mode), found.entry.id)


@pytest.mark.parametrize(
    ("can", "mode", "expected"),
    [
        (WHOLE, "", ("full", "memory:l.0:500")),
        (HOOK, "", ("full", "local:l.0:300")),
        ((*WHOLE, "rollback_disk"), "", ("full", "memory:l.0:500")),
        (NO_DATA, "", ("relaunch", "local:l.0:300")),
        (("pause",), "", None),
        ((), "", ("full", "memory:l.0:500")),
        (NO_DATA, "full", None),
        (WHOLE, "relaunch", ("relaunch", "local:l.0:300")),
        (("rollback", "rollback_memory"), "relaunch", None),
    ],
)
def test_a_job_goes_back_in_full_else_by_a_relaunch(can, mode, expected):
    assert way(can, mode) == expected


def test_after_a_refusal_the_next_tier_is_taken_and_a_relaunch_last():
    can = (*WHOLE, "rollback_disk")
    refused = {(RollbackMode.FULL, CheckpointTier.MEMORY)}
    assert way(can, refused=refused) == ("full", "local:l.0:300")
    refused.add((RollbackMode.FULL, CheckpointTier.LOCAL))
    assert way(can, refused=refused) == ("full", "remote:l.0:200")
    refused.add((RollbackMode.FULL, CheckpointTier.REMOTE))
    assert way(can, refused=refused) == ("relaunch", "local:l.0:300")
    assert way(can[:-2], refused=refused) is None


@pytest.mark.parametrize("verdict", [Verdict.GOOD, Verdict.UNPROVEN, Verdict.SUSPECT])
def test_what_was_asked_for_by_its_id_is_taken_whatever_is_thought_of_it(verdict):
    saves = [*SAVES, entry("memory", 450, verdict)]
    assert way(WHOLE, entries=saves, wanted="memory:l.0:450") == ("full", "memory:l.0:450")


@pytest.mark.parametrize("verdict", [Verdict.GONE, Verdict.INCOMPLETE])
def test_in_place_of_what_is_gone_comes_the_newest_good_one_that_is_not_newer(verdict):
    saves = [*SAVES, entry("memory", 450, verdict)]
    assert way(WHOLE, entries=saves, wanted="memory:l.0:450") == ("full", "memory:l.0:400")
    assert way(NO_DATA, entries=saves, wanted="memory:l.0:450") == ("relaunch", "local:l.0:300")


def test_a_save_on_disk_that_was_asked_for_is_relaunched_from_where_the_processes_cannot_load_it():
    assert way(WHOLE, wanted="local:l.0:300") == ("relaunch", "local:l.0:300")
    assert way(HOOK, wanted="local:l.0:300") == ("full", "local:l.0:300")


def test_only_what_is_older_than_the_trouble_and_survives_it_comes_into_question():
    assert way(WHOLE, before_step=500) == ("full", "memory:l.0:400")
    assert way(WHOLE, survives=(CheckpointTier.LOCAL, CheckpointTier.REMOTE)) == ("relaunch", "local:l.0:300")
    assert way(WHOLE, survives=(CheckpointTier.REMOTE,)) == ("relaunch", "remote:l.0:200")
    assert way(WHOLE, before_step=200) is None


def test_a_refusal_says_what_is_missing():
    assert why_none([], WHOLE) == "there is no checkpoint to go back to"
    corrupted = [entry("memory", 100, Verdict.SUSPECT), entry("memory", 50, Verdict.GONE)]
    assert (
        why_none(corrupted, WHOLE) == "there is no good checkpoint to go back to: 1 gone (memory), 1 suspect (memory)"
    )
    assert why_none(SAVES, ("pause",)) == "the job supports neither mode full nor relaunch"
    assert why_none(SAVES, ("relaunch",), "full") == "the job does not support mode full"
