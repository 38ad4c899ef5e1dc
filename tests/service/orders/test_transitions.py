"""`advance`, one rule at a time. Whole schedules are played in test_orders_at_random.py."""

from dataclasses import replace

import pytest
from sqlalchemy import select

from rankwatch.wire import Progress, View
from rankwatch_service.orders.order import CommandOutcome, HostView, Order, OrderSituation, Phase, S, advance, take_over
from rankwatch_service.orders.running_attempt import ATTEMPTS_MAX, ReceivedView, store_views
from rankwatch_service.store.models import AgentView
from tests.support.store.database import rows_of

NOW = 1_000 * S
HOSTS = {"a": (0, 1), "b": (2,)}


def order(phase, action="pause", *, step=100, since_s=0.1, lease_s=60.0, **changes):
    made = Order(
        "c.1", "c", "j", "l.0", action, phase, step, 1, "", "", -1, 0, (),
        NOW - int(since_s * S), NOW + int(lease_s * S), "", 7,
    )  # fmt: skip
    return replace(made, **changes)


def rank(number, step=100, **fields):
    return Progress(number, step, "", 0.0, 0.0, **fields)


def answer(number, what, step=100, **fields):
    state = {"held": "held", "done": "held"}.get(what, "running")
    return rank(number, step, **{"state": state, "order": "c.1", "answer": what, "answer_step": step, **fields})


def situation(ranks, *, age_s=0.05, **changes):
    by_rank = {one.rank: one for one in ranks}
    views = {
        host: HostView(NOW - int(age_s * S), tuple(by_rank[n] for n in numbers if n in by_rank))
        for host, numbers in HOSTS.items()
    }
    made = OrderSituation(NOW, NOW + 60 * S, "", False, False, HOSTS, views, 0.1, ((0, 1, 2),), True)
    return replace(made, **changes)


def all_ranks(what, **fields):
    return [answer(number, what, **fields) for number in range(3)]


def phase_of(before, now):
    moved, outcome = advance(before, now)
    return moved.phase, outcome.state if outcome else None


def test_the_step_lies_beyond_what_any_rank_can_have_reached_when_the_order_comes():
    moved, _ = advance(order(Phase.VIEW), situation([rank(0, 10), rank(1, 12), rank(2, 11)], age_s=0.25))
    # newest 12, ceil((0.25 + 0.1) / 0.1) + 1 = 5 steps
    assert (moved.phase, moved.step) == (Phase.HOLD, 17)


def test_the_margin_doubles_with_each_try():
    ranks = [rank(n, 10) for n in range(3)]
    steps = [advance(order(Phase.VIEW, try_number=n), situation(ranks, age_s=0.04))[0].step - 10 for n in (1, 2, 3)]
    assert steps == [3, 4, 7]


@pytest.mark.parametrize(
    "now",
    [
        situation([rank(0), rank(1), rank(2)], age_s=0.4),
        situation([rank(0), rank(2)]),
        situation([rank(0), rank(1), rank(2, state="held", order="x.1", answer="held")]),
        situation([rank(0), rank(1), rank(2)], step_time_s=None),
        situation([rank(0), rank(1), rank(2)], hosts={}),
    ],
    ids=["old view", "rank not told", "held by another", "pace unknown", "topology unknown"],
)
def test_no_step_is_chosen_while_something_is_not_known(now):
    assert phase_of(order(Phase.VIEW), now) == (Phase.VIEW, None)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"withdrawn": "by me"}, "cancelled"),
        ({"superseded": True}, "refused"),
        ({"expires_unix_ns": NOW - 1}, "expired"),
    ],
)
def test_what_must_not_begin_ends_before_do_and_never_after(changes, state):
    ranks = [rank(n) for n in range(3)]
    assert phase_of(order(Phase.VIEW), situation(ranks, **changes)) == (Phase.CLOSED, state)
    held = all_ranks("held")
    assert phase_of(order(Phase.HOLD), situation(held, **changes)) == (Phase.RELEASE, state)
    if state != "refused":
        assert advance(order(Phase.DO, "stop"), situation(held, **changes))[0].phase is Phase.DO


def test_a_job_that_ends_refuses():
    ranks = [rank(0), rank(1), rank(2, state="left")]
    assert phase_of(order(Phase.VIEW), situation(ranks)) == (Phase.CLOSED, "refused")


def test_do_is_written_when_all_stand_and_not_before():
    two = [answer(0, "held"), answer(1, "held"), rank(2, 99)]
    assert phase_of(order(Phase.HOLD), situation(two)) == (Phase.HOLD, None)
    assert phase_of(order(Phase.HOLD), situation(all_ranks("held"))) == (Phase.DO, "accepted")


@pytest.mark.parametrize(
    "ranks",
    [
        [answer(0, "held"), answer(1, "held"), answer(2, "passed", 101)],
        [answer(0, "held"), answer(1, "held"), rank(2, 101)],
        [answer(0, "held"), answer(1, "held"), answer(2, "released")],
        [answer(0, "held"), answer(1, "held"), answer(2, "held", 99)],
    ],
    ids=["passed", "past it", "its lease ended", "at another step"],
)
def test_do_is_never_written_with_a_rank_elsewhere(ranks):
    moved, _ = advance(order(Phase.HOLD), situation(ranks))
    assert moved.phase in (Phase.RELEASE, Phase.HOLD)


def test_a_silent_agent_releases_the_hold():
    assert phase_of(order(Phase.HOLD), situation(all_ranks("held"), age_s=2.1)) == (Phase.RELEASE, None)


def test_a_step_that_is_not_reached_in_time_releases_and_the_third_try_fails_the_command():
    late = order(Phase.HOLD, lease_s=-0.1)
    assert phase_of(late, situation(all_ranks("held"))) == (Phase.RELEASE, None)
    assert phase_of(replace(late, try_number=3), situation(all_ranks("held"))) == (Phase.RELEASE, "failed")


def test_the_first_rank_that_stands_shortens_the_time_for_do():
    ranks = [answer(0, "held"), rank(1, 99), rank(2, 99)]
    moved, _ = advance(order(Phase.HOLD), situation(ranks))
    assert moved.lease_unix_ns == NOW + 3 * S
    assert moved.version == 8


def test_a_rank_that_cannot_do_it_refuses_for_all():
    ranks = [answer(0, "failed", answer_detail="no hook"), rank(1), rank(2)]
    moved, outcome = advance(order(Phase.HOLD), situation(ranks))
    assert (moved.phase, outcome) == (Phase.RELEASE, CommandOutcome("refused", "rank 0: no hook"))


def test_a_pause_is_applied_once_and_then_lasts():
    moved, outcome = advance(order(Phase.DO), situation(all_ranks("done")))
    assert (moved.phase, outcome) == (Phase.DO, CommandOutcome("applied", "", 100))
    assert advance(moved, situation(all_ranks("done"))) == (moved, None)


def test_the_lease_of_a_pause_is_renewed_while_all_agents_answer():
    worn = order(Phase.DO, detail="paused", lease_s=30.0)
    moved, _ = advance(worn, situation(all_ranks("done")))
    assert moved.lease_unix_ns == NOW + 60 * S
    assert moved.wire().renewal > worn.wire().renewal
    assert advance(worn, situation(all_ranks("done"), age_s=3.0))[0] is worn
    assert advance(worn, situation(all_ranks("done"), age_s=21.0))[0].phase is Phase.GO


@pytest.mark.parametrize("action", ["checkpoint", "rollback", "stop"])
def test_go_is_written_when_all_are_done_and_the_command_is_applied(action):
    assert phase_of(order(Phase.DO, action), situation([*all_ranks("done")[:2], answer(2, "held")])) == (Phase.DO, None)
    assert phase_of(order(Phase.DO, action), situation(all_ranks("done"))) == (Phase.GO, "applied")


@pytest.mark.parametrize(
    "odd",
    [{"answer_k": 1}, {"answer_fingerprint": 5}, {"answer_step": 101}],
    ids=["another k", "other weights", "another step"],
)
def test_go_is_never_written_after_a_rollback_that_differs(odd):
    ranks = [answer(0, "done"), answer(1, "done"), answer(2, "done", **odd)]
    assert phase_of(order(Phase.DO, "rollback"), situation(ranks)) == (Phase.KILL, "failed")
    assert phase_of(order(Phase.DO, "rollback"), situation(ranks, can_relaunch=False)) == (Phase.CLOSED, "failed")


def test_weights_are_compared_among_replicas_only():
    ranks = [answer(n, "done", answer_fingerprint=n) for n in range(3)]
    now = situation(ranks, replicas=((0,), (1,), (2,)))
    assert phase_of(order(Phase.DO, "rollback"), now) == (Phase.GO, "applied")


@pytest.mark.parametrize(("action", "phase"), [("checkpoint", Phase.GO), ("rollback", Phase.KILL)])
def test_a_hook_that_fails_lets_training_go_on_only_where_the_weights_were_not_touched(action, phase):
    ranks = [answer(0, "done"), answer(1, "done"), answer(2, "failed", answer_detail="disk full")]
    moved, outcome = advance(order(Phase.DO, action), situation(ranks))
    assert (moved.phase, outcome.state) == (phase, "failed")
    assert "disk full" in outcome.result


def test_an_order_is_closed_when_all_have_gone_on_or_cannot_any_more():
    assert phase_of(order(Phase.GO), situation(all_ranks("went"))) == (Phase.CLOSED, None)
    assert phase_of(order(Phase.GO), situation(all_ranks("done"))) == (Phase.GO, None)
    assert phase_of(order(Phase.GO, lease_s=-1), situation(all_ranks("done"))) == (Phase.CLOSED, None)


def test_a_relaunch_is_applied_when_every_process_has_ended():
    kill = order(Phase.KILL, "relaunch")
    ended = [rank(n, state="exited") for n in range(3)]
    assert phase_of(kill, situation(ended)) == (Phase.CLOSED, "applied")
    assert phase_of(kill, situation([*ended[:2], rank(2)])) == (Phase.KILL, None)
    assert phase_of(kill, situation([])) == (Phase.KILL, None)
    late = order(Phase.KILL, "relaunch", since_s=30.0, lease_s=-1)
    assert phase_of(late, situation([*ended[:2], rank(2)])) == (Phase.CLOSED, "failed")
    # Agents that heard of it and then fell silent have ended with their ranks.
    assert phase_of(late, situation([*ended[:2], rank(2)], age_s=20.0)) == (Phase.CLOSED, "applied")


def in_pause(phase, action="checkpoint", **changes):
    return order(phase, action, detail="paused", **changes)


def test_a_checkpoint_takes_over_the_ranks_of_a_pause_at_their_step():
    fresh = order(Phase.VIEW, "checkpoint", step=-1)
    taken = take_over(fresh, in_pause(Phase.DO, "pause", step=100), NOW)
    assert (taken.phase, taken.step, taken.wire().lease_s) == (Phase.HOLD, 100, 60.0)
    acting, outcome = advance(taken, situation(all_ranks("held")))
    assert (acting.phase, acting.action, outcome.state) == (Phase.DO, "checkpoint", "accepted")


def test_after_a_checkpoint_in_a_pause_the_ranks_are_paused_again_until_they_are_resumed():
    saved = [answer(n, "done", answer_detail="/c/100") for n in range(3)]
    again, outcome = advance(in_pause(Phase.DO, lease_s=1), situation(saved))
    assert (again.phase, again.action, again.lease_unix_ns) == (Phase.DO, "pause", NOW + 60 * S)
    assert outcome == CommandOutcome("applied", "/c/100", 100)
    assert advance(again, situation(saved)) == (again, None)
    assert phase_of(again, situation(saved, resumed=True)) == (Phase.GO, None)
    late = replace(again, lease_unix_ns=NOW - 1)
    assert phase_of(late, situation(saved)) == (Phase.GO, None)


def test_a_checkpoint_in_a_pause_without_a_location_says_when_it_may_be_saved():
    _, outcome = advance(in_pause(Phase.DO), situation(all_ranks("done")))
    assert (outcome.state, "once the job is resumed" in outcome.result) == ("applied", True)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (situation([*all_ranks("done")[:2], answer(2, "failed", answer_detail="disk full")]), "rank 2: disk full"),
        (situation([*all_ranks("done")[:2], answer(2, "held")], now_unix_ns=NOW + 61 * S), "not all ranks answered"),
    ],
    ids=["one rank cannot save", "one rank saves for too long"],
)
def test_a_checkpoint_that_fails_in_a_pause_fails_alone_and_the_pause_goes_on(now, why):
    again, outcome = advance(in_pause(Phase.DO), now)
    assert (again.phase, again.action, outcome.state) == (Phase.DO, "pause", "failed")
    assert why in outcome.result
    # The ranks keep their answer while they wait.
    assert advance(again, replace(now, now_unix_ns=NOW)) == (again, None)


def test_a_pause_ends_after_a_checkpoint_in_which_a_process_has_ended():
    ranks = [*all_ranks("done")[:2], rank(2, state="exited")]
    again, outcome = advance(in_pause(Phase.DO), situation(ranks))
    assert outcome.state == "failed"
    assert phase_of(again, situation(ranks)) == (Phase.GO, None)


@pytest.mark.parametrize(
    ("changes", "state"), [({"withdrawn": "by me"}, "cancelled"), ({"expires_unix_ns": NOW - 1}, "expired")]
)
def test_a_checkpoint_in_a_pause_that_is_not_wanted_any_more_leads_back_to_the_pause(changes, state):
    some = situation([*all_ranks("held")[:2], answer(2, "went", order="p.1", state="held")], **changes)
    assert phase_of(in_pause(Phase.HOLD), some) == (Phase.HOLD, None)
    again, outcome = advance(in_pause(Phase.HOLD), situation(all_ranks("held"), **changes))
    assert (again.phase, again.action, outcome.state) == (Phase.DO, "pause", state)


def test_paused_ranks_that_shall_save_wait_for_a_silent_agent_as_long_as_in_the_pause():
    some = [*all_ranks("held")[:2], answer(2, "done", order="p.1", state="held")]
    assert phase_of(in_pause(Phase.HOLD), situation(some, age_s=19.0)) == (Phase.HOLD, None)
    assert phase_of(in_pause(Phase.HOLD), situation(some, age_s=21.0)) == (Phase.RELEASE, None)


def test_an_agent_keeps_the_views_of_its_newest_attempts_and_other_agents_keep_theirs(engine):
    store_views(engine, [ReceivedView(View("j", "l.0", "other", "b", 0, ()), "two", is_first=True)], 1)
    for k in range(ATTEMPTS_MAX + 3):
        views = [View("j", f"l.{k}", host, "b", 0, ()) for host in ("h0", "h1")]
        store_views(engine, [ReceivedView(view, "one", is_first=True) for view in views], 2 + k)
    kept = rows_of(engine, select(AgentView.host, AgentView.attempt).order_by(AgentView.host, AgentView.attempt))
    newest = [f"l.{k}" for k in range(3, ATTEMPTS_MAX + 3)]
    assert kept == [(host, one) for host in ("h0/one", "h1/one") for one in newest] + [("other/two", "l.0")]
