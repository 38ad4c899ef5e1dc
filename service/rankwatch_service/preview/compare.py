"""Compares what two tunings tell of an exported job. Replay and stream run the same code, so this is a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rankwatch_detectors.base import Kind
from rankwatch_detectors.tuning import PREVIEWABLE
from rankwatch_service.incidents.model import Incident
from rankwatch_service.replay.report import as_json, unshared
from rankwatch_service.replay.run import ReplayResult, replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.tuning.tunings import TuningSet

NOT_PREVIEWED: Final = [str(kind) for kind in Kind if kind not in PREVIEWABLE]
"""Kinds that no preview shows: series have neither times of day nor events nor exits."""


def compare(path: Path, job: str, before: TuningSet, after: TuningSet) -> dict[str, Any]:
    """The incidents that both tunings find in the export of a job, and those that one of them finds.

    Raises:
        ReplayError: the file cannot be read.
    """
    configs = [before.of(job).config, after.of(job).config]
    outcome = replay([open_source(path)], {}, configs, job=job, until_step=None, progress=lambda _done, _total: None)
    first, second = (_previewable(incidents) for incidents in outcome.incidents)
    only_first, only_second = unshared(first, second)
    return {
        "rows": outcome.rows,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "both": len(first) - len(only_first),
        "does_not_open": [_shown(one, outcome) for one in only_first],
        "opens": [_shown(one, outcome) for one in only_second],
        "not_previewed": NOT_PREVIEWED,
    }


def _previewable(incidents: list[Incident]) -> list[Incident]:
    return [one for one in incidents if one.kind in PREVIEWABLE]


def _shown(incident: Incident, outcome: ReplayResult) -> dict[str, Any]:
    return as_json(incident, outcome.named)
