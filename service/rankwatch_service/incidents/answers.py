"""An incident in words: how sure it is, its cause, its impact, what changed, and where to look first. Pure.

`evidence` is that of the incident's first mover.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.hang import PIDS, seconds_of
from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF, ENDED_WITH_JOB, KINDS, LIKELY, has_norm_alone
from rankwatch_service.names import one_line

_START: Final = re.compile(r"attempt \S+ began(?P<before> after )?")
"""The change that the start of an attempt is (`JobHistory.begin`)."""

CHANGES_REPORTED: Final = 2
"""Changes before the onset that are named; of the others only the number is shown."""

CHANGE_CHARS_MAX: Final = 160
"""Longest name of a change that is shown; a script may declare longer ones."""

NOTHING_CHANGED: Final = "nothing"
"""Begins the clause, where nothing is known to have changed."""

_CONFIDENCE: Final = ((0.97, "certain"), (LIKELY, "likely"))
"""Least confidence, and how it is called."""

_CAUSES: Final[Mapping[str, str]] = {
    "": "not known",
    "worker": "the rank itself: its device, process or data",
    "device": "the device: its clock, power, heat or a fault",
    "host": "the host: other processes, memory or limits that its ranks share",
    "stage": "the work of that pipeline stage",
    "data": "waiting for data",
    "communication": "communication between the ranks",
    "network": "the network",
    "storage": "saving checkpoints",
    "disk": "a full disk",
}
"""By the cause class of a finding (`Finding.cause`)."""


def cause_words(cause: str, evidence: Mapping[str, Any]) -> str:
    """A cause class as a clause; the class itself if it is a new one.

    >>> cause_words("data", {}), cause_words("", {})
    ('waiting for data', 'not known')
    """
    if "fingerprints" in evidence and cause == "worker":
        return "its device or memory: replicas stay equal, whatever their data"
    if cause == "host" and evidence.get("queued_excess_s"):
        return "want of a core: other processes there, or the few cores that it is bound to"
    return _CAUSES.get(cause, cause)


def normal(kind: str, evidence: Mapping[str, Any]) -> str:
    """What is normal where there is no such incident, as a clause."""
    if kind == Kind.CORRUPTION and "local_grad_norm" in evidence:
        return "the gradients of all ranks have norms of about one size"
    return KINDS[Kind(kind)].normal


def impact(kind: str, severity: str, evidence: Mapping[str, Any], state: str = "open") -> str:
    """What an incident does to its job while it lasts, as a clause without figures."""
    if state == "resolved":
        return f"none any more: {'the job has ended' if evidence.get(ENDED_WITH_JOB) else 'it is over'}"
    if kind == Kind.RANK_LOST and severity == Severity.INFO:
        return "none: nothing is wrong"
    if evidence.get(ENDED_BY_ITSELF):
        return "none any more: it has ended by itself"
    if kind == Kind.HANG and severity == Severity.INFO:
        after_s, age_s, usual_s = (seconds_of(evidence, name) for name in ("critical_after_s", "age_s", "usual_step_s"))
        raised = "" if after_s is None else f" once it has lasted {duration(after_s)}"
        stood = f" for {age_s:.2g} s (a step usually takes {usual_s:.2g} s)" if age_s and usual_s else ""
        return f"training has stood still{stood}, which may pass: rankwatch calls it critical{raised}"
    if evidence.get("update_skipped") or evidence.get("metrics") == ["optimizer_skipped"]:
        return "skipped steps change no weight: nothing is trained while it lasts"
    if may_be_skipped(kind, severity, evidence):
        return "none if a loss scaler skipped this update; else all steps and checkpoints since then are lost"
    if kind == Kind.NONFINITE and severity != Severity.CRITICAL:
        return "none is proven while loss and gradients stay finite"
    if kind == Kind.LOSS_DIVERGENCE and severity == Severity.INFO:
        return KINDS[Kind.LOSS_SPIKE].impact
    if kind == Kind.STRAGGLER and severity == Severity.INFO:
        return "next to none: no rank waits for it for long"
    if "straggler" in evidence:
        return "its ranks are slow, and the others wait for them"
    if kind == Kind.TELEMETRY_LOST and evidence.get("steps_go_on"):
        return "these ranks train unwatched: their faults are not found"
    if has_norm_alone(kind, severity, evidence):
        return "none is proven; if its gradients are wrong, they go into the weights of all ranks alike"
    if kind == Kind.DEVICE_FAULT and {one.get("class") for one in evidence.get("xids") or ()} == {"wear"}:
        return "the device has contained it, so what is saved is good; it may end the job"
    return KINDS[Kind(kind)].impact


def may_be_skipped(kind: str, severity: str, evidence: Mapping[str, Any]) -> bool:
    """Whether a norm was not finite, and nothing says whether a loss scaler has kept it from the weights."""
    norms = set(evidence.get("metrics") or ("loss",)) <= {"grad_norm", "local_grad_norm"}
    return kind == Kind.NONFINITE and severity == Severity.CRITICAL and norms and "update_skipped" not in evidence


def confidence_words(confidence: float) -> str:
    """How sure the detector is, in words: certain, likely or possible.

    >>> confidence_words(0.95)
    'likely'
    """
    return next((words for least, words in _CONFIDENCE if confidence >= least), "possible")


def changed(changes: Sequence[Mapping[str, Any]], onset_unix_ns: int) -> str:
    """The newest changes before an onset, as a clause: saves only where nothing else has changed, and what several
    ranks send only once.

    Args:
        changes: {what, step, unix_ns} each (`Incident.changes_before`).
        onset_unix_ns: of the incident.
    """
    others = [one for one in changes if not _is_save(one["what"])]
    different = {(one["what"], one["step"]): one for one in others or changes}
    if len(different) == 1 and (start := _START.match(str(next(iter(different.values()))["what"]))):
        (one,) = different.values()
        earlier = f"{duration((onset_unix_ns - one['unix_ns']) / 1e9)} earlier"
        if start["before"] is not None:
            return f"training was started again{_at_step(one)}, {earlier}"
        return f"{NOTHING_CHANGED}; training began {earlier}"
    newest = sorted(different.values(), key=lambda one: int(one["unix_ns"]), reverse=True)
    reported = []
    for one in newest[:CHANGES_REPORTED]:
        what = "a checkpoint was saved" if _is_save(one["what"]) else one_line(str(one["what"]))[:CHANGE_CHARS_MAX]
        reported.append(f"{what}{_at_step(one)}, {duration((onset_unix_ns - one['unix_ns']) / 1e9)} before")
    left = len(newest) - len(reported)
    return (
        "; ".join(reported) + (f"; and {left} more" if left else "")
        if reported
        else f"{NOTHING_CHANGED} known shortly before"
    )


def _at_step(change: Mapping[str, Any]) -> str:
    return "" if change["step"] is None else f" at step {change['step']}"


def save_text(id_: str) -> str:
    """The change of a job that the save of a checkpoint is."""
    return f"checkpoint {id_} saved"


def _is_save(what: str) -> bool:
    return what.startswith("checkpoint ") and what.endswith(" saved")


def duration(seconds: float) -> str:
    """Two units at most.

    >>> duration(3_725)
    '1 h 2 min'
    """
    whole = max(round(seconds), 0)
    for unit_s, unit, less_s, less in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // less_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {less}" if rest else "")
    return f"{whole} s"


LIMITS: Final = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK"
"""The command that shows what slows devices down."""

_BY_CAUSE: Final[Mapping[tuple[Kind, str], str]] = {
    (Kind.STRAGGLER, "data"): "See why its data comes late: its loader workers, its part of the data, and the disk or "
    "network that it reads from.",
    (Kind.STRAGGLER, "storage"): "See why it saves for longer than the others: its disk, or a larger part of it.",
    (Kind.STRAGGLER, "host"): "Compare the host with another: `nvidia-smi -q -d TEMPERATURE,POWER,CLOCK`, what else "
    "runs (`top`), and the limits of its container (`cat /sys/fs/cgroup/cpu.max`).",
    (Kind.STRAGGLER, "stage"): "See which layers that pipeline stage has: they may be divided unevenly.",
    (Kind.CHECKPOINT_FAILED, "disk"): "Make room on that disk: delete old checkpoints, but not the newest complete "
    "one, or raise the quota.",
    (Kind.SLOWDOWN, "data"): "Look at the loader workers and the storage: all ranks wait longer for data.",
    (Kind.SLOWDOWN, "communication"): "Look at the network between the hosts: all ranks communicate for longer.",
    (Kind.SLOWDOWN, "device"): f"Look at power, heat and clocks of the devices (`{LIMITS}`): all of "
    "them work for longer.",
}
"""In place of the first step, where the cause is known."""


def under_cause(kind: str, cause: str, evidence: Mapping[str, Any], accelerated: bool) -> str:
    """What to do in place of the first step of a kind, as far as the cause is known; empty: that step."""
    if kind == Kind.SLOWDOWN and not accelerated and cause == "device":
        return "See what else runs on the hosts (`top`), and the limits of their containers."
    if kind == Kind.STRAGGLER and not accelerated and cause in ("host", "worker", "device", ""):
        pids = _pids(evidence)
        cores = f", which cores process {pids[0]} may use (`taskset -cp {pids[0]}`)" if pids else ""
        limits = "the limits of its container (`cat /sys/fs/cgroup/cpu.max`)"
        few = ""
        if pids and evidence.get("queued_excess_s"):
            few = f" Few cores: let it have more (`taskset -acp CORES {pids[0]}`); a spare may start with as few."
        return f"See what else runs on the host (`top`){cores}, and {limits}.{few}"
    return _BY_CAUSE.get((Kind(kind), cause), "")


def over(kind: str, severity: str, evidence: Mapping[str, Any], state: str, accelerated: bool) -> str:
    """What is left to do about what is no fault, or is over; empty: it is neither."""
    if kind == Kind.RANK_LOST and severity == Severity.INFO:
        if evidence.get("requested"):
            return "Nothing: the job was asked to end."
        return "Nothing, if this rank was meant to finish first: the others do not wait for it."
    if state != "resolved":
        passed = "Nothing: it has ended by itself. It is watched for some minutes, in case it comes back."
        return passed * bool(evidence.get(ENDED_BY_ITSELF))
    if not evidence.get(ENDED_WITH_JOB):
        return "Nothing: it is over."
    if has_norm_alone(kind, severity, evidence):
        return "The job has ended. Before you start it again: look at the data of that rank, then at its device."
    return _before_restart(kind, evidence, accelerated)


_XIDS: Final = (
    "an Xid other than 13, 31, 43, 45 (those are of programs) means the GPU: put a spare in place of that host first, "
    "or restart it if there is none. Without such an Xid"
)

NATIVE: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""Signals by which native code or broken hardware ends a process."""


def how_it_ended(evidence: Mapping[str, Any], ranks: Sequence[int], accelerated: bool) -> str:
    """The first step for people after a lost rank, chosen by the cause of its end as far as it is known."""
    error, where = str(evidence.get("error") or ""), str(evidence.get("where") or "")
    number, code = evidence.get("signal"), evidence.get("code")
    log = f"the output of rank {ranks[0]}" if ranks else "its output"
    process = f"process {pids[0]}" if (pids := _pids(evidence)) else "it"
    by_itself = error in (f"SystemExit: {code}", "SystemExit: None")
    if error and not by_itself:
        said = one_line(error.splitlines()[0]).partition(" (Caught ")[0][:CHANGE_CHARS_MAX].rstrip(".")
        place = f" (raised in {where})" if where else ""
        find = f"Find `{said}` in {log}, and mend what the traceback above it shows{place}."
        return f"On its host `dmesg -T | grep -i xid`: {_XIDS}: {lower(find)}" if "cuda" in said.lower() else find
    if number in (signal.SIGKILL, None) and code is None and (number or evidence.get("abrupt")):
        return (
            f"On its host `dmesg -T | grep -i oom`: if the kernel killed {process}, let it hold less in memory (fewer "
            "loader workers, a smaller cache). If not, a person or the scheduler sent the signal: ask them, but do not "
            "wait for an answer."
        )
    if number in NATIVE:
        failed = f"native code failed: the end of {log} may say where."
        return (
            f"On its host `dmesg -T | tail -50`: {_XIDS}, {failed}"
            if accelerated
            else f"{failed[:1].upper()}{failed[1:]}"
        )
    if code == 0:
        return "See why its loop was over before the others': a break, an exit, or less data than they have."
    if code is not None:
        known = "the script asked for that by `sys.exit`" if by_itself else "no exception of it is known"
        printed = [str(line) for line in evidence.get("output") or ()]
        last = f" (`{one_line(printed[-1])[:CHANGE_CHARS_MAX]}`)" if printed else ""
        return f"Read the end of {log}{last}: it ended with exit code {code}, and {known}."
    return f"Read the end of {log}: nothing else is known of how it ended."


def _pids(evidence: Mapping[str, Any]) -> Sequence[int]:
    """Process ids of the first host that the evidence lists."""
    return next(iter((evidence.get(PIDS) or {}).values()), ())


def _before_restart(kind: str, evidence: Mapping[str, Any], accelerated: bool) -> str:
    """What is left to do about what lasted until its job ended."""
    if kind == Kind.RANK_LOST:
        step = how_it_ended(evidence, (), accelerated)
    else:
        step = under_cause(kind, "", evidence, accelerated) or KINDS[Kind(kind)].first_steps[0]
    if step.startswith("Nothing"):
        return "Nothing: the job has ended."
    return f"The job has ended. Before you start it again: {lower(step)}"


def lower(sentence: str) -> str:
    """A sentence as it goes on after a colon."""
    return sentence[:1].lower() + sentence[1:]
