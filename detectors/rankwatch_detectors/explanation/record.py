"""The explanation of a finding, as JSON: its statistic over time, rows left out, and what would have been larger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import Finding
from rankwatch_detectors.episodes import plain
from rankwatch_detectors.explanation.suspect import Shortfall, Statistic, Suspect

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
    Shortfall.CERTAINTY: "it could still be chance, or was too small to report",
    Shortfall.DURATION: "it had not lasted long enough",
    Shortfall.AGREEMENT: "the whole step did not show it",
    Shortfall.ONSET: "it grew as slowly as by a schedule",
    Shortfall.VALUE: "the rank did not measure the step",
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
"""Of a point of a trail, in order."""


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
        points: the statistic over time, the newest last: as `Trails` keeps them.
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
        sentences.append(f"To be reported {possible['rows']} rows after its onset it needed {least}; it had {was}.")
    if not sentences:
        sentences.append(SOON[crossed.statistic])
    return " ".join(sentences)


def _sized(size: float, unit: str) -> str:
    return f"{size:.3g} times what is usual" if unit == "ratio" else f"a value of {size:.4g}"
