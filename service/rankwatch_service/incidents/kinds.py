"""The table of kinds: all that is known of a kind of incident, in one row.

A new kind needs a row here, a member in `rankwatch_detectors.base.Kind` and a runbook in docs/incidents. Pages, replays
and previews read this table. The severity of an incident depends on its findings, not on its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from rankwatch_detectors.base import Kind, Severity

_LOSS: Final = frozenset({Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE, Kind.GRAD_NORM})
_CORRUPTED: Final = frozenset({Kind.LOSS_DIVERGENCE, Kind.NONFINITE, Kind.CORRUPTION})
_ENDS: Final = frozenset({Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST, Kind.RESTART_LOOP})
_OF_SENDERS: Final = frozenset({Kind.LIMIT_REACHED, Kind.FORGED_TELEMETRY})
_ALONE: Final = _OF_SENDERS | {Kind.METRIC, Kind.ALERT}
"""Kinds that never have a cause: a rule that a user wrote always opens an incident of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """What holds for all incidents of a kind."""

    label: str
    """Its name on pages."""
    normal: str
    """What is normal where there is no such incident, as a clause."""
    impact: str
    """What it does to its job while it lasts, as a clause without figures."""
    may_cause: frozenset[Kind]
    """Kinds that it may cause. If two kinds may cause each other, the earlier incident is the cause."""
    first_steps: tuple[str, ...]
    """What a person does first, in the order in which it is worth trying: the runbook in short."""
    actions: tuple[str, ...] = ("wait", "pause")
    """What helps, best first: a `policy.actions.Action`, or "wait" for trouble that usually passes by itself."""
    becomes: frozenset[Kind] = frozenset()
    """Kinds into which it may turn if it does not pass: the incident continues under that kind."""
    ends_job: bool = False
    """Whether it ends the job, and ends it again after each restart while its cause is there."""
    stands_still: bool = False
    """The job stands still while it lasts: all GPUs are idle."""
    corrupts_weights: bool = False
    """Checkpoints from after its onset cannot be trusted, and training is wasted while it lasts."""
    tells_all: bool = False
    """Each of its findings names all ranks that it is about; of those that an earlier one named, none is kept."""
    is_lasting: bool = False
    """A rollback does not end it: the same processes go on, on the same hardware."""
    flaps: bool = False
    """Whether it ends with the first sign of life and may come back at once; other kinds end once it has stayed
    away."""
    is_condition: bool = False
    """A state of hardware that many jobs do not feel: a hang is an incident of its own, which has it as suspected cause
    in its evidence (`suspected_causes`)."""
    is_of_device: bool = False
    """Trouble of a device alone: its incident is a grade lower while training does not feel it (`correlator.grade`)."""
    is_host_wide: bool = False
    """If it names most ranks of a host, it is about the host."""
    is_on_record: bool = False
    """It may concern hardware (`host_incidents`); then it goes on the record of the hosts and devices of
    the ranks that it names."""
    spans_attempts: bool = False
    """A new attempt says nothing about it: only its detector knows when it ends."""
    chart: Literal["", "level", "ranks", "peers", "fingerprints", "phases"] = ""
    """The chart of its page (`incidents/kind_chart.js`); empty: none."""
    in_files: tuple[tuple[str, ...], ...] | None = ()
    """Columns of a recorded file that show it, of each group one; empty: any file may; None: no file. A silent host
    looks there like ranks that ended, and a file has no counters of devices and hosts, no events and no alerts."""
    is_previewable: bool = False
    """Step metrics decide it, so that a replay of stored series finds it."""
    needs_own_rule: bool = False
    """A rule of the policy that matches every kind does not act on it: it is about who sent telemetry, or comes from
    outside, and whoever sends such messages could steer the job."""


KINDS: Final[dict[Kind, KindTraits]] = {
    Kind.DEVICE_FAULT: KindTraits(
        label="Device fault",
        normal="a device reports no faults",
        impact="what was computed on that device is in doubt, and it may end the job",
        may_cause=frozenset(Kind) - _ALONE,
        first_steps=(
            "Leave that device out, or its host: one that has failed once fails again.",
            "See the kernel's log of that host for more (`dmesg -T | grep -i nvrm`).",
            "What was computed on it since the onset is in doubt: go back to a checkpoint from before it.",
        ),
        actions=("relaunch", "checkpoint", "pause"),
        is_lasting=True,
        is_of_device=True,
        is_host_wide=True,
        is_on_record=True,
        in_files=None,
    ),
    Kind.NETWORK_DEGRADED: KindTraits(
        label="Network degraded",
        normal="links keep their speed and lose almost nothing",
        impact="communication over that link may slow all ranks down",
        may_cause=frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.NETWORK_DEGRADED}),
        first_steps=(
            "Look at the link and the switch port: error counters, speed, a flapping port.",
            "If several hosts of one rack are affected, look at their switch.",
        ),
        is_condition=True,
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
        chart="peers",
        in_files=None,
    ),
    Kind.DEVICE_DEGRADED: KindTraits(
        label="Device degraded",
        normal="a device keeps its clocks, as its neighbours do",
        impact="its rank may become slow, and the others wait for it",
        # A rank dies of memory errors alone (`causes`): heat or a slow clock ends nothing.
        may_cause=frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.RANK_LOST, Kind.DEVICE_DEGRADED}),
        first_steps=(
            "See what limits the device, on its host: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK`.",
            "If several devices of one host are affected, look at its cooling and its power supply.",
        ),
        is_condition=True,
        is_lasting=True,
        is_of_device=True,
        is_host_wide=True,
        is_on_record=True,
        chart="peers",
        in_files=None,
    ),
    Kind.HOST_DEGRADED: KindTraits(
        label="Host degraded",
        normal="a host has cores, memory and disk to spare",
        impact="its ranks may become slow, or be killed",
        may_cause=frozenset(
            {Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST, Kind.HOST_DEGRADED}
        ),
        first_steps=(
            "See what else runs on the host (`top`, `dmesg`), and which limits its container has.",
            "Memory: fewer or smaller loader workers, or a smaller cache; a killed process is in the kernel's log.",
        ),
        actions=("checkpoint", "wait", "pause"),
        is_condition=True,
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
        chart="peers",
        in_files=None,
    ),
    Kind.RESTORE_FAILED: KindTraits(
        label="Restore failed",
        normal="all ranks load the checkpoint and train on",
        impact="the job cannot go on until a checkpoint is loaded",
        may_cause=_ENDS,
        first_steps=(
            "Read the error in the evidence: a file that is missing or cut short, or a model that does not fit it.",
            "Load that checkpoint by hand on the named host, to see whether the file or the script is at fault.",
        ),
        actions=("relaunch",),
        stands_still=True,
        is_lasting=True,
        spans_attempts=True,
        in_files=None,
    ),
    Kind.CHECKPOINT_FAILED: KindTraits(
        label="Checkpoint failed",
        normal="every save succeeds on all ranks",
        impact="a fault now would lose all steps since the last good checkpoint",
        # A script that does not catch the exception ends, or hangs where the other ranks wait for it.
        may_cause=_ENDS | {Kind.CHECKPOINT_OVERDUE},
        first_steps=(
            "Repair what the error says. If no room is left, delete old checkpoints or raise the quota.",
            "If the disk has room, look at the permissions and the mount of that folder on the named host.",
        ),
        actions=("checkpoint", "wait"),
        is_lasting=True,
        spans_attempts=True,
        in_files=None,
    ),
    Kind.RANK_LOST: KindTraits(
        label="Rank lost",
        normal="all ranks live until the job ends",
        impact="the other ranks wait for it, or end with it",
        # A dead rank leaves the others waiting; then the launcher ends them, and with them their agent.
        may_cause=_ENDS | {Kind.STRAGGLER, Kind.SLOWDOWN},
        first_steps=(
            "Read the end of that rank's own log.",
            "If nothing restarts the job, start it from the newest good checkpoint.",
        ),
        actions=("wait", "relaunch"),
        ends_job=True,
        stands_still=True,
        in_files=(("rank",),),
    ),
    Kind.CORRUPTION: KindTraits(
        label="Data corruption",
        normal="replicas have the same weights, bit for bit",
        impact="as its gradients go into the weights of all ranks, steps and checkpoints since then are in doubt",
        # The next reduction spreads the wrong numbers of one rank to all ranks.
        may_cause=_LOSS | {Kind.NONFINITE, Kind.CORRUPTION, Kind.RESTART_LOOP},
        first_steps=(
            "Go back to a checkpoint from before the onset: gradients may have spread the wrong numbers since then.",
        ),
        actions=("rollback", "relaunch", "pause"),
        corrupts_weights=True,
        is_on_record=True,
        chart="fingerprints",
        in_files=(("rank",), ("fingerprint", "local_grad_norm")),
        is_previewable=True,
    ),
    Kind.NONFINITE: KindTraits(
        label="NaN / Inf",
        normal="every value is finite",
        impact="it goes into the weights: steps and checkpoints since then are ruined",
        # A script that checks for NaN may end because of it.
        may_cause=_LOSS | {Kind.NONFINITE, Kind.CORRUPTION, Kind.RANK_LOST, Kind.RESTART_LOOP},
        first_steps=(
            "Roll back to the newest good checkpoint, or relaunch from it: what is not finite stays in the weights.",
            "If all ranks have it at once, look at the model and the learning rate.",
        ),
        actions=("rollback", "relaunch", "pause"),
        corrupts_weights=True,
        chart="ranks",
        in_files=(("loss", "grad_norm", "nonfinite"),),
        is_previewable=True,
    ),
    Kind.STRAGGLER: KindTraits(
        label="Straggler",
        normal="ranks that do the same work take equally long",
        impact="the other ranks wait for the slow one",
        # Not TELEMETRY_LOST: a slow rank alone does not make a host silent.
        may_cause=frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.RANK_LOST}),
        first_steps=(
            "Compare its GPU with the others on its host (`nvidia-smi -q -d TEMPERATURE,POWER,CLOCK`: hot, or slowly "
            "clocked?), and see with `top` what else runs there.",
            "Look at the heat map on the page of its job: one bright row is a slow rank, a bright block a slow host.",
        ),
        actions=("wait", "trace", "relaunch", "pause", "checkpoint"),
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
        chart="peers",
        in_files=(("rank",), ("busy_s", "device_busy_s")),
        is_previewable=True,
    ),
    Kind.TELEMETRY_LOST: KindTraits(
        label="Telemetry lost",
        normal="every host reports every second",
        impact="it is not known whether these ranks train, and their faults are not found",
        may_cause=_ENDS | {Kind.SLOWDOWN},
        first_steps=(
            "Look at the log of the agent on that host, at its disk and network; if steps stand still, at its console.",
            "If all hosts are silent at once, look at the service and the network in front of it.",
        ),
        ends_job=True,
        flaps=True,
        in_files=None,
    ),
    Kind.HANG: KindTraits(
        label="Hang",
        normal="all ranks go on to the next step",
        impact="training stands still",
        # Somebody or something ends a hanging rank sooner or later.
        may_cause=_ENDS | {Kind.STRAGGLER, Kind.SLOWDOWN},
        first_steps=(
            "Read the stack of the named rank in the evidence: its innermost frame is where it hangs.",
            "If all ranks stand in the same collective, look at the network between them.",
        ),
        actions=("relaunch",),
        ends_job=True,
        stands_still=True,
        flaps=True,
        is_host_wide=True,
        chart="phases",
        in_files=(("time_s", "step_time_s"),),
    ),
    Kind.GRAD_NORM: KindTraits(
        label="Gradient norm",
        normal="the gradient norm stays near its usual level",
        impact="nothing is lost yet; the loss may follow",
        may_cause=_LOSS,
        first_steps=(
            "Nothing to do now: while the loss stays at its level, nothing is lost; if it follows, you get a message.",
            "If norms jump again and again, lower the learning rate or the clipping threshold.",
        ),
        becomes=_CORRUPTED,
        chart="level",
        in_files=(("grad_norm",),),
        is_previewable=True,
    ),
    Kind.LOSS_SPIKE: KindTraits(
        label="Loss spike",
        normal="the loss stays near its trend",
        impact="nothing is lost if the loss comes back",
        may_cause=_LOSS,
        first_steps=(
            "Nothing to do now: most spikes pass within 16 steps; you get a message if the loss stays high.",
            "If it jumps again and again, look at the batches of these steps, and lower the learning rate.",
        ),
        becomes=_CORRUPTED,
        chart="level",
        in_files=(("loss",),),
        is_previewable=True,
    ),
    Kind.LOSS_DIVERGENCE: KindTraits(
        label="Loss divergence",
        normal="the loss falls or stays level",
        impact="training since the onset is probably wasted",
        # A loss that keeps growing overflows in the end.
        may_cause=_LOSS | {Kind.NONFINITE},
        first_steps=(
            "If it was planned (data, schedule), resolve the incident: that accepts the new level. Else go back.",
            "If it diverges again at another step with the same data, suspect a device.",
        ),
        actions=("rollback", "relaunch", "pause"),
        corrupts_weights=True,
        chart="level",
        in_files=(("loss",),),
        is_previewable=True,
    ),
    Kind.SLOWDOWN: KindTraits(
        label="Slowdown",
        normal="steps take as long as before",
        impact="every step takes longer",
        may_cause=frozenset({Kind.SLOWDOWN}),
        first_steps=(
            "It is not known which part of the steps grew: look at the devices' clocks, and at what else runs there.",
            "More communication points to the network, more waiting for data to the storage, more computing to heat.",
        ),
        actions=("wait", "trace", "pause"),
        is_lasting=True,
        in_files=(("step_time_s",),),
        is_previewable=True,
    ),
    Kind.RESTART_LOOP: KindTraits(
        label="Restart loop",
        normal="a launch gets further than the one before",
        impact="the job makes no progress, however often it restarts",
        # While the loop lasts, each further end of the job belongs to it.
        may_cause=_ENDS,
        first_steps=(
            "Look at the lost ranks of these launches: one host points to hardware, one exception to code or data.",
            "Stop the launcher from restarting: it only costs GPU-hours.",
            "If it is always the same step, skip its batch, or go back one checkpoint further.",
        ),
        actions=("stop",),
        ends_job=True,
        is_lasting=True,
        spans_attempts=True,
    ),
    Kind.CHECKPOINT_OVERDUE: KindTraits(
        label="Checkpoint overdue",
        normal="checkpoints are saved at their usual pace",
        impact="a fault now would lose more steps than usual",
        may_cause=frozenset(),
        first_steps=(
            "Look at the disk of the checkpoints (`df`, quota, mount), and at the log of rank 0 for errors of a save.",
            "If the job saves less often intentionally, resolve the incident: its pace is learned anew.",
        ),
        actions=("checkpoint", "wait"),
        becomes=frozenset({Kind.CHECKPOINT_FAILED}),
        in_files=None,
    ),
    Kind.FORGED_TELEMETRY: KindTraits(
        label="Forged telemetry",
        normal="all telemetry comes from enrolled agents",
        impact="none on training: what was refused has changed nothing",
        may_cause=frozenset(),
        first_steps=(
            "Find who sent it: agent and host are in the evidence, the address is in the log of the api or the broker.",
            "Revoke that token and make a new one for the job: `rankwatch token revoke`, `rankwatch token create`.",
            "What was refused changed nothing: incidents, checkpoints and orders of the job still hold.",
        ),
        actions=("wait",),
        spans_attempts=True,
        needs_own_rule=True,
        in_files=None,
    ),
    Kind.LIMIT_REACHED: KindTraits(
        label="Limit reached",
        normal="a job stays below every limit",
        impact="none on training; what is above the limit is not watched",
        may_cause=frozenset(),
        first_steps=(
            "Read in the evidence which limit was reached, by how much, and who sent it.",
            "If the sender is yours, look for a script that makes up job names, metrics or ranks.",
            "If it is not, revoke its token (`rankwatch token revoke`).",
        ),
        actions=("wait",),
        spans_attempts=True,
        needs_own_rule=True,
        in_files=None,
    ),
    Kind.METRIC: KindTraits(
        label="Metric rule",
        normal="the condition of the rule does not hold",
        impact="what its rule says; nothing else is known to be wrong",
        may_cause=frozenset(),
        first_steps=(
            "Look at the metric's chart around that step, on the page of the job, and at what else changed then.",
            "If the new level is right, resolve the incident: it is accepted. If the rule is wrong, change the rule.",
        ),
        chart="level",
    ),
    Kind.ALERT: KindTraits(
        label="Alert",
        normal="the alert does not fire",
        impact="what the rule in Prometheus says, in the evidence",
        may_cause=frozenset(),
        first_steps=(
            "Follow the link in the evidence: it shows the query of the alert in its Prometheus.",
            "See in the evidence which hosts its labels name, and whether other incidents of these hosts are open.",
            "If it says nothing about training, do not send it here: relabel it in Prometheus, or silence it.",
        ),
        actions=("wait",),
        tells_all=True,
        is_lasting=True,
        flaps=True,
        spans_attempts=True,
        needs_own_rule=True,
        in_files=None,
    ),
}
"""In the order of causes: of findings with the same onset, the one whose kind comes first here is the cause."""

PREVIEWABLE: Final = frozenset(kind for kind, row in KINDS.items() if row.is_previewable)
"""Kinds that a replay of stored series finds. The others depend on when messages arrived, or on events and counters
of devices."""

CAUSE_ORDER: Final = tuple(KINDS)

LIKELY: Final = 0.66
"""Least confidence of what is more than possible: what is only possible is information, and the policy leaves it be."""

ENDED_BY_ITSELF: Final = "ended_by_itself"
"""In the evidence of an unresolved incident: the trouble is over, and the incident is kept in case it comes back."""

ENDED_WITH_JOB: Final = "ended_with_job"
"""In the evidence of a resolved incident: the trouble lasted until the job ended."""


def has_norm_alone(kind: str, severity: str, evidence: Mapping[str, Any]) -> bool:
    """Whether a local gradient norm is the only sign of a corruption."""
    return kind == Kind.CORRUPTION and severity != Severity.CRITICAL and "local_grad_norm" in evidence


def kinds_where(holds: Callable[[KindTraits], bool]) -> frozenset[Kind]:
    """The kinds whose traits satisfy `holds`."""
    return frozenset(kind for kind, traits in KINDS.items() if holds(traits))
