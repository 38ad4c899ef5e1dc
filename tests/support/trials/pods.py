"""Pods for tests: the command and the environment of a manifest's container, as a process of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwatch_service.demo import processes


def environment_of(container: Mapping[str, Any], labels: Mapping[str, str], secret: str) -> dict[str, str]:
    """A container's environment as the kubelet makes it: in order, with $(NAME) of what stands before."""
    found: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[variable["name"]] = secret
        elif "fieldRef" in source:
            (label,) = re.fullmatch(r"metadata\.labels\['(.+)'\]", source["fieldRef"]["fieldPath"]).groups()
            found[variable["name"]] = labels[label]
        else:
            found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], variable["value"])
    return found


class Pod:
    """The first process of a pod. When it ends, the others are killed, the agent too."""

    def __init__(self, folder: Path, container: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start it in a folder; the manifest's own paths and addresses must be of this machine already."""
        self._mark = f"TEST_POD={folder}-{id(self)}"
        path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
        name, _, value = self._mark.partition("=")
        with (folder / "out.txt").open("ab") as out:
            self.process = subprocess.Popen(
                [*container["command"], *container["args"]],
                env={"PATH": path, "HOME": str(folder), **environment, name: value},
                stdout=out,
                stderr=out,
                cwd=folder,
            )

    def wait(self, seconds: float) -> int:
        """Wait for its first process, and kill what it leaves; the exit status."""
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all of its processes."""
        for pid in processes.working_for(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
