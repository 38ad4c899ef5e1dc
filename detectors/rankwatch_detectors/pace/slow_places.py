"""Finds hosts and switches that are slow as a whole, also by a shift that the noise of each of their ranks hides.

Their values are averaged over blocks of rows and judged by the same baseline and CUSUMs as ranks, each kind for itself.
Their noise is learned from their own past, since what the ranks of a host share, such as power and cooling, does not
shrink with their number, and may last for minutes: a shift must exceed what means over as many blocks differed by.

A larger shift shows in the ranks first: one that crosses its threshold speaks for its host or switch if all but a
quarter of its ranks are suspected with it.

While a place is slow, its ranks are tested beyond what they share.

The value of a host is the lower quartile of its ranks', that of a switch the lower quartile of its hosts'. So a host is
slow as a whole only if no more than a quarter of its ranks are as fast as ever: 7 of 8 ranks are slow, or all of 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Finding, Floats, Frame, Ints, Kind, Severity, Topology
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, OWN_PACE
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.explanation import DETECTABLE_ROWS, Detectable, Statistic, Suspect
from rankwatch_detectors.pace.load import LoadConfig
from rankwatch_detectors.pace.peer_test import SUSPECT_EVIDENCE, PeerTest, PeerTestConfig
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.baseline import BaselineConfig
from rankwatch_detectors.statistics.peers import GROUP_MIN, GroupQuartiles, PeerGroups, anyone, everyone
from rankwatch_detectors.statistics.shift import Crossing
from rankwatch_detectors.words import duration, slower_than


@dataclass(frozen=True, slots=True)
class PlacesConfig:
    """Settings for hosts and switches as a whole. The rows of their baseline and CUSUMs are blocks."""

    block_rows: int = 8
    """Rows of a block: a host of 8 ranks then has a fifth of the noise of a rank's row, and judging it costs little."""
    peer_test: PeerTestConfig = field(
        # Three blocks at least: most disturbances of a host that are harmless last for seconds.
        default_factory=lambda: PeerTestConfig(ratios=(1.02, 1.05), ratio_min=1.015, rows_min=2)
    )
    baseline: BaselineConfig = field(
        # Hosts of different devices differ by more than silicon does, so any standing offset is accepted. They are
        # judged only once blocks have shown for how long their common noise lasts. No single row or rank can move the
        # value of a block far, so more of it counts.
        default_factory=lambda: BaselineConfig(
            warm_rows=16,
            block_rows=(4, 16),
            clip_sigmas=5.0,
            sigma_start=0.02,
            sigma_floor=0.003,
            offset_max=math.inf,
            warm_reach=math.inf,
            kept_rows=128,
        )
    )
    spoken_sigmas: float = 4.0
    """A rank speaks for its host or switch only if that is slower by more than this many sigmas of its own noise."""
    usual_blocks: int = 64
    """Blocks over which the usual offset of each rank is averaged: far more than it takes to find a slow place."""
    smooth_blocks: int = 2
    """Blocks over which the excess of a slow place is smoothed."""
    clear_share: float = 0.35
    """It is over when the smoothed excess stays below this share of the reported one ..."""
    clear_blocks: int = 3
    """... for this many blocks."""
    retell_share: float = 0.5
    """A change of the excess by this share is reported as an update, once it has lasted as long."""


_NOBODY = np.zeros(0, dtype=np.int64)


class PlaceUnits(Stateful):
    """Hosts, then switches, each in the order of their names. Memory: 17 bytes for each rank, 16 for each host."""

    STATE: ClassVar[str] = "texts judged _of_hosts _of_switches _compared"

    def __init__(self) -> None:
        self.texts: list[str] = []
        """The scope of each unit, as text."""
        self.judged: Bools = np.zeros(0, dtype=np.bool_)
        """Hosts of several ranks and switches of several hosts; none of a kind of which there are fewer than three."""
        self._of_hosts = GroupQuartiles(_NOBODY, 0)
        """Ranks by host."""
        self._of_switches = GroupQuartiles(_NOBODY, 1)
        """Hosts by switch; the last group are those whose switch is not known."""
        self._compared: Bools = np.zeros(0, dtype=np.bool_)
        """Ranks whose peers are on three hosts or more, and for the most part not on their own."""

    @classmethod
    def of(cls, topology: Topology) -> PlaceUnits:
        """The hosts and switches of these ranks."""
        units, hosts = cls(), sorted(set(topology.host))
        switch_of = dict(zip(topology.host, topology.switch, strict=True)) if topology.switch else {}
        switches = sorted(set(switch_of.values()) - {""})
        host_number = {host: index for index, host in enumerate(hosts)}
        switch_number = {switch: index for index, switch in enumerate(switches)}
        host_of = np.asarray([host_number[host] for host in topology.host], dtype=np.int64)
        below = [switch_number.get(switch_of.get(host, ""), len(switches)) for host in hosts]
        units._of_hosts = GroupQuartiles(host_of, len(hosts))
        units._of_switches = GroupQuartiles(np.asarray(below, dtype=np.int64), len(switches) + 1)
        units._compared = _compared(topology.peer_group, host_of)
        units.texts = [str(IncidentScope.of_host(host)) for host in hosts]
        units.texts += [str(IncidentScope.of_switch(switch)) for switch in switches]
        units.judged = units._judged(np.asarray([bool(host) for host in hosts], dtype=np.bool_))
        return units

    def _judged(self, named: Bools) -> Bools:
        ranks, below = self._of_hosts.sizes, self._of_switches.sizes[:-1]
        known = named & (2 * self._of_hosts.counts(self._compared) > ranks)
        known_below = self._of_switches.counts(known)[:-1]
        # A switch with half of the hosts is what the others are compared with.
        of_switches = (known_below > 1) & (2 * known_below > below) & (2 * below < ranks.size)
        return np.concatenate([_enough(known & (ranks > 1)), _enough(of_switches)])

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self.texts)

    @property
    def hosts(self) -> int:
        """How many of them are hosts: the first ones."""
        return int(self._of_hosts.sizes.size)

    def same_as(self, other: PlaceUnits) -> bool:
        """Whether these are the same units of the same ranks."""
        return self.texts == other.texts and all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self._of_hosts.group, other._of_hosts.group),
                (self._of_switches.group, other._of_switches.group),
                (self._compared, other._compared),
            )
        )

    def values(self, of_ranks: Floats, usable: Bools) -> Floats:
        """The value of each unit; NaN if it is not judged, or not more than half of its parts have a value."""
        values = self._of_hosts.of(of_ranks, usable & self._compared)
        if self.count > self.hosts:
            values = np.concatenate([values, self._of_switches.of(values, np.isfinite(values))[:-1]])
        return values if everyone(self.judged) else np.where(self.judged, values, np.nan)

    def whole(self, ranks: Bools) -> Bools:
        """Units of which no more than a quarter is not among these ranks."""
        return self.with_switches(self._of_hosts.whole(ranks | ~self._compared))

    def with_switches(self, hosts: Bools) -> Bools:
        """These hosts, and each switch of which they are three quarters or more."""
        return np.concatenate([hosts, self._of_switches.whole(hosts)[:-1]])

    def ranks_within(self, units: Bools) -> Bools:
        """Ranks whose host is among these units, and whose switch is too if it is known."""
        switches = np.append(units[self.hosts :], True)
        hosts = units[: self.hosts] & switches[self._of_switches.group]
        within: Bools = hosts[self._of_hosts.group]
        return within

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return int(self._of_hosts.group[rank])

    def switch_of(self, unit: int) -> int | None:
        """The switch of a host, if it is known; of a switch None."""
        switch = self.hosts + int(self._of_switches.group[unit]) if unit < self.hosts else self.count
        return switch if switch < self.count else None

    def hosts_of(self, unit: int) -> Ints:
        """The host itself, or the hosts of the switch."""
        return np.asarray([unit]) if unit < self.hosts else np.flatnonzero(self._of_switches.group == unit - self.hosts)

    def ranks_of(self, unit: int) -> list[int]:
        """The ranks of a unit, ascending."""
        return [int(rank) for rank in np.flatnonzero(np.isin(self._of_hosts.group, self.hosts_of(unit)))]


def _enough(judged: Bools) -> Bools:
    return judged & (np.count_nonzero(judged) >= GROUP_MIN)


def _compared(peer_group: Ints, host_of: Ints) -> Bools:
    groups = PeerGroups()
    groups.regroup(peer_group)
    hosts = int(host_of.max(initial=0)) + 1
    pairs, pair_of, together = np.unique(groups.number * hosts + host_of, return_inverse=True, return_counts=True)
    hosts_of_group = np.bincount(pairs // hosts, minlength=groups.count)
    sizes = np.bincount(groups.number, minlength=groups.count)
    here = together[np.asarray(pair_of).reshape(-1)]
    compared: Bools = (hosts_of_group >= GROUP_MIN)[groups.number] & (2 * here < sizes[groups.number])
    return compared


MOVED = "Ranks are on other hosts, or below other switches."
Described = Callable[[Sequence[int], float], tuple[dict[str, Any], str]]
"""Evidence and cause class of some ranks that need so many times as long as the others."""


class SlowPlaces(Stateful):
    """Hosts and switches of a job, and which of them are slow. Memory: 57 bytes for each rank, 2 KB for each place."""

    STATE: ClassVar[str] = "episodes _units _peer_test _source _sum _missed _usual _known _rows _first_step _slow shift"

    def __init__(self, config: PlacesConfig, kind: Kind, budget: float) -> None:
        self._config = config
        self.episodes = Episodes(kind)
        self._units = PlaceUnits()
        self._peer_test = PeerTest(config.peer_test, config.baseline, LoadConfig(), budget)
        self._source = ""
        """The quantity that is judged: the name of a peer test of ranks."""
        self._slow: dict[str, list[float]] = {}
        """The reported excess, the smoothed excess, calm blocks, blocks that differ from the report, by open scope."""
        self.shift: Floats = np.zeros(0)
        """How much longer each rank takes since its host or switch is slow, in logarithms; empty: none is."""
        self._usual: Floats = np.zeros(0)
        """How far each rank usually is from its peers, in logarithms. A rank's own baseline learns a shift too soon."""
        self._known: Floats = np.zeros(0)
        """Blocks from which that is known."""
        self._begin_block(0)

    def begin(
        self, topology: Topology, came_from: Ints, *, new_attempt: bool, other_clock: bool, now_s: float
    ) -> list[Finding]:
        """Set the topology, and end what is open if it, or the attempt, is another one. Baselines follow the places.

        Args:
            topology: of the attempt.
            came_from: each rank's number before, or -1 if its unit is new.
            new_attempt: whether it is of another attempt than before.
            other_clock: whether ranks are judged by another clock, so that baselines are learned anew.
            now_s: stream time.
        """
        units, stayed = PlaceUnits.of(topology), (came_from >= 0) & (not other_clock)
        before_it = np.where(stayed, came_from, 0)
        for name in ("_usual", "_known"):
            values = getattr(self, name)
            setattr(self, name, np.where(stayed, values[before_it], 0.0) if values.size else np.zeros(stayed.size))
        same = not new_attempt and not other_clock and units.same_as(self._units)
        if same and topology.lockstep:
            return []
        before = {} if other_clock else {text: index for index, text in enumerate(self._units.texts)}
        origins = np.asarray([before.get(text, -1) for text in units.texts], dtype=np.int64)
        self._units, self._slow = units, {}
        self._share()
        self._peer_test.begin(_alike(units), origins)
        self._begin_block(topology.world_size)
        ends = {ATTEMPT_ENDED: new_attempt, OTHER_CLOCK: other_clock, OWN_PACE: not topology.lockstep, MOVED: True}
        return self.episodes.close_all(now_s, next(reason for reason, holds in ends.items() if holds))

    def _begin_block(self, ranks: int) -> None:
        self._sum: Floats = np.zeros(ranks)
        self._missed: Floats = np.zeros(ranks)
        """Rows of the block in which each rank has no value."""
        self._rows, self._first_step = 0, 0

    def add(self, ranks: PeerTest, source: str, frame: Frame, now_s: float, describe: Described) -> list[Finding]:
        """Process a row of ranks that has been judged and not learned yet.

        Args:
            ranks: the peer test of ranks, which was given their times without `shift`.
            source: its name.
            frame: the row.
            now_s: stream time.
            describe: evidence and cause class of ranks.
        """
        if not anyone(self._units.judged):
            return []
        if source != self._source:
            self._source = source
            self._peer_test.begin(_alike(self._units), np.full(self._units.count, -1, dtype=np.int64))
            self._usual, self._known = np.zeros(self._sum.size), np.zeros(self._sum.size)
            self._begin_block(self._sum.size)
        deviation, usable = ranks.deviation, ranks.usable
        if self.shift.size:
            deviation += self.shift
        if everyone(usable):
            self._sum += deviation
        else:
            self._sum += np.where(usable, deviation, 0.0)
            self._missed += ~usable
        if not self._rows:
            self._first_step = frame.step
        self._rows += 1
        if self._rows < self._config.block_rows:
            return []
        return self._evaluate(ranks.step_s, frame, now_s, describe)

    def _evaluate(self, step_s: float, frame: Frame, now_s: float, describe: Described) -> list[Finding]:
        """Judge the block of rows that is now complete."""
        units, peer_test, rows = self._units, self._peer_test, self._rows
        seen = rows - self._missed
        means, usable = self._sum / np.maximum(seen, 1.0) - self._usual, 2 * seen > rows
        values = np.exp(units.values(means, usable & (self._known > 0.0)))
        block = Frame(frame.attempt, frame.family, self._first_step, frame.kind, frame.time_s, {}, {})
        residual, crossings = peer_test.evaluate(values, block, step_s * rows, now_s, self._frozen())
        findings = self._follow(residual, frame.step, now_s)
        for crossing in crossings:
            if crossing.rank in self._frozen():  # within a switch that was opened just now
                continue
            run = replace(self._widest(crossing), rows=crossing.rows * rows)
            findings += self._open(run, step_s, frame, now_s, describe, limit=peer_test.limit)
        frozen = self._frozen()
        peer_test.learn(frozen)
        normal = peer_test.bank.strongest() < SUSPECT_EVIDENCE
        normal[frozen] = False
        self._learn_usual(means, usable if everyone(normal) else usable & units.ranks_within(normal))
        self._begin_block(self._sum.size)
        return findings

    def _learn_usual(self, means: Floats, normal: Bools) -> None:
        if not everyone(normal):
            means = np.where(normal, means, 0.0)
        self._known += normal
        self._usual += means / np.minimum(np.maximum(self._known, 1.0), self._config.usual_blocks)

    def _widest(self, run: Crossing) -> Crossing:
        """The run of a unit; of a host whose neighbours are suspected with it, or slow, as one of their switch."""
        units, bank = self._units, self._peer_test.bank
        switch, suspected = units.switch_of(run.rank), bank.strongest() >= SUSPECT_EVIDENCE
        slow = suspected.copy()
        slow[self._frozen()] = True
        if switch is None or not units.judged[switch] or not units.with_switches(slow[: units.hosts])[switch]:
            return run
        effects = [bank.run(host).effect for host in units.hosts_of(switch).tolist() if suspected[host]]
        return replace(run, rank=switch, effect=median_low(effects))

    def spoken_for(
        self,
        ranks: PeerTest,
        crossings: Sequence[Crossing],
        named: Sequence[int],
        frame: Frame,
        now_s: float,
        describe: Described,
    ) -> list[Finding]:
        """The hosts and switches that slow ranks speak for; their ranks are then not slow by themselves.

        Args:
            ranks: the peer test by which they were found.
            crossings: ranks that are found to be slow in this row, which is not learned yet.
            named: ranks that are slow already.
            frame: the row.
            now_s: stream time.
            describe: evidence and cause class of ranks.
        """
        units, bank = self._units, ranks.bank
        suspected = bank.strongest() >= SUSPECT_EVIDENCE
        slow = suspected.copy()
        slow[list(named)] = True
        if self.shift.size:
            slow |= self.shift > 0.0
        known = units.judged & self._peer_test.baseline.ready() & units.whole(slow)
        sigma = self._peer_test.baseline.sigma()
        findings: list[Finding] = []
        for crossing in crossings:
            host = units.host_of(crossing.rank)
            switch = units.switch_of(host)
            unit = switch if switch is not None and known[switch] and known[host] else host
            if not known[unit]:
                continue
            effect = median_low([bank.run(rank).effect for rank in units.ranks_of(unit) if suspected[rank]])
            if effect > self._config.spoken_sigmas * sigma[unit]:
                run = replace(crossing, rank=unit, effect=effect)
                findings += self._open(run, ranks.step_s, frame, now_s, describe, limit=ranks.limit)
        return findings

    def _open(
        self, run: Crossing, step_s: float, frame: Frame, now_s: float, describe: Described, *, limit: float
    ) -> list[Finding]:
        """Report a unit, unless it is open or within an open switch; its hosts are followed no more by themselves."""
        unit, ratio = run.rank, math.exp(run.effect)
        if unit in self._frozen():
            return []
        scope, ranks = IncidentScope.parse(self._units.texts[unit]), self._units.ranks_of(unit)
        evidence, cause = describe(ranks, ratio)
        findings = self.episodes.open(
            scope,
            attempt=frame.attempt,
            severity=Severity.WARNING,
            ranks=tuple(ranks),
            onset_step=run.onset_step,
            detected_step=frame.step,
            onset_time_s=now_s - run.rows * step_s,
            detected_time_s=now_s,
            score=math.sqrt(2 * run.evidence),
            confidence=1.0 - math.exp(-run.evidence / 4),
            summary=f"{called(scope)} is slow as a whole: its {len(ranks)} ranks are "
            f"{slower_than(ratio, 'their peers')} since step {run.onset_step} "
            f"({duration(evidence['busy_s'])} a step, they {duration(evidence['peers_busy_s'])}).",
            evidence={**evidence, "rows": run.rows, "log_likelihood_ratio": run.evidence, "threshold": limit},
            cause=cause,
        )
        if findings:
            self._slow[str(scope)] = [run.effect, run.effect, 0.0, 0.0]
            for each in self._with_hosts(unit):
                self._peer_test.bank.clear_rank(each)
            self._share()
        return findings

    def _share(self) -> None:
        """Set what the ranks of slow places share: the excess of the host, or of the switch, whichever is more."""
        self.shift = np.zeros(self._sum.size if self._slow else 0)
        for text, state in self._slow.items():
            ranks = self._units.ranks_of(self._units.texts.index(text))
            self.shift[ranks] = np.maximum(self.shift[ranks], state[1])

    def _frozen(self) -> list[int]:
        """Units with an open episode, and the hosts of open switches."""
        open_units = [self._units.texts.index(text) for text in self._slow]
        return [each for unit in open_units for each in self._with_hosts(unit)]

    def _with_hosts(self, unit: int) -> list[int]:
        return sorted({unit, *self._units.hosts_of(unit).tolist()})

    def _follow(self, residual: Floats, step: int, now_s: float) -> list[Finding]:
        """Follow the slow places by a block: close those that are over, and report changes."""
        config = self._config
        findings: list[Finding] = []
        for text, state in list(self._slow.items()):
            unit, scope = self._units.texts.index(text), IncidentScope.parse(text)
            if not self._peer_test.judged[unit]:
                continue
            reported = state[0]
            state[1] += (float(residual[unit]) - state[1]) / config.smooth_blocks
            state[2] = state[2] + 1 if state[1] < config.clear_share * reported else 0.0
            state[3] = (
                state[3] + 1 if abs(state[1] - reported) > config.retell_share * reported and not state[2] else 0.0
            )
            if state[2] >= config.clear_blocks:
                del self._slow[text]
                since = step - config.clear_blocks * config.block_rows
                summary = f"{called(scope)} is as fast as the others again since about step {since}."
                findings += self.episodes.close(scope, step, now_s, summary)
            elif state[3] >= config.clear_blocks:
                state[0], state[3] = state[1], 0.0
                ratio = math.exp(state[1])
                findings += self.episodes.update(
                    scope,
                    detected_step=step,
                    detected_time_s=now_s,
                    summary=f"{called(scope)} is now {slower_than(ratio, 'the others')}.",
                    evidence={**self.episodes.reported(scope)["evidence"], "ratio": ratio, "rate": 1 / ratio},
                )
        if self.shift.size:
            self._share()
        return findings

    def shared(self, rank: int) -> float:
        """How much longer the host or switch of a rank seems to take, in logarithms; 0: no longer than usual."""
        if not self._units.count:
            return 0.0
        host, bank = self._units.host_of(rank), self._peer_test.bank
        places = [host, self._units.switch_of(host)]
        runs = [bank.run(place) for place in places if place is not None]
        return max([run.effect for run in runs if run.evidence >= SUSPECT_EVIDENCE], default=0.0)

    def suspects(self) -> list[Suspect]:
        """Hosts and switches with half of the evidence that is reported, or more, in a block that has just ended."""
        if not self._peer_test.bank.near:
            return []
        rows = self._config.block_rows
        return [
            one._replace(scope=IncidentScope.parse(self._units.texts[one.scope.number]), rows=one.rows * rows)
            for one in self._peer_test.suspected(self._source)
        ]

    def crossed(self, finding: Finding) -> Suspect:
        """The evidence by which a host or switch was found."""
        reported = finding.evidence
        value, limit, rows = reported["log_likelihood_ratio"], reported["threshold"], reported["rows"]
        return Suspect(finding.scope, Statistic.EVIDENCE, value, limit, rows, reported["ratio"], source=self._source)

    def needed(self, scope: IncidentScope, rows: int) -> float | None:
        """The mean ratio of a place that would have been reported this many rows after its onset."""
        unit = self._units.texts.index(str(scope))
        return self._least(unit, rows)

    def detectable(self) -> list[Detectable]:
        """The smallest fault of a host and of a switch with the median noise, and of the noisiest, of each kind."""
        units, baseline = self._units, self._peer_test.baseline
        known, sigma, found = units.judged & baseline.ready(), baseline.sigma(), list[Detectable]()
        for of_kind in (range(units.hosts), range(units.hosts, units.count)):
            ordered = sorted((unit for unit in of_kind if known[unit]), key=lambda unit: (float(sigma[unit]), unit))
            if not ordered:
                continue
            middle, noisiest = ordered[len(ordered) // 2], ordered[-1]
            level, name = units.texts[middle].partition(":")[0], called(IncidentScope.parse(units.texts[noisiest]))
            found.append(self._detectable(middle, f"a {level} that is slow as a whole"))
            found.append(self._detectable(noisiest, f"{name[0].lower()}{name[1:]}, the noisiest"))
        return found

    def _detectable(self, unit: int, fault: str) -> Detectable:
        noise, rows = float(self._peer_test.baseline.sigma()[unit]), self._config.block_rows
        sizes, least = list[tuple[int, float | None]](), math.inf
        for count in DETECTABLE_ROWS:
            # The past shows less of longer runs, so what was found sooner is found too.
            least = min(least, self._least(unit, count) or math.inf)
            sizes.append((count, least if math.isfinite(least) else None))
        return Detectable(f"{fault}, by {self._source} time over {rows} rows", "ratio", math.expm1(noise), tuple(sizes))

    def _least(self, unit: int, rows: int) -> float | None:
        shift = self._peer_test.detectable(unit, rows // self._config.block_rows)
        return None if shift is None or math.isinf(shift) else math.exp(shift)


def called(scope: IncidentScope) -> str:
    """What people call a host or switch.

    >>> called(IncidentScope.of_switch("leaf-3"))
    'Switch leaf-3'
    """
    return f"{scope.level.capitalize()} {scope.name}"


def _alike(units: PlaceUnits) -> Topology:
    """The units as if each were a rank, of which those of one kind do the same work."""
    zero, nowhere = np.zeros(units.count, dtype=np.int64), ("",) * units.count
    kind = (np.arange(units.count) >= units.hosts).astype(np.int64)
    return Topology(units.count, nowhere, nowhere, dp=zero, tp=zero, pp=kind, cp=zero, ep=zero)
