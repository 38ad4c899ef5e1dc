"""`rankwatch.start`: from a process to its watch, with everything found out that the process can tell.

The watch started last is the current one: `capture` and `restore` mean it, and an exception that ends the process is
noted in it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from rankwatch import layout
from rankwatch.console import say
from rankwatch.folders import directories
from rankwatch.identity import identify, this_start
from rankwatch.notices import notice_path
from rankwatch.recorder import Recorder
from rankwatch.rivals import launches_at_once
from rankwatch.spawn import ensure_agent
from rankwatch.stacks import STACK_SIGNAL, StackFile
from rankwatch.state import Capture
from rankwatch.watch import Watch

GRACE_S_MAX: Final = 3_600.0
"""Nobody waits an hour for processes that were told to end."""

_log = logging.getLogger("rankwatch")

_current: Watch | None = None
_hooked = False


def start(
    job: str | None = None,
    *,
    launch: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    host: str | None = None,
    device_uuid: str | None = None,
    topology: Mapping[str, int] | None = None,
    lockstep: bool = True,
    relaunches: bool | None = None,
    grace_s: float | None = None,
    agent: bool = True,
    url: str | None = None,
    token_file: str | None = None,
    stack_signal: int | None = STACK_SIGNAL,
    env: Mapping[str, str] | None = None,
) -> Watch:
    """Begin to watch this rank. Call it once, in the training thread, before the loop.

    Args:
        job: the run's name; else RANKWATCH_JOB, or what the scheduler calls it.
        launch: text that all ranks of this start share and no other start has; else from the launcher.
        rank: this and the next four: else from torchrun, Slurm, MPI or Kubernetes, or from `torch.distributed` where
            that is initialized already.
        world_size: number of ranks.
        local_rank: index on this host.
        host: this machine.
        device_uuid: of the accelerator this rank drives; else from CUDA_VISIBLE_DEVICES if that lists UUIDs.
        topology: this rank's place: any of dp, tp, pp, cp, ep.
        lockstep: ranks wait for each other in each step. False for rollouts, parameter servers, evaluation workers:
            each rank is then judged against its own past only.
        relaunches: whether the launcher starts a job again whose processes were ended; else torchrun tells.
        grace_s: seconds that the launcher waits between asking the ranks to end and killing them; None: 30, as torchrun
            and Slurm do. A job whose ranks have all ended within this and 15 s of the first was ended on request.
        agent: make sure that an agent runs on this host. Without one the rank is recorded, and nobody reads it.
        url: the service, handed to the agent; else it looks for it by itself.
        token_file: file with the access token, handed to the agent.
        stack_signal: asks this process for its stacks; None leaves signals alone.
        env: the environment; os.environ if left out.

    Raises:
        ValueError: arguments or environment that make no sense.
    """
    env = os.environ if env is None else env
    if grace_s is not None and not 0 <= grace_s <= GRACE_S_MAX:
        raise ValueError(f"grace_s must be 0 to {GRACE_S_MAX:g} seconds, not {grace_s}")
    identity = identify(
        env,
        job=job,
        launch=launch,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=host,
        device_uuid=device_uuid,
        topology=topology,
        process_group=_process_group(),
        start=this_start,
    )
    places = directories(env, os.getuid())
    if identity.local_rank == 0 and (others := launches_at_once(places, identity.job, identity.launch)):
        say(f"job {identity.job!r} trains on this host already, as launch {others[0]!r}: give one another job= name")
        if identity.source == "single":
            say("if both are ranks of one job: call rankwatch.start after torch.distributed.init_process_group")
    recorder = Recorder.create(
        identity._asdict(),
        places,
        monotonic_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
    )
    directory = os.path.dirname(recorder.path) if recorder.path is not None else None
    watch = Watch(identity, recorder, directory=directory, placed=bool(topology))
    if _is_relaunched(env) if relaunches is None else relaunches:
        watch.allow("relaunch")
    if grace_s is not None:
        watch.tell_grace(grace_s)
    if not lockstep:
        recorder.declare({"lockstep": False})
    _take_stack_signal(watch, recorder, stack_signal)
    if directory is not None and identity.local_rank == 0:
        named = env.get("RANKWATCH_DIR")
        if named and os.path.realpath(directory) != os.path.realpath(named):
            say(f"RANKWATCH_DIR={named} cannot be written; recording in {directory}")
        watch.say_notices(notice_path(directory, identity.job))
    if agent and directory is not None:
        try:
            ensure_agent(directory, identity.job, env, url=url, token_file=token_file)
        except OSError as error:
            say(f"no agent could be started, and nobody reads what is recorded: {error}")
    _make_current(watch)
    return watch


def _process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, if the script has one; torch is never imported."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
            return None
        return distributed.get_rank(), distributed.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # half imported, or another thread takes it down
        return None


def capture(step: int) -> Capture:
    """Copy the state registered with the current watch, at the boundary before `step`.

    Raises:
        ValueError: there is no watch, or `state` was not called.
    """
    return _watch().capture(step)


def restore(captured: Capture) -> int:
    """Load a capture in place; return the step to go on from.

    Raises:
        ValueError: there is no watch, or `state` was not called.
    """
    return _watch().restore(captured)


def _watch() -> Watch:
    if _current is None:
        raise ValueError("nothing is watched: call rankwatch.start(...) first")
    return _current


def _is_relaunched(env: Mapping[str, str]) -> bool:
    """Whether torchrun has restarts left."""
    most = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    done = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return most.isdecimal() and done.isdecimal() and int(most) > int(done)


def _take_stack_signal(watch: Watch, recorder: Recorder, number: int | None) -> None:
    if number is None or recorder.path is None:
        return
    try:
        watch.stacks = StackFile(layout.stack_path(recorder.path), number)
    except (OSError, ValueError) as error:
        _log.warning("stacks of this rank cannot be asked for: %s", error)
        return
    recorder.declare({"stack_signal": number})


def _make_current(watch: Watch) -> None:
    global _current, _hooked  # noqa: PLW0603 - there is one process, one exception hook and one current watch
    _current = watch
    atexit.register(watch.at_exit)
    if not _hooked:
        _hooked = True
        previous = sys.excepthook

        def note_then_tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if _current is not None:
                _current.crashed(error, trace)
            previous(kind, error, trace)

        sys.excepthook = note_then_tell
