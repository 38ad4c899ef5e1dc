"""`rankwatch doctor --gpu`: what the GPUs of this host can tell, what is missing, and why."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from rankwatch_service.cli.commands.doctor.check_result import CheckResult

ANSWER_WITHIN_S: Final = 60.0
"""A driver that keeps no state between its users initializes each device anew, which takes seconds."""
END_WITHIN_S: Final = 5.0
_CONTAINER: Final = "in a container, start it with NVIDIA's runtime (`--gpus all`)"


def gpu_checks() -> Iterator[CheckResult]:
    """Ask the driver in a process of its own, which may hang."""
    command = [sys.executable, "-m", "rankwatch.agent.device_reader", "survey"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        told, trouble = process.communicate(timeout=ANSWER_WITHIN_S)
        found = msgspec.json.decode(told, type=dict[str, Any])
    except subprocess.TimeoutExpired:
        process.terminate()  # one that hangs in the driver ends later
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_WITHIN_S)
        detail = (
            f"does not answer within {ANSWER_WITHIN_S:.0f} s: look for processes in state D (`ps axo pid,stat,comm`)"
        )
        yield CheckResult("GPU driver", "finding", detail)
        return
    except msgspec.DecodeError:
        last = trouble.decode(errors="replace").strip().rpartition("\n")[2]
        yield CheckResult("GPU driver", "finding", f"asking it failed: {last}")
        return
    yield from _results(found)


def _results(found: Mapping[str, Any]) -> Iterator[CheckResult]:
    if found["trouble"] == "pynvml is not installed":
        yield CheckResult("GPU driver", "finding", f"{found['trouble']}: pip install 'rankwatch[gpu]'")
        return
    if found["trouble"]:
        detail = f"no GPU can be read: {found['trouble']}; {_CONTAINER}; a job on CPUs needs none"
        yield CheckResult("GPU driver", "finding", detail)
        return
    yield CheckResult("GPU driver", "ok", f"version {found['driver'] or 'unknown'}, {len(found['devices'])} devices")
    for device in found["devices"]:
        yield _device(device)
    sources = [
        name
        for name, open_to_us in (("the kernel's log", not found["kernel_log"]), ("NVML", found["events"]))
        if open_to_us
    ]
    if sources:
        missing = f"; not from {found['kernel_log']}" if found["kernel_log"] else ""
        yield CheckResult("GPU errors", "ok", f"are heard from {' and '.join(sources)}{missing}")
    else:
        detail = f"are not heard: NVML refuses events, {found['kernel_log']}; give the agent CAP_SYSLOG and that file"
        yield CheckResult("GPU errors", "finding", detail)


def _device(device: Mapping[str, Any]) -> CheckResult:
    name = f"GPU {device['index']}"
    if not device["answers"]:
        return CheckResult(
            name, "finding", f"{device['uuid'] or 'a device that cannot be opened'}: the driver has lost it"
        )
    reasons: dict[str, list[str]] = {}
    for what, reason in sorted(device["refused"].items()):
        reasons.setdefault(reason, []).append(what)
    missing = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items())
    return CheckResult(
        name, "ok", f"{device['name']}, {device['uuid']}" + (f"; does not tell: {missing}" if missing else "")
    )
