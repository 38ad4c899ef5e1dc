"""Slurm and Kubernetes for tests: batch scripts with the commands they call, and pods, as processes here."""

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

SRUN = """
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
folder = {folder!r}
step = str(len(os.listdir(folder + "/steps")))
mine = dict(os.environ, TEST_STEP=f"{{folder}}-{{step}}")
tasks = [
    subprocess.Popen(command, env=mine | {{"SLURM_PROCID": str(host), "SLURM_NTASKS": os.environ["SLURM_NNODES"]}},
                     start_new_session=True)
    for host in range(int(os.environ["SLURM_NNODES"]))
]
with open(f"{{folder}}/steps/{{step}}", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
statuses = [task.wait() for task in tasks]
wanted = f"TEST_STEP={{folder}}-{{step}}".encode()
for name in filter(str.isdecimal, os.listdir("/proc")):  # as slurmstepd ends what is left in the step's cgroup
    try:
        if int(name) != os.getpid() and wanted in open(f"/proc/{{name}}/environ", "rb").read().split(bytes(1)):
            os.kill(int(name), signal.SIGKILL)
    except OSError:
        pass
sys.exit(max(abs(status) for status in statuses))
"""
SCANCEL = """
import os, signal, sys
assert sys.argv[1] == "--signal=TERM", sys.argv
folder = {folder!r}
newest = max(os.listdir(folder + "/steps"), key=int)
for pid in open(f"{{folder}}/steps/{{newest}}").read().split():
    os.killpg(int(pid), signal.SIGTERM)
"""
SCONTROL = """
import sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost")
else:
    open({folder!r} + "/requeued", "a").write(" ".join(sys.argv[1:]) + chr(10))
"""


class BatchJob:
    """A batch script that runs as Slurm runs it. At the end of a step, everything in it is killed, the agent too."""

    def __init__(self, folder: Path, script: Path, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Start it; `environment` has what its allocation is."""
        self.folder = folder
        (folder / "steps").mkdir(parents=True)
        commands = folder / "bin"
        commands.mkdir()
        for name, code in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (commands / f"{name}.py").write_text(code.format(folder=str(folder)).lstrip())
            # A #! line with the interpreter itself would take no path that is long or has a space.
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{commands}/{name}.py" "$@"\n')
            (commands / name).chmod(0o755)
        path = os.pathsep.join((str(commands), str(Path(sys.executable).parent), "/usr/bin", "/bin"))
        with (folder / "out.txt").open("wb") as out:
            self.process = subprocess.Popen(
                ["bash", str(script), *arguments],
                env={"PATH": path, "HOME": str(folder), **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    @property
    def requeued(self) -> str:
        """What `scontrol` was asked for, besides names of hosts."""
        file = self.folder / "requeued"
        return file.read_text() if file.exists() else ""

    def kill(self) -> None:
        """End all of it, as far as it runs."""
        self.process.kill()
        self.process.wait()
        processes.end_all(f"TEST_STEP={self.folder}-")

    def said(self) -> str:
        return (self.folder / "out.txt").read_text()


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
