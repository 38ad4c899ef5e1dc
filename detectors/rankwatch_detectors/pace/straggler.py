"""Finds ranks whose own work persistently takes longer than their peers', and hosts and switches as a whole.

In synchronous training all ranks wait for the slowest, so the time of a whole step does not show it. Busy time does:
as wall time including waiting for data, as CPU time of the training thread, as what devices measure of their own work.
If ranks of a host share cores, wall time alone does not distinguish slow work from being descheduled. CPU time does,
and so does wall time less the time in which the rank wanted a core and had none, which shows sleep, disks and networks
as well. Wall time decides alone only if it is a third higher for a minute, and the cause is the host. Each peer test
has its own baseline and its own bank of CUSUMs.

A rank that is slow from its first rows is reported too. Its excess then becomes its baseline, and later changes are
judged against it and reported separately.

A rank is followed as a unit through attempts and launches. It knows the UUID of its device once its model lies there,
which may be after the first rows of a launch. Until then it is taken for the unit that had its place on the host
before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Change,
    Finding,
    Floats,
    Frame,
    Ints,
    Kind,
    Observation,
    Severity,
    StepKind,
    Topology,
)
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, STARTS, finite, typical
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.explanation import Detectable, Suspect
from rankwatch_detectors.pace.load import CpuContention, CpuContentionConfig, LoadConfig
from rankwatch_detectors.pace.peer_test import (
    MEASURED,
    PEERS_SHOWN_MAX,
    PeerTest,
    PeerTestConfig,
    PeerTestDetector,
    arrival_seconds,
    cpu_seconds,
    device_seconds,
    own_seconds,
    wanted_seconds,
)
from rankwatch_detectors.pace.slow_places import PlacesConfig, SlowPlaces
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope, ScopeLevel
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.baseline import BaselineConfig
from rankwatch_detectors.statistics.shift import ROWS_BETWEEN, Crossing
from rankwatch_detectors.words import duration, listed, percent, slower_than


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """Settings of the straggler detector."""

    budget: float = 1.0
    """False incidents per job-week, over all ranks, hosts, switches, levels and peer tests."""
    wall: PeerTestConfig = field(
        # +3 %, +5 %, +10 %, +30 %: close enough that a shift in between is found only a few rows later.
        default_factory=lambda: PeerTestConfig(
            ratios=(1.03, 1.05, 1.10, 1.30), ratio_min=1.022, rows_between=ROWS_BETWEEN
        )
    )
    cpu: PeerTestConfig = field(
        # CPU time on shared cores varies with caches, clock frequencies and hyper-threads although no rank is at fault:
        # mostly by 10 %, by 50 % for seconds while something else runs on the same core, and by more for tenths of one.
        default_factory=lambda: PeerTestConfig(
            ratios=(1.25, 1.6), ratio_min=1.2, lasting_ratio=1.6, lasting_s=20.0, lasting_rows=24, large_s=1.0
        )
    )
    host: PeerTestConfig = field(
        # Being descheduled comes and goes; only a third more time for a minute needs a person's attention.
        default_factory=lambda: PeerTestConfig(ratios=(1.3, 2.0), ratio_min=1.3, duration_min_s=60.0)
    )
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    shared_baseline: BaselineConfig = field(
        # On CPU jobs rank 0 often writes logs too, which costs about 10 % and is no fault.
        default_factory=lambda: BaselineConfig(offset_max=math.log(1.15))
    )
    cpu_contention: CpuContentionConfig = field(default_factory=CpuContentionConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    places: PlacesConfig = field(default_factory=PlacesConfig)
    skipped_rows: int = 2
    """First rows of an attempt: compilation, caches and connections, not work."""
    standing_rows: int = 16
    """A rank with fewer usual rows than these was never seen at another speed: it is slow from the first step ..."""
    standing_onset_rows: int = 64
    """... and so is one whose offset silicon does not explain, if noise hid it for up to this many rows."""
    fact_rows: int = 48
    """Rows after which smaller standing differences are reported; they are then known to a third of a percent. This is
    before a relaunch counts as the fix of an earlier incident."""
    fact_ratio: float = 1.05
    """The least standing difference that is reported."""
    excess_min: float = 1.01
    """A rank that takes less than this ratio of its peers' time delays nobody, whatever its own time was before."""
    smooth_rows: int = 8
    """Rows over which the excess of an open episode is smoothed."""
    clear_share: float = 0.35
    """An episode ends when the smoothed excess stays below this share of the reported one ..."""
    clear_rows: int = 16
    """... for this many rows, in which the rank was not measurably slower than its peers."""
    clear_sigmas: float = 2.0
    """Tolerance for the mean of these rows, in sigmas of that mean."""
    retell_share: float = 0.3
    """A change of the excess by this share is reported as an update ..."""
    retell_rows: int = 32
    """... once it has lasted this many rows."""


def units_of(topology: Topology, before: Sequence[str]) -> list[str]:
    """A text for each rank's unit; no two are equal.

    Args:
        topology: the ranks as they are known now.
        before: their units, or those of an earlier attempt, by rank.
    """
    earlier = dict(zip(_counted([_host(unit) for unit in before]), before, strict=True))
    devices = zip(topology.device_uuid, _counted(topology.unit), strict=True)
    units = [f"{unit}#{number}" if device else "" for device, (unit, number) in devices]
    reported = set(units)
    for rank, (host, place) in enumerate(_counted(topology.host)):
        if not units[rank]:
            assumed = earlier.get((host, place))
            units[rank] = assumed if assumed and assumed not in reported else f"{host}/#{place}"
    return units


def came_from(units: Sequence[str], before: Sequence[str], *, same_attempt: bool) -> Ints:
    """Where each rank's unit was before: a rank, or -1 if it is new.

    Within an attempt ranks stay where they are, so that a unit whose device was not known is the one that is told now.
    """
    index = {unit: rank for rank, unit in enumerate(before)}
    found = [index.get(unit, -1) for unit in units]
    if same_attempt:
        found = [rank if place < 0 and _has_no_device(before[rank]) else place for rank, place in enumerate(found)]
    return np.asarray(found, dtype=np.int64)


def names_of(topology: Topology) -> list[str]:
    """What people call each rank."""
    return [f"Rank {rank} on {host}" if host else f"Rank {rank}" for rank, host in enumerate(topology.host)]


def _counted(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Each text, and how many equal ones stand before it."""
    seen: dict[str, int] = {}
    counted = []
    for text in texts:
        number = seen.get(text, 0)
        counted.append((text, number))
        seen[text] = number + 1
    return counted


def _host(unit: str) -> str:
    return unit.partition("/")[0]


def _has_no_device(unit: str) -> bool:
    return unit.partition("/")[2].startswith("#")


@dataclass(slots=True)
class TrackedRank:
    """One rank that was reported as slow. Excesses are logarithms of a ratio to its peers."""

    peer_test: str
    """Which peer test found it: one of `PEER_TESTS`."""
    reported: float
    """The excess that was reported last."""
    excess: float
    """The excess now, smoothed over rows."""
    standing: float
    """Its excess before that, which its baseline attributes to silicon."""
    changed: int = 0
    """Rows in which the excess differs from the reported one."""
    normal: int = 0
    """Rows in a row in which the excess is small, and the sum of their residuals."""
    normal_sum: float = 0.0

    @property
    def beyond_peers(self) -> float:
        """How much longer than its peers it takes."""
        return self.excess + self.standing


class TrackedRanks(Stateful):
    """Tracked ranks by number; in a snapshot by the text of the rank's scope."""

    def __init__(self) -> None:
        self.ranks: dict[int, TrackedRank] = {}

    def snapshot(self) -> dict[str, Any]:
        """All tracked ranks, as JSON types."""
        return {str(IncidentScope.of_rank(rank)): asdict(slow) for rank, slow in self.ranks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a result of `snapshot`."""
        self.ranks = {IncidentScope.parse(text).number: TrackedRank(**slow) for text, slow in state.items()}


PHASES_SHOWN = 4


def excess_of(frame: Frame, name: str, ranks: Sequence[int], peers: Sequence[int]) -> float | None:
    """The excess of a quantity of these ranks over their peers', by medians; None if it is not measured."""
    found = finite(frame, name)
    if found is None:
        return None
    here, among = (found[0][[one for one in some if found[1][one]]] for some in (ranks, peers))
    return float(np.median(here) - np.median(among)) if here.size and among.size else None


def phase_excess(frame: Frame, ranks: Sequence[int], peers: Sequence[int]) -> dict[str, float]:
    """Seconds by which each phase of these ranks is longer than of their peers, by the medians, largest first."""
    phases = [name for name in frame.values if name.startswith("phase.")]
    found = {name.removeprefix("phase."): excess_of(frame, name, ranks, peers) for name in phases}
    excess = {name: seconds for name, seconds in found.items() if seconds is not None}
    longest = sorted(excess.items(), key=lambda item: (-item[1], item[0]))
    return dict(longest[:PHASES_SHOWN])


def cause_class(phase_excess_s: dict[str, float], added_s: float, *, peer_test: str, device: bool) -> str:
    """Cause class of a slow rank: `device` if that works for longer, else by its phases, else `host` or `worker`.

    The longest excess that explains half of what is added decides: data_wait is `data`, checkpoint_save is `storage`.

    Args:
        phase_excess_s: of each phase of the host.
        added_s: seconds by which the rank takes longer.
        peer_test: the quantity that shows it.
        device: its device works for longer.
    """
    if device:
        return "device"
    grown = {name: seconds for name, seconds in phase_excess_s.items() if seconds > max(added_s / 2, 0.0)}
    longest = max(grown, key=lambda name: grown[name], default="")
    named = {"data_wait": "data", "checkpoint_save": "storage"}
    return named.get(longest, "host" if peer_test in ("host", "arrival") else "worker")


def waits_for(evidence: Mapping[str, Any]) -> str:
    """A sentence on what a rank waits for that is longer by the clock than by its CPU time; "" where that is unknown.

    It has to explain most of the added time: the newest row gives the parts, the run their size.
    """
    added_s = evidence["busy_s"] - evidence["peers_busy_s"]
    if evidence["witness"] == "own" and evidence.get("cpu_excess_s", math.inf) < added_s / 2:
        return " It waits in its own code, as for a disk or a network, or sleeps: its CPU time has hardly grown."
    if evidence["witness"] == "host" and evidence.get("queued_excess_s", 0.0) > added_s / 2:
        return " It waits for a core, which others of its host have."
    return ""


def _times(peer_test: str, figures: Mapping[str, Any]) -> str:
    here, peers = duration(figures["busy_s"]), duration(figures["peers_busy_s"])
    if peer_test == "device":
        return f"its device works for {here} in a step, theirs for {peers}"
    return f"{here}{' of CPU time' * (peer_test == 'cpu')} a step, they {peers}"


class ExplainedStraggler(PeerTestDetector):
    """Base of the straggler detector."""

    _places: SlowPlaces

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """Ranks, hosts and switches with half of the evidence that is reported, or more."""
        places = self._places.suspects() if frame.family != "values" else ()
        return [*super().suspects(frame), *places] if places else super().suspects(frame)

    def crossed(self, finding: Finding) -> Suspect | None:
        """The evidence of the run; None for differences that are reported without one."""
        return self._places.crossed(finding) if finding.scope in self._places.episodes else super().crossed(finding)

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The mean ratio that would have been reported."""
        if crossed.scope.level is not ScopeLevel.RANK:
            return self._places.needed(crossed.scope, rows)
        return super().needed(crossed, rows)

    def detectable(self) -> Sequence[Detectable]:
        """Effects that each peer test can detect, for ranks, and for hosts and switches as a whole."""
        return [*super().detectable(), *self._places.detectable()]


PEER_TESTS = ("wall", "own", "cpu", "host", "device", "arrival")
"""Judged is wall time; or wall time without waiting for a core, CPU time, and wall time; or device time and the time
until host and device are done."""
RANKS_SHOWN = 4
RANKS_REPORTED_MAX = 64
"""Ranks named in one finding about standing differences; longer lists are not read."""


class StragglerDetector(ExplainedStraggler):
    """Finds slow ranks, hosts and switches; scope "rank:N", "host:NAME", "switch:NAME".

    Memory: about 1,350 bytes for each rank.
    """

    kind: Kind = Kind.STRAGGLER
    COMPARES_RANKS: ClassVar[bool] = True
    JUDGES_TIMES: ClassVar[bool] = True
    STATE: ClassVar[str] = (
        "lockstep _wall _own _cpu _host _device _arrival _units _peers _names _accelerated _rows _excess standing "
        "_stood _cpu_contention _places"
    )

    def __init__(self, config: StragglerConfig) -> None:
        super().__init__()
        self.name = "straggler"
        self.version = 17
        self._config = config
        # Two peer tests of ranks at most evaluate a row, or three of which two share; the last third is for places.
        share = config.budget / 3
        self._wall = PeerTest(config.wall, config.baseline, config.load, share)
        self._own = PeerTest(config.cpu, config.shared_baseline, config.load, share / 2)
        self._cpu = PeerTest(config.cpu, config.shared_baseline, config.load, share)
        self._host = PeerTest(config.host, config.shared_baseline, config.load, share / 2)
        self._device = PeerTest(config.wall, config.baseline, config.load, share)
        self._arrival = PeerTest(config.wall, config.baseline, config.load, share)
        self.peer_tests = {name: getattr(self, f"_{name}") for name in PEER_TESTS}
        self._units: list[str] = []
        self._peers: Ints = np.zeros(0, dtype=np.int64)
        self._names: list[str] = []
        self._accelerated = False
        self._rows = 0
        self._excess = TrackedRanks()
        self.standing = Episodes(self.kind)
        """Differences from the first steps of the launch on: the baseline includes them, so ranks stay tested."""
        self._stood = TrackedRanks()
        self._cpu_contention = CpuContention(config.cpu_contention)
        self._places = SlowPlaces(config.places, self.kind, share)

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        topology = start.topology
        units = units_of(topology, self._units)
        origins = came_from(units, self._units, same_attempt=not new_attempt)
        moved = origins.tolist() != list(range(len(self._units)))
        other_clock = not new_attempt and topology.accelerated != self._accelerated
        findings: list[Finding] = []
        if new_launch or moved or other_clock:
            findings = self.standing.close_all(self.now_s, OTHER_CLOCK if other_clock else ATTEMPT_ENDED)
        if findings:
            # A rank that was slow from its first step has no other past, so it is learned anew.
            origins[np.isin(origins, list(self._stood.ranks))] = -1
            self._stood.ranks.clear()
        if other_clock:
            findings += self.episodes.close_all(self.now_s, OTHER_CLOCK)
        findings += self._places.begin(
            topology, origins, new_attempt=new_attempt, other_clock=other_clock, now_s=self.now_s
        )
        peers = topology.peer_group
        if new_attempt or moved or other_clock or not np.array_equal(peers, self._peers):
            for peer_test in self.peer_tests.values():
                peer_test.begin(topology, origins)
        if new_attempt or units != self._units:
            self._cpu_contention.regroup(topology.host)
        if new_attempt:
            self._rows = 0
        if new_attempt or other_clock:
            self._excess.ranks.clear()
        self._units, self._peers = units, peers
        self._names = names_of(topology)
        self._accelerated = topology.accelerated
        return findings

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """A single rank has no peers."""
        return super().reads if self.world_size > 1 else STARTS

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family == "values" or frame.kind is not StepKind.TRAIN or MEASURED.isdisjoint(frame.values):
            return ()
        if self.world_size == 1:  # it has no peers
            return ()
        self._rows += 1
        if self._rows <= self._config.skipped_rows:
            return ()
        step_s, device = typical(frame, "step_time_s"), device_seconds(frame)
        arrival, findings = arrival_seconds(frame, device), list[Finding]()
        if device is not None:
            findings = [
                *self._evaluate(self._device, device, frame, step_s),
                *self._lesser(self._device, device, frame),
            ]
        if arrival is not None:
            return [*findings, *self._evaluate(self._arrival, arrival, frame, step_s)]
        wall, cpu = own_seconds(frame), None if self._accelerated else cpu_seconds(frame)
        if wall is None:
            return ()
        if cpu is None:
            return [*self._evaluate(self._wall, wall, frame, step_s), *self._lesser(self._wall, wall, frame)]
        wanted = wanted_seconds(frame)
        uncertainty = self._cpu_contention.uncertainty(wall, cpu if wanted is None else wanted)
        found = [] if wanted is None else self._evaluate(self._own, wanted, frame, step_s, uncertainty)
        found += self._evaluate(self._cpu, cpu, frame, step_s, uncertainty)
        return [*found, *self._evaluate(self._host, wall, frame, step_s, uncertainty)]

    def _evaluate(
        self,
        peer_test: PeerTest,
        seconds: Floats,
        frame: Frame,
        step_s: float | None,
        uncertainty: Floats | None = None,
    ) -> list[Finding]:
        shift, left_out, beyond = self._places.shift, list[int](), seconds
        if shift.size and peer_test is self._device:
            # How much longer the devices of a slow host take is not known.
            shift, left_out = np.zeros(0), np.flatnonzero(shift).tolist()
        if shift.size:
            beyond = seconds * np.exp(-shift)
        named = self._named()
        residual, crossings = peer_test.evaluate(beyond, frame, step_s, self.now_s, named + left_out, uncertainty)
        if shift.size:
            residual = residual + shift
            crossings = [replace(one, effect=one.effect + float(shift[one.rank])) for one in crossings]
        findings = [
            *self._follow(peer_test, residual, seconds, frame),
            *self._follow_standing(peer_test, residual, frame),
        ]
        if peer_test in (self._wall, self._device, self._arrival):
            describe, places = partial(self._described, peer_test, seconds, frame), self._places
            if crossings:
                findings += places.spoken_for(peer_test, crossings, named, frame, self.now_s, describe)
                # What its host or switch seems to share is not the rank's own, whether or not that is certain yet.
                crossings = [one for one in crossings if one.effect - places.shared(one.rank) >= peer_test.effect_min]
            if peer_test is not self._device:
                name = "wall" if peer_test is self._wall else "arrival"
                findings += places.add(peer_test, name, frame, self.now_s, describe)
        if crossings or findings:
            placed = {rank for one in findings if one.change is Change.OPEN for rank in one.ranks}
            for crossing in crossings:
                if crossing.rank not in placed:
                    findings.extend(self._open(peer_test, crossing, seconds, frame))
            for rank in placed.union(one.rank for one in crossings):
                for other in self.peer_tests.values():
                    other.bank.clear_rank(rank)
        peer_test.learn(self._named() + left_out)
        return findings

    def _named(self) -> list[int]:
        """Ranks with an open episode."""
        return [scope.number for scope in self.episodes]

    def _follow(self, peer_test: PeerTest, residual: Floats, seconds: Floats, frame: Frame) -> list[Finding]:
        """Follow the open episodes of this peer test: close those that recovered, and report changes."""
        config = self._config
        findings: list[Finding] = []
        for scope in self.episodes:
            rank = scope.number
            state = self._excess.ranks[rank]
            if state.peer_test != self._name(peer_test) or not peer_test.judged[rank]:
                continue
            state.excess += (float(residual[rank]) - state.excess) / config.smooth_rows
            as_peers = state.beyond_peers < math.log(config.excess_min)
            normal = as_peers or state.excess < config.clear_share * state.reported
            changed = abs(state.excess - state.reported) > config.retell_share * state.reported
            state.normal = state.normal + 1 if normal else 0
            state.normal_sum = state.normal_sum + float(residual[rank]) if normal else 0.0
            # An excess twice the reported one is certain after fewer rows.
            pace = 4 if state.excess > 2 * state.reported else 1
            state.changed = state.changed + pace if changed and not normal else 0
            if state.normal >= config.clear_rows and self._as_usual(peer_test, rank, state):
                since = frame.step - config.clear_rows
                summary = f"{self._names[rank]} is as fast as its peers again since about step {since}."
                findings.extend(self.episodes.close(scope, frame.step, self.now_s, summary))
                del self._excess.ranks[rank]
            elif state.normal >= config.clear_rows or state.changed >= config.retell_rows:
                findings.extend(self._retell(peer_test, rank, state, seconds, frame))
        return findings

    def _as_usual(self, peer_test: PeerTest, rank: int, state: TrackedRank) -> bool:
        """Whether a rank that is much faster than reported is as fast as its peers, and not only less slow."""
        mean = state.normal_sum / state.normal
        chance = self._config.clear_sigmas * float(peer_test.sigma[rank]) / math.sqrt(state.normal)
        least = math.log(self._config.excess_min)
        if mean < max(peer_test.effect_min, chance) or mean + state.standing < least:
            return True
        state.excess = mean
        return False

    def _follow_standing(self, peer_test: PeerTest, residual: Floats, frame: Frame) -> list[Finding]:
        """Follow ranks that were slow from the first step; the baseline forgets one that has recovered."""
        config = self._config
        findings: list[Finding] = []
        for rank, state in list(self._stood.ranks.items()):
            if state.peer_test != self._name(peer_test) or not peer_test.judged[rank]:
                continue
            state.excess += (state.reported + float(residual[rank]) - state.excess) / config.smooth_rows
            state.normal = state.normal + 1 if state.excess < config.clear_share * state.reported else 0
            if state.normal >= config.clear_rows:
                since = frame.step - config.clear_rows
                summary = f"{self._names[rank]} is as fast as its peers since about step {since}."
                findings.extend(self.standing.close(IncidentScope.of_rank(rank), frame.step, self.now_s, summary))
                del self._stood.ranks[rank]
                for each in self.peer_tests.values():
                    each.baseline.forget(rank)
        return findings

    def _lesser(self, peer_test: PeerTest, seconds: Floats, frame: Frame) -> list[Finding]:
        """Report once which ranks are slower from the first step by no more than silicon explains."""
        config = self._config
        if self._rows != config.skipped_rows + config.fact_rows:
            return []
        offset = peer_test.baseline.offset
        ranks = [
            rank
            for rank in peer_test.baseline.outliers(config.fact_ratio).tolist()
            if IncidentScope.of_rank(rank) not in self.episodes and IncidentScope.of_rank(rank) not in self.standing
        ]
        ranks = sorted(ranks, key=lambda rank: -offset[rank])[:RANKS_REPORTED_MAX]
        if not ranks:
            return []
        ratios = {str(rank): math.exp(offset[rank]) for rank in ranks}
        names = [f"{self._names[rank]} by {percent(math.exp(offset[rank]))} %" for rank in ranks]
        shown = listed([f"{name[:1].lower()}{name[1:]}" for name in names], RANKS_SHOWN)
        slowest = ranks[0]
        return self.standing.open(
            IncidentScope.of_rank(slowest) if len(ranks) == 1 else WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.INFO,
            ranks=tuple(ranks),
            onset_step=frame.step - config.fact_rows,
            detected_step=frame.step,
            onset_time_s=self.now_s - config.fact_rows * peer_test.step_s,
            detected_time_s=self.now_s,
            score=float(offset[slowest] / peer_test.sigma[slowest]),
            confidence=0.9,
            summary=f"Slower than their peers from the first step on: {shown}.",
            evidence={
                "standing": True,
                "ratio": math.exp(offset[slowest]),
                "ratios": ratios,
                "busy_s": float(seconds[slowest]),
                "witness": self._name(peer_test),
            },
            cause="device" if peer_test is self._device else "worker",
        )

    def _retell(
        self, peer_test: PeerTest, rank: int, state: TrackedRank, seconds: Floats, frame: Frame
    ) -> list[Finding]:
        state.reported, state.changed, state.normal, state.normal_sum = state.excess, 0, 0, 0.0
        scope, ratio = IncidentScope.of_rank(rank), math.exp(state.beyond_peers)
        name = self._name(peer_test)
        figures = self._figures(seconds, [rank], peer_test.peers_of(rank), ratio, frame)
        return self.episodes.update(
            scope,
            detected_step=frame.step,
            detected_time_s=self.now_s,
            summary=f"{self._names[rank]} is now {slower_than(ratio, 'its peers')} ({_times(name, figures)}).",
            evidence={**self.episodes.reported(scope)["evidence"], **figures},
        )

    def _open(self, peer_test: PeerTest, crossing: Crossing, seconds: Floats, frame: Frame) -> list[Finding]:
        rank, baseline = crossing.rank, peer_test.baseline
        scope, where = IncidentScope.of_rank(rank), self._names[rank]
        first = self._from_the_first_step(peer_test, crossing)
        # The ratio to the peers includes the offset that the baseline attributes to silicon.
        standing = float(baseline.offset[rank]) if baseline.groups.proper[rank] else 0.0
        ratio = math.exp(crossing.effect + standing)
        if ratio < self._config.excess_min:
            # It was faster than its peers and is as fast as they are now: nobody waits for it.
            baseline.absorb(rank, crossing.effect, crossing.rows)
            return []
        if first:
            baseline.accept(rank, crossing.effect, crossing.rows)
            if scope in self.standing:
                return []
        evidence, cause = self._evidence(peer_test, crossing, ratio, seconds, frame)
        rows = self._rows - 1 if first else crossing.rows
        since = "from the first step on" if first else f"since step {crossing.onset_step}"
        findings = (self.standing if first else self.episodes).open(
            scope,
            attempt=self.attempt,
            severity=Severity.WARNING,
            ranks=(rank,),
            onset_step=frame.step - rows if first else crossing.onset_step,
            detected_step=frame.step,
            onset_time_s=self.now_s - rows * peer_test.step_s,
            detected_time_s=self.now_s,
            score=crossing.effect / float(peer_test.sigma[rank]) * math.sqrt(crossing.rows),
            confidence=1.0 - math.exp(-crossing.evidence / 4),
            summary=f"{where} is {slower_than(ratio, 'its peers')} {since} "
            f"({_times(evidence['witness'], evidence)}).{waits_for(evidence)}",
            evidence=evidence | ({"standing": True} if first else {}),
            cause=cause,
        )
        if findings:
            followed = self._stood if first else self._excess
            followed.ranks[rank] = TrackedRank(self._name(peer_test), crossing.effect, crossing.effect, standing)
        return findings

    def _described(
        self, peer_test: PeerTest, seconds: Floats, frame: Frame, ranks: Sequence[int], ratio: float
    ) -> tuple[dict[str, Any], str]:
        """Evidence about several ranks that need so many times as long as the others, and the cause class."""
        others = np.setdiff1d(np.flatnonzero(peer_test.usable), ranks)[:PEERS_SHOWN_MAX].tolist()
        phases = phase_excess(frame, ranks, others)
        figures = self._figures(seconds, ranks, others, ratio, frame)
        device = 2 * sum(self._device.suspects(rank) for rank in ranks) > len(ranks)
        added_s, by = figures["busy_s"] - figures["peers_busy_s"], self._name(peer_test)
        evidence = {**figures, "witness": by, "ranks": len(ranks), "phase_excess_s": phases}
        return evidence, cause_class(phases, added_s, peer_test=by, device=device)

    def _evidence(
        self, peer_test: PeerTest, crossing: Crossing, ratio: float, seconds: Floats, frame: Frame
    ) -> tuple[dict[str, Any], str]:
        """Evidence about a rank, and the cause class that its phases show."""
        rank = crossing.rank
        peers = peer_test.peers_of(rank)
        phases = phase_excess(frame, [rank], peers)
        figures = self._figures(seconds, [rank], peers, ratio, frame)
        evidence = {
            **figures,
            "witness": self._name(peer_test),
            "peers_compared": len(peers),
            "rows": crossing.rows,
            "sigma": float(peer_test.sigma[rank]),
            "log_likelihood_ratio": crossing.evidence,
            "phase_excess_s": phases,
        }
        for what, name in (("cpu_excess_s", "busy_cpu_s"), ("queued_excess_s", "queued_s")):
            if peer_test in (self._own, self._host) and (excess_s := excess_of(frame, name, [rank], peers)) is not None:
                evidence[what] = excess_s
        device = peer_test is self._device or self._device.suspects(rank)
        added_s = figures["busy_s"] - figures["peers_busy_s"]
        return evidence, cause_class(phases, added_s, peer_test=self._name(peer_test), device=device)

    def _figures(
        self, seconds: Floats, ranks: Sequence[int], peers: Sequence[int], ratio: float, frame: Frame
    ) -> dict[str, float]:
        """How much slower these ranks are. Their busy time is computed from the ratio, since a single row is mostly
        noise; and the step from its own, since a rank that is slow in every second step makes this one longer.
        """
        own_s, peers_busy_s = (float(np.median(seconds[list(of)])) for of in (ranks, peers))
        step_s, busy_s = typical(frame, "step_time_s"), peers_busy_s * ratio
        usual_s = None if step_s is None else step_s + busy_s - max(own_s, peers_busy_s)
        cost = self._cost(busy_s, ratio, usual_s)
        seconds_reported = {"busy_s": busy_s, "peers_busy_s": peers_busy_s}
        return {"ratio": ratio, "rate": 1 / ratio, **seconds_reported, "cost_gpu_hours_per_hour": cost}

    def _from_the_first_step(self, peer_test: PeerTest, crossing: Crossing) -> bool:
        """Whether the rank was never seen at another speed."""
        config, baseline = self._config, peer_test.baseline
        if baseline.rows[crossing.rank] <= config.standing_rows:
            return True
        onset_row = self._rows - crossing.rows
        return onset_row <= config.standing_onset_rows and baseline.pinned(crossing.rank)

    def _cost(self, busy_s: float, ratio: float, step_s: float | None) -> float:
        """GPU-hours lost per hour: all ranks wait for the time that the slow one adds to the step."""
        added_s = busy_s * (1 - 1 / ratio)
        return self.world_size * min(1.0, added_s / max(step_s or busy_s, busy_s))
