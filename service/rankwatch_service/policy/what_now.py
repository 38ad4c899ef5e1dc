"""What is done about an incident: what rankwatch does by itself, and what is left for a person, in order. Pure.

One function makes it for messages, the API, pages and the command line. Each step is a sentence or two that can be
followed without any other: a wait names the time at which it ends and the command that follows, and a command what it
does and costs. None is advised that costs more than the incident.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_detectors.words import listed
from rankwatch_service.incidents.answers import (
    LIMITS,
    NATIVE,
    duration,
    how_it_ended,
    lower,
    may_be_skipped,
    over,
    under_cause,
)
from rankwatch_service.incidents.hang import RANKS_ON_HOST, hang_steps, seconds_of
from rankwatch_service.incidents.kinds import KINDS, has_norm_alone
from rankwatch_service.incidents.lost_time import HOUR_NS, cost_unit
from rankwatch_service.incidents.model import IncidentVersion
from rankwatch_service.names import one_line, short
from rankwatch_service.policy.actions import Action
from rankwatch_service.policy.policy import NOT_CRITICAL_YET, ONLY_SUGGESTS, Mode
from rankwatch_service.policy.suggestion import RELAUNCH_S, RESTARTED, WAIT

LOOK_NS: Final = 10 * 60 * 10**9
"""Default wait for incidents that cost little."""

GOES_ON_NS: Final = 3 * 60 * 10**9
"""How long after an order steps must go on."""

NOTHING: Final = "nothing"
"""What happens by itself, where that is nothing."""

COST_MIN: Final = 0.01
"""Least cost that is reported, in hours of one GPU."""

COMMAND: Final = re.compile(rf"`(rankwatch (?:{'|'.join(Action)}) [^`]+)`")

HOST: Final = re.compile(r"\b(on|On|of|without) (?:the|that|its) host\b")
"""How steps of a kind call the host of the ranks, which is named where it is one."""

LAUNCH: Final = "start the job with the command that launched it"
AFRESH: Final = "end the job, and start it with the command that launched it"

PLACES_MAX: Final = 4
"""Ranks or hosts that a step names."""

_DOES: Final[Mapping[str, str]] = {
    Action.ROLLBACK: "loads {checkpoint}",
    Action.RELAUNCH: "new processes from {checkpoint}",
    Action.CHECKPOINT: "saves the work so far",
    Action.TRACE: "prints what some steps spend their time on",
}


@dataclass(frozen=True, slots=True)
class WhatNow:
    """What is done about an incident as it is now."""

    automatic: str
    """What rankwatch, or the launcher, does by itself, as a clause; empty: the incident is over."""
    steps: tuple[str, ...]
    """What a person does, in order; that it is nothing, and what would change that."""

    @property
    def command(self) -> str:
        """The command line of the first step; empty: it has none, or only for a case that may come."""
        found = COMMAND.search(self.steps[0].partition(" If ")[0])
        return found[1] if found else ""

    @property
    def listed(self) -> list[str]:
        """All of it, one below the other."""
        automatic = () if self.automatic in ("", NOTHING) else (f"Automatic: {self.automatic}.",)
        return [*automatic, *self.steps]


def what_now(incident: IncidentVersion, world_size: int = 0, accelerated: bool = True) -> WhatNow:
    """What is done about an incident.

    Args:
        incident: as it is now.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
    """
    if done := over(incident.kind, incident.severity, incident.evidence, incident.state, accelerated):
        return WhatNow("", (done,))
    case = _Case(incident, world_size, accelerated)
    steps = [step for step in case.steps() if step]
    if len(incident.hosts) == 1:
        steps = [HOST.sub(lambda found: f"{found[1]} {incident.hosts[0]}", step) for step in steps]
    return WhatNow(case.automatic(), tuple(steps))


def hours(cost: float, accelerated: bool) -> str:
    """Hours of all ranks, with their unit.

    >>> hours(0.2961, True)
    '0.3 GPU-hours'
    """
    return f"{amount(cost)} {cost_unit(accelerated)}"


def amount(number: float) -> str:
    """A number of GPUs or hours with two digits, or as whole."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


@dataclass(frozen=True, slots=True)
class _Case:
    """One unresolved incident."""

    incident: IncidentVersion
    world_size: int
    accelerated: bool

    # ---- what is known -----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Mapping[str, Any]:
        return self.incident.suggestion.get("policy") or {}

    @property
    def restarts(self) -> bool:
        """Whether a launcher starts the job again by itself."""
        return (self.way(WAIT) or {}).get("reason") == RESTARTED

    @property
    def ordered(self) -> str:
        """The action that the policy has ordered; empty: none."""
        return str((self.policy.get("ordered") or {}).get("action", ""))

    def way(self, action: str) -> Mapping[str, Any] | None:
        """An action that helps and that the job can do, with its cost and checkpoint; None: it is none of these."""
        suggestion = self.incident.suggestion
        ways = (suggestion, *(suggestion.get("alternatives") or ()))
        return next((one for one in ways if one.get("action") == action), None)

    @property
    def ranks(self) -> str:
        ranks = self.incident.ranks
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, PLACES_MAX)}" if ranks else "a rank"

    @property
    def host(self) -> str:
        """The host, where it is one; else how to call it."""
        return self.incident.hosts[0] if len(self.incident.hosts) == 1 else "its host"

    # ---- sentences ---------------------------------------------------------------------------------------------------

    def typed(self, command: str) -> str:
        return f"`rankwatch {command} {shlex.quote(one_line(self.incident.job))}`"

    def command(self, action: str) -> str:
        """A command with what it does and costs; empty if the job cannot do that, or it needs a checkpoint and there is
        none.
        """
        way = self.way(action)
        if way is None or (action in (Action.ROLLBACK, Action.RELAUNCH) and not way.get("checkpoint")):
            return ""
        does = _DOES[action].format(checkpoint=checkpoint(way.get("checkpoint")))
        return f"{self.typed(action)} ({does}; {self.price(way)})"

    def price(self, way: Mapping[str, Any]) -> str:
        """What an action costs, also in time of the job."""
        cost = float(way.get("cost_gpu_hours") or 0.0)
        if cost < COST_MIN:
            return "costs next to nothing"
        if way.get("action") == Action.PAUSE:
            return f"costs {hours(cost, self.accelerated)} an hour"
        took = f"{duration(cost / self.world_size * 3_600)} of the job" if self.world_size else ""
        return f"costs {took or hours(cost, self.accelerated)}"

    def at(self, unix_ns: float, form: str = "%H:%M") -> str:
        when = datetime.fromtimestamp(unix_ns / 1e9, UTC)
        day = f"{when:%Y-%m-%d} " * (abs(unix_ns - self.incident.updated_unix_ns) > 12 * HOUR_NS)
        return f"{day}{when:{form}} UTC"

    def if_still_so(self, cost: float = 0.0) -> str:
        """Until when to wait: until as much is lost as an action costs, else for a while."""
        onset, rate = self.incident.onset_unix_ns, self.incident.impact_gpu_hours_per_hour
        until = onset + (cost / rate * HOUR_NS if cost > 0 and rate > 0 else LOOK_NS)
        if until <= self.incident.updated_unix_ns:
            return "Since it has lasted for so long"
        # The next whole minute: times are shown without seconds.
        return f"If it is still so at {self.at(until + 59e9)}"

    def see_that_it_goes_on(self, at_unix_ns: float, instead: str = "") -> str:
        """What is left where a rollback or a relaunch is ordered, or will be; `instead`: what helps if it was not."""
        way, until = self.way(Action.RELAUNCH) or {}, self.at(at_unix_ns + GOES_ON_NS + 59e9)
        from_ = (self.policy.get("ordered") or way).get("checkpoint")
        no_later = ", as later ones are in doubt" * KINDS[self.incident.kind].corrupts_weights
        afresh = AFRESH + f": training goes on from {checkpoint(from_)}{no_later}" * bool(from_)
        else_ = (way.get("checkpoint") != from_ and self.command(Action.RELAUNCH)) or afresh
        if instead:
            else_ = f"see {self.typed('commands --job')}. If it shows no relaunch, {instead}. Else {else_}"
        return f"Nothing to do before {until}. If no step is trained by then ({self.typed('jobs show')}): {else_}."

    def relaunch_then(self, more: str = "") -> str:
        """A relaunch at a later time, when other checkpoints are there than now; `more`: what it costs besides."""
        command = self.typed(Action.RELAUNCH) if self.way(Action.RELAUNCH) else AFRESH
        more = more or f"and the steps since {'the newest checkpoint' if self.incident.checkpoint else 'the start'}"
        return f"{command} (costs {duration(RELAUNCH_S)} {more})"

    # ---- what rankwatch does -----------------------------------------------------------------------------------------

    def automatic(self) -> str:
        """What happens without a person."""
        incident, policy, ordered = self.incident, self.policy, self.policy.get("ordered")
        action, reason = str(policy.get("action") or ""), str(policy.get("reason") or "")
        if ordered:
            at = self.at(ordered["unix_ns"], "%H:%M:%S")
            costs = ordered["reason"] + f"; {self.price(ordered)}" * (ordered["action"] != Action.STOP)
            held = f", until {self.typed(Action.RESUME)}" * (ordered["action"] == Action.PAUSE)
            held += ", and waits for an approval: `rankwatch commands --waiting`" * bool(ordered.get("approval"))
            gone = incident.kind is Kind.DEVICE_FAULT and incident.severity is Severity.CRITICAL
            fails = "; it fails if the device is gone" * (gone and ordered["action"] == Action.CHECKPOINT)
            return f"{_target(ordered)}, ordered by the policy at {at} ({costs}{fails}){held}"
        if policy.get("mode") == Mode.SUGGEST and action:
            if reason == NOT_CRITICAL_YET:
                way = self.way(action) or {"action": action}
                return f"{_target(way)}, {self.as_critical()} ({self.price(way)})"
            if reason != ONLY_SUGGESTS and incident.severity is not Severity.INFO:
                return f"nothing (no {action}, since {reason})"
        if self.restarts:
            from_ = f", from {checkpoint(self.incident.checkpoint)}" if self.incident.checkpoint else ""
            return f"the launcher starts the job again{from_}"
        return NOTHING

    def as_critical(self) -> str:
        """When a hang becomes critical by itself."""
        after_s = seconds_of(self.incident.evidence)
        at = "" if after_s is None else f"at {self.at(self.incident.onset_unix_ns + after_s * 1e9, '%H:%M:%S')} "
        return f"{at}if it still stands then"

    # ---- what a person does ------------------------------------------------------------------------------------------

    def steps(self) -> list[str]:
        incident, kind = self.incident, self.incident.kind
        steps = list(KINDS[kind].first_steps)
        if by_cause := under_cause(kind, incident.cause, incident.evidence, self.accelerated):
            steps = [by_cause, *steps[1:]]
        match kind:
            case Kind.STRAGGLER | Kind.DEVICE_DEGRADED | Kind.NETWORK_DEGRADED | Kind.SLOWDOWN:
                return self.of_pace(steps)
            case Kind.HANG:
                return self.of_a_hang(steps)
            case Kind.RANK_LOST:
                return [how_it_ended(incident.evidence, incident.ranks, self.accelerated), self.started_again()]
            case Kind.CORRUPTION | Kind.NONFINITE:
                return self.of_weights(steps)
            case Kind.LOSS_DIVERGENCE if incident.severity is not Severity.INFO:
                return self.of_divergence(steps)
            case Kind.LOSS_DIVERGENCE:
                return ["Nothing to do now: you get a message, as a warning or worse, if it stays or grows.", steps[1]]
            case Kind.DEVICE_FAULT if incident.severity is not Severity.INFO:
                return self.of_a_device(steps)
            case Kind.DEVICE_FAULT:
                return ["Nothing to do now: such errors come from the program, unless they recur on that device."]
            case Kind.TELEMETRY_LOST if "steps_go_on" in incident.evidence:
                return self.of_silence()
            case Kind.CHECKPOINT_FAILED if save := self.command(Action.CHECKPOINT):
                if incident.cause == "disk" and (path := incident.evidence.get("path")):
                    steps[0] = steps[0].replace("that disk:", f"the disk of `{path}` on {self.host} (`df -h`):")
                return [steps[0], f"Then {save}; if that fails too, you get its error.", *steps[1:]]
            case Kind.CHECKPOINT_OVERDUE if save := self.command(Action.CHECKPOINT):
                return [f"{save}: if that fails, it says why.", *steps]
            case Kind.HOST_DEGRADED if save := self.command(Action.CHECKPOINT):
                return [steps[0], f"If its provider announces its end: {save}, and a spare in its place.", *steps[1:]]
            case Kind.RESTORE_FAILED if relaunch := self.command(Action.RELAUNCH):
                return [steps[0], f"If it cannot be read: {relaunch}.", *steps[1:]]
            case _:
                return steps

    def of_pace(self, steps: list[str]) -> list[str]:
        """What only costs time: look, and act once that has cost as much as acting."""
        incident, (first, *others) = self.incident, steps
        rate, trace = incident.impact_gpu_hours_per_hour, self.command(Action.TRACE)
        if len(incident.hosts) != 1 and trace:
            others = [f"Then {trace}.", *others]
            if not incident.cause:
                idle = "if devices idle for much of it" if self.accelerated else "else"
                heat = f"; else at heat and clocks (`{LIMITS}`)" * self.accelerated
                read = f"look at the network; {idle}, at what else runs on the hosts (`top`){heat}"
                same = " Let it train meanwhile: all ranks are equally slow, so a spare host does not help."
                first = f"First {trace}. If collectives take most of it, {read}.{same * (not incident.hosts)}"
                others = []
        if incident.cause == "worker" and incident.evidence.get("witness") == "own":
            waits = "what its own code waits for in each step: a file, a download, a lock, a sleep"
            first = f"First {trace}: find {waits}." if trace else f"Find {waits}."
        if incident.severity is Severity.INFO:
            what = "no rank waits for it" if rate <= 0 else "little is lost"
            nothing = f"Nothing to do now, as {what}: you get a message, as a warning, if that changes."
            return [nothing, f"{self.if_still_so()}: {lower(first)}", *others]
        if rate <= 0:
            return [first, "No rank waits for it yet; you get a message if one does.", *others]
        if len(incident.hosts) != 1:
            return [first, *others]
        save, cost = self.way(Action.CHECKPOINT) is not None, RELAUNCH_S * self.world_size / 3_600
        now = (self.way(Action.RELAUNCH) or {}).get("cost_gpu_hours") or cost
        still = self.if_still_so(cost if save else float(now))
        even = ", as much as the fault has cost by then" * (still.startswith("If") and cost > 0)
        relaunch = self.relaunch_then(f"of the job{even}" if save else "")
        listed = f"{self.typed(Action.CHECKPOINT)}, and once {self.typed('checkpoints')} lists it as good, " * save
        if incident.cause == "data":
            move = "if a disk or network is slow, move the data, or let it train; if a loader worker hangs,"
            return [first, f"{still}: {move} {listed}{relaunch}.", *others]
        without, on_host = "", int(incident.evidence.get(RANKS_ON_HOST) or 0)
        if on_host:
            of_host, now = f"{on_host} {'GPUs' if self.accelerated else 'ranks'}", f"{amount(rate)} are lost now"
            go_on = f"go on: leaving {self.host} out would lose {of_host}, and {now}"
            leave = f"leave {self.host} out: it has {of_host}, and {now}"
            without = f" Without a spare {go_on if on_host >= rate else leave}."
        free = f"{still} and a spare host is free" if still.startswith("If") else "If a spare host is free"
        spare = f"{free}: {listed}put the spare in place of {self.host} and {relaunch}."
        return [first, f"{spare}{without}", *others]

    def of_a_hang(self, steps: list[str]) -> list[str]:
        first, *others = hang_steps(steps, self.incident.evidence, self.incident.hosts)
        relaunch = self.command(Action.RELAUNCH) or AFRESH
        waits, go_on = self.policy.get("reason") == NOT_CRITICAL_YET, first.startswith("Continue")
        if is_silent := first.startswith("First"):
            fails, relaunch_ = (", a relaunch fails", self.typed(Action.RELAUNCH)) if waits else ("", relaunch)
            spare = "put a spare in its place, or restart it if there is none"
            first += f" If it is down{fails}: {spare}, then {relaunch_}."
        if waits or self.ordered == Action.RELAUNCH:
            after_s = seconds_of(self.incident.evidence) or 0.0
            at = self.incident.onset_unix_ns + after_s * 1e9 if waits else self.policy["ordered"]["unix_ns"]
            if "py-spy" in first:
                first = f"Where {self.ranks} stood is in the incident, as all ranks are asked for their stacks."
            if go_on:
                return [self.see_that_it_goes_on(at, lower(first).removesuffix(".")), *others]
            then = self.see_that_it_goes_on(at)
            return [first, f"If it is up: {lower(then)}", *others] if is_silent else [then, first, *others]
        after = f"Then {'if no step follows within a minute: ' * go_on}{relaunch}."
        if is_silent:
            return [first, f"If it is up: {relaunch}.", *others]
        if self.incident.severity is Severity.INFO and not go_on:
            wait = f"Nothing to do before it becomes critical by itself, {self.as_critical()}: it may pass."
            return [f"{wait} Then: {lower(first)}", after, *others]
        return [first, after, *others]

    def started_again(self) -> str:
        """How a job goes on whose processes have ended."""
        launch, begins = LAUNCH, f"training goes on from {checkpoint(self.incident.checkpoint)}"
        if not self.incident.checkpoint:
            begins = f"it begins from scratch, since it has no good checkpoint ({self.typed('checkpoints')} lists all)"
        if self.restarts and self.ordered != Action.STOP:
            return f"If no step is trained by {self.at(self.incident.onset_unix_ns + LOOK_NS)}: {launch}; {begins}."
        evidence, again = self.incident.evidence, "leave it stopped, and tell its owner"
        if evidence.get("signal") in NATIVE:
            again = f"put a spare in place of {self.host}; if it does so there as well, tell the owner of the code"
        return f"Then {launch}: {begins}. If it ends so again: {again}."

    def of_weights(self, steps: list[str]) -> list[str]:
        """Wrong numbers in weights or gradients: go back, then find out where they come from."""
        incident, kind = self.incident, self.incident.kind
        device = f"the GPU of {self.ranks}" if self.accelerated else "the memory of its host"
        if has_norm_alone(kind, incident.severity, incident.evidence):
            look = f"{self.if_still_so()}: see whether {self.ranks} has batches of another kind than the others"
            other = "(source, lengths, labels): if so, mend them, or leave them if that is meant"
            spare = f"put a spare in place of {self.host}, {self.relaunch_then()}, and test {device}"
            unsure = "If you are not sure, let it train: you get a message if the loss suffers."
            return [f"Nothing to do now. {look} {other}; if they are alike, {spare}.", unsure]
        if incident.severity is not Severity.CRITICAL:
            finite = (
                "Nothing to do now: while loss and gradients stay finite, nothing is lost; otherwise you get a message"
            )
            return [f"{finite}, as critical.", *steps[1:]]
        onset = "the step of the onset" if incident.onset_step is None else f"step {incident.onset_step}"
        batch = f"If it recurs in {onset}: skip that batch."
        if may_be_skipped(kind, incident.severity, incident.evidence):
            needless = "do nothing"
            if ordered := self.policy.get("ordered"):
                rule = f"set {ordered['reason']} to suggest (`rankwatch policy`)"
                needless = f"the rollback was not needed; to prevent another one, {rule}"
            scaler = f"If the job has a loss scaler, as with fp16, it has skipped that update: {needless}."
            cause = f"{scaler} Without one: {lower(batch)} In another: lower the learning rate."
        elif kind is Kind.CORRUPTION:
            test = f"test {'its GPU (`dcgmi diag -r 3`)' if self.accelerated else device}"
            relaunch = self.typed(Action.RELAUNCH) if self.way(Action.RELAUNCH) else AFRESH
            spare = f"once the job trains and a spare is free, put it in place of {self.host}, {relaunch}, and {test}"
            cause = f"It usually recurs: {spare}. Without a spare, continue; if it recurs: {self.typed(Action.STOP)}."
        elif incident.ranks:
            who = self.ranks if len(incident.ranks) == 1 else "one of these ranks"
            then = f"put a spare in place of {self.host}, then {self.typed(Action.RELAUNCH)}"
            cause = f"{batch} If {who} has it again in another step: {then}."
        else:
            cause = f"{batch} Else lower the learning rate."
        back = self.command(Action.ROLLBACK) or self.command(Action.RELAUNCH)
        if self.ordered in (Action.ROLLBACK, Action.RELAUNCH):
            return [self.see_that_it_goes_on(self.policy["ordered"]["unix_ns"]), cause, *steps[1:]]
        stop = f"Stop the job ({self.typed(Action.STOP)}), and start it from a checkpoint from before {onset}"
        return [f"Go back: {back}." if back else f"{stop}: no good one is known.", cause, *steps[1:]]

    def of_divergence(self, steps: list[str]) -> list[str]:
        paused = self.ordered == Action.PAUSE
        resolve = f"`rankwatch incidents resolve {short(self.incident.id)} --reason planned`"
        resume = f", and {self.typed(Action.RESUME)}" * paused
        meant = f"If a change of data or schedule was meant to do this: {resolve}{resume}."
        back = self.command(Action.ROLLBACK) or self.command(Action.RELAUNCH)
        ends = ", which ends the pause" * paused
        again = f"to try once more as it is, {back}{ends}" if back else "start it again from before the onset"
        change = f"to change the learning rate or the data, {self.typed(Action.STOP)}, and start it with that"
        if saved := (self.way(Action.RELAUNCH) or {}).get("checkpoint"):
            change += f", from {checkpoint(saved)}"
        unknown = " If you do not know, leave it paused, and ask its owner." * paused
        not_ = f"If not: {again}; {change}.{unknown}"
        return [f"{meant} {not_}", *steps[1:]]

    def of_a_device(self, steps: list[str]) -> list[str]:
        """An error that a device reports: save while the job still runs, then take the device away."""
        relaunch, again = self.command(Action.RELAUNCH) or LAUNCH, self.typed(Action.RELAUNCH)
        _, known, advised = self.incident.summary.removesuffix(".").rpartition("; ")
        save = "" if self.ordered else f"If steps still go on, save first: {self.typed(Action.CHECKPOINT)}. "
        if self.incident.severity is Severity.CRITICAL:
            spare = f"{save}Put a spare in place of {self.host}, and {relaunch}."
            mend = (advised if known else "restart the machine").replace("the machine", self.host)
            none = f"Without a spare: {self.typed(Action.STOP)}, {mend}, then {LAUNCH}"
            return [spare, f"{none}. If it comes again: replace the GPU.", *steps[1:]]
        cost = self.price({"cost_gpu_hours": RELAUNCH_S * self.world_size / 3_600})
        saved = f"{save}As soon as {self.typed('checkpoints')} lists it as good"
        fresh = f"{saved}: {again} (new processes from it; {cost})."
        none = f"If none is listed by {self.at(self.incident.updated_unix_ns + GOES_ON_NS + 59e9)}: {relaunch}."
        spare = f"If it comes again on that device: put a spare in place of {self.host}."
        return [f"{fresh} {none}", spare, *steps[1:]]

    def of_silence(self) -> list[str]:
        if self.incident.evidence["steps_go_on"]:
            log = f"`{one_line(self.incident.job)}.agent.log` (in $RANKWATCH_DIR, else in /dev/shm/rankwatch-UID)"
            look = f"Only the agent is away: on {self.host} read its {log}, and see disk (`df`) and network."
            job = re.sub(r"([.^$*+?()\[\]{}|\\])", r"\\\1", one_line(self.incident.job))
            there = f"`pgrep -f {shlex.quote(f'rankwatch.agent.*{job}')}`"
            start = f"If {there} finds none there, start it as the user of the job: {self.typed('agent --job')}."
            runs = "If one runs and sends nothing though these are well: end it (training goes on), and start it."
            return [look, f"{start} {runs}"]
        down = f"Training stands still as well, so {self.host} is probably down: look at its console, or `ping` it"
        relaunch = self.command(Action.RELAUNCH) or LAUNCH
        return [f"{down}.", f"If it is down: a spare in its place, and {relaunch}."]


def _target(way: Mapping[str, Any]) -> str:
    """An action with the checkpoint that it goes on from."""
    id_ = way.get("checkpoint")
    to = f" {'to' if way['action'] == Action.ROLLBACK else 'from'} {checkpoint(id_)}" if id_ else ""
    to += " with new processes" * (way["action"] == Action.ROLLBACK and way.get("mode") == Action.RELAUNCH)
    return f"{way['action']}{to}" + " of all ranks" * (way["action"] in (Action.STOP, Action.PAUSE))


def checkpoint(id_: str | None) -> str:
    """A checkpoint as people call it: by its step."""
    step = (id_ or "").rpartition(":")[2]
    where = " in memory" * (id_ or "").startswith("memory:")
    return f"the checkpoint of step {step}{where}" if step.isdigit() else f"checkpoint {id_}"
