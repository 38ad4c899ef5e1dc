"""What a start does about what it finds: one line for each case, and what holds in all of them."""

from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import pytest

from rankwatch_service.log.base import Claim, Offsets, Saved
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.stream.recovery import Facts, Plan, plan_start

COMMITTED = Offsets(100, 10, 5)
NEEDED = 40
BEFORE, RECENT, BEYOND = Offsets(30, 3, 1), Offsets(80, 8, 4), Offsets(130, 13, 6)
GPT = Saved("gpt", RECENT, "gpt's state")
SETTINGS = Saved(ALL_JOBS, Offsets(90, 9, 5), "settings")
OLD_SETTINGS = Saved(ALL_JOBS, BEFORE, "settings")
ELSEWHERE = Saved(ALL_JOBS, Offsets(700, 70, 3), "settings of another partition")


def moved(saved: Saved, position: int) -> Saved:
    offsets = saved.offsets
    return Saved(saved.job, Offsets(position, offsets.tick_number, offsets.control_position), saved.state)


def facts(**found: Any) -> Facts:
    """A partition whose log was trimmed to where it is needed, with 20 records that are not processed yet."""
    usual = {
        "claim": Claim(COMMITTED, 7, NEEDED, 2),
        "log_begin": NEEDED,
        "log_end": 120,
        "snapshots": (SETTINGS,),
        "unreadable": {},
        "idle": {},
        "jobs": frozenset({"gpt"}),
        "newest_settings": SETTINGS,
    }
    return Facts(**(usual | found))


@dataclass(frozen=True)
class Case:
    sentence: str
    facts: Facts
    plan: dict[str, Any] = field(default_factory=dict)
    """What is other than after a stop and a start at once: nothing is replayed, and nobody begins anew."""


NEW = Claim(Offsets(0, 0, 0), 1, 0, 0)
UNPROCESSED = Claim(COMMITTED, 7, 0, 0)
QUIET = {
    "snapshots": (SETTINGS,),
    "idle": {},
    "from_tables": (),
    "replay_from": SETTINGS.offsets,
    "replay_to": COMMITTED,
    "from_log": frozenset(),
    "resume_at": COMMITTED,
    "is_new_log": False,
    "needed_position": NEEDED,
    "save": (),
    "lost_records": 0,
}

CASES = (
    Case(
        "the first start of all begins with nothing",
        facts(claim=NEW, log_begin=0, log_end=0, snapshots=(), jobs=frozenset(), newest_settings=None),
        {"snapshots": (), "replay_from": NEW.offsets, "replay_to": NEW.offsets, "resume_at": NEW.offsets}
        | {"needed_position": 0},
    ),
    Case(
        "a job with a snapshot is restored from it and replayed from there",
        facts(snapshots=(SETTINGS, GPT)),
        {"snapshots": (SETTINGS, GPT), "replay_from": RECENT},
    ),
    Case(
        "the replay begins at the earliest record, tick and control record that any snapshot lacks",
        facts(snapshots=(SETTINGS, GPT, Saved("bert", Offsets(60, 9, 2), "")), jobs=frozenset({"gpt", "bert"})),
        {"snapshots": (SETTINGS, GPT, Saved("bert", Offsets(60, 9, 2), "")), "replay_from": Offsets(60, 8, 2)},
    ),
    Case(
        "a young job without a snapshot is replayed from where the log is kept",
        facts(),
        {"from_log": {"gpt"}, "replay_from": Offsets(NEEDED, 0, 2)},
    ),
    Case(
        "an unreadable snapshot does not matter while the log has everything",
        facts(claim=UNPROCESSED, log_begin=0, unreadable={"gpt": RECENT}),
        {"from_log": {"gpt"}, "replay_from": Offsets(0, 0, 0), "needed_position": 0},
    ),
    Case(
        "a job whose snapshots are unreadable is restored from the tables once the log was trimmed",
        facts(unreadable={"gpt": RECENT}),
        {"from_tables": ("gpt",)},
    ),
    Case(
        "a snapshot that is older than the trimmed log is as good as none",
        facts(snapshots=(SETTINGS, Saved("gpt", BEFORE, ""))),
        {"from_tables": ("gpt",)},
    ),
    Case(
        "settings whose snapshot is unreadable are lost once the log was trimmed",
        facts(snapshots=(GPT,), unreadable={ALL_JOBS: RECENT}),
        {"snapshots": (GPT,), "from_tables": (ALL_JOBS,), "replay_from": RECENT},
    ),
    Case(
        "settings that were saved long ago are used all the same: control records are never missing",
        facts(snapshots=(OLD_SETTINGS, GPT)),
        {"snapshots": (moved(OLD_SETTINGS, NEEDED), GPT), "replay_from": Offsets(NEEDED, 3, 1)},
    ),
    Case("an idle job stays in its row", facts(idle={"gpt": BEFORE}), {"idle": {"gpt": BEFORE}}),
    Case(
        "an idle job that came back and was saved since is restored from that snapshot",
        facts(idle={"gpt": BEFORE}, snapshots=(SETTINGS, GPT)),
        {"snapshots": (SETTINGS, GPT), "replay_from": RECENT},
    ),
    Case(
        "an idle job that came back and whose snapshot is unreadable is not taken from its old row",
        facts(idle={"gpt": BEFORE}, unreadable={"gpt": RECENT}),
        {"from_tables": ("gpt",)},
    ),
    Case(
        "a snapshot that is older than the idle row is not used",
        facts(idle={"gpt": Offsets(85, 9, 4)}, snapshots=(SETTINGS, GPT)),
        {"idle": {"gpt": Offsets(85, 9, 4)}},
    ),
    Case(
        "an idle row of a place that was never committed is not used",
        facts(idle={"gpt": BEYOND}),
        {"from_log": {"gpt"}, "replay_from": Offsets(NEEDED, 0, 2)},
    ),
    Case(
        "a snapshot of a job that another partition has now is left alone",
        facts(snapshots=(SETTINGS, GPT), jobs=frozenset()),
    ),
    Case(
        "a log that forgot what was not needed any more changes nothing",
        facts(log_begin=NEEDED - 1, snapshots=(SETTINGS, GPT)),
        {"snapshots": (SETTINGS, GPT), "replay_from": RECENT},
    ),
    Case(
        "a log that forgot needed records keeps the jobs whose snapshots lie behind the gap",
        facts(log_begin=70, snapshots=(SETTINGS, GPT)),
        {"snapshots": (SETTINGS, GPT), "replay_from": RECENT, "needed_position": 70},
    ),
    Case(
        "a job is restored from the tables where the log forgot records behind its snapshot",
        facts(log_begin=85, snapshots=(SETTINGS, GPT)),
        {"from_tables": ("gpt",), "needed_position": 85},
    ),
    Case(
        "a job without a snapshot is restored from the tables where the log forgot needed records",
        facts(log_begin=70),
        {"from_tables": ("gpt",), "needed_position": 70},
    ),
    Case(
        "an idle job is restored from the tables where the log forgot records behind its row",
        facts(log_begin=70, idle={"gpt": BEFORE}),
        {"from_tables": ("gpt",), "needed_position": 70},
    ),
    Case(
        "an idle job stays in its row where the log forgot records before it alone",
        facts(log_begin=70, idle={"gpt": RECENT}),
        {"idle": {"gpt": RECENT}, "needed_position": 70},
    ),
    Case(
        "records that were forgotten unprocessed are counted, and the stream goes on behind them",
        facts(log_begin=115, snapshots=(SETTINGS, GPT)),
        {"from_tables": ("gpt",), "lost_records": 15, "resume_at": Offsets(115, 10, 5), "needed_position": 115}
        | {"snapshots": (moved(SETTINGS, 100),), "replay_from": Offsets(100, 9, 5)},
    ),
    Case(
        "a job that was saved at the very end survives the loss of unprocessed records",
        facts(log_begin=115, snapshots=(SETTINGS, Saved("gpt", COMMITTED, ""))),
        {"lost_records": 15, "resume_at": Offsets(115, 10, 5), "needed_position": 115}
        | {"snapshots": (moved(SETTINGS, 100), Saved("gpt", COMMITTED, "")), "replay_from": Offsets(100, 9, 5)},
    ),
    Case(
        "a log that ends before what is committed is another one, and is read from its beginning",
        facts(log_begin=0, log_end=25, snapshots=(SETTINGS, GPT)),
        {"from_tables": ("gpt",), "is_new_log": True, "resume_at": Offsets(0, 10, 5), "needed_position": 0}
        | {"snapshots": (moved(SETTINGS, 100),), "replay_from": Offsets(100, 9, 5)},
    ),
    Case(
        "idle rows of another log are not used",
        facts(log_begin=0, log_end=25, idle={"gpt": RECENT}),
        {"from_tables": ("gpt",), "is_new_log": True, "resume_at": Offsets(0, 10, 5), "needed_position": 0}
        | {"snapshots": (moved(SETTINGS, 100),), "replay_from": Offsets(100, 9, 5)},
    ),
    Case(
        "a partition that is new takes the settings from another one and saves them at once",
        facts(claim=NEW, log_begin=0, log_end=3, snapshots=(), jobs=frozenset(), newest_settings=ELSEWHERE),
        {"snapshots": (Saved(ALL_JOBS, Offsets(0, 0, 3), ELSEWHERE.state),), "save": (ALL_JOBS,)}
        | {"replay_from": Offsets(0, 0, 3), "replay_to": Offsets(0, 0, 3), "resume_at": Offsets(0, 0, 3)}
        | {"needed_position": 0},
    ),
    Case(
        "a job that moved into a new partition is restored from the tables",
        facts(claim=NEW, log_begin=0, log_end=3, snapshots=(), newest_settings=ELSEWHERE),
        {"snapshots": (Saved(ALL_JOBS, Offsets(0, 0, 3), ELSEWHERE.state),), "save": (ALL_JOBS,)}
        | {"replay_from": Offsets(0, 0, 3), "replay_to": Offsets(0, 0, 3), "resume_at": Offsets(0, 0, 3)}
        | {"from_tables": ("gpt",), "needed_position": 0},
    ),
    Case(
        "a job that moved into a new partition before anybody saved settings is restored from the tables",
        facts(claim=NEW, log_begin=0, log_end=3, snapshots=(), newest_settings=None),
        {"snapshots": (), "replay_from": Offsets(0, 0, 0), "replay_to": NEW.offsets, "resume_at": NEW.offsets}
        | {"from_tables": ("gpt",), "needed_position": 0},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.sentence)
def test_plan(case):
    plan = plan_start(case.facts)
    found = {one.name: getattr(plan, one.name) for one in fields(Plan) if one.name in QUIET}
    assert found == QUIET | case.plan


def anything():
    """Every mix of a log, snapshots and rows, most of which no case names."""
    places = (None, BEFORE, RECENT, COMMITTED)
    for begin, end, saved, row, is_readable in product(
        (0, 30, NEEDED, 85, 110), (25, 120), places, (*places, BEYOND), (False, True)
    ):
        if begin > end:
            continue
        readable = (Saved("gpt", saved, ""),) if saved and is_readable else ()
        yield facts(
            log_begin=begin,
            log_end=end,
            snapshots=(SETTINGS, *readable),
            unreadable={"gpt": saved} if saved and not is_readable else {},
            idle={"gpt": row} if row else {},
            jobs=frozenset({"gpt", "bert"}),
        )


def test_every_job_starts_in_exactly_one_way():
    for found in anything():
        plan = plan_start(found)
        ways = [{saved.job for saved in plan.snapshots}, set(plan.idle), set(plan.from_tables), set(plan.from_log)]
        assert sorted(name for way in ways for name in way) == sorted({ALL_JOBS, "gpt", "bert"}), found


def test_nothing_is_replayed_that_the_log_does_not_have():
    for found in anything():
        plan = plan_start(found)
        first = plan.replay_from.position
        assert first == plan.replay_to.position or (found.log_begin <= first and not plan.is_new_log), found


def test_a_start_goes_on_at_a_position_that_the_log_has():
    for found in anything():
        plan = plan_start(found)
        assert found.log_begin <= plan.resume_at.position <= found.log_end, found
        assert plan.needed_position <= plan.resume_at.position, found


def test_a_second_start_after_the_first_begins_nobody_anew():
    """Whoever was restored from the tables has a row then, as of where the start went on."""
    for found in anything():
        plan = plan_start(found)
        again = plan_start(
            facts(
                claim=Claim(plan.resume_at, 8, plan.needed_position, 2),
                log_begin=found.log_begin,
                log_end=found.log_end,
                snapshots=tuple(moved(saved, plan.resume_at.position) for saved in plan.snapshots),
                idle={**plan.idle, **dict.fromkeys(plan.from_tables, plan.resume_at)},
                jobs=found.jobs,
            )
        )
        assert again.from_tables == (), found
        assert (again.lost_records, again.is_new_log) == (0, False), found
