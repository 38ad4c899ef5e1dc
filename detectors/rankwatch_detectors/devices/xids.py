"""The table of Xids: what NVIDIA's driver means by each number, what others make of it, and what we do. Beside it stand
events of NVML that have no number, and errors of NVSwitches (SXids), whose text says whether they are fatal.

Sources disagree (63, 94), so each keeps its column: what NVIDIA's catalogue says to do at once, as mirrored by gpud
(generated 2025-10-29), with gpud's own grade (fatal, warning); what DCGM's health watch makes of it; and whether the
node check of Azure refuses a host on which the number was seen within two hours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rankwatch_detectors.base import Severity


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
    """What NVIDIA says to do at once; empty: nothing is known."""
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
"""By event of NVML: what it says, its class, and what to do at once."""

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
    """What the text of an Xid of NVLink 5 says: `unit`, `fatal`, `link`, and the `sub_code` (bits 20 to 25 of the first
    register); empty if it is another text.
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
