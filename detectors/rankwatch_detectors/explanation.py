"""Why a detector reported something, and why not earlier.

A suspect is a judgement that has not become a finding: its statistic, its threshold, and what is missing. Histories
keep the statistics of a job row by row, as long as they speak for something, and which rows were left out;
`explanation` makes JSON of them when a finding is opened. `judged` says of a job now, by detector, the rows, their
noise, and the smallest faults that would be reported. Nothing here decides anything.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple

from rankwatch_detectors.base import Change, Finding, Frame, Kind, Observation, StepKind
from rankwatch_detectors.dispatch import DispatchingDetector, typical
from rankwatch_detectors.episodes import plain
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.shift import TestedLevels


class Statistic(StrEnum):
    """The quantity that a threshold is for."""

    EVIDENCE = "log_likelihood_ratio"
    """Evidence for a shifted run against a usual one."""
    LEFT_LEVEL = "excess_over_best_level"
    """Share by which a series is above the best level that it has kept."""
    DISTANCE = "sigmas_from_level"
    """Distance of one point from the level."""
    SUM = "sum_of_high_points"
    """Sum of the distances of moderately high points."""
    LASTED = "points_beyond_level"
    """Points for which a jump has lasted."""
    AGE = "seconds_without_progress"


class UnmetCriterion(StrEnum):
    """What a statistic beyond its threshold still lacks."""

    NOTHING = ""
    CERTAINTY = "certainty"
    """The mean of the run may still differ from the baseline by chance, or is below the least reported shift."""
    DURATION = "duration"
    """The problem may pass by itself within seconds."""
    AGREEMENT = "agreement"
    """The whole step does not show it."""
    ONSET = "onset"
    """The change is as slow as a schedule's."""
    VALUE = "value"
    """The rank did not measure this step."""


class Suspect(NamedTuple):
    """One judged row of a scope that may become a finding."""

    scope: IncidentScope
    statistic: Statistic
    value: float
    threshold: float
    rows: int = 1
    """Rows of the run so far."""
    size: float = math.nan
    """How large it is, NaN if not known: for `DISTANCE`, `SUM` and `LASTED` the value of a curve, else the ratio to
    what is usual (of a run its mean)."""
    missing: UnmetCriterion = UnmetCriterion.NOTHING
    source: str = ""
    """Which of several views of the scope it is, such as a peer test."""


class Suspicion(NamedTuple):
    """A suspect, and when it was one."""

    step: int
    time_s: float
    suspect: Suspect


def least_shift(bank: TestedLevels, sigma: float, threshold: float, rows: float) -> float | None:
    """The smallest constant shift whose expected evidence reaches the threshold in this many rows.

    A row that is shifted by s adds L (s - L / 2) / sigma² to the evidence of level L, with s cut at the
    bank's `clip_sigmas` and the sum of a row at 1 / `rows_needed` of the threshold.

    Args:
        bank: the CUSUMs; negative levels find no rise.
        sigma: scatter of one row.
        threshold: log-likelihood ratio to reach.
        rows: rows since the onset.

    Returns:
        The shift in logarithms; None if none is found in so few rows, however large it is.
    """
    if rows < bank.rows_needed:
        return None
    needed = [threshold / rows * sigma**2 / level + level / 2 for level in bank.tested if level > 0]
    return min((shift for shift in needed if shift <= bank.clip_sigmas * sigma), default=None)


EARLIER_ROWS: Final = (3, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
"""Rows after the onset for which it is computed what would have been reported then."""

LABELS: Final = {
    Statistic.EVIDENCE: "log-likelihood ratio of a lasting change",
    Statistic.LEFT_LEVEL: "share above the best lasting level",
    Statistic.DISTANCE: "distance from the level in sigmas",
    Statistic.SUM: "summed distance of high points in sigmas",
    Statistic.LASTED: "number of points for which the jump has lasted",
    Statistic.AGE: "time without progress in seconds",
}
IN_VALUES: Final = frozenset({Statistic.DISTANCE, Statistic.SUM, Statistic.LASTED})
"""Statistics whose sizes are values of a curve; of the others they are ratios."""

OF_RUNS: Final = frozenset({Statistic.EVIDENCE, Statistic.SUM})
"""Statistics that a larger fault reaches in fewer rows."""

LACKS: Final = {
    UnmetCriterion.CERTAINTY: "it could still be chance, or was too small to report",
    UnmetCriterion.DURATION: "it had not lasted long enough",
    UnmetCriterion.AGREEMENT: "the whole step did not show it",
    UnmetCriterion.ONSET: "it grew as slowly as by a schedule",
    UnmetCriterion.VALUE: "the rank did not measure the step",
}

SOON: Final = {
    Statistic.EVIDENCE: "It was reported as soon as any fault of its kind can be: fewer rows may be chance.",
    Statistic.LEFT_LEVEL: "It grew slowly, and was below the threshold until then.",
    Statistic.DISTANCE: "It was reported with the first step that showed it.",
    Statistic.SUM: "It was reported as soon as any rise of its kind can be: fewer points may be chance.",
    Statistic.LASTED: "Until then it could still come back, as a spike does.",
    Statistic.AGE: "Until then it was within what this job usually takes.",
}
"""Why not earlier, where nothing else is known."""

FIELDS: Final = ("step", "at_unix_ns", "value", "threshold", "rows", "size", "missing")
"""Fields of a point of a history, in order."""


def explanation(
    finding: Finding,
    crossed: Suspect,
    points: Sequence[Sequence[Any]],
    rows: Mapping[str, int],
    needed: Callable[[Suspect, int], float | None],
) -> dict[str, Any]:
    """Explain a finding that has just been opened.

    Args:
        finding: the finding.
        crossed: its statistic when it was opened.
        points: the statistic over time, the newest last: as `StatisticHistories` keeps them.
        rows: rows of the attempt by what became of them.
        needed: the size that would have been reported a number of rows after the onset.
    """
    shown = [_shown(point) for point in points]
    unit = "value" if crossed.statistic in IN_VALUES else "s" if crossed.statistic is Statistic.AGE else "ratio"
    earlier = _earlier(shown, crossed, needed)
    return plain(
        {
            "kind": str(finding.kind),
            "scope": str(finding.scope),
            "attempt": finding.attempt,
            "statistic": str(crossed.statistic),
            "label": LABELS[crossed.statistic],
            "source": crossed.source,
            "unit": unit,
            "onset_step": finding.onset_step,
            "detected_step": finding.detected_step,
            "points": {name: [point[name] for point in shown] for name in FIELDS},
            "rows": rows,
            "earlier": earlier,
            "why": _why(crossed),
            "why_not_earlier": _why_not_earlier(shown, crossed, earlier, unit),
        }
    )


def _shown(point: Sequence[Any]) -> dict[str, Any]:
    step, time_s, *more = point
    return dict(zip(FIELDS, [step, round(time_s * 1e6) * 1_000, *more], strict=True))


def _earlier(
    points: Sequence[Mapping[str, Any]], crossed: Suspect, needed: Callable[[Suspect, int], float | None]
) -> list[dict[str, Any]]:
    seen = {point["rows"]: point for point in points[:-1]}
    nothing = {"step": None, "size": None}
    return [
        {"rows": rows, **{name: seen.get(rows, nothing)[name] for name in nothing}, "needed": needed(crossed, rows)}
        for rows in EARLIER_ROWS
        if rows < crossed.rows and crossed.statistic in OF_RUNS
    ]


def _why(crossed: Suspect) -> str:
    rows = f" after {crossed.rows} rows" if crossed.rows > 1 else ""
    label = LABELS[crossed.statistic]
    return f"The {label} reached {crossed.value:.4g}{rows}; its threshold is {crossed.threshold:.4g}."


def _why_not_earlier(
    points: Sequence[Mapping[str, Any]], crossed: Suspect, earlier: Sequence[Mapping[str, Any]], unit: str
) -> str:
    sentences = []
    waited = next((point for point in points[:-1] if point["missing"] in LACKS), None)
    if waited is not None:
        sentences.append(f"In step {waited['step']} {LACKS[waited['missing']]}.")
    possible = next((one for one in earlier if one["needed"] is not None), None)
    if possible is not None:
        least, was = _sized(possible["needed"], unit), _sized(crossed.size, unit)
        sentences.append(
            f"To be found within {possible['rows']} rows of its onset, it had to reach {least}; it reached {was}."
        )
    if not sentences:
        sentences.append(SOON[crossed.statistic])
    return " ".join(sentences)


def _sized(size: float, unit: str) -> str:
    return f"{size:.3g} times the usual value" if unit == "ratio" else f"a value of {size:.4g}"


def has_deadline(finding: Finding) -> bool:
    """Whether a standstill has just been reported because of a deadline."""
    return finding.kind is Kind.HANG and finding.change is Change.OPEN and "deadline_s" in finding.evidence


def by_deadline(finding: Finding) -> dict[str, Any]:
    """The explanation of a finding that `has_deadline`."""
    reported = finding.evidence
    age_s, deadline_s = float(reported["age_s"]), float(reported["deadline_s"])
    crossed = Suspect(finding.scope, Statistic.AGE, age_s, deadline_s, size=age_s)
    points = [
        [None, finding.onset_time_s, 0.0, deadline_s, 0, 0.0, ""],
        [None, finding.detected_time_s, age_s, deadline_s, 1, age_s, ""],
    ]
    return explanation(finding, crossed, points, {}, lambda _crossed, _rows: None)


class LeftOut(StrEnum):
    """Why a row was not judged."""

    OWN_PACE = "ranks go at their own pace"
    ALONE = "no other rank to compare with"
    LATE = "arrived after its step had closed"
    NOT_TRAINING = "evaluation or checkpoint"
    NOT_MEASURED = "not measured"
    NOT_FINITE = "not finite"
    FIRST_ROWS = "first rows of an attempt"
    WARM_UP = "the usual value was not known yet"


JUDGED: Final = "judged"
TRAIN, EVAL, CHECKPOINT, LATE = *(kind.value for kind in StepKind), "late"
CURVES: Final = ("loss", "grad_norm")
NOT_FINITE: Final = {metric: f"{metric} not finite" for metric in CURVES}
DETECTABLE_ROWS: Final = (6, 16, 64, 256, 1024)
"""Rows since the onset for which the smallest fault is computed."""


@dataclass(frozen=True, slots=True)
class Detectable:
    """The smallest fault of one sort that would be reported today."""

    fault: str
    """Such as "a slow rank"."""
    unit: str
    """ratio: to what is usual; value: of the curve."""
    noise: float
    """Standard deviation of one row, or of the mean over the rows that `fault` names: as a share of what is usual, or
    of the curve's value."""
    sizes: tuple[tuple[int, float | None], ...]
    """The smallest size, by rows since the onset; None: none is reported so early."""


class FrameCounts(Stateful):
    """Counts of one attempt's frames by properties that need no detector."""

    STATE: ClassVar[str] = "attempt _counts"

    def __init__(self) -> None:
        self.attempt = ""
        self._counts: dict[str, int] = {}

    def copy(self) -> FrameCounts:
        """The same counts, which go on apart."""
        counted = FrameCounts()
        counted.attempt, counted._counts = self.attempt, dict(self._counts)
        return counted

    def add(self, frame: Frame) -> None:
        """Count one more frame."""
        if frame.attempt != self.attempt:
            self.attempt, self._counts = frame.attempt, {}
        if frame.awaits_times:
            return
        counts = self._counts
        what = LATE if frame.late else frame.kind.value
        if frame.family != "values":
            counts[what] = counts.get(what, 0) + 1
        if what == TRAIN:
            for metric in CURVES:
                if metric in frame.values:
                    key = metric if typical(frame, metric) is not None else NOT_FINITE[metric]
                    counts[key] = counts.get(key, 0) + 1

    def __getitem__(self, what: str) -> int:
        return self._counts.get(what, 0)


class ExplainedDetector(DispatchingDetector):
    """Call `suspects` after `observe`, with the same frame."""

    def rows(self, counts: FrameCounts) -> dict[str, int]:
        """Rows of the attempt by what became of them: judged, or the reason why not."""
        rows: dict[str, int] = self._rows_of_steps(counts)
        if self.COMPARES_RANKS and not self.lockstep:
            rows = {LeftOut.OWN_PACE: sum(rows.values())}
        others: dict[str, int] = {LeftOut.NOT_TRAINING: counts[EVAL] + counts[CHECKPOINT], LeftOut.LATE: counts[LATE]}
        return {str(reason): count for reason, count in {**rows, **others}.items() if count}

    @abstractmethod
    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        """The same for rows of training steps that came in time."""

    @abstractmethod
    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """What the row speaks for: statistics from half of their threshold on."""

    @abstractmethod
    def crossed(self, finding: Finding) -> Suspect | None:
        """The statistic of a finding that has just been opened; None if no threshold decided."""

    def before(self, crossed: Suspect, step: int, time_s: float) -> list[Suspicion]:  # noqa: ARG002
        """What is known of rows before a finding that no row announced."""
        return []

    @abstractmethod
    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The size that would have been reported this many rows after the onset; None: none, however large."""

    @abstractmethod
    def detectable(self) -> Sequence[Detectable]:
        """The smallest faults that would be reported today."""


def split(taken: int, first: int, warm: int) -> dict[str, int]:
    """Rows that a detector took, by what became of them.

    Args:
        taken: their number.
        first: how many are skipped at first.
        warm: how many of the others are needed to know what is usual.
    """
    first = min(taken, first)
    warm = min(taken - first, warm)
    return {JUDGED: taken - first - warm, LeftOut.FIRST_ROWS: first, LeftOut.WARM_UP: warm}


POINTS_MAX: Final = 240
"""Points of a history. When it is full, every second one of its older half is dropped."""

HISTORIES_MAX: Final = 32
"""Histories kept of a detector, the newest: those of 16 ranks by two peer tests. Five detectors have 38,400 points at
most, which take 2 MB; usually there are a hundred."""

GAP_STEPS: Final = 1_024
"""A history without a point for more steps than this begins anew."""

Points = dict[str, list[list[Any]]]
"""By statistic of a scope: step, stream time, value, threshold, rows, size, what is missing."""


class StatisticHistories(Stateful):
    """The histories of one job, and the frames of its attempt."""

    STATE: ClassVar[str] = "counts _histories"

    def __init__(self) -> None:
        self.counts = FrameCounts()
        self._histories: dict[str, Points] = {}
        """By detector."""
        self._before = self.counts
        """The counts before the newest frames ..."""
        self._newest: list[Frame] = []
        """... and these."""

    def count(self, observations: Sequence[Observation]) -> None:
        """Count the frames that detectors are given next."""
        self._before, self._newest = self.counts.copy(), [one for one in observations if isinstance(one, Frame)]
        for frame in self._newest:
            if frame.attempt != self.counts.attempt:
                self._histories = {}
            self.counts.add(frame)

    def _as_of(self, frame: Frame) -> FrameCounts:
        """The counts up to one of the newest frames."""
        counts = self._before.copy()
        for one in self._newest:
            counts.add(one)
            if one is frame:
                break
        return counts

    def add(self, detector: ExplainedDetector, frame: Frame, findings: Sequence[Finding]) -> list[dict[str, Any]]:
        """Add a frame that a detector has just processed.

        Args:
            detector: the detector; it has not been given the next frame yet.
            frame: the frame.
            findings: what the detector found in it.

        Returns:
            Explanations of what it opened.
        """
        reported = list[dict[str, Any]]()
        for finding in findings:
            if finding.change is Change.OPEN and (why := self._why(detector, finding, frame)) is not None:
                reported.append(why)
        if frame.kind is StepKind.TRAIN and not frame.late:
            suspects = detector.suspects(frame)
            if suspects:
                _follow(self._histories.setdefault(detector.name, {}), suspects, frame)
        return reported

    def forget(self, detector: str) -> None:
        """Drop the histories of a detector."""
        self._histories.pop(detector, None)

    def _why(self, detector: ExplainedDetector, finding: Finding, frame: Frame) -> dict[str, Any] | None:
        crossed = detector.crossed(finding)
        if crossed is None:
            return None
        known = self._histories.get(detector.name, {}).get(_key(crossed), [])
        at = (finding.detected_step or 0, finding.detected_time_s)
        before = known or [_point(one.suspect, one.step, one.time_s) for one in detector.before(crossed, *at)]
        points = [*before, _point(crossed, *at)]
        return explanation(finding, crossed, points, detector.rows(self._as_of(frame)), detector.needed)


def _follow(histories: Points, suspects: Sequence[Suspect], frame: Frame) -> None:
    for suspect in suspects:
        key = _key(suspect)
        points = histories.pop(key, [])
        if points and frame.step - points[-1][0] > GAP_STEPS:
            points = []
        points.append(_point(suspect, frame.step, frame.time_s))
        if len(points) >= POINTS_MAX:
            del points[: POINTS_MAX // 2 : 2]
        histories[key] = points
    while len(histories) > HISTORIES_MAX:
        del histories[next(iter(histories))]


def _key(suspect: Suspect) -> str:
    return f"{suspect.scope} {suspect.source} {suspect.statistic}"


def _point(suspect: Suspect, step: int, time_s: float) -> list[Any]:
    size = suspect.size if math.isfinite(suspect.size) else None
    return [step, time_s, suspect.value, suspect.threshold, suspect.rows, size, str(suspect.missing)]


WHY_NOT: Final = {
    LeftOut.OWN_PACE: "ranks go at their own pace and are compared with their own past",
    LeftOut.ALONE: "the job has no other rank to compare with",
    LeftOut.NOT_MEASURED: "what it judges is not measured",
    LeftOut.NOT_FINITE: "its values are not finite",
    LeftOut.WARM_UP: "the usual value is not known yet",
    LeftOut.FIRST_ROWS: "the first rows of an attempt are skipped",
}
"""By the reason for which rows are left out, if no row is judged."""

RULES: Final = {
    Kind.NONFINITE: "each value of each rank: the first that is not finite is reported",
    Kind.CORRUPTION: "each fingerprint that ranks must share: the first that differs is reported",
    Kind.METRIC: "each rule that people have set on a metric",
    Kind.HANG: "time without progress, against what steps, pauses and long phases of this job usually take",
    Kind.RANK_LOST: "each process of a rank: an end without a reason is reported",
    Kind.TELEMETRY_LOST: "each host: silence of its agent is reported",
    Kind.DEVICE_FAULT: "each error that a driver reports",
    Kind.DEVICE_DEGRADED: "counters of devices, against limits and against their peers",
    Kind.HOST_DEGRADED: "counters of hosts, against limits",
    Kind.NETWORK_DEGRADED: "counters of network ports, against limits and against their peers",
    Kind.RESTART_LOOP: "launches that make no progress, by their number",
    Kind.CHECKPOINT_FAILED: "each save that fails",
    Kind.CHECKPOINT_OVERDUE: "steps since the last save, against the usual interval",
    Kind.RESTORE_FAILED: "each load of a checkpoint that fails",
    Kind.LIMIT_REACHED: "each limit of the service that this job reaches",
    Kind.FORGED_TELEMETRY: "each message that is not signed as it must be",
    Kind.ALERT: "each alert that a Prometheus reports about the job",
}
"""Kinds that are judged by a rule, without a statistic of rows."""


def judged(detectors: Sequence[ExplainedDetector], counts: FrameCounts) -> list[dict[str, Any]]:
    """By detector, in their order, as JSON types."""
    return [_judged(detector, counts) for detector in detectors]


def _judged(detector: ExplainedDetector, counts: FrameCounts) -> dict[str, Any]:
    left_out = detector.rows(counts)
    rows = left_out.pop(JUDGED, 0)
    reasons = [WHY_NOT[reason] for reason in LeftOut if reason in WHY_NOT and left_out.get(reason)]
    return {
        "kind": str(detector.kind),
        "detector": detector.name,
        "judged": rows > 0,
        "why_not": "" if rows else (reasons or ["no row of a training step has come"])[0],
        "rows": rows,
        "left_out": left_out,
        "smallest": [
            {
                "fault": one.fault,
                "unit": one.unit,
                "noise": one.noise,
                "sizes": [{"rows": count, "size": size} for count, size in one.sizes],
            }
            for one in (_detectable(detector) if rows else ())
        ],
    }


def _detectable(detector: ExplainedDetector) -> Sequence[Detectable]:
    try:
        return detector.detectable()
    except ArithmeticError:  # a curve near the largest float: nothing larger can be written down
        return ()
