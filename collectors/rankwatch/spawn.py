"""Starts the agent of a job on this host, unless it runs.

Any local rank that finds the agent's lock free starts one. The agent takes the lock itself and ends at once if it is
taken, so races are harmless. It has its own session, since launchers kill the process group of a failed rank, and
inherits neither output nor descriptors, which would keep a user's pipeline open.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from struct import Struct
from typing import Final

from rankwatch import children, layout

_FLOCK: Final = Struct("hhqqi4x")
START_S_MAX: Final = 10.0
"""Time for a shell to start and end; if it takes longer, the job goes on without an agent."""
_RANK_VARIABLES: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_RANK_PREFIXES: Final = ("TORCHELASTIC_", "PET_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


def ensure_agent(
    directory: str, job: str, env: Mapping[str, str], *, url: str | None = None, token_file: str | None = None
) -> bool:
    """Start the job's agent for this directory unless one holds the lock.

    Args:
        directory: the folder of this rank's recorder file.
        job: the job's name.
        env: this process's environment; the agent gets it without the variables of a rank.
        url: base URL of the service; if None, the agent finds it by itself.
        token_file: file with the access token.

    Returns:
        True if an agent was started; False if one was running.

    Raises:
        OSError: the agent could not be started.
    """
    if lock_is_held(layout.agent_lock_path(directory, job)):
        return False
    command = children.python_module("rankwatch.agent", "--dir", children.absolute(directory), "--job", job)
    command += ["--url", url] if url else []
    command += ["--token-file", children.absolute(token_file)] if token_file else []
    import subprocess  # noqa: PLC0415 - as in `children`

    try:
        # Started by a shell that ends at once, so that the training process need not reap the agent as its child.
        children.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            env=_agent_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
            timeout=START_S_MAX,
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return True


def lock_is_held(path: str) -> bool:
    """Whether another process holds a POSIX lock on the file; False if there is no file. Takes no lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, probe))[0] != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)


def _agent_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
