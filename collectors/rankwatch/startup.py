"""`rankwatch.start`: creates the watch of this process, and finds out what the caller did not pass.

The watch started last is the current one: `capture` and `restore` use it, and it records an exception that ends the
process.

Finds another launch that trains under the same job name on this host: the service could not tell the two apart.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final

from rankwatch import layout
from rankwatch.folders import directories, others_reach
from rankwatch.identity import RankIdentity, identify, mixed_launches, this_start
from rankwatch.locations import ROOTS_MAX, checkpoint_root
from rankwatch.loop.state import Capture
from rankwatch.notices import notice_path, say
from rankwatch.output.tail import keep_output
from rankwatch.reader import RingReader
from rankwatch.recorder import Recorder
from rankwatch.spawn import ensure_agent
from rankwatch.stacks import STACK_SIGNAL, StackFile
from rankwatch.watch import Watch


def launches_at_once(directories: Iterable[str], job: str, launch: str) -> list[str]:
    """Other launches of this job with a living process that trains here.

    Never raises: an unreadable file must not prevent a start.
    """
    found: set[str] = set()
    # Closing a file that this process records into would drop its lock (see rankwatch.reader), so these are skipped.
    ours = f"-p{os.getpid()}-"
    for directory in directories:
        try:
            if others_reach(directory, os.getuid()):
                continue
            names = [name for name in os.listdir(directory) if name.endswith(layout.RING_SUFFIX) and ours not in name]
        except OSError:
            continue
        found.update(filter(None, (_launch(os.path.join(directory, name), job) for name in names)))
    return sorted(found - {launch})


def _launch(path: str, job: str) -> str:
    """The launch of a living rank of this job that has not left its loop; "" for any other file."""
    try:
        reader = RingReader(path)
    except (OSError, ValueError):
        return ""
    try:
        identity = reader.header.identity
        trains = identity.get("job") == job and reader.owner_alive() and reader.progress().state != "left"
        return str(identity.get("launch", "")) if trains else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    finally:
        reader.close()


GRACE_S_MAX: Final = 3_600.0
"""No launcher waits an hour for processes that it asked to end."""

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
    switch: str | None = None,
    lockstep: bool = True,
    relaunches: bool | None = None,
    grace_s: float | None = None,
    checkpoint_roots: Sequence[str] | None = None,
    agent: bool = True,
    url: str | None = None,
    token_file: str | None = None,
    stack_signal: int | None = STACK_SIGNAL,
    env: Mapping[str, str] | None = None,
) -> Watch:
    """Begin to watch this rank. Call it once, in the training thread, before the loop.

    Args:
        job: the run's name; else RANKWATCH_JOB, or its name in the scheduler.
        launch: text that all ranks of this start share and no other start has; else from the launcher.
        rank: global rank. This and the next four are else read from torchrun, Slurm, MPI or Kubernetes, or from
            `torch.distributed` if it is initialized.
        world_size: number of ranks.
        local_rank: index on this host.
        host: name of this machine.
        device_uuid: UUID of this rank's accelerator; else from CUDA_VISIBLE_DEVICES if it lists UUIDs.
        topology: this rank's index in any of dp, tp, pp, cp, ep.
        switch: name of the switch that this machine is connected to; else RANKWATCH_SWITCH, else the leaf switch in
            Slurm's topology. What is common to the hosts of a switch is then reported as one.
        lockstep: ranks wait for each other in each step. False for rollouts, parameter servers, evaluation workers:
            each rank is then judged against its own past only.
        relaunches: whether the launcher restarts a job whose processes were ended; None: as torchrun's variables say.
        grace_s: seconds that the launcher waits between asking the ranks to end and killing them; None: 30, as torchrun
            and Slurm do. A job whose ranks have all ended within this and 15 s of the first was ended on request.
        checkpoint_roots: folders and URLs (`s3://bucket/run`) below which all checkpoints of the job lie; nothing is
            loaded from elsewhere. Else RANKWATCH_CHECKPOINT_ROOTS, with commas between them, else the folders of the
            checkpoints that ranks of this host have saved.
        agent: start an agent on this host unless one runs. Without an agent the records are not read.
        url: base URL of the service, for the agent; if None, the agent finds it by itself.
        token_file: file with the access token, for the agent.
        stack_signal: signal that requests this process's stacks; None installs no handler.
        env: the environment; None: os.environ.

    Raises:
        ValueError: invalid arguments or environment.
    """
    env = os.environ if env is None else env
    if grace_s is not None and not 0 <= grace_s <= GRACE_S_MAX:
        raise ValueError(f"grace_s must be 0 to {GRACE_S_MAX:g} seconds, not {grace_s}")
    roots = _checkpoint_roots(env, checkpoint_roots)
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
        switch=switch,
        process_group=process_group(),
        start=this_start,
    )
    places = directories(env, os.getuid())
    if identity.local_rank == 0 and (others := launches_at_once(places, identity.job, identity.launch)):
        say(f"job {identity.job!r} already trains on this host as launch {others[0]!r}: give one of them another job=")
        if identity.source == "single":
            say("if both are ranks of one job: call rankwatch.start after torch.distributed.init_process_group")
    if identity.rank == 0 and launch is None and (trouble := mixed_launches(env)):
        say(trouble)
    began_unix_ns = time.time_ns()
    recorder = Recorder.create(
        {**identity._asdict(), **({"checkpoint_roots": roots} if roots else {})},
        places,
        monotonic_ns=time.monotonic_ns(),
        unix_ns=began_unix_ns,
    )
    directory = os.path.dirname(recorder.path) if recorder.path is not None else None
    watch = Watch(identity, recorder, directory=directory, placed=bool(topology))
    if _is_relaunched(env) if relaunches is None else relaunches:
        watch.allow("relaunch")
    if grace_s is not None:
        watch.report_grace(grace_s)
    if not lockstep:
        recorder.declare({"lockstep": False})
    _take_stack_signal(watch, recorder, stack_signal)
    _keep_output(recorder, identity, env)
    if directory is not None and identity.local_rank == 0:
        named = env.get("RANKWATCH_DIR")
        if named and not recorder.warned and os.path.realpath(directory) != os.path.realpath(named):
            say(f"RANKWATCH_DIR={named} cannot be written; recording in {directory}")
        watch.say_notices(notice_path(directory, identity.job), began_unix_ns)
    if agent and directory is not None:
        try:
            ensure_agent(directory, identity.job, env, url=url, token_file=token_file)
        except OSError as error:
            say(f"no agent could be started, so nothing is sent to the service: {error}")
    _make_current(watch)
    return watch


def _checkpoint_roots(env: Mapping[str, str], reported: Sequence[str] | None) -> list[str]:
    """The declared checkpoint roots; local ones as absolute path too, and as relative one below this directory.

    Raises:
        ValueError: one is not valid, or there are too many.
    """
    if isinstance(reported, str):
        raise ValueError(f"checkpoint_roots must be a list of folders and URLs, not {reported!r}")  # noqa: TRY004
    if reported is None:
        reported = [text for text in env.get("RANKWATCH_CHECKPOINT_ROOTS", "").split(",") if text.strip()]
    if len(reported) > ROOTS_MAX // 2:
        raise ValueError(f"checkpoint_roots takes at most {ROOTS_MAX // 2} folders and URLs, not {len(reported)}")
    roots: dict[str, None] = {}
    for text in (str(each).strip() for each in reported):
        forms = [text]
        if "://" not in text:
            absolute, here = os.path.abspath(text), os.getcwd()
            forms.append(absolute)
            if os.path.commonpath((absolute, here)) == here:
                forms.append(os.path.relpath(absolute, here))
        try:
            roots |= dict.fromkeys(map(checkpoint_root, forms))
        except ValueError as error:
            raise ValueError(f"{text!r} cannot be a checkpoint root: {error}") from None
    return list(roots)


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, if the script has one; torch is never imported."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
            return None
        return distributed.get_rank(), distributed.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # partly imported, or another thread destroys the group
        return None


def is_watched() -> bool:
    """Whether this process has a watch."""
    return _current is not None


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
        _log.warning("stacks of this rank cannot be requested: %s", error)
        return
    recorder.declare({"stack_signal": number, "stack_thread": threading.get_ident()})


RANK_LOGS: Final = "RANKWATCH_RANK_LOGS"
"""Where each rank's output goes, if the agent cannot see it: a path with {rank}, {local_rank} or {host}, or Slurm's %t,
%N and %j. "none": the output of ranks is neither kept nor read."""


def _keep_output(recorder: Recorder, identity: RankIdentity, env: Mapping[str, str]) -> None:
    named = env.get(RANK_LOGS, "")
    if recorder.path is None or named == "none":
        return
    if named:
        job_id = env.get("SLURM_JOB_ID", "")
        numbers = {"{rank}": identity.rank, "{local_rank}": identity.local_rank, "{host}": identity.host}
        for name, value in {**numbers, "%t": identity.rank, "%N": identity.host, "%j": job_id}.items():
            named = named.replace(name, str(value))
        recorder.declare({"rank_log": os.path.abspath(named)})
    try:
        keep_output(layout.output_path(recorder.path))
    except OSError as error:
        _log.warning("the output of this rank is not kept: %s", error)


def _make_current(watch: Watch) -> None:
    global _current, _hooked  # noqa: PLW0603 - there is one process, one exception hook and one current watch
    _current = watch
    atexit.register(watch.at_exit)
    if not _hooked:
        _hooked = True
        previous = sys.excepthook

        def note_then_report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            # At a prompt, and after a script of `python -i`, the process lives on.
            if _current is not None and not (sys.flags.inspect or hasattr(sys, "ps1")):
                _current.crashed(error, trace)
            previous(kind, error, trace)

        sys.excepthook = note_then_report
        processes = sys.modules.get("multiprocessing.process")  # not imported: this process is none of it
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize  # noqa: PLC0415, TID251 - rarely needed; starts none

            Finalize(None, _note_end_of_child, exitpriority=0)


def _note_end_of_child() -> None:
    """Note the exception that ends a process of `multiprocessing`, which calls no hook and runs no exit handlers.

    `torch.multiprocessing.spawn` writes the exception down for the parent and exits while it handles it.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
        error = error.__context__
    if error is not None and _current is not None:
        _current.crashed(error, error.__traceback__)
