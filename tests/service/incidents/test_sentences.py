"""What is said of anything that is found: its numbers agree with each other and with its kind, in words of training.

Every sentence of the source is read; all detectors play jobs with drawn faults; and 10,000 drawn findings of all kinds
go through the text of messages.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from rankwatch_detectors.base import Change, Finding, Kind, Severity
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.devices import device_degraded, host_degraded, network_degraded
from rankwatch_detectors.devices.counter_detector import DeviceProblem
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.words import compared, lasting, slower_than
from rankwatch_detectors.words import duration as pace_duration
from rankwatch_service.api.routes.receivers import ReceiverSettings
from rankwatch_service.incidents.answers import impact, normal
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.kinds import KINDS, LIKELY
from rankwatch_service.incidents.model import IncidentVersion
from rankwatch_service.job.detection import DetectionPipeline
from rankwatch_service.policy.actions import POLICY_ACTIONS, Action
from rankwatch_service.policy.message_text import incident_text, with_held
from rankwatch_service.policy.response import impact_gpu_hours_per_hour
from rankwatch_service.policy.suggestion import WAIT
from rankwatch_service.policy.what_now import what_now
from rankwatch_service.simulate import faults as scripted
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from suite.pipeline import topology_state_of
from tests.support.trials.selection import in_ci
from tests.support.values.incidents import finding, topology_state

ROOT: Final = Path(__file__).parents[3]
COLUMN: Final = re.compile(r"(?<![\w/:.`])[a-z]+(?:_[a-z0-9]+)+(?![\w/(])")
"""A name of a column, or of another thing in the source."""
UNIT: Final = r"(?:ms|s|min|h|d|%|times|GPU-hours|rank-hours|GPUs|steps|ranks|MHz|W)\b"
NEVER: Final = (
    re.compile(r"sigma|times as long|log-likelihood|standard deviation", re.IGNORECASE),
    re.compile(rf"(?:^|[\s(])-\d[\d.,]*(?:e[+-]?\d+)? {UNIT}"),
    re.compile(rf"\b(?:nan|inf)\b(?: {UNIT})?"),
    re.compile(r"(?<![\d.])0 % (?:slower|above|below)"),
    re.compile(r"(?<![\d.])0\.\d+ times"),
)
GROWN: Final = re.compile(r"jumped to (?P<now>-?[\d.e+-]+) [^\n]*?(?:usual (?:is )?|usual: )(?P<usual>-?[\d.e+-]+\d)")


@lru_cache(maxsize=10_000)
def faults_of(text: str) -> list[str]:
    """What is wrong with a text for people; commands in it are not read."""
    read = re.sub(r"`[^`]*`|rankwatch \S+ \S+", "", text)
    wrong = [found.group() for never in NEVER if (found := never.search(read))]
    wrong += [found.group() for found in COLUMN.finditer(read)]
    wrong += [one.group() for one in GROWN.finditer(read) if float(one["now"]) <= float(one["usual"])]
    return wrong


@pytest.mark.parametrize(
    "text",
    [
        "Rank 3 takes 0.98 times as long as its peers.",
        "The grad_norm jumped to 32.",
        "The loss is high (34 sigmas).",
        "It costs -0.1 GPU-hours.",
        "The loss jumped to 1.5 in step 3; usual is 4.5.",
        "It lasted nan s.",
        "Rank 3 is 0 % slower than its peers.",
    ],
)
def test_what_contradicts_itself_is_seen(text: str) -> None:
    assert faults_of(text)


def sentences() -> Iterator[tuple[str, str]]:
    """(file and line, text) of all literals that are parts of sentences for people."""
    service = ROOT / "service/rankwatch_service"
    files = [*(ROOT / "detectors/rankwatch_detectors").rglob("*.py"), *(service / "incidents").glob("*.py")]
    files += [
        service / "policy" / f"{name}.py" for name in ("message_text", "suggestion", "response", "rollback", "what_now")
    ]
    for file in files:
        if file.name in ("explanation.py", "tuning.py"):  # how it was found, and settings: for those who tune it
            continue
        tree = ast.parse(file.read_text())
        left_out = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        left_out |= {id(part) for one in ast.walk(tree) if isinstance(one, ast.Raise) for part in ast.walk(one)}
        declared = [one for one in ast.walk(tree) if isinstance(one, ast.AnnAssign)]
        left_out |= {id(one.value) for one in declared if ast.unparse(one.target) == "STATE"}  # names of attributes
        formatted = {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in one.values}
        for one in ast.walk(tree):
            if not isinstance(one, ast.Constant) or not isinstance(one.value, str) or id(one) in left_out:
                continue
            if " " in one.value.strip() or (id(one) in formatted and " " in one.value):
                yield f"{file.name}:{one.lineno}", one.value


def test_no_sentence_in_the_source_has_a_word_of_the_source() -> None:
    read = list(sentences())
    assert len(read) > 500
    assert {where: wrong for where, text in read if (wrong := faults_of(text))} == {}


def test_comparisons_and_durations_agree_with_their_numbers() -> None:
    draw = np.random.default_rng(1)
    for ratio in 10.0 ** draw.uniform(-3, 3, 5_000):
        said = compared(ratio)
        assert bool(re.search("above|times", said)) == (ratio >= 1.005), (ratio, said)
        assert ("below" in said) == (ratio <= 0.995), (ratio, said)
        assert faults_of(f"It is {said} its usual size.") == []
        assert faults_of(f"It is {slower_than(1.01 + ratio, 'before')}.") == []
    signed = draw.choice((-1.0, 1.0), 5_000) * 10.0 ** draw.uniform(-6, 9, 5_000)
    for seconds in (*signed, math.nan, math.inf):
        assert faults_of(lasting(seconds)) == [], seconds
        if seconds > 0 and math.isfinite(seconds):
            assert faults_of(pace_duration(seconds)) == [], seconds


DEVICES: Final = {
    "power": ("power_w", "usual_power_w", "peers_power_w"),
    "clock": ("sm_clock_hz", "usual_sm_clock_hz", "peers_sm_clock_hz"),
    "link": ("pcie_width", "pcie_width_max"),
    "speed": ("pcie_generation", "pcie_generation_max"),
    "replays": ("pcie_replays_per_minute", "allowed_per_minute"),
    "unequal": ("sm_clock_hz", "sm_clock_max_hz", "peers_share"),
    "margin": (),
    "remap": (),
    "pending": (),
    "ecc": ("ecc_uncorrected",),
    "links": ("nvlinks_active", "usual_nvlinks_active"),
    "nvlink": ("new_errors",),
    "recovery": ("recovery_action",),
}
HOSTS: Final = {
    "throttled": ("cpu_throttled_ratio", "usual_cpu_throttled_ratio"),
    "steal": ("cpu_steal_ratio", "usual_cpu_steal_ratio"),
    "memory": ("memory_pressure_ratio", "usual_memory_pressure_ratio"),
    "oom": ("new_errors",),
}
PORTS: Final = {
    "down": (),
    "flap": (),
    "errors": ("new_errors",),
    "speed": ("usual_link_bits_per_s", "link_bits_per_s"),
    "retransmissions": ("retransmissions_per_s", "peers_retransmissions_per_s"),
}


def test_what_is_told_of_hardware_is_in_words_whatever_its_figures() -> None:
    draw, scope = np.random.default_rng(2), IncidentScope.of_rank(3)
    host = host_degraded.HostDegradedDetector(host_degraded.HostDegradedConfig())
    port = network_degraded.NetworkDegradedDetector(network_degraded.NetworkDegradedConfig())
    for _ in range(100):
        for rules, reported in ((DEVICES, device_degraded._reported), (HOSTS, host._sentence), (PORTS, port._sentence)):
            for what, names in rules.items():
                figures = {name: float(10 ** draw.uniform(-1, 10)) for name in names}
                problem = DeviceProblem(0, what, 1, evidence=figures)
                said = reported(scope, problem, "host-1", "GPU-1")
                assert faults_of(said) == [], said


def drawn_job(seed: int) -> Job:
    """A job of eight ranks with a drawn fault."""
    draw = np.random.default_rng(seed)
    rank, factor = int(draw.integers(8)), float(10 ** draw.uniform(-0.3, 0.8))
    far = float(10 ** draw.uniform(0.1, 3))
    ways = (
        scripted.Slow(rank, 60, factor),
        scripted.Slow(rank, 60, factor, data_wait=True),
        scripted.Slow((4, 5, 6, 7), 60, factor),
        scripted.Slow(rank, 0, factor),
        scripted.SlowJob(100, factor),
        scripted.Drift(100, factor, 80),
        scripted.WanderingPace(1.0, max(factor, 1.01), 60),
        scripted.Hang(rank, 80, float(draw.uniform(5, 90))),
        scripted.Kill(rank, 80),
        scripted.HostSilence("host-1", 80, int(draw.integers(90, 160))),
        scripted.NonFinite(rank, 80),
        scripted.Overflow(rank, 80),
        scripted.BitFlip(rank, 75),
        scripted.LocalGradient(rank, 80, factor),
        scripted.LossSpike(120, far),
        scripted.LossDivergence(120, 0.05 * factor),
        scripted.LossClimb(120, 1 + factor, 60),
        scripted.LossLevel(120, factor),
        scripted.NormSpike(120, far, 2),
    )
    fault = ways[seed % len(ways)]
    placement = RankPlacement(ranks_per_host=4, pp=2 if seed % 5 == 0 else 1)
    return Job(8, 180, seed, step_s=float(10 ** draw.uniform(-1, 1)), placement=placement).inject(fault)


@pytest.mark.parametrize("seed", [*range(19), *in_ci(range(19, 57))])
def test_what_detectors_say_of_drawn_faults_agrees_with_its_numbers(seed: int) -> None:
    job = drawn_job(seed)
    pipeline, topology = DetectionPipeline("gpt", detectors), topology_state_of(job.topology())
    said: dict[str, None] = {}
    for observation in generate(job):
        for news in pipeline.observe(observation, topology)[0]:
            incident = news.incident
            incident.impact_gpu_hours_per_hour = impact_gpu_hours_per_hour(incident, job.world_size)
            incident.transitions += 1
            now = incident.version()
            agrees(now)
            said |= dict.fromkeys((news.text, incident_text(now, job.world_size), *what_now(now, 8).listed))
    assert {text: wrong for text in said if (wrong := faults_of(text))} == {}


def agrees(incident: IncidentVersion) -> None:
    """The figures of an incident do not contradict what it says."""
    assert incident.impact_gpu_hours_per_hour >= 0
    assert incident.onset_unix_ns <= incident.detected_unix_ns
    assert incident.severity is Severity.INFO or incident.confidence >= LIKELY, incident.summary
    cost, ratio = (incident.evidence.get(name) for name in ("cost_gpu_hours_per_hour", "ratio"))
    assert cost is None or cost >= 0, incident.summary
    if "slower" in incident.summary or "as slow" in incident.summary:
        assert ratio is None or ratio > 1, incident.summary


FIGURES: Final = (
    *("ratio", "busy_s", "peers_busy_s", "seconds", "usual_s", "age_s", "usual_step_s", "value", "usual", "since_s"),
    *("cost_gpu_hours_per_hour", "local_grad_norm", "peers_local_grad_norm", "best", "level", "threshold"),
)
NOT_NUMBERS: Final = (math.nan, math.inf, -math.inf, -1.0, 0.0)


def drawn_finding(draw: np.random.Generator, number: int) -> Finding:
    """A finding of any kind, with figures of any size, some of which are no numbers."""
    kind = tuple(Kind)[number % len(Kind)]
    chosen = draw.choice(FIGURES, 5, replace=False)
    evidence: dict[str, Any] = {str(name): float(10 ** draw.uniform(-6, 6)) for name in chosen}
    if draw.random() < 0.3:
        evidence[str(draw.choice(chosen))] = float(draw.choice(NOT_NUMBERS))
    if kind is Kind.RANK_LOST:
        ways = ({"signal": 9}, {"signal": 11}, {"code": 3}, {"code": 0}, {"error": "ValueError: x", "where": "a.py:3"})
        evidence |= ways[int(draw.integers(len(ways)))]
    onset_s = float(draw.uniform(0, 2_000))
    return finding(
        kind,
        scope="job" if draw.random() < 0.5 else f"rank:{int(draw.integers(8))}",
        severity=draw.choice(list(Severity)),
        evidence=evidence,
        confidence=float(draw.random()),
        onset_step=None if draw.random() < 0.2 else 100,
        onset_time_s=onset_s,
        detected_time_s=onset_s + float(draw.choice((0.0, 1e-6, 3.0, 1e5))),
        summary="Something is wrong.",
    )


def test_no_message_about_10_000_drawn_findings_contradicts_itself() -> None:
    draw, topology = np.random.default_rng(3), topology_state()
    for number in range(10_000):
        found = drawn_finding(draw, number)
        correlator = Correlator("gpt")
        correlator.begin(found.attempt)
        (incident,) = (update.incident for update in correlator.evaluate([found], topology))
        texts = []
        for then in ("", ("closed", "ended")[number // len(Kind) % 2]):
            if then == "closed":
                over = replace(found, change=Change.CLOSE, detected_time_s=2e5, summary="It is over.")
                correlator.evaluate([over], topology)
            elif then == "ended":
                correlator.finish(120, 2e5)
            incident.impact_gpu_hours_per_hour = impact_gpu_hours_per_hour(incident, 8)
            incident.transitions += 1
            now = incident.version()
            assert now.impact_gpu_hours_per_hour >= 0
            texts += [with_held(incident_text(now, 8), number % 3 + 1), *what_now(now, 8).listed]
        wrong = {text: wrong for text in texts if (wrong := faults_of(text))}
        assert wrong == {}, found


def test_every_kind_has_its_row():
    assert set(KINDS) == set(Kind)


def test_every_kind_has_a_runbook_and_every_runbook_a_kind():
    assert {page.stem for page in (ROOT / "docs" / "incidents").glob("*.md")} == {str(kind) for kind in KINDS}


def test_a_receiver_can_be_limited_to_any_kind():
    assert ReceiverSettings(url="https://x.example/hook", kinds=list(KINDS)).kinds == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_something_to_do_first(kind):
    assert KINDS[kind].first_steps


def test_every_kind_says_in_its_own_words_what_is_normal_and_how_bad_it_is():
    for answers in ([normal(kind, {}) for kind in KINDS], [impact(kind, "critical", {}) for kind in KINDS]):
        assert len(set(answers)) == len(KINDS)
        assert not any(answer.endswith(".") for answer in answers)


def test_the_page_of_answers_says_of_every_kind_what_the_incident_says():
    page = (ROOT / "docs" / "answers.md").read_text()
    rows = [line for line in page.splitlines() if "](incidents/" in line]
    assert rows == [
        f"| [{row.label}](incidents/{kind}.md) | {usual} | {impact(kind, 'critical', {})} | {row.first_steps[0]} |"
        for kind, row in KINDS.items()
        for usual in [normal(kind, {})]
    ], "docs/answers.md has the rows of KINDS, in that order"


def test_what_is_no_fault_or_has_ended_by_itself_has_no_impact():
    assert impact("rank_lost", "info", {}) == "none: nothing is wrong"
    assert impact("hang", "critical", {"ended_by_itself": True}) == "none any more: it has ended by itself"


@pytest.mark.parametrize("kind", KINDS)
def test_what_helps_is_an_action_or_waiting(kind):
    assert KINDS[kind].actions
    assert set(KINDS[kind].actions) <= {WAIT, Action.TRACE, *POLICY_ACTIONS}
