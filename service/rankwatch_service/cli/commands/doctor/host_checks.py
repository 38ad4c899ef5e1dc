"""What an agent could tell of this host and its network ports, for `rankwatch doctor`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from rankwatch_service.cli.commands.doctor.check_result import CheckResult

ANSWER_WITHIN_S: Final = 30.0
"""A few dozen small files are read in milliseconds, unless the folder is on a file system that does not answer."""


def host_checks(named: str) -> Iterator[CheckResult]:
    """Read the host in a process of its own, which may hang.

    Args:
        named: `RANKWATCH_HOST_ROOT`; empty: /.
    """
    root = named or "/"
    command = [sys.executable, "-m", "rankwatch.agent.host", root]
    try:
        told = subprocess.run(command, capture_output=True, check=True, timeout=ANSWER_WITHIN_S).stdout
    except subprocess.TimeoutExpired:
        yield CheckResult("host", "finding", f"{root} does not answer within {ANSWER_WITHIN_S:.0f} s")
        return
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        yield CheckResult("host", "finding", f"reading {root} failed: {last}")
        return
    found = msgspec.json.decode(told, type=dict[str, Any])
    if missing := found["missing"]:
        what = f"{root} has no {' and no '.join(missing)}: agents cannot tell what is in it"
        yield CheckResult("host", *(("finding", f"{what} (RANKWATCH_HOST_ROOT)") if named else ("note", what)))
    if "proc" not in missing:
        yield CheckResult("host", "ok", f"{root} tells {', '.join(found['counters'])}, and rates")
    if "sys" not in missing:
        none = f"{root} has no port in use that is hardware; those of containers are not read"
        ports = ", ".join(found["ports"])
        yield CheckResult("network ports", "ok" if ports else "note", ports or none)
