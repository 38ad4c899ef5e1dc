"""Which way a job goes back, by what its ranks say that they can and by what lies where."""

import pytest

from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, LedgerEntry, Verdict
from rankwatch_service.policy.rollback import RollbackMode, way_back, why_none

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
