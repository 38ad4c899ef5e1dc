"""One kind of evidence about slow ranks: a quantity, its baseline, its load model and its CUSUMs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Finding, Floats, Frame, Topology
from rankwatch_detectors.dispatch import finite, where_usable
from rankwatch_detectors.explanation import (
    DETECTABLE_ROWS,
    TRAIN,
    Detectable,
    ExplainedDetector,
    FrameCounts,
    LeftOut,
    Statistic,
    Suspect,
    UnmetCriterion,
    least_shift,
    split,
)
from rankwatch_detectors.pace.load import LoadConfig, LoadModel
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.baseline import BaselineConfig, PeerBaseline, Proof
from rankwatch_detectors.statistics.peers import everyone, median
from rankwatch_detectors.statistics.shift import Crossing, ShiftBank, threshold, usual_step_s

# exp(4): chance produces such a run once in about fifty rows. From here on a rank no longer teaches its baseline.
SUSPECT_EVIDENCE = 4.0
SUSPECTS_MAX = 16
"""Suspected ranks whose evidence is kept row by row. By chance there are fewer than one, at any number of ranks."""
_REPORTED = ("step_time_s", "busy_s")
PEERS_SHOWN_MAX = 1024
"""Peers whose values are compared in evidence: their median is exact enough, and the cost is bounded."""


@dataclass(frozen=True, slots=True)
class PeerTestConfig:
    """What a peer test looks for."""

    ratios: tuple[float, ...]
    """Tested ratios to the usual value, one CUSUM each; ratios below 1 find values that fall."""
    ratio_min: float
    """Verification: the mean ratio over the run must be at least this far from 1, in logarithms."""
    duration_min_s: float = 0.0
    """How long a run must have lasted."""
    rows_min: int = 5
    """Slow rows before a finding: runs of two to four slow steps are common and harmless."""
    lasting_ratio: float = 1.0
    """Below it a run must have lasted for `lasting_s` and `lasting_rows`."""
    lasting_s: float = 0.0
    lasting_rows: int = 0
    large_s: float = 0.0
    """Runs of `lasting_ratio` and more must have lasted for this long."""
    rows_between: float = 1.0
    """Mean rows between false firings as a multiple of exp(threshold) while noise is plain (`PeerBaseline.is_plain`);
    else it is 1."""


class PeerTest(Stateful):
    """Judges one positive quantity of all ranks, row by row."""

    STATE: ClassVar[str] = "baseline load bank step_s _since _rows"

    def __init__(self, config: PeerTestConfig, baseline: BaselineConfig, load: LoadConfig, budget: float) -> None:
        self._config = config
        self.effect_min = abs(math.log(config.ratio_min))
        """The least shift that is reported, in logarithms."""
        self._budget = budget
        self.baseline = PeerBaseline(baseline)
        self.load = LoadModel(load)
        levels = tuple(math.log(ratio) for ratio in config.ratios)
        self.bank = ShiftBank(levels, baseline.clip_sigmas, config.rows_min)
        self.step_s = 1.0
        """Usual seconds between rows."""
        self._rows = 0
        self._since: dict[str, float] = {}
        self._waits = False
        """Whether a run is large enough but has not lasted long enough; set with each row."""
        self.judged: Bools = np.zeros(0, dtype=np.bool_)
        self.sigma: Floats = np.zeros(0)
        self._logs: Floats = np.zeros(0)
        self._residual: Floats = np.zeros(0)
        self._usable: Bools = np.zeros(0, dtype=np.bool_)
        self._missing: dict[int, UnmetCriterion] = {}
        """Ranks beyond the threshold in this row that were not reported, and what they lack."""

    def begin(self, topology: Topology, came_from: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Set the topology: baselines follow the units, evidence is discarded."""
        self.baseline.regroup(topology.peer_group, came_from)
        self.load.regroup(topology.dp)
        self.bank.clear(topology.world_size)
        self._since = {}

    def evaluate(
        self,
        values: Floats,
        frame: Frame,
        step_s: float | None,
        now_s: float,
        frozen: Sequence[int],
        uncertainty: Floats | None = None,
    ) -> tuple[Floats, list[Crossing]]:
        """Score and decide one row; `learn` must follow.

        Args:
            values: the quantity by rank; not measured if not finite or not positive.
            frame: the frame of this row, for the load.
            step_s: seconds of this step, None if not measured.
            now_s: stream time.
            frozen: ranks with an open episode, which are scored but neither tested nor learned.
            uncertainty: scatter of this row in addition to the baseline's, by rank, in logarithms.

        Returns:
            Each rank's residual in logarithms, and the ranks that crossed and passed verification.
        """
        self._rows += 1
        if step_s is not None and step_s > 0:
            self.step_s = usual_step_s(self.step_s, step_s, self._rows)
        usable = (values > 0) & (values < np.inf)
        all_usable = everyone(usable)
        logs = np.log(values if all_usable else np.where(usable, values, 1.0))
        baseline = self.baseline
        residual = baseline.residual(logs, usable)
        self.sigma = baseline.sigma() if uncertainty is None else np.hypot(baseline.sigma(), uncertainty)
        residual = self.load.unexplained(frame, residual, usable, baseline.groups, self.sigma)
        if not all_usable:
            residual = np.where(usable, residual, 0.0)
        self.judged = usable & baseline.ready()
        limit = self.limit
        tested = self.judged
        if frozen:
            tested = tested.copy()
            tested[list(frozen)] = False
        self.bank.push(residual, self.sigma, tested, frame.step, limit)
        self._logs, self._residual, self._usable = logs, residual, usable
        return residual, self._crossings(limit, now_s)

    @property
    def deviation(self) -> Floats:
        """How far each rank is from its peers in the row just judged, its usual offset included, in logarithms."""
        return self._residual + self.baseline.offset

    @property
    def usable(self) -> Bools:
        """Ranks with a value in the row just judged."""
        return self._usable

    def learn(self, frozen: Sequence[int]) -> None:
        """Learn the row just judged: scatter from all but the `frozen` ranks, offsets from those without suspicion."""
        if self._waits:
            return
        scattered = self._usable
        if frozen:
            scattered = scattered.copy()
            scattered[list(frozen)] = False
        normal = scattered & (self.bank.strongest() < SUSPECT_EVIDENCE)
        self.baseline.learn(self._logs, self._residual, normal, scattered)

    def suspects(self, rank: int) -> bool:
        """Whether a rank's newest rows are higher than chance would explain."""
        return bool(self.bank.strongest()[rank] >= SUSPECT_EVIDENCE)

    def peers_of(self, rank: int) -> list[int]:
        """Usable peers of a rank, without itself, at most `PEERS_SHOWN_MAX`."""
        members = self.baseline.groups.members(rank)
        usable = members[self._usable[members] & (members != rank)]
        return [int(peer) for peer in usable[:PEERS_SHOWN_MAX]]

    def _crossings(self, limit: float, now_s: float) -> list[Crossing]:
        config = self._config
        crossings = []
        self._missing = {}
        found = self.bank.crossings(limit)
        if not found:
            self._waits, self._since = False, {}
            return []
        # The threshold counts every level as a test, but a crossing is verified only once, so their share is removed.
        uncertainty_limit = limit - math.log(self.bank.levels)
        for crossing in found:
            verdict = self.baseline.verify(crossing, uncertainty_limit, self.effect_min)
            if verdict is Proof.FAILED or not self._moved_itself(crossing):
                self.baseline.absorb(crossing.rank, crossing.effect, crossing.rows)
                self.bank.clear_rank(crossing.rank)
            elif verdict is Proof.GIVEN:
                crossings.append(crossing)
            else:
                self._missing[crossing.rank] = UnmetCriterion.CERTAINTY
        beyond = crossings
        lasting = [crossing for crossing in crossings if self._lasts(crossing)]
        # With two ranks, the other rank's baseline would learn this shift while it is waited for.
        self._waits = len(lasting) < len(crossings)
        crossings = lasting
        if config.duration_min_s:
            self._since = {str(c.rank): self._since.get(str(c.rank), now_s) for c in crossings}
            crossings = [c for c in crossings if now_s - self._since[str(c.rank)] >= config.duration_min_s]
        if len(crossings) < len(beyond):
            self._missing |= dict.fromkeys(
                {one.rank for one in beyond} - {one.rank for one in crossings}, UnmetCriterion.DURATION
            )
        return crossings

    @property
    def limit(self) -> float:
        """The threshold for the evidence of a rank."""
        between = self._config.rows_between if self.baseline.is_plain else 1.0
        tests = self.bank.levels * max(self.baseline.rows.size, 1)
        return threshold(tests, self.step_s, self._budget * between)

    @property
    def known_rows(self) -> int:
        """Rows from which the baseline of the best known rank was learned."""
        return int(self.baseline.rows.max(initial=0.0))

    def suspected(self, source: str) -> list[Suspect]:
        """Ranks with half of the evidence that is reported, or more; at most `SUSPECTS_MAX`, the strongest.

        `source`: name of this test.
        """
        near, strongest = self.bank.take_near(), self.bank.strongest()
        left = [rank for rank in near if strongest[rank] > 0.0]  # without those that have just been reported
        ranks = sorted(left, key=lambda rank: (-strongest[rank], rank))[:SUSPECTS_MAX]
        return [self._suspect(self.bank.run(rank), source) for rank in ranks]

    def _suspect(self, run: Crossing, source: str) -> Suspect:
        missing = self._missing.get(run.rank, UnmetCriterion.NOTHING) if self.judged[run.rank] else UnmetCriterion.VALUE
        scope = IncidentScope.of_rank(run.rank)
        ratio = math.exp(run.effect)
        return Suspect(scope, Statistic.EVIDENCE, run.evidence, self.limit, run.rows, ratio, missing, source)

    def detectable(self, rank: int, rows: int) -> float | None:
        """The smallest shift of a rank that is reported this many rows after its onset; None: none, however large.

        Args:
            rank: the rank, whose own scatter and baseline decide.
            rows: rows since the onset.
        """
        config, lasted_s = self._config, rows * self.step_s
        held = rows - math.ceil(config.duration_min_s / self.step_s)
        shift = least_shift(self.bank, float(self.baseline.sigma()[rank]), self.limit, held)
        if shift is None or lasted_s < config.large_s:
            return None
        brief = rows < config.lasting_rows or lasted_s < config.lasting_s
        uncertainty = self.baseline.uncertainty(rank, self.limit - math.log(self.bank.levels), held)
        return max(shift, self.effect_min, uncertainty, math.log(config.lasting_ratio) if brief else 0.0)

    def _lasts(self, crossing: Crossing) -> bool:
        """Whether a run is large, or long enough for its size."""
        config = self._config
        lasted_s = crossing.rows * self.step_s
        if abs(crossing.effect) >= math.log(config.lasting_ratio):
            return lasted_s >= config.large_s
        return crossing.rows >= config.lasting_rows and lasted_s >= config.lasting_s

    def _moved_itself(self, crossing: Crossing) -> bool:
        """With only one peer: whether this rank became slow, and not its peer fast."""
        groups = self.baseline.groups
        if groups.size_of(crossing.rank) > 2:
            return True
        own = float(self._logs[crossing.rank] - self.baseline.level[crossing.rank])
        return own * crossing.effect > 0 and abs(own) > abs(crossing.effect) / 2


def own_seconds(frame: Frame) -> Floats | None:
    """Each rank's own wall time in seconds: busy, and waiting for its data. NaN where not measured."""
    computed = frame.computed
    if "own seconds" not in computed:
        computed["own seconds"] = _own_seconds(frame)
    seconds: Floats | None = computed["own seconds"]
    return seconds


def _own_seconds(frame: Frame) -> Floats | None:
    busy = finite(frame, "busy_s")
    if busy is None:
        return None
    seconds = where_usable(busy, np.nan)
    data_wait = finite(frame, "phase.data_wait")
    if data_wait is None:
        return seconds
    with np.errstate(over="ignore"):  # an overflowing sum is then treated as not measured
        both = seconds + where_usable(data_wait, 0.0)
    return where_usable((both, np.isfinite(both)), np.nan)


def cpu_seconds(frame: Frame) -> Floats | None:
    """CPU seconds of each rank's training thread. NaN where not measured.

    None if no rank measures it, or any rank measures its device: it is then the time of launching the device's work.
    """
    cpu = None if "device_busy_s" in frame.values else finite(frame, "busy_cpu_s")
    return None if cpu is None else where_usable(cpu, np.nan)


def wanted_seconds(frame: Frame) -> Floats | None:
    """Seconds of each rank's work less those in which it wanted a core and had none: CPU time, sleep, disks, networks.

    NaN where not measured. None unless most ranks measure it, or if any measures its device.
    """
    busy, queued = finite(frame, "busy_s"), of_most(frame, "queued_s")
    if busy is None or queued is None or "device_busy_s" in frame.values:
        return None
    return where_usable(busy, np.nan) - queued


def device_seconds(frame: Frame) -> Floats | None:
    """Seconds of each rank's own work on its device. NaN where not measured; None unless most ranks measure it."""
    return of_most(frame, "device_busy_s")


def arrival_seconds(frame: Frame, device_s: Floats | None) -> Floats | None:
    """Seconds until each rank, host and device, has done its part of the step. NaN where not measured.

    It is the step (as the device measures it, if it does) less the device's wait for other ranks; where that is not
    measured, the longer of the device's own work and the host's.

    Args:
        frame: the row.
        device_s: what `device_seconds` gives for it.

    Returns:
        None unless most ranks measure the wait or their device's own work.
    """
    wait_s, step = of_most(frame, "device_wait_s"), finite(frame, "step_time_s")
    if wait_s is not None and step is not None:
        by_device = finite(frame, "device_step_s")
        step_s = where_usable(step, np.nan)
        return (step_s if by_device is None else np.where(by_device[1], by_device[0], step_s)) - wait_s
    host = own_seconds(frame)
    return device_s if host is None or device_s is None else np.maximum(device_s, host)


def of_most(frame: Frame, name: str) -> Floats | None:
    """A quantity by rank, NaN where not measured; None unless most of the ranks that report anything measure it."""
    here = finite(frame, name)
    if here is None:
        return None
    reported = max(np.count_nonzero(frame.present[one]) for one in (*_REPORTED, name) if one in frame.present)
    return where_usable(here, np.nan) if 2 * np.count_nonzero(here[1]) > reported else None


def added_by_one_s(frame: Frame) -> float | None:
    """Seconds by which the slowest rank's own work is longer than the median rank's; None if no rank reports it."""
    arrival = arrival_seconds(frame, device_seconds(frame))
    own = own_seconds(frame) if arrival is None else arrival
    if own is None:
        return None
    measured = own[np.isfinite(own)]
    if not measured.size:
        return None
    return max(float(measured.max()) - median(measured), 0.0)


MEASURED = frozenset({"busy_s", "device_busy_s", "device_wait_s"})


class PeerTestDetector(ExplainedDetector):
    """Base of a detector whose scopes are ranks, each judged by one or more peer tests."""

    _config: Any
    _rows: int
    peer_tests: dict[str, PeerTest]
    """By name."""

    def _name(self, peer_test: PeerTest) -> str:
        return next(name for name, one in self.peer_tests.items() if one is peer_test)

    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        if self.world_size == 1:
            return {LeftOut.ALONE: counts[TRAIN]}
        known = max(peer_test.known_rows for peer_test in self.peer_tests.values())
        warm = self._config.baseline.warm_rows
        before = max(known - max(self._rows - self._config.skipped_rows, 0), 0)
        not_measured = {LeftOut.NOT_MEASURED: max(counts[TRAIN] - self._rows, 0)}
        return split(self._rows, self._config.skipped_rows, max(warm - before, 0)) | not_measured

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """Ranks with half of the evidence that is reported, or more, by each test."""
        if frame.family == "values":
            return ()
        near = [name for name, peer_test in self.peer_tests.items() if peer_test.bank.near]
        return [suspect for name in near for suspect in self.peer_tests[name].suspected(name)] if near else ()

    def crossed(self, finding: Finding) -> Suspect | None:
        """The evidence of the run; None for differences that are reported without one."""
        reported = finding.evidence
        if "log_likelihood_ratio" not in reported:
            return None
        effect = finding.score * reported["sigma"] / math.sqrt(reported["rows"])
        value, limit = reported["log_likelihood_ratio"], self.peer_tests[reported["witness"]].limit
        ratio = math.exp(effect)
        return Suspect(
            finding.scope, Statistic.EVIDENCE, value, limit, reported["rows"], ratio, source=reported["witness"]
        )

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The mean ratio that would have been reported."""
        return _ratio(self.peer_tests[crossed.source].detectable(crossed.scope.number, rows))

    def detectable(self) -> Sequence[Detectable]:
        """Effects that each test can detect, for a rank with the median noise and for the noisiest."""
        found = []
        for name, peer_test in self.peer_tests.items():
            ranks = np.flatnonzero(peer_test.baseline.ready())
            if ranks.size:
                sigma = peer_test.baseline.sigma()
                order = ranks[np.argsort(sigma[ranks], kind="stable")]
                middle, noisiest = int(order[order.size // 2]), int(order[-1])
                found.append(_detectable(peer_test, middle, f"a slow rank, by {name} time"))
                found.append(_detectable(peer_test, noisiest, f"rank {noisiest}, the noisiest, by {name} time"))
        return found


def _detectable(peer_test: PeerTest, rank: int, fault: str) -> Detectable:
    sizes = tuple((rows, _ratio(peer_test.detectable(rank, rows))) for rows in DETECTABLE_ROWS)
    return Detectable(fault, "ratio", math.expm1(float(peer_test.baseline.sigma()[rank])), sizes)


def _ratio(shift: float | None) -> float | None:
    return None if shift is None else math.exp(shift)
