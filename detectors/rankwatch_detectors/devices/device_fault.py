"""Reports faults of devices: errors of the driver (Xids), a device that is gone, a driver that is silent.

Errors of one device come in bursts, in which the first ones cause the others: a burst lasts until no error was received
for three minutes, and is one episode, graded by the worst of it (`XIDS`). Numbers that only follow from others open
nothing. Most Xids of the class *application* are faults of the program; twice within a day on one device, while no
other device of the job has it, they are the device's. An episode with a fault of the hardware lasts as long as the
launch that uses the device: a rollback inside the processes changes nothing about it. Where it is not known whether a
rank of the job computes on the device, the host is named, and nothing is more than a warning. Errors of a host's
NVSwitches name the host, and are critical if they are fatal: all its GPUs reach each other through them.

The table of Xids: what NVIDIA's driver means by each number, what others make of it, and what we do. Beside it stand
events of NVML that have no number, and errors of NVSwitches (SXids), whose text says whether they are fatal.

Sources disagree (63, 94), so each keeps its column: what NVIDIA's catalogue says to do at once, as mirrored by gpud
(generated 2025-10-29), with gpud's own grade (fatal, warning); what DCGM's health watch makes of it; and whether the
node check of Azure refuses a host on which the number was seen within two hours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import GRAVITY, AttemptStart, Finding, Frame, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.devices.counter_detector import DevicePlaces
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, DispatchingDetector
from rankwatch_detectors.scope import IncidentScope


class XidClass(StrEnum):
    """What kind of trouble an Xid is, from the least to the most of the hardware."""

    CONSEQUENCE = "consequence"
    """Follows from something else; says nothing alone."""
    NOTE = "note"
    APPLICATION = "application"
    """Usually a fault of the program; of the device if it comes back on one device alone."""
    SUSPECT = "hang suspect"
    WEAR = "wear"
    """The device goes on, with something repaired or retired."""
    FABRIC = "fabric"
    """A link between devices, at one of its two ends."""
    DRIVER = "driver"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True)
class Xid:
    """One row of the table."""

    number: int
    name: str
    kind: XidClass
    nvidia: str = ""
    """NVIDIA's immediate action; empty: unknown."""
    gpud: str = ""
    dcgm: str = ""
    azure: bool = False

    @property
    def severity(self) -> Severity | None:
        """How grave it is by itself; None: not at all."""
        return SEVERITIES[self.kind]


SEVERITIES: Final[dict[XidClass, Severity | None]] = {
    XidClass.CONSEQUENCE: None,
    XidClass.NOTE: Severity.INFO,
    XidClass.APPLICATION: Severity.INFO,
    XidClass.SUSPECT: Severity.WARNING,
    XidClass.WEAR: Severity.WARNING,
    XidClass.FABRIC: Severity.CRITICAL,
    XidClass.DRIVER: Severity.CRITICAL,
    XidClass.HARDWARE: Severity.CRITICAL,
}

_IGNORE, _RESTART, _RESET, _WORKFLOW = "ignore", "restart the program", "reset the GPU", "follow NVIDIA's workflow"
_CONSEQUENCE, _NOTE, _APPLICATION = XidClass.CONSEQUENCE, XidClass.NOTE, XidClass.APPLICATION
_SUSPECT, _WEAR, _FABRIC, _DRIVER, _HARDWARE = (
    XidClass.SUSPECT,
    XidClass.WEAR,
    XidClass.FABRIC,
    XidClass.DRIVER,
    XidClass.HARDWARE,
)

XIDS: Final[dict[int, Xid]] = {
    xid.number: xid
    for xid in (
        Xid(13, "graphics engine exception", _APPLICATION, _RESTART, "warning"),
        Xid(31, "GPU memory page fault", _APPLICATION, _RESTART, "warning", "warn"),
        Xid(32, "invalid push buffer", _APPLICATION, _RESTART, "fatal", "warn"),
        Xid(38, "driver firmware error", _WEAR, _IGNORE),
        Xid(39, "copy engine exception", _APPLICATION, _RESTART),
        Xid(40, "copy engine exception", _APPLICATION, _RESTART),
        Xid(41, "copy engine exception", _APPLICATION, _RESTART),
        Xid(43, "GPU stopped processing a channel", _CONSEQUENCE, _IGNORE, "warning", "warn"),
        Xid(44, "context switch fault", _SUSPECT, _IGNORE, "fatal"),
        Xid(45, "preemptive cleanup", _CONSEQUENCE, "follow the other Xid", "warning"),
        Xid(46, "context switch time-out", _SUSPECT, _RESET, "fatal"),
        Xid(48, "double bit ECC error", _HARDWARE, _WORKFLOW, "fatal", "fail", azure=True),
        Xid(54, "auxiliary power is missing", _HARDWARE, "check the mechanics", "warning"),
        Xid(56, "display or memory interface error", _HARDWARE, azure=True),
        Xid(57, "display or memory interface error", _HARDWARE, azure=True),
        Xid(58, "display or memory interface error", _HARDWARE, azure=True),
        Xid(61, "internal micro-controller breakpoint", _HARDWARE),
        Xid(62, "internal micro-controller halt", _HARDWARE, _RESET, "fatal", azure=True),
        Xid(63, "row remapping recorded", _WEAR, _IGNORE, "fatal", "warn", azure=True),
        Xid(64, "row remapping failed", _HARDWARE, _RESET, "fatal", "fail", azure=True),
        Xid(68, "video decoder exception", _APPLICATION, _RESTART, "fatal", azure=True),
        Xid(69, "graphics engine class error", _APPLICATION, _RESTART, "fatal", azure=True),
        Xid(73, "video encoder error", _SUSPECT, azure=True),
        Xid(74, "NVLink error", _FABRIC, _WORKFLOW, "fatal", "fail", azure=True),
        Xid(79, "GPU has fallen off the bus", _HARDWARE, "restart the machine", "fatal", "fail", azure=True),
        Xid(80, "corrupted data sent to the GPU", _APPLICATION, _RESTART, "warning", azure=True),
        Xid(81, "VGA subsystem error", _SUSPECT, azure=True),
        Xid(92, "high rate of single bit ECC errors", _WEAR, _IGNORE, "warning", azure=True),
        Xid(94, "contained memory error", _WEAR, _RESTART, "fatal", "warn"),
        Xid(95, "uncontained memory error", _HARDWARE, _RESET, "fatal", "fail"),
        Xid(109, "context switch time-out", _SUSPECT, _RESET, "warning"),
        Xid(110, "security fault", _HARDWARE, _RESET, "fatal"),
        Xid(119, "GSP does not answer", _DRIVER, _RESET, "fatal", "fail", azure=True),
        Xid(120, "GSP error", _DRIVER, _RESET, "fatal", "fail", azure=True),
        Xid(121, "C2C link error", _WEAR, _IGNORE, "fatal", "warn"),
        Xid(136, "NVLink training failed", _FABRIC, _RESET, "warning"),
        Xid(137, "NVLink privilege error", _APPLICATION, _IGNORE, "warning", "warn"),
        Xid(140, "unrecovered ECC error", _HARDWARE, _RESET, "fatal", "fail"),
        Xid(141, "fast path error", _NOTE, _IGNORE),
        Xid(143, "GPU initialization error", _HARDWARE, _RESET, "fatal"),
        Xid(144, "NVLink: SAW error", _FABRIC, _WORKFLOW, "warning"),
        Xid(145, "NVLink: RLW error", _FABRIC, _WORKFLOW, "warning"),
        Xid(146, "NVLink: TLW error", _FABRIC, _WORKFLOW, "warning"),
        Xid(147, "NVLink: TREX error", _FABRIC, _WORKFLOW, "warning"),
        Xid(148, "NVLink: NVLPW control error", _FABRIC, _WORKFLOW, "warning"),
        Xid(149, "NVLink: NETIR error", _FABRIC, _WORKFLOW, "warning"),
        Xid(150, "NVLink: MSE error", _FABRIC, _WORKFLOW, "warning"),
        Xid(151, "key rotation error", _SUSPECT, "restart the virtual machine"),
        Xid(152, "DLA SMMU error", _NOTE, _IGNORE),
        Xid(153, "DLA time-out", _NOTE, _IGNORE),
        Xid(154, "recovery action changed", _CONSEQUENCE, "as its text says", "warning"),
        Xid(155, "NVLink software error", _FABRIC, _RESET, "warning"),
        Xid(156, "resource retirement", _WEAR, _RESET, "warning"),
        Xid(157, "resource retirement failed", _HARDWARE, _IGNORE),
        Xid(158, "fatal time-out", _HARDWARE, _RESET, "warning"),
        Xid(160, "channel retirement", _NOTE, _IGNORE),
        Xid(161, "channel retirement failed", _NOTE, _IGNORE),
        Xid(162, "power smoothing", _NOTE),
        Xid(163, "power smoothing", _NOTE),
        Xid(164, "power smoothing", _NOTE),
        Xid(165, "power smoothing", _NOTE),
        Xid(167, "PCIe fatal time-out", _HARDWARE),
        Xid(168, "reduced memory capacity", _HARDWARE),
        Xid(169, "SEC2 error", _HARDWARE),
        Xid(171, "uncorrectable DRAM error", _HARDWARE, _WORKFLOW, "warning", "fail"),
        Xid(172, "uncorrectable SRAM error", _HARDWARE, _WORKFLOW, "warning", "fail"),
        Xid(173, "C2C link fatal error", _HARDWARE, "", "warning"),
    )
}


def xid_of(number: int) -> Xid:
    """The row of a number; one that is not in the table is a suspect, never dropped."""
    return XIDS.get(number) or Xid(number, "not in the table", XidClass.SUSPECT)


DEVICE_EVENTS: Final[dict[str, tuple[str, XidClass, str]]] = {
    "single_bit_error_storm": ("a storm of single bit memory errors", XidClass.WEAR, ""),
    "dram_retirement": ("memory was retired", XidClass.WEAR, ""),
    "dram_retirement_failure": ("memory could not be retired", XidClass.HARDWARE, _RESET),
    "poison_error": ("contained memory error (poison)", XidClass.WEAR, _RESTART),
    "fatal_poison_error": ("uncontained memory error (poison)", XidClass.HARDWARE, _RESET),
    "unavailable": ("the device is not available", XidClass.HARDWARE, _RESET),
    "recovery_action": ("recovery action changed", XidClass.CONSEQUENCE, ""),
}
"""Text, class and first step of each error, by event of NVML."""

FATAL: Final = re.compile(r"\bFatal\b")
NOT_FATAL: Final = re.compile(r"\bNon-?fatal\b")

NVLINK5: Final = range(144, 151)
"""Xids of NVLink 5: the text names the unit, whether it is fatal, and the link."""
_NVLINK5_TEXT: Final = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]+) +(?P<fatal>Fatal|Non-?fatal) .*?\bLink (?P<link>\d+)(?: \((?P<words>[0-9a-fx ]+)\))?"
)
_SUB_CODE_SHIFT: Final = 20
_SUB_CODE_BITS: Final = 0x3F


def nvlink5_fields(text: str) -> dict[str, Any]:
    """The fields in the text of an Xid of NVLink 5: `unit`, `fatal`, `link`, and the `sub_code` (bits 20 to 25 of the
    first register); empty if it is another text.
    """
    found = _NVLINK5_TEXT.search(text)
    if found is None:
        return {}
    fields = {"unit": found["unit"], "fatal": found["fatal"] == "Fatal", "link": int(found["link"])}
    try:
        first = int((found["words"] or "").split()[0], 16)
    except (ValueError, IndexError):
        return fields
    return fields | {"sub_code": first >> _SUB_CODE_SHIFT & _SUB_CODE_BITS}


def severity_of_switch(text: str) -> Severity:
    """How grave an SXid is, by its text: one that is not fatal is handled by the link itself."""
    return Severity.CRITICAL if FATAL.search(text) and not NOT_FATAL.search(text) else Severity.INFO


KINDS: Final = frozenset(
    {"device_error", "device_event", "device_lost", "switch_error", "driver_silent", "driver_answers"}
)
PAGE_FAULT: Final = 31
GRAPHICS: Final = 13
_UNIT: Final = re.compile(r"GPC ?(\d+),? ?TPC ?(\d+)")


@dataclass(frozen=True, slots=True)
class DeviceFaultConfig:
    """Settings of the device_fault detector."""

    quiet_s: float = 180.0
    """Silence after which a burst is over, as NVIDIA counts bursts of Xids."""
    repeated_s: float = 24 * 3600.0
    """Two page faults of a device, or two graphics exceptions of one unit of it, within this time are the device's."""
    silent_s: float = 30.0
    """A driver that does not answer for so long is a warning: under load it may be busy for seconds."""
    listed_max: int = 16
    """Xids that are listed in the evidence of an episode; further ones are only counted."""
    devices_max: int = 1024
    """Devices with errors that are remembered; those with the oldest error are forgotten."""


class DeviceFaultDetector(DispatchingDetector):
    """Episodes by device: scope "rank:N" of the rank that runs on it, "host:NAME" where that is not known.

    Memory: linear in devices with errors.
    """

    kind: Kind = Kind.DEVICE_FAULT
    STATE: ClassVar[str] = "_places _bursts _repeats _step"

    def __init__(self, config: DeviceFaultConfig) -> None:
        super().__init__()
        self.name = "device_fault"
        self.version = 2
        self._config = config
        self._places = DevicePlaces()
        self._step = -1
        self._bursts: dict[str, dict[str, Any]] = {}
        """The errors of a device since it was last quiet, by text of the scope."""
        self._repeats: dict[str, list[float]] = {}
        """When an error of the program occurred there, by device and unit of it."""

    def _begin(self, start: AttemptStart) -> list[Finding]:
        findings: list[Finding] = []
        if start.launch != self.attempt.rpartition(".")[0]:
            findings = self.episodes.close_all(self.now_s, ATTEMPT_ENDED)
            self._bursts, self._step = {}, -1
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        self._places.learn(start.topology)
        return findings

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        self._step = max(self._step, frame.step)
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind not in KINDS:
            return ()
        scope = self._scope_of(occurrence)
        if scope is None or occurrence.attempt.rpartition(".")[0] != self.attempt.rpartition(".")[0]:
            return ()
        if occurrence.kind == "driver_answers":
            return self._answers(scope)
        burst = self._burst(scope, occurrence)
        burst["last_s"] = self.now_s
        if occurrence.kind == "driver_silent":
            burst["silent_since_s"] = self.now_s - _number(occurrence.fields.get("silent_s"))
            self._raise(burst, Severity.INFO, "The driver does not answer", "")
        elif occurrence.kind == "device_lost":
            reason = str(occurrence.fields.get("reason", ""))
            self._raise(burst, Severity.CRITICAL, f"The device is gone: {reason}", "restart the machine")
        elif occurrence.kind == "device_event":
            self._add_event(burst, str(occurrence.fields.get("event", "")))
        elif occurrence.kind == "switch_error":
            self._add_switch_error(burst, occurrence)
        else:
            self._add(burst, occurrence)
        return self._report(scope, burst)

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:  # noqa: ARG002
        findings: list[Finding] = []
        for text, burst in list(self._bursts.items()):
            scope = IncidentScope.parse(text)
            silent_since_s = burst["silent_since_s"]
            if silent_since_s is not None:
                if self.now_s - silent_since_s >= self._config.silent_s and burst["grade"] == Severity.INFO:
                    self._raise(burst, Severity.WARNING, "The driver does not answer", "")
                    findings += self._report(scope, burst)
                continue
            lasts = burst["grade"] == Severity.CRITICAL and (scope.host is None or _is_fatal(burst["sxids"]))
            if self.now_s - burst["last_s"] < self._config.quiet_s or lasts:
                continue
            del self._bursts[text]
            if scope in self.episodes:
                why = f"No error of the device for {self._config.quiet_s:.0f} s."
                findings += self.episodes.close(scope, None, self.now_s, why)
        return findings

    def _scope_of(self, occurrence: Occurrence) -> IncidentScope | None:
        if occurrence.kind in ("driver_silent", "driver_answers"):
            return IncidentScope.of_host(occurrence.host) if self._places.has(occurrence.host) else None
        if occurrence.kind == "switch_error":
            return IncidentScope.of_host(occurrence.host) if self._places.has_devices(occurrence.host) else None
        return self._places.scope_of(occurrence)

    # ---- what was heard of it ----------------------------------------------------------------------------------------

    def _burst(self, scope: IncidentScope, occurrence: Occurrence) -> dict[str, Any]:
        burst = self._bursts.get(str(scope))
        if burst is None:
            fields = occurrence.fields
            named = {
                name: fields[name] for name in ("device_uuid", "index", "pci_bus_id", "serial") if fields.get(name)
            }
            burst = self._bursts[str(scope)] = {
                "host": occurrence.host,
                "device": {key: value for key, value in named.items() if value != -1},
                "began_s": self.now_s,
                "began_step": self._step if self._step >= 0 else None,
                "last_s": self.now_s,
                "silent_since_s": None,
                "grade": "",
                "what": "",
                "action": "",
                "recovery": "",
                "xids": {},
                "sxids": {},
                "events": [],
                "others": 0,
            }
        return burst

    def _add(self, burst: dict[str, Any], occurrence: Occurrence) -> None:
        number, text = int(_number(occurrence.fields.get("xid"))), str(occurrence.fields.get("text", ""))
        xid, link = xid_of(number), nvlink5_fields(text) if number in NVLINK5 else {}
        row = {"xid": number, "name": xid.name, "class": str(xid.kind), "count": 0, "text": text, **link}
        self._list(burst, burst["xids"], f"{number} {link.get('unit', '')}".strip(), row)
        if number == 154:
            burst["recovery"] = text
        severity, action = xid.severity, xid.nvidia
        if xid.kind is XidClass.APPLICATION and self._comes_back(xid, text, burst):
            severity, action = Severity.WARNING, "run a diagnosis of the device: it is the only one with this error"
        if link and not link["fatal"]:
            severity = Severity.WARNING
        if severity is not None:
            self._raise(burst, severity, f"Xid {number}, {xid.name}", action)

    def _list(self, burst: dict[str, Any], listed: dict[str, dict[str, Any]], key: str, row: dict[str, Any]) -> None:
        """Count an error, and list it if it is new."""
        if key in listed:
            listed[key]["count"] += 1
        elif len(listed) < self._config.listed_max:
            listed[key] = row | {"count": 1}
        else:
            burst["others"] += 1

    def _add_event(self, burst: dict[str, Any], event: str) -> None:
        """An event of NVML that has no number; one that nobody knows is a suspect, as an Xid is."""
        what, kind, action = DEVICE_EVENTS.get(event, (f"event {event[:64]}", XidClass.SUSPECT, ""))
        if what not in burst["events"] and len(burst["events"]) < self._config.listed_max:
            burst["events"].append(what)
        if (severity := SEVERITIES[kind]) is not None:
            self._raise(burst, severity, what[0].upper() + what[1:], action)

    def _add_switch_error(self, burst: dict[str, Any], occurrence: Occurrence) -> None:
        number, text = int(_number(occurrence.fields.get("sxid"))), str(occurrence.fields.get("text", ""))
        severity = severity_of_switch(text)
        switch = str(occurrence.fields.get("pci_bus_id", ""))
        row = {"sxid": number, "pci_bus_id": switch, "fatal": severity is Severity.CRITICAL, "count": 0, "text": text}
        self._list(burst, burst["sxids"], f"{switch} {number}", row)
        action = "restart the machine" if severity is Severity.CRITICAL else ""
        self._raise(burst, severity, f"SXid {number} of NVSwitch {switch}", action)

    def _comes_back(self, xid: Xid, text: str, burst: Mapping[str, Any]) -> bool:
        """Whether an error of the program has now occurred twice on this device within a day, and on no other."""
        unit = _UNIT.search(text)
        if xid.number not in (PAGE_FAULT, GRAPHICS) or (xid.number == GRAPHICS and unit is None):
            return False
        device = f"{burst['host']}/{burst['device'].get('device_uuid', '')}"
        key = f"{xid.number} {device} {unit[0] if unit and xid.number == GRAPHICS else ''}"
        since_s = self.now_s - self._config.repeated_s
        times = [time_s for time_s in self._repeats.pop(key, []) if time_s > since_s]
        self._repeats[key] = [*times, self.now_s][-2:]
        while len(self._repeats) > self._config.devices_max:
            del self._repeats[next(iter(self._repeats))]
        elsewhere = any(
            other.split(" ")[:2] != key.split(" ")[:2] and other.startswith(f"{xid.number} ") and last[-1] > since_s
            for other, last in self._repeats.items()
        )
        return len(self._repeats[key]) > 1 and not elsewhere

    def _raise(self, burst: dict[str, Any], severity: Severity, what: str, action: str) -> None:
        """Return the graver of two grades; of equal ones the first, which causes the others."""
        if not burst["grade"] or GRAVITY.index(severity) > GRAVITY.index(Severity(burst["grade"])):
            burst.update(grade=severity.value, what=what, action=action)

    def _answers(self, scope: IncidentScope) -> list[Finding]:
        burst = self._bursts.get(str(scope))
        if burst is None or burst["silent_since_s"] is None:
            return []
        silent_s, burst["silent_since_s"] = self.now_s - burst["silent_since_s"], None
        if burst["xids"] or burst["sxids"] or burst["events"] or burst["grade"] == Severity.CRITICAL:
            return []
        del self._bursts[str(scope)]
        why = f"The driver answers again, after {silent_s:.0f} s."
        return self.episodes.close(scope, None, self.now_s, why) if scope in self.episodes else []

    # ---- findings ----------------------------------------------------------------------------------------------------

    def _report(self, scope: IncidentScope, burst: Mapping[str, Any]) -> list[Finding]:
        if not burst["grade"]:
            return []  # so far only what follows from something else
        severity = Severity(burst["grade"])
        # A fatal error of a switch is all GPUs' of the host; else nobody knows whether the job uses the device.
        if scope.host is not None and severity is Severity.CRITICAL and not _is_fatal(burst["sxids"]):
            severity = Severity.WARNING
        reported: dict[str, Any] = {
            "severity": severity,
            "detected_step": self._step if self._step >= 0 else None,
            "detected_time_s": self.now_s,
            "summary": self._sentence(scope, burst),
            "evidence": self._evidence(burst),
        }
        if scope not in self.episodes:
            return self.episodes.open(
                scope,
                attempt=self.attempt,
                ranks=() if scope.host is not None else (scope.number,),
                onset_step=burst["began_step"],
                onset_time_s=burst["began_s"],
                score=math.inf,
                confidence=1.0,
                cause="device",
                **reported,
            )
        before = self.episodes.reported(scope)
        if before["severity"] == severity.value and before["summary"] == reported["summary"]:
            self.episodes.note(scope, reported["evidence"])
            return []
        return self.episodes.update(scope, **reported)

    def _sentence(self, scope: IncidentScope, burst: Mapping[str, Any]) -> str:
        device = burst["device"]
        name = device.get("device_uuid") or device.get("pci_bus_id") or ""
        where = f"host {burst['host']}" if scope.host is not None else f"rank {scope.number} on {burst['host']}"
        place = f"{name}, {where}" if name else where[0].upper() + where[1:]
        then = f"; {burst['action']}" if burst["action"] not in ("", "ignore") else ""
        recovery = f" (driver: {burst['recovery']})" if burst["recovery"] else ""
        return f"{place}: {burst['what']}{then}{recovery}."

    def _evidence(self, burst: Mapping[str, Any]) -> dict[str, Any]:
        found = {**burst["device"], "host": burst["host"], "xids": list(burst["xids"].values())}
        if burst["sxids"]:
            found["sxids"] = list(burst["sxids"].values())
        if burst["events"]:
            found["events"] = list(burst["events"])
        if burst["others"]:
            found["further_xids"] = burst["others"]
        if burst["recovery"]:
            found["recovery_action"] = burst["recovery"]
        if burst["silent_since_s"] is not None:
            found["silent_s"] = self.now_s - burst["silent_since_s"]
        return found


def _is_fatal(listed: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(row["fatal"] for row in listed.values())


def _number(value: Any) -> float:
    """A number of an event; 0 if it is none: events are what somebody sent."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
