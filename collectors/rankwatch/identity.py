"""The identity of this process: from arguments, else from what its launcher left in the environment.

Sources in this order: torchrun, Slurm, MPI, Kubernetes, torch's process group, a single process; an argument overrides
any of them, field by field, and `source` names the one that was used. The launch must be equal on all ranks of one
start and differ from the next start. If the launcher provides no such text, it must be passed (`launch=` or
RANKWATCH_LAUNCH).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

LAUNCH_VARIABLE: Final = "RANKWATCH_LAUNCH"
JOB_VARIABLE: Final = "RANKWATCH_JOB"
SWITCH_VARIABLE: Final = "RANKWATCH_SWITCH"
TEXT_CHARACTERS_MAX: Final = 200
"""Longest name of a job or a launch."""
AXES: Final = ("dp", "tp", "pp", "cp", "ep")
_LOCAL_MASTERS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class RankIdentity(NamedTuple):
    """One rank of one launch. Rank numbers move between launches; (host, device_uuid) does not."""

    job: str
    launch: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = ""
    device_uuid: str = ""
    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    switch: str = ""
    """The switch that this host is connected to; "" if not known."""
    source: str = "arguments"
    """arguments, torchrun, environment (RANK and WORLD_SIZE), slurm, mpi, kubernetes, torch, single."""


class _Found(NamedTuple):
    """The values of a launcher's variables."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    launch: str
    """"" if the launcher does not name its starts."""
    job: str = ""
    host: str = ""
    here: int = 0
    """Ranks of this start on this host; 0 if the launcher does not report it."""


def identify(
    env: Mapping[str, str],
    *,
    job: str | None = None,
    launch: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    host: str | None = None,
    device_uuid: str | None = None,
    topology: Mapping[str, int] | None = None,
    switch: str | None = None,
    process_group: tuple[int, int] | None = None,
    start: Callable[[bool], str],
) -> RankIdentity:
    """Build an identity; arguments that are None are looked up.

    Args:
        env: the process's environment.
        job: the run's name; else RANKWATCH_JOB, else its name in Slurm or Kubernetes.
        launch: text that all ranks of this start share and no other start has.
        rank: global rank.
        world_size: number of ranks.
        local_rank: index on this host.
        host: this machine's name.
        device_uuid: of the accelerator this rank drives.
        topology: any of dp, tp, pp, cp, ep; with none of them every rank is a data-parallel replica, dp = rank.
        switch: the switch that this host is connected to; else RANKWATCH_SWITCH, else Slurm's leaf switch.
        process_group: rank and world size of `torch.distributed`, if it is initialized; Lightning and
            `torch.multiprocessing.spawn` set no variables.
        start: returns a text that identifies this start on this host, for launchers that do not name theirs. Its
            argument says whether this process started all other ranks; see `this_start`.

    Raises:
        ValueError: no job name, ranks that make no sense, or several hosts and no common launch.
    """
    found = _launched(env) or _torch(env, process_group) or _Found("single", 0, 1, 0, "")
    job = job or env.get(JOB_VARIABLE) or found.job
    if not job:
        raise ValueError(f"the job has no name: pass job= (rankwatch run: --job) or set {JOB_VARIABLE}")
    source = "arguments" if rank is not None and world_size is not None else found.source
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks")
    local_rank = found.local_rank if local_rank is None else local_rank
    # A script that spawns its ranks itself passes its master to torch only, and usually runs on one host.
    master = "localhost" if found.source == "torch" else ""
    here = env.get("LOCAL_WORLD_SIZE") == str(world_size) or found.here == world_size
    launch = launch or env.get(LAUNCH_VARIABLE) or found.launch
    launch = launch or _launch_of_this_host(env, world_size, start, master, here=here)
    switch = env.get(SWITCH_VARIABLE) or _leaf_switch(env) if switch is None else switch
    for name, text in (("job", job), ("launch", launch), ("switch", switch)):
        if len(text) > TEXT_CHARACTERS_MAX or not text.isprintable():
            raise ValueError(f"{name} must be at most {TEXT_CHARACTERS_MAX} printable characters: {text[:60]!r}")
    axes = dict(topology or {})
    if not set(axes) <= set(AXES) or any(place < 0 for place in axes.values()):
        raise ValueError(f"topology takes places from 0 for any of {', '.join(AXES)}, not {axes}")
    return RankIdentity(
        job,
        launch,
        rank,
        world_size,
        local_rank,
        host or found.host or os.uname().nodename,
        device_uuid or _visible_device(env, local_rank),
        switch=switch,
        source=source,
        **(axes or {"dp": rank}),
    )


def job_name(env: Mapping[str, str]) -> str:
    """The job's name in RANKWATCH_JOB, else in the scheduler's variables; "" if neither names it."""
    found = _launched(env)
    return env.get(JOB_VARIABLE) or (found.job if found is not None else "")


def is_launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher's variables say which rank this process is."""
    return _launched(env) is not None


def _launched(env: Mapping[str, str]) -> _Found | None:
    return _torchrun(env) or _slurm(env) or _mpi(env) or _kubernetes(env)


def _torchrun(env: Mapping[str, str]) -> _Found | None:
    """torchrun, or any launcher that sets RANK and WORLD_SIZE as PyTorch reads them."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK", rank)
    run = env.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return _Found("environment", rank, world_size, local_rank, "")
    # "none" is torchrun's default, the same for every start.
    launch = f"{run}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run != "none" else ""
    return _Found("torchrun", rank, world_size, local_rank, launch)


def _slurm(env: Mapping[str, str]) -> _Found | None:
    # A shell inside an allocation has SLURM_JOB_ID but no task: that is one process alone.
    if "SLURM_JOB_ID" not in env or "SLURM_PROCID" not in env:
        return None
    number = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env:
        number = f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    step = env.get("SLURM_STEP_ID", "0")
    return _Found(
        "slurm",
        _number(env, "SLURM_PROCID"),
        _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1)),
        _number(env, "SLURM_LOCALID", 0),
        f"slurm-{number}-{step}-{env.get('SLURM_RESTART_COUNT', '0')}",
        env.get("SLURM_JOB_NAME", ""),
        env.get("SLURMD_NODENAME", ""),
    )


def _mpi(env: Mapping[str, str]) -> _Found | None:
    """Open MPI; MPICH and Intel MPI, whose launcher on each host is the parent of its ranks."""
    for rank, size, local, here in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if rank in env and size in env:
            launch = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
            numbers = _number(env, rank), _number(env, size), _number(env, local, 0)
            return _Found("mpi", *numbers, launch, here=_number(env, here, 0))
    return None


def _kubernetes(env: Mapping[str, str]) -> _Found | None:
    """An indexed Job whose size the pod knows; operators that run torch set RANK and WORLD_SIZE instead."""
    if "JOB_COMPLETION_INDEX" not in env or "JOB_COMPLETIONS" not in env:
        return None
    return _Found(
        "kubernetes",
        _number(env, "JOB_COMPLETION_INDEX"),
        _number(env, "JOB_COMPLETIONS"),
        0,
        env.get("JOB_UID", ""),
        env.get("JOB_NAME", ""),
        env.get("NODE_NAME", ""),
    )


def _torch(env: Mapping[str, str], process_group: tuple[int, int] | None) -> _Found | None:
    """Torch's process group, for launchers that set neither RANK nor a scheduler's variables."""
    if process_group is None:
        return None
    rank, world_size = process_group
    return _Found("torch", rank, world_size, _number(env, "LOCAL_RANK", rank), "")


def _launch_of_this_host(
    env: Mapping[str, str], world_size: int, start: Callable[[bool], str], default_master: str, *, here: bool
) -> str:
    """A launch for ranks that all run on this host, from the start time of the process that started them.

    Args:
        env: the process's environment.
        world_size: number of ranks.
        start: see `identify`.
        default_master: the master where the environment names none.
        here: the launcher says that all ranks are on this host.
    """
    if not (here or world_size == 1 or env.get("MASTER_ADDR", default_master) in _LOCAL_MASTERS):
        raise ValueError(
            f"{world_size} ranks on several hosts need one name for this start: set {LAUNCH_VARIABLE} to the same text "
            "on all of them, another one each time (torchrun: pass --rdzv-id)"
        )
    # Lightning's first process starts the others itself, and sets NODE_RANK for all of them.
    leads = world_size == 1 or ("RANK" not in env and "NODE_RANK" in env and env.get("LOCAL_RANK") == "0")
    text = start(leads)
    return f"{text}-{env['TORCHELASTIC_RESTART_COUNT']}" if "TORCHELASTIC_RESTART_COUNT" in env else text


def mixed_launches(env: Mapping[str, str]) -> str:
    """Why the ranks of a start after one of torchrun's restarts have no launch of their own; "" if they have."""
    if env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return ""
    if env.get(LAUNCH_VARIABLE):
        return f"{LAUNCH_VARIABLE} stays the same when torchrun restarts the ranks: leave --max-restarts at 0 beside it"
    if env.get("GROUP_WORLD_SIZE", "1") != "1":
        return (
            "torchrun counts its restarts on each host for itself, so ranks would have different launches: on several "
            f"hosts leave --max-restarts at 0, and start the job anew with another --rdzv-id or {LAUNCH_VARIABLE}"
        )
    return ""


def this_start(leads: bool) -> str:
    """A text unique to this start on this host: boot, PID and start time of the process that started its ranks."""
    pid = os.getpid() if leads else os.getppid()
    return f"{_boot()}-{pid:x}-{process_start_ticks(pid):x}"


def process_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of its stat); 0 if /proc does not show it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read(8)
    except OSError:
        return os.uname().nodename


def _visible_device(env: Mapping[str, str], local_rank: int) -> str:
    """The rank's GPU if CUDA_VISIBLE_DEVICES lists UUIDs, else "": the script may pass `device_uuid` itself."""
    devices = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = devices[0] if len(devices) == 1 else devices[local_rank] if local_rank < len(devices) else ""
    return named.strip() if named.strip().startswith(("GPU-", "MIG-")) else ""


def _leaf_switch(env: Mapping[str, str]) -> str:
    """The lowest switch above this host in Slurm's topology, as s4 in s0.s4.node7; "" if no usable name is known."""
    levels = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".").count("switch")
    names = env.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    leaf = names[levels - 1] if 0 < levels < len(names) else ""
    return leaf if len(leaf) <= TEXT_CHARACTERS_MAX and leaf.isprintable() else ""


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name} should be a whole number, not {text!r}") from None
