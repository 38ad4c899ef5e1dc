"""What a proposed change would have found in a job's own past: a replay of the job's export with it and without it.

Replay and stream run the same code. A preview runs in a process of its own, so that detectors take no time from
requests: `python -m rankwatch_service.preview.engine FILE JOB` reads the proposal as JSON from standard input and
writes the comparison to standard output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import Engine

from rankwatch_detectors.base import Kind
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.metric_detector import MetricDetector
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_detectors.tuning import PREVIEWABLE
from rankwatch_service.job.detection import MakeDetectors
from rankwatch_service.preview.export import StoredSteps, write_export
from rankwatch_service.replay.report import as_json, unshared
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.tuning import TuningSet

PREVIEW_S_MAX: Final = 300
"""Time of a preview; one that would take longer is ended and refused."""

STEP_TIME: Final = "step_time_s"

_one_at_a_time = threading.Lock()


class OtherTunings(msgspec.Struct, frozen=True, tag=True):
    """Tunings in place of those in force."""

    before: TuningSet
    after: TuningSet


class AnotherRule(msgspec.Struct, frozen=True, tag=True):
    """A rule on a metric that there is not yet."""

    rule: MetricRule

    def steps(self, job: str) -> StoredSteps:
        """What it is judged on. Only for absence it matters that a step has no value."""
        metrics = (self.rule.metric, STEP_TIME)
        having = metrics if self.rule.when is Condition.ABSENT else (self.rule.metric,)
        return StoredSteps(job, metrics=metrics, having=having, newest=True)


Proposal = OtherTunings | AnotherRule


class PreviewRunningError(Exception):
    """There is one preview at a time."""


class PreviewFailedError(Exception):
    """The preview gave no answer; the message says why."""


class PreviewTooLongError(PreviewFailedError):
    """It takes longer than `PREVIEW_S_MAX`."""


def preview(engine: Engine, steps: StoredSteps, proposal: Proposal) -> dict[str, Any]:
    """What a proposal changes on stored steps of a job; see `compare`.

    Raises:
        ExportError: the steps cannot be exported.
        PreviewRunningError: another preview is running.
        PreviewFailedError: it gave no answer.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise PreviewRunningError
    try:
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            left_out = write_export(engine, steps, file)
            file.flush()
            return {**_in_a_process(Path(file.name), steps.job, proposal), "left_out": left_out}
    finally:
        _one_at_a_time.release()


def _in_a_process(path: Path, job: str, proposal: Proposal) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(path), job]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(proposal), capture_output=True, timeout=PREVIEW_S_MAX, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise PreviewTooLongError(f"it takes longer than {PREVIEW_S_MAX} s; choose fewer steps") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise PreviewFailedError(f"the preview has failed: {lines[-1] if lines else error}"[:500]) from error
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def compare(path: Path, job: str, proposal: Proposal) -> dict[str, Any]:
    """The incidents that are found in the export of a job with a proposal and without it.

    Raises:
        ReplayError: the file cannot be read.
    """
    rules: tuple[MetricRule, ...] = ()
    configs, kinds = [CatalogueConfig()], frozenset({Kind.METRIC})
    make_detectors: MakeDetectors = detectors
    match proposal:
        case OtherTunings(before, after):
            configs, kinds = [before.of(job).config, after.of(job).config], PREVIEWABLE
        case AnotherRule(rule):
            rules, make_detectors = (replace(rule, jobs=()),), lambda _config=None: [MetricDetector()]
    outcome = replay(
        [open_source(path)],
        {},
        configs,
        job=job,
        until_step=None,
        progress=lambda _done, _total: None,
        rules=rules,
        make_detectors=make_detectors,
    )
    found = [[one for one in incidents if one.kind in kinds] for incidents in outcome.incidents]
    first, second = found if len(found) > 1 else ([], *found)
    only_first, only_second = unshared(first, second)
    return {
        "rows": outcome.rows,
        "steps": outcome.frames,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "both": len(first) - len(only_first),
        "does_not_open": [as_json(one, outcome.named) for one in only_first],
        "opens": [as_json(one, outcome.named) for one in only_second],
    }


if __name__ == "__main__":
    os.nice(10)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Proposal)
    sys.stdout.buffer.write(msgspec.json.encode(compare(Path(sys.argv[1]), sys.argv[2], wanted)))
