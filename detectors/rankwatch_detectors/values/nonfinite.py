"""Finds NaN and Inf in the step in which they are recorded, and the rank that had them first.

After the gradient reduction a NaN is on every rank, so the culprit shows only in values measured before it: the exact
columns `nonfinite` (how many local gradients were not finite) and `nonfinite_first` (which parameter). Without them the
ranks whose own values are not finite are named, unless all are. A value that was not logged does not count. The norms
of a step that the loss scaler skipped (`optimizer_skipped`) do not count either, unless many steps in a row are

skipped. If ranks go at their own pace, there is no reduction over them in a step: each rank's row is judged by itself,
late or not, and the episode names every rank with such a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Frame, Ints, Kind, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_detectors.statistics.peers import anyone

# Measured by rankwatch, not by the training: a NaN in these means a broken clock, not a broken model.
NOT_TRAINING = frozenset(
    {
        *(
            "step_time_s",
            "busy_s",
            "busy_cpu_s",
            "queued_s",
            "wait_s",
            "device_busy_s",
            "device_wait_s",
            "device_step_s",
        ),
        "relative_step",
    }
)
NOT_TRAINING_PREFIXES = ("phase.", "device.", "tokens")
NORMS = ("grad_norm", "local_grad_norm")
CRITICAL = (*NORMS, "loss", "nonfinite")
SKIPPED = "optimizer_skipped"
RANKS_SHOWN_MAX = 64


@dataclass(frozen=True, slots=True)
class NonfiniteConfig:
    """Settings of the non-finite detector. Its evidence is exact, so there is nothing to calibrate."""

    clear_rows: int = 3
    """Finite rows of the affected metrics before the episode ends."""
    skips_max: int = 20
    """Skipped steps in a row that a loss scaler explains: halving 2^16 twenty times leaves less than 1, and at such a
    scale the gradients themselves overflow."""
    logged_rows: int = 4
    """A value present in this many rows in a row is expected in every row."""
    silent_rows: int = 2
    """Rows without an expected value after which it counts as no longer logged."""


class NonfiniteDetector(DispatchingDetector):
    """One episode at a time, scope "rank:N" if one rank is named when it opens, else "job".

    Memory: constant, and while an episode is open 8 bytes for each rank and metric that was not finite.
    """

    kind: Kind = Kind.NONFINITE
    TAKES_LATE = True
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "lockstep",
        "_parameters",
        "_bad",
        "_rows_left",
        "_skips",
        "_exact",
        "_logged",
    )

    def __init__(self, config: NonfiniteConfig) -> None:
        super().__init__()
        self.name = "nonfinite"
        self.version = 5
        self._config = config
        self._parameters: list[str] = []
        self._bad: dict[str, int] = {}
        """Metrics that were not finite in the open episode, with their number of finite rows since."""
        self._rows_left: dict[str, Ints] = {}
        """For the same metrics: finite rows still needed from each rank."""
        self._skips = 0
        self._exact = False
        self._logged: dict[str, list[Any]] = {}
        """By metric: its frame family, the number of consecutive rows with it, and of rows without it since then."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        self._parameters = list(start.topology.parameters)
        if new_attempt:
            self._bad, self._rows_left, self._skips, self._exact, self._logged = {}, {}, 0, False, {}
        return ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        excused = _flagged(frame, SKIPPED)
        if frame.late:
            return self._judge(frame, _bad_ranks(frame, excused), excused)
        if anyone(excused):
            self._skips += 1
        elif self._skips and anyone(_flagged(frame, "grad_norm")) and np.isfinite(frame.values["grad_norm"]).all():
            self._skips = 0
        bad = _bad_ranks(frame, excused)
        if self._skips >= self._config.skips_max:
            bad.setdefault(SKIPPED, excused)
        silent = self._fallen_silent(frame)
        if silent and not bad:
            return self._tell_silent(frame, silent)
        return self._judge(frame, bad, excused)

    def _judge(self, frame: Frame, bad: dict[str, Bools], excused: Bools) -> list[Finding]:
        if bad or self._bad:
            self._count_rows(frame, bad, excused)
        return self._tell(frame, bad) if bad else self._recover(frame)

    def _count_rows(self, frame: Frame, bad: dict[str, Bools], excused: Bools) -> None:
        for name, left in self._rows_left.items():
            if name in frame.present:
                finite = frame.present[name] & ~bad.get(name, np.False_)
                if name in (*NORMS, SKIPPED):
                    finite &= ~excused
                self._rows_left[name] = np.maximum(left - finite, 0)
        for name, which in bad.items():
            left = self._rows_left.get(name, np.zeros(which.size, dtype=np.int64))
            self._rows_left[name] = np.where(which, self._config.clear_rows, left)

    def _fallen_silent(self, frame: Frame) -> list[str]:
        """Metrics that were in every row and are now missing for `silent_rows` rows."""
        silent = []
        for name in ("loss", *NORMS):
            state = self._logged.setdefault(name, [frame.family, 0, 0])
            if _seen(frame, name):
                self._logged[name] = [frame.family, state[1] + 1 if state[2] == 0 else 1, 0]
            elif state[0] == frame.family and state[1]:
                state[2] += 1
                if state[1] >= self._config.logged_rows and state[2] == self._config.silent_rows:
                    silent.append(name)
        return silent

    def _tell_silent(self, frame: Frame, names: list[str]) -> list[Finding]:
        """Report missing values within an episode: some loggers omit NaN, so this is no recovery."""
        since = frame.step
        summary = f"{' and '.join(names).capitalize()} stopped being logged by step {since}, after non-finite values."
        return [
            finding
            for scope in self.episodes
            for finding in self.episodes.update(scope, detected_step=since, detected_time_s=self.now_s, summary=summary)
        ]

    def _tell(self, frame: Frame, bad: dict[str, Bools]) -> list[Finding]:
        for name in bad:
            self._bad[name] = 0
        ranks = _culprits(frame, bad, reduced=self.lockstep)
        exact = "nonfinite" in bad
        open_scope = next(iter(self.episodes), None)
        if open_scope is not None:
            told = self.episodes.told(open_scope)
            if not self.lockstep:
                return self._tell_others(frame, bad, open_scope, [rank for rank in ranks if rank not in told["ranks"]])
            # The first rank stays named: in the next step the reduction has spread the value to all ranks.
            better = exact and not self._exact and bool(ranks) and frame.step <= told["onset_step"]
            if not better:
                return []
            self._exact = True
            return self.episodes.update(open_scope, **self._words(frame, bad, ranks))
        self._exact = exact and bool(ranks)
        critical = any(name in CRITICAL for name in bad)
        return self.episodes.open(
            IncidentScope.of_rank(ranks[0]) if len(ranks) == 1 else WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.CRITICAL if critical else Severity.WARNING,
            onset_time_s=self.now_s,
            detected_time_s=self.now_s,
            score=math.inf,
            confidence=1.0 if critical and SKIPPED not in bad else 0.5,
            **self._words(frame, bad, ranks),
        )

    def _tell_others(self, frame: Frame, bad: dict[str, Bools], scope: IncidentScope, more: list[int]) -> list[Finding]:
        """Add further ranks with non-finite values, which each has by itself."""
        before = self.episodes.told(scope)["ranks"]
        if not more or len(before) >= RANKS_SHOWN_MAX:
            return []
        ranks = (*before, *more)[:RANKS_SHOWN_MAX]
        summary = (
            f"Not finite: {' and '.join(sorted(bad))}{self._who(tuple(more), len(more))} in step {frame.step} too."
        )
        severity = {"severity": Severity.CRITICAL} if any(name in CRITICAL for name in bad) else {}
        return self.episodes.update(scope, ranks=ranks, detected_time_s=self.now_s, summary=summary, **severity)

    def _words(self, frame: Frame, bad: dict[str, Bools], ranks: tuple[int, ...]) -> dict[str, Any]:
        evidence: dict[str, Any] = {"metrics": sorted(bad), "values": _examples(frame, bad)}
        evidence["ranks_affected"] = max(int(which.sum()) for which in bad.values())
        who = self._who(ranks, evidence["ranks_affected"])
        what = "local gradients" if "nonfinite" in bad else " and ".join(sorted(bad))
        summary = f"Not finite: {what}{who} in step {frame.step}"
        if "nonfinite" in bad and ranks:
            evidence["nonfinite_gradients"] = int(frame.exact["nonfinite"][ranks[0]])
            parameter = self._parameter(frame, ranks[0])
            if parameter:
                evidence["parameter"] = parameter
                summary += f", first in {parameter}"
        if list(bad) == [SKIPPED]:
            summary = f"The loss scaler has skipped {self._skips} steps in a row, up to step {frame.step}"
        return {
            "ranks": ranks,
            "onset_step": frame.step,
            "detected_step": frame.step,
            "summary": summary + ".",
            "evidence": evidence,
        }

    def _who(self, ranks: tuple[int, ...], affected: int) -> str:
        if self.world_size == 1:
            return ""
        if len(ranks) == 1:
            return f" on rank {ranks[0]}"
        affected = len(ranks) or affected
        return " on all ranks" if affected == self.world_size else f" on {affected} of {self.world_size} ranks"

    def _parameter(self, frame: Frame, rank: int) -> str:
        first = frame.exact.get("nonfinite_first")
        if first is None or not frame.present["nonfinite_first"][rank]:
            return ""
        index = int(first[rank])
        return self._parameters[index] if 0 <= index < len(self._parameters) else f"parameter {index}"

    def _recover(self, frame: Frame) -> list[Finding]:
        for name in list(self._bad):
            seen = self._skips == 0 if name == SKIPPED else _seen(frame, name)
            self._bad[name] += seen
            # Without lockstep each affected rank needs finite rows of its own.
            if (self._bad[name] >= self._config.clear_rows) if self.lockstep else not self._rows_left[name].any():
                del self._bad[name], self._rows_left[name]
        if self._bad:
            return []
        summary = f"All values are finite again in step {frame.step}."
        return [f for scope in self.episodes for f in self.episodes.close(scope, frame.step, self.now_s, summary)]


def _bad_ranks(frame: Frame, excused: Bools) -> dict[str, Bools]:
    """By metric, the ranks whose present value is not finite; `excused` ranks' norms do not count."""
    bad: dict[str, Bools] = {}
    for name in () if frame.finite else _suspects(frame):
        if name in NOT_TRAINING or name.startswith(NOT_TRAINING_PREFIXES):
            continue
        which = frame.present[name] & ~np.isfinite(frame.values[name])
        if name in NORMS:
            which = which & ~excused
        if which.any():
            bad[name] = which
    counts = frame.exact.get("nonfinite")
    if counts is not None and np.count_nonzero(counts):
        which = frame.present["nonfinite"] & (counts > 0)
        if which.any():
            bad["nonfinite"] = which
    return bad


def _suspects(frame: Frame) -> list[str]:
    # A non-finite term makes the sum non-finite: one cheap pass for the usual case.
    with np.errstate(all="ignore"):
        return [name for name, values in frame.values.items() if not math.isfinite(np.add.reduce(values))]


def _culprits(frame: Frame, bad: dict[str, Bools], *, reduced: bool) -> tuple[int, ...]:
    """Ranks to name: by local gradients if known, else by their own values; none if all ranks are affected.

    Once `reduced`, the total norm is equal on all ranks, so it names a rank only if another rank's is finite.
    """
    own = sorted(name for name in bad if name not in ("nonfinite", *NORMS))
    for name in ["nonfinite", "local_grad_norm", *own, "grad_norm"]:
        if name not in bad or name == SKIPPED:
            continue
        others = frame.present[name] if name == "grad_norm" and reduced else True
        if (others & ~bad[name]).any() or bad[name].size == 1:
            return tuple(int(rank) for rank in np.flatnonzero(bad[name])[:RANKS_SHOWN_MAX])
    return ()


def _examples(frame: Frame, bad: dict[str, Bools]) -> dict[str, float]:
    return {name: float(frame.values[name][which][0]) for name, which in bad.items() if name in frame.values}


def _flagged(frame: Frame, name: str) -> Bools:
    """Ranks that have this metric present and not 0."""
    values = frame.values.get(name)
    if values is None:
        return np.zeros(frame.ranks, dtype=np.bool_)
    return np.asarray(frame.present[name] & (values != 0))


def _seen(frame: Frame, name: str) -> bool:
    """Whether any rank has this metric in this frame."""
    return name in frame.present and anyone(frame.present[name])
