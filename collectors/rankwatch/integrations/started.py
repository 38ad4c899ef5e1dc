"""What the integrations of frameworks have in common: how they start the watch and come between a framework's calls."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from rankwatch.identity import TEXT_CHARACTERS_MAX, job_name
from rankwatch.loop import Checkpoint
from rankwatch.notices import say
from rankwatch.startup import start
from rankwatch.watch import Watch

_RESTART_COUNTS: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def started(name: str, folder: str, job: str | None = None, **options: Any) -> Watch:
    """Start the watch of a framework's job.

    Args:
        name: what the framework calls the run, or the folder that it writes to, or "": the job's name where neither
            `job` nor the environment says one. Without any of them the job is named after the script.
        folder: where its checkpoints go, a checkpoint root unless others are declared; "" if that is not known.
        job: the job's name.
        options: further arguments of `rankwatch.start`.

    Raises:
        ValueError: as `rankwatch.start`.
    """
    env = options.get("env") or os.environ
    if job is None and not job_name(env):
        name = os.path.basename(os.path.normpath(name)) if name else _script()
        job = "".join(sign for sign in name if sign.isprintable())[:TEXT_CHARACTERS_MAX] or None
    if folder and not env.get("RANKWATCH_CHECKPOINT_ROOTS"):
        options.setdefault("checkpoint_roots", [folder if "://" in folder else os.path.abspath(folder)])
    return start(job, **options)


def _script() -> str:
    """The name of the script that runs, without its ending; "" if none does."""
    name, ending = os.path.splitext(os.path.basename(sys.argv[0]))
    return name if ending == ".py" else ""


def is_relaunch(options: Mapping[str, Any]) -> bool:
    """Whether the launcher has started this job again, or `relaunches=True` says that some launcher does."""
    env = options.get("env") or os.environ
    return bool(options.get("relaunches")) or any(env.get(name, "0") not in ("", "0") for name in _RESTART_COUNTS)


def advised(watch: Watch) -> Checkpoint | None:
    """The checkpoint to go on from after a relaunch; None without advice, or if it does not exist on this host."""
    checkpoint = watch.resume
    if checkpoint is not None and "://" not in checkpoint.location and not os.path.exists(checkpoint.location):
        watch._loop.gone(checkpoint.id, "it was advised for a relaunch and does not exist")
        checkpoint = None
    if watch.identity.rank == 0:
        say(f"goes on from {checkpoint.location}" if checkpoint else "no good checkpoint to go on from is known")
    return checkpoint


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one object, if it has it; `around` gets the method, then the arguments of each call."""
    original = getattr(owner, name, None)
    if callable(original):
        setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))
