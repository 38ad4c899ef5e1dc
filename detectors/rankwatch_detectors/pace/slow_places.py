"""Finds hosts and switches that are slow as a whole, also by a shift that the noise of each of their ranks hides.

Their values are averaged over blocks of rows and judged by the same baseline and CUSUMs as ranks, each kind for itself.
Their noise is learned from their own past, since what the ranks of a host share, such as power and cooling, does not
shrink with their number, and may last for minutes: a shift must exceed what means over as many blocks differed by.

A larger shift shows in the ranks first: one that crosses its threshold speaks for its host or switch if all but a
quarter of its ranks are suspected with it.

While a place is slow, its ranks are tested beyond what they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Finding, Floats, Frame, Ints, Kind, Severity, Topology
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, OWN_PACE
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.explanation.explained import DETECTABLE_ROWS, Detectable
from rankwatch_detectors.explanation.suspect import Statistic, Suspect
from rankwatch_detectors.pace.load import LoadConfig
from rankwatch_detectors.pace.place_units import PlaceUnits
from rankwatch_detectors.pace.places_config import PlacesConfig
from rankwatch_detectors.pace.witness import SUSPECT_EVIDENCE, Witness
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import anyone, everyone
from rankwatch_detectors.statistics.shift import Crossing

MOVED = "Ranks are on other hosts, or below other switches."
Described = Callable[[Sequence[int], float], tuple[dict[str, Any], str]]
"""Evidence and cause class of some ranks that need so many times as long as the others."""


class SlowPlaces(Stateful):
    """Hosts and switches of a job, and which of them are slow. Memory: 57 bytes for each rank, 2 KB for each place."""

    STATE: ClassVar[tuple[str, ...]] = (
        "episodes",
        "_units",
        "_witness",
        "_source",
        "_sum",
        "_missed",
        "_usual",
        "_known",
        "_rows",
        "_first_step",
        "_slow",
        "shift",
    )

    def __init__(self, config: PlacesConfig, kind: Kind, budget: float) -> None:
        self._config = config
        self.episodes = Episodes(kind)
        self._units = PlaceUnits()
        self._witness = Witness(config.witness, config.baseline, LoadConfig(), budget)
        self._source = ""
        """The quantity that is judged: the name of a witness of ranks."""
        self._slow: dict[str, list[float]] = {}
        """By open scope: the reported excess, the smoothed excess, calm blocks, blocks that differ from the report."""
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
        self._witness.begin(_alike(units), origins)
        self._begin_block(topology.world_size)
        ends = {ATTEMPT_ENDED: new_attempt, OTHER_CLOCK: other_clock, OWN_PACE: not topology.lockstep, MOVED: True}
        return self.episodes.close_all(now_s, next(reason for reason, holds in ends.items() if holds))

    def _begin_block(self, ranks: int) -> None:
        self._sum: Floats = np.zeros(ranks)
        self._missed: Floats = np.zeros(ranks)
        """Rows of the block in which each rank has no value."""
        self._rows, self._first_step = 0, 0

    def take(
        self,
        ranks: Witness,
        source: str,
        frame: Frame,
        now_s: float,
        describe: Described,
    ) -> list[Finding]:
        """Take a row of ranks that has just been judged, and is not learned yet.

        Args:
            ranks: the witness of ranks, which was given their times without `shift`.
            source: its name.
            frame: the row.
            now_s: stream time.
            describe: evidence and cause class of ranks.
        """
        if not anyone(self._units.judged):
            return []
        if source != self._source:
            self._source = source
            self._witness.begin(_alike(self._units), np.full(self._units.count, -1, dtype=np.int64))
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
        return self._judge(ranks.step_s, frame, now_s, describe)

    def _judge(self, step_s: float, frame: Frame, now_s: float, describe: Described) -> list[Finding]:
        """Judge the block of rows that is now complete."""
        units, witness, rows = self._units, self._witness, self._rows
        seen = rows - self._missed
        means, usable = self._sum / np.maximum(seen, 1.0) - self._usual, 2 * seen > rows
        values = np.exp(units.values(means, usable & (self._known > 0.0)))
        block = Frame(frame.attempt, frame.family, self._first_step, frame.kind, frame.time_s, {}, {})
        residual, crossings = witness.judge(values, block, step_s * rows, now_s, self._frozen())
        findings = self._follow(residual, frame.step, now_s)
        for crossing in crossings:
            if crossing.rank in self._frozen():  # within a switch that was opened just now
                continue
            run = replace(self._widest(crossing), rows=crossing.rows * rows)
            findings += self._open(run, step_s, frame, now_s, describe, limit=witness.limit)
        frozen = self._frozen()
        witness.learn(frozen)
        calm = witness.bank.strongest() < SUSPECT_EVIDENCE
        calm[frozen] = False
        self._learn_usual(means, usable if everyone(calm) else usable & units.ranks_within(calm))
        self._begin_block(self._sum.size)
        return findings

    def _learn_usual(self, means: Floats, calm: Bools) -> None:
        if not everyone(calm):
            means = np.where(calm, means, 0.0)
        self._known += calm
        self._usual += means / np.minimum(np.maximum(self._known, 1.0), self._config.usual_blocks)

    def _widest(self, run: Crossing) -> Crossing:
        """The run of a unit; of a host whose neighbours are suspected with it, or slow, as one of their switch."""
        units, bank = self._units, self._witness.bank
        switch, suspected = units.switch_of(run.rank), bank.strongest() >= SUSPECT_EVIDENCE
        slow = suspected.copy()
        slow[self._frozen()] = True
        if switch is None or not units.judged[switch] or not units.with_switches(slow[: units.hosts])[switch]:
            return run
        effects = [bank.run(host).effect for host in units.hosts_of(switch).tolist() if suspected[host]]
        return replace(run, rank=switch, effect=median_low(effects))

    def spoken_for(
        self,
        ranks: Witness,
        crossings: Sequence[Crossing],
        named: Sequence[int],
        frame: Frame,
        now_s: float,
        describe: Described,
    ) -> list[Finding]:
        """The hosts and switches that slow ranks speak for; their ranks are then not slow by themselves.

        Args:
            ranks: the witness by which they were found.
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
        known = units.judged & self._witness.baseline.ready() & units.whole(slow)
        sigma = self._witness.baseline.sigma()
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
            summary=f"{called(scope)} is slow as a whole: its {len(ranks)} ranks take {ratio:.2f} times as long as "
            f"their peers since step {run.onset_step}.",
            evidence={**evidence, "rows": run.rows, "log_likelihood_ratio": run.evidence, "threshold": limit},
            cause=cause,
        )
        if findings:
            self._slow[str(scope)] = [run.effect, run.effect, 0.0, 0.0]
            for each in self._with_hosts(unit):
                self._witness.bank.clear_rank(each)
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
            if not self._witness.judged[unit]:
                continue
            told = state[0]
            state[1] += (float(residual[unit]) - state[1]) / config.smooth_blocks
            state[2] = state[2] + 1 if state[1] < config.clear_share * told else 0.0
            state[3] = state[3] + 1 if abs(state[1] - told) > config.retell_share * told and not state[2] else 0.0
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
                    summary=f"{called(scope)} takes {ratio:.2f} times as long as the others.",
                    evidence={**self.episodes.told(scope)["evidence"], "ratio": ratio, "rate": 1 / ratio},
                )
        if self.shift.size:
            self._share()
        return findings

    def suspects(self) -> list[Suspect]:
        """Hosts and switches with half of the evidence that is reported, or more, in a block that has just ended."""
        if not self._witness.bank.near:
            return []
        rows = self._config.block_rows
        return [
            one._replace(scope=IncidentScope.parse(self._units.texts[one.scope.number]), rows=one.rows * rows)
            for one in self._witness.suspected(self._source)
        ]

    def crossed(self, finding: Finding) -> Suspect:
        """The evidence by which a host or switch was found."""
        told = finding.evidence
        value, limit, rows = told["log_likelihood_ratio"], told["threshold"], told["rows"]
        return Suspect(finding.scope, Statistic.EVIDENCE, value, limit, rows, told["ratio"], source=self._source)

    def needed(self, scope: IncidentScope, rows: int) -> float | None:
        """The mean ratio of a place that would have been reported this many rows after its onset."""
        unit = self._units.texts.index(str(scope))
        return self._least(unit, rows)

    def detectable(self) -> list[Detectable]:
        """The smallest fault of a host and of a switch with the median noise, and of the noisiest, of each kind."""
        units, baseline = self._units, self._witness.baseline
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
        noise, rows = float(self._witness.baseline.sigma()[unit]), self._config.block_rows
        sizes, least = list[tuple[int, float | None]](), math.inf
        for count in DETECTABLE_ROWS:
            # The past shows less of longer runs, so what was found sooner is found too.
            least = min(least, self._least(unit, count) or math.inf)
            sizes.append((count, least if math.isfinite(least) else None))
        return Detectable(f"{fault}, by {self._source} time over {rows} rows", "ratio", math.expm1(noise), tuple(sizes))

    def _least(self, unit: int, rows: int) -> float | None:
        shift = self._witness.detectable(unit, rows // self._config.block_rows)
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
