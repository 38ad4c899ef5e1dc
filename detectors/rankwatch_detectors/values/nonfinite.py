"""Finds NaN and Inf in the step in which they are recorded, and the rank that had them first.

After the gradient reduction a NaN is on every rank, so the culprit shows only in values measured before it: the exact
columns `nonfinite` (how many local gradients were not finite) and `nonfinite_first` (which parameter). Without them the
ranks whose own values are not finite are named, unless all are. A row of that rank that comes late, as after an outage
between its host and the service, still names it. A value that was not logged does not count. The norms
of a step that the loss scaler skipped (`optimizer_skipped`) do not count either, unless many steps in a row are
skipped: that is reported once, and again only if it lasts longer than before.

A metric of the script's own that has never been finite, such as the loss of a part that is not used, is reported once
as information. A loss that becomes exactly 0 from one step to the next and stays so, with the same gradient norm in
each step, is training that is over: some loggers write 0 for NaN.

If ranks go at their own pace, there is no reduction over them in a step: each rank's row is judged by itself,
late or not, and the episode names every rank with such a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Frame, Ints, Kind, Severity
from rankwatch_detectors.dispatch import DispatchingDetector, typical
from rankwatch_detectors.metrics import is_of_training
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_detectors.statistics.level import last_digit
from rankwatch_detectors.statistics.peers import anyone, median

NORMS = ("grad_norm", "local_grad_norm")
CRITICAL = (*NORMS, "loss", "nonfinite")
SKIPPED = "optimizer_skipped"
DEAD = "dead"
"""Stands for a gradient norm of exactly 0 among what must be well again."""
ZERO = "zero"
"""Stands for a loss of exactly 0 among what must be well again."""
WORDS = {
    "nonfinite": "gradients",
    "grad_norm": "gradient norm",
    "local_grad_norm": "local gradient norm",
    SKIPPED: "updates",
}
ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh")
RANKS_SHOWN_MAX = 64


@dataclass(frozen=True, slots=True)
class NonfiniteConfig:
    """Settings of the non-finite detector. Its evidence is exact, so there is nothing to calibrate."""

    clear_rows: int = 3
    """Finite rows of the affected metrics before the episode ends."""
    skips_max: int = 20
    """Skipped steps in a row that a loss scaler explains: halving 2^16 twenty times leaves less than 1, and at such a
    scale the gradients themselves overflow."""
    skips_critical: int = 60
    """Skipped steps in a row after which nothing is trained any more."""
    skips_usual: int = 3
    """After so many bouts they are usual for the job; one longer by `skips_ratio` than each of them is still
    reported."""
    skips_ratio: float = 2.0
    zero_rows: int = 16
    """Rows in a row in which the loss is exactly 0 ..."""
    zero_before: int = 32
    """... after so many in which it was not near 0: the lowest of them is a tenth of their median, ..."""
    zero_digits: float = 100.0
    """... and that so many last digits: a loss that is printed as 0.0001 becomes 0 by rounding."""
    dead_rows: int = 128
    """Rows in a row in which the gradient norm is exactly 0: no loss depends on any parameter."""
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
    STATE: ClassVar[str] = (
        "lockstep _parameters _bad _rows_left _skips _bouts _finite _losses _zeros _dead _measured _exact _logged"
    )

    def __init__(self, config: NonfiniteConfig) -> None:
        super().__init__()
        self.name = "nonfinite"
        self.version = 11
        self._config = config
        self._parameters: list[str] = []
        self._bad: dict[str, int] = {}
        """Metrics that were not finite in the open episode, with their number of finite rows since."""
        self._rows_left: dict[str, Ints] = {}
        """For the same metrics: finite rows still needed from each rank."""
        self._skips = 0
        self._bouts: list[int] = []
        """Lengths of the newest bouts of skipped steps that were reported or usual."""
        self._finite: dict[str, bool] = {}
        """Whether one was finite, by metric that had a value in this launch."""
        self._losses: list[float] = []
        """The newest losses before the zeros."""
        self._zeros: list[Any] = []
        """Of the current row of zeros: how many, the step of the first, the gradient norm in it, whether it changed."""
        self._dead = [0, 0]
        """Rows in a row in which the gradient norm was exactly 0, and the step of the first."""
        self._measured = False
        """Whether the gradient norm of this launch was ever another than 0, or is the probe's."""
        self._exact = False
        self._logged: dict[str, list[Any]] = {}
        """Its frame family, the number of consecutive rows with it, and of rows without it since then, by metric."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        self._parameters = list(start.topology.parameters)
        if new_attempt:
            self._bad, self._rows_left, self._skips, self._exact, self._logged = {}, {}, 0, False, {}
            self._bouts, self._losses, self._zeros, self._dead = [], [], [], [0, 0]
        if new_launch:
            self._finite, self._measured = {}, False
        return ()

    def _takes_late(self) -> bool:
        return super()._takes_late() or (self.lockstep and not self._exact and bool(self._bad))

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        excused = _flagged(frame, SKIPPED)
        if frame.late:
            bad = _bad_ranks(frame, excused)
            return self._name(frame, bad) if self.lockstep else self._evaluate(frame, bad, excused)
        if anyone(excused):
            self._skips += 1
        elif self._skips and anyone(_flagged(frame, "grad_norm")) and np.isfinite(frame.values["grad_norm"]).all():
            if self._skips >= self._config.skips_max:
                self._bouts = [*self._bouts, self._skips][-2 * self._config.skips_usual :]
            self._skips = 0
        bad = _bad_ranks(frame, excused)
        never = self._never_finite(frame, bad)
        if self._too_many_skips:
            bad.setdefault(SKIPPED, excused)
        silent = self._fallen_silent(frame)
        if silent and not bad:
            return self._report_silent(frame, silent)
        judged = self._evaluate(frame, bad, excused)
        return [*never, *judged, *self._look_at_zeros(frame), *self._look_at_norm(frame)]

    @property
    def _too_many_skips(self) -> bool:
        """Whether enough steps in a row were skipped to report it."""
        if not self._skips:
            return False
        config, before = self._config, sorted(self._bouts, reverse=True)[: self._config.skips_usual]
        usual = config.skips_ratio * before[-1] if len(before) >= config.skips_usual else 0.0
        return self._skips >= max(config.skips_max, min(usual, config.skips_critical))

    def _never_finite(self, frame: Frame, bad: dict[str, Bools]) -> list[Finding]:
        """Remove the script's own metrics that were never finite in this launch from `bad`, and report them once."""
        reported: list[str] = []
        for name, values in frame.values.items():
            if self._finite.get(name):
                continue
            here = frame.present[name]
            first = anyone(here) and name not in self._finite
            self._finite[name] = name not in bad or anyone(here & np.isfinite(values))
            if name in bad and name not in CRITICAL and not self._finite[name]:
                del bad[name]
                reported += [name] if first else []
        if not reported or WHOLE_JOB in self.episodes:
            return []
        has = "has" if len(reported) == 1 else "have"
        summary = f"{_listed(sorted(reported))} {has} been NaN or Inf since the first value."
        opened = self._open(Severity.INFO, frame, frame.step, 0.5, summary, {"metrics": sorted(reported)})
        return [*opened, *self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)]

    def _look_at_zeros(self, frame: Frame) -> list[Finding]:
        """Report a loss that is exactly 0 from one step on, and a gradient norm that is the same in each step."""
        loss, norm, config = typical(frame, "loss"), typical(frame, "grad_norm"), self._config
        if loss is None:
            return []
        if loss != 0.0:
            zeros, self._zeros = self._zeros[0] if self._zeros else 0, []
            self._losses += [*[0.0] * min(zeros, config.zero_before), loss]
            del self._losses[: -config.zero_before]
            return []
        count, since, first, changes = self._zeros or (0, frame.step, norm, False)
        self._zeros = [count + 1, since, first, changes or norm != first]
        if self._zeros[0] != config.zero_rows or self._zeros[3] or len(self.episodes) or not self._was_far_from_zero():
            return []
        self._bad[ZERO] = 0
        same = f" and the gradient norm always {first:.4g}" if first is not None else ""
        severity, confidence = (Severity.CRITICAL, 0.9) if same else (Severity.WARNING, 0.7)
        summary = f"The loss has been exactly 0 since step {since}{same}: nothing is trained any more, or its NaN is "
        evidence = {"metrics": ["loss"], "value": 0.0, "usual": median(np.asarray(self._losses))}
        return self._open(severity, frame, since, confidence, f"{summary}logged as 0.", evidence)

    def _look_at_norm(self, frame: Frame) -> list[Finding]:
        """Report gradients that are exactly 0 for long, as of dead units, or of a loss without its graph.

        For information where they were so from the first row on, and a script logs them: many print 0 for what they do
        not measure.
        """
        norm, (count, since) = typical(frame, "grad_norm"), self._dead
        if norm is None:
            return []
        self._measured = self._measured or norm != 0.0 or "local_grad_norm" in frame.values
        self._dead = [count + 1, since if count else frame.step] if norm == 0.0 else [0, 0]
        if self._dead[0] != self._config.dead_rows or len(self.episodes):
            return []
        evidence = {"metrics": ["grad_norm"], "value": 0.0}
        if not self._measured:
            summary = "The logged gradient norm has always been exactly 0: it is not measured, or nothing is trained."
            opened = self._open(Severity.INFO, frame, self._dead[1], 0.5, summary, evidence)
            return [*opened, *self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)]
        self._bad[DEAD] = 0
        summary = f"All gradients have been exactly 0 since step {self._dead[1]}: nothing is trained."
        return self._open(Severity.WARNING, frame, self._dead[1], 0.9, summary, evidence)

    def _open(
        self,
        severity: Severity,
        frame: Frame,
        onset_step: int,
        confidence: float,
        summary: str,
        evidence: dict[str, Any],
    ) -> list[Finding]:
        """Open an episode of the whole job, found in this frame."""
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=severity,
            onset_step=onset_step,
            detected_step=frame.step,
            onset_time_s=self.now_s,
            detected_time_s=self.now_s,
            score=math.inf,
            confidence=confidence,
            summary=summary,
            evidence=evidence,
        )

    def _was_far_from_zero(self) -> bool:
        config, sizes = self._config, np.abs(self._losses)
        if sizes.size < config.zero_before or not sizes.all():
            return False
        middle, digit = median(sizes), min(map(last_digit, self._losses))
        return bool(sizes.min() >= middle / 10) and middle >= config.zero_digits * digit

    def _evaluate(self, frame: Frame, bad: dict[str, Bools], excused: Bools) -> list[Finding]:
        if bad or self._bad:
            self._count_rows(frame, bad, excused)
        return self._report(frame, bad) if bad else self._recover(frame)

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
                state[:] = frame.family, state[1] + 1 if state[2] == 0 else 1, 0
            elif state[0] == frame.family and state[1]:
                state[2] += 1
                if state[1] >= self._config.logged_rows and state[2] == self._config.silent_rows:
                    silent.append(name)
        return silent

    def _report_silent(self, frame: Frame, names: list[str]) -> list[Finding]:
        """Report missing values within an episode: some loggers omit NaN, so this is no recovery."""
        since = frame.step
        summary = f"{' and '.join(names).capitalize()} stopped being logged by step {since}, after non-finite values."
        return [
            finding
            for scope in self.episodes
            for finding in self.episodes.update(scope, detected_step=since, detected_time_s=self.now_s, summary=summary)
        ]

    def _report(self, frame: Frame, bad: dict[str, Bools]) -> list[Finding]:
        for name in bad:
            self._bad[name] = 0
        ranks = _culprits(frame, bad, reduced=self.lockstep)
        exact = "nonfinite" in bad
        open_scope = next(iter(self.episodes), None)
        if open_scope is not None:
            reported = self.episodes.reported(open_scope)
            if self._skips == self._config.skips_critical and reported["severity"] != Severity.CRITICAL:
                return self.episodes.update(open_scope, severity=Severity.CRITICAL, **self._words(frame, bad, ranks))
            if not self.lockstep:
                return self._report_others(
                    frame, bad, open_scope, [rank for rank in ranks if rank not in reported["ranks"]]
                )
            # The first rank stays named: in the next step the reduction has spread the value to all ranks.
            graver = reported["severity"] != Severity.CRITICAL and any(name in CRITICAL for name in bad)
            if graver:
                self._exact = exact and bool(ranks)
                words = {"severity": Severity.CRITICAL, "confidence": 1.0} | self._words(frame, bad, ranks)
                return self.episodes.update(open_scope, **words)
            return self._name(frame, bad)
        self._exact = exact and bool(ranks)
        critical = any(name in CRITICAL for name in bad)
        return self.episodes.open(
            IncidentScope.of_rank(ranks[0]) if len(ranks) == 1 else WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.CRITICAL if critical else Severity.INFO if self._bouts else Severity.WARNING,
            onset_time_s=self.now_s,
            detected_time_s=self.now_s,
            score=math.inf,
            confidence=1.0 if critical and SKIPPED not in bad else 0.7,
            **self._words(frame, bad, ranks),
        )

    def _name(self, frame: Frame, bad: dict[str, Bools]) -> list[Finding]:
        """Name the ranks whose own gradients were not finite, if the open episode began in this step or later."""
        ranks = _culprits(frame, bad, reduced=self.lockstep) if "nonfinite" in bad and not self._exact else ()
        scope = next(iter(self.episodes), None)
        if not ranks or scope is None or frame.step > self.episodes.reported(scope)["onset_step"]:
            return []
        self._exact = True
        return self.episodes.update(scope, **self._words(frame, bad, ranks))

    def _report_others(
        self, frame: Frame, bad: dict[str, Bools], scope: IncidentScope, more: list[int]
    ) -> list[Finding]:
        """Add further ranks with non-finite values, which each has by itself."""
        before = self.episodes.reported(scope)["ranks"]
        if not more or len(before) >= RANKS_SHOWN_MAX:
            return []
        ranks = (*before, *more)[:RANKS_SHOWN_MAX]
        summary = f"{self._what(frame, bad, tuple(more), len(more))} in step {frame.step} too."
        severity = {"severity": Severity.CRITICAL} if any(name in CRITICAL for name in bad) else {}
        return self.episodes.update(scope, ranks=ranks, detected_time_s=self.now_s, summary=summary, **severity)

    def _words(self, frame: Frame, bad: dict[str, Bools], ranks: tuple[int, ...]) -> dict[str, Any]:
        evidence: dict[str, Any] = {"metrics": sorted(bad), "values": _examples(frame, bad)}
        evidence["ranks_affected"] = max(int(which.sum()) for which in bad.values())
        summary = f"{self._what(frame, bad, ranks, evidence['ranks_affected'])} in step {frame.step}"
        if "nonfinite" in bad and ranks:
            evidence["nonfinite_gradients"] = int(frame.exact["nonfinite"][ranks[0]])
            parameter = self._parameter(frame, ranks[0])
            if parameter:
                evidence["parameter"] = parameter
                summary += f", first in {parameter}"
        if any(name in (*NORMS, "nonfinite") for name in bad) and _seen(frame, SKIPPED):
            skipped = evidence["update_skipped"] = anyone(_flagged(frame, SKIPPED))
            summary += f"; the update was {'not ' * (not skipped)}skipped"
        if list(bad) == [SKIPPED]:
            summary = f"The loss scaler has skipped {self._skips} steps in a row, up to step {frame.step}"
            times = len(self._bouts) + 1
            summary += f", for the {ORDINALS[times]} time" if 1 < times < len(ORDINALS) else ""
            if self._skips >= self._config.skips_critical:
                summary += ": nothing is trained"
        return {
            "ranks": ranks,
            "onset_step": frame.step - (self._skips - 1 if list(bad) == [SKIPPED] else 0),
            "detected_step": frame.step,
            "summary": summary + ".",
            "evidence": evidence,
        }

    def _what(self, frame: Frame, bad: dict[str, Bools], ranks: tuple[int, ...], affected: int) -> str:
        """What is not finite, and of which ranks."""
        names = (
            ["nonfinite"] if "nonfinite" in bad else sorted(name for name in bad if name != SKIPPED or len(bad) == 1)
        )
        reported = [frame.values[name][bad[name]] for name in bad if name in frame.values and name != SKIPPED]
        nan, inf = (bool(any(test(values).any() for values in reported)) for test in (np.isnan, np.isinf))
        which = "NaN" if nan and not inf else "Inf" if inf and not nan else "NaN or Inf"
        return f"{which} in {_listed(['the ' + WORDS.get(name, name) for name in names])}{self._who(ranks, affected)}"

    def _who(self, ranks: tuple[int, ...], affected: int) -> str:
        if self.world_size == 1:
            return ""
        if len(ranks) == 1:
            return f" of rank {ranks[0]}"
        affected = len(ranks) or affected
        return " of all ranks" if affected == self.world_size else f" of {affected} of the {self.world_size} ranks"

    def _parameter(self, frame: Frame, rank: int) -> str:
        first = frame.exact.get("nonfinite_first")
        if first is None or not frame.present["nonfinite_first"][rank]:
            return ""
        index = int(first[rank])
        return self._parameters[index] if 0 <= index < len(self._parameters) else f"parameter {index}"

    def _recover(self, frame: Frame) -> list[Finding]:
        zero, dead = ZERO in self._bad, DEAD in self._bad
        well = {SKIPPED: self._skips == 0, ZERO: not self._zeros, DEAD: not self._dead[0]}
        for name in list(self._bad):
            self._bad[name] += well[name] if name in well else _seen(frame, name)
            # Without lockstep each affected rank needs finite rows of its own.
            left = self._rows_left.get(name)
            if self._bad[name] >= self._config.clear_rows if self.lockstep or left is None else not left.any():
                del self._bad[name]
                self._rows_left.pop(name, None)
        if self._bad:
            return []
        well_again = "The loss is not 0 any more" if zero else "All values are finite again"
        summary = f"{'Gradients are not 0 any more' if dead else well_again} in step {frame.step}."
        return [f for scope in self.episodes for f in self.episodes.close(scope, frame.step, self.now_s, summary)]


def _bad_ranks(frame: Frame, excused: Bools) -> dict[str, Bools]:
    """The ranks whose present value is not finite, by metric; `excused` ranks' norms do not count."""
    bad: dict[str, Bools] = {}
    for name in () if frame.finite else _suspects(frame):
        if not is_of_training(name):
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


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _examples(frame: Frame, bad: dict[str, Bools]) -> dict[str, float]:
    return {name: float(frame.values[name][which][0]) for name, which in bad.items() if name in frame.values}


def _flagged(frame: Frame, name: str) -> Bools:
    """Ranks that have this metric present and not 0."""
    values = frame.values.get(name)
    if values is None:
        return _nobody(frame.ranks)
    return np.asarray(frame.present[name] & (values != 0))


@lru_cache(maxsize=16)
def _nobody(ranks: int) -> Bools:
    nobody = np.zeros(ranks, dtype=np.bool_)
    nobody.flags.writeable = False
    return nobody


def _seen(frame: Frame, name: str) -> bool:
    """Whether any rank has this metric in this frame."""
    return name in frame.present and anyone(frame.present[name])
