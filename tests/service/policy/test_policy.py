from dataclasses import replace

import pytest

from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, Ledger, Shard
from rankwatch_service.policy.control_records import decode_control, encode_control
from rankwatch_service.policy.policy import (
    HOUR_NS,
    IncidentFacts,
    Mode,
    PastAction,
    Policy,
    PolicyLimits,
    Rule,
    decide,
    demotion,
    policy_of,
    policy_record,
)
from rankwatch_service.policy.precision import UNREVIEWED, Precision
from rankwatch_service.policy.suggestion import NOWHERE, Figures, suggest

NOW = 10 * HOUR_NS
CAN = ("pause", "checkpoint", "rollback", "rollback_memory", "rollback_disk", "stop", "relaunch")
BIT = IncidentFacts("i1", "j", "corruption", "critical", 1.0, 100, (2,), 4)
RELAUNCH = Policy((Rule("r", Mode.ACT, kind="hang", action="relaunch"),))
ROLL_BACK = Policy((Rule("r", Mode.ACT, kind="corruption", action="rollback"),))


def ledger(*steps, tier=CheckpointTier.LOCAL):
    made = Ledger()
    for step in steps:
        made.saved(Shard("l.0", step, 0, tier, "/x", 2.0, 1, step), 1)
    made.progressed("l.0", 0, 10_000)
    return made


def reported(incident=BIT, policy=ROLL_BACK, history=(), can=CAN, checkpoints=None, precision=UNREVIEWED):
    found = ledger(40, 80, 120) if checkpoints is None else checkpoints
    return decide(incident, policy, history, can, found, NOW, precision)


def test_without_rules_nothing_is_done_but_telling():
    assert reported(policy=Policy()).mode is Mode.NOTIFY


def test_a_rule_that_matches_acts_on_the_newest_good_checkpoint_before_the_onset():
    decision = reported()
    assert (decision.mode, decision.action, decision.rule) == (Mode.ACT, "rollback", "r")
    assert decision.params == {"checkpoint": "local:l.0:80"}
    assert not decision.approval_required


@pytest.mark.parametrize("kind", ["limit_reached", "forged_telemetry"])
def test_whoever_sends_forged_telemetry_does_not_steer_the_job_by_a_rule_for_every_kind(kind):
    sent = replace(BIT, kind=kind)
    decision = reported(sent, Policy((Rule("any", Mode.ACT, action="stop"),)))
    assert (decision.mode, decision.reason) == (Mode.SUGGEST, f"only a rule for {kind} acts on it")
    assert reported(sent, Policy((Rule("own", Mode.ACT, kind=kind, action="stop"),))).mode is Mode.ACT


def test_the_first_rule_that_matches_decides():
    rules = (
        Rule("other", Mode.ACT, kind="hang", action="relaunch"),
        Rule("sure", Mode.NOTIFY, confidence_min=0.99),
        Rule("rest", Mode.ACT, action="stop"),
    )
    assert reported(policy=Policy(rules)).rule == "sure"
    assert reported(replace(BIT, confidence=0.95), Policy(rules)).rule == "rest"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"policy": replace(ROLL_BACK, hands_off=True)}, "hands-off"),
        ({"can": ("pause",)}, "does not support"),
        ({"incident": replace(BIT, confidence=0.5)}, "confidence"),
        ({"checkpoints": Ledger()}, "no good checkpoint"),
        ({"checkpoints": ledger(100, 120)}, "no good checkpoint"),
        (
            {"incident": replace(BIT, processes_lost=True), "checkpoints": ledger(80, tier=CheckpointTier.MEMORY)},
            "no good",
        ),
        ({"history": [PastAction("rollback", NOW - 10**9)]}, "less than 60 s"),
        ({"history": [PastAction("stop", NOW - n * 300 * 10**9) for n in range(1, 5)]}, "budget of 4"),
    ],
)
def test_each_gate_turns_an_act_into_a_suggestion_with_its_reason(how, reason):
    decision = reported(**how)
    assert decision.mode is Mode.SUGGEST
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("least", "precision", "withheld", "reason"),
    [
        (0.0, UNREVIEWED, False, "rule r"),
        (0.0, Precision(0, 9), False, "rule r"),
        (0.6, Precision(4, 0), True, "the precision of corruption is not known: 4 of 5 incidents are judged"),
        (0.6, Precision(5, 4), True, "the precision of corruption is below 60%: 5 of 9 incidents were useful"),
        (0.6, Precision(3, 2), False, "rule r"),
        (0.55, Precision(11, 9), False, "rule r"),
        (1.0, Precision(5, 0), False, "rule r"),
    ],
)
def test_a_rule_acts_if_the_precision_of_the_kind_is_known_to_be_high_enough(least, precision, withheld, reason):
    policy = replace(ROLL_BACK, limits=PolicyLimits(precision_min=least))
    decision = reported(policy=policy, precision=precision)
    assert (decision.withheld, decision.reason) == (withheld, reason)
    assert decision.mode is (Mode.SUGGEST if withheld else Mode.ACT)
    assert (decision.action, decision.params) == ("rollback", {"checkpoint": "local:l.0:80"})


def test_what_was_done_more_than_an_hour_ago_is_not_counted():
    assert reported(history=[PastAction("stop", NOW - HOUR_NS)] * 9).mode is Mode.ACT


def test_a_large_job_needs_approval():
    assert reported(replace(BIT, world_size=65)).approval_required
    assert not reported(replace(BIT, world_size=64)).approval_required


@pytest.mark.parametrize(
    ("action", "world_size", "needed"),
    [
        ("rollback", 65, True),
        ("relaunch", 65, True),
        ("stop", 65, True),
        ("stop", 64, False),
        ("stop", 0, True),
        ("pause", 65, False),
        ("resume", 65, False),
        ("checkpoint", 65, False),
    ],
)
def test_two_people_are_needed_for_what_costs_much_and_only_where_that_is_set(action, world_size, needed):
    assert Policy(two_people=True).needs_second_person(action, world_size) is needed
    assert not Policy().needs_second_person(action, world_size)


def test_a_relaunch_names_the_culprits():
    hang = replace(BIT, kind="hang", hung=True, ranks=(3, 1))
    assert reported(hang, RELAUNCH).params == {"culprits": [3, 1]}


def test_a_rule_never_relaunches_from_scratch():
    hang = replace(BIT, kind="hang", hung=True)
    decision = reported(hang, RELAUNCH, checkpoints=ledger(40, tier=CheckpointTier.MEMORY))
    reason = "training would begin from scratch: there is no good checkpoint on disk: 1 good (memory)"
    assert (decision.mode, decision.action, decision.reason) == (Mode.SUGGEST, "relaunch", reason)
    assert reported(hang, RELAUNCH).mode is Mode.ACT


def test_a_hang_that_is_not_critical_yet_is_left_alone():
    hang = replace(BIT, kind="hang", severity="info", hung=True)
    assert (reported(hang, RELAUNCH).mode, reported(hang, RELAUNCH).action) == (Mode.SUGGEST, "relaunch")
    assert reported(replace(hang, severity="critical"), RELAUNCH).mode is Mode.ACT


def test_information_is_acted_upon_only_by_a_rule_that_names_it():
    info, named = replace(BIT, severity="info"), replace(ROLL_BACK.rules[0], severity="info")
    assert reported(info).mode is Mode.SUGGEST
    assert reported(info, Policy((named,))).mode is Mode.ACT


def test_what_is_only_possible_is_left_alone_whatever_the_limits_allow():
    bold = replace(RELAUNCH, limits=PolicyLimits(confidence_min=0.1))
    hang = replace(BIT, kind="hang", hung=True, severity="critical", confidence=0.65)
    assert reported(hang, bold).mode is Mode.SUGGEST
    assert reported(replace(hang, confidence=0.66), bold).mode is Mode.ACT


def test_a_policy_survives_the_log():
    policy = Policy(RELAUNCH.rules, PolicyLimits(actions_per_hour=9, precision_min=0.5), True, True)
    assert policy_of(decode_control(encode_control(policy_record(policy)))) == policy


def test_the_suggestion_prices_each_way_and_leads_with_what_the_policy_chose():
    figures = Figures(step=120, step_time_s=0.5, impact_gpu_hours_per_hour=4.0)
    made = suggest(BIT, reported(), figures, CAN, ledger(80))
    # 40 steps of 0.5 s to repeat and 2 s to read, on 4 ranks.
    assert (made["action"], made["checkpoint"]) == ("rollback", "local:l.0:80")
    assert made["cost_gpu_hours"] == pytest.approx(22 * 4 / 3_600)
    assert made["break_even_s"] == pytest.approx(22.0)
    others = {one["action"]: one["cost_gpu_hours"] for one in made["alternatives"]}
    assert others == {"relaunch": pytest.approx(142 * 4 / 3_600), "pause": 4.0, "investigate": 4.0}


def test_a_suggestion_only_names_what_the_job_can_do():
    figures = Figures(120, 0.5, 0.4)
    made = suggest(BIT, reported(policy=Policy()), figures, (), Ledger())
    assert (made["action"], made["alternatives"]) == ("investigate", [])
    assert made["reason"] == NOWHERE


@pytest.mark.parametrize("kind", ["nonfinite", "corruption", "loss_divergence", "hang"])
def test_nobody_is_told_to_wait_for_what_does_not_pass(kind):
    made = suggest(replace(BIT, kind=kind), reported(policy=Policy()), Figures(120, 0.5, 0.4), (), Ledger())
    assert "wait" not in [made["action"], *(one["action"] for one in made["alternatives"])]


LOW = Precision(useful=2, noise=3)
HANGS = Rule("hangs", Mode.ACT, kind="hang", action="relaunch")
ALL = Rule("all", Mode.ACT, action="pause")


@pytest.mark.parametrize(
    ("useful", "noise", "ratio", "interval"),
    [
        (0, 0, None, (0.0, 1.0)),
        (1, 0, 1.0, (0.207, 1.0)),
        (0, 1, 0.0, (0.0, 0.793)),
        (5, 5, 0.5, (0.237, 0.763)),
        (90, 10, 0.9, (0.826, 0.945)),
    ],
)
def test_the_ratio_comes_with_wilsons_interval(useful, noise, ratio, interval):
    precision = Precision(useful, noise)
    assert precision.ratio == ratio
    assert precision.interval == pytest.approx(interval, abs=5e-4)


@pytest.mark.parametrize(("useful", "noise", "low"), [(0, 4, False), (2, 3, True), (3, 3, False), (0, 5, True)])
def test_a_precision_is_low_below_one_half_of_five_answers_or_more(useful, noise, low):
    assert Precision(useful, noise).is_low is low
    assert (demotion("hang", Precision(useful, noise), Policy()) != "") is low


@pytest.mark.parametrize(
    ("rules", "proposed"),
    [
        ((), "no rule acts on it: leave it out of the receivers that page people"),
        ((Rule("s", Mode.SUGGEST, kind="hang", action="stop"),), "no rule acts on it"),
        ((Rule("other", Mode.ACT, kind="straggler", action="stop"),), "no rule acts on it"),
        ((HANGS,), "set the mode of hangs to suggest"),
        ((HANGS, ALL), "put a rule for hang with mode suggest before hangs, all"),
    ],
)
def test_what_is_proposed_depends_on_the_rules_that_act_on_the_kind(rules, proposed):
    assert demotion("hang", LOW, Policy(rules)).startswith(proposed)
