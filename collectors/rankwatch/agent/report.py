"""A rank's progress block and its exit as messages of the wire."""

from __future__ import annotations

from typing import Any

from rankwatch import wire
from rankwatch.agent.exits import ProcessExit
from rankwatch.agent.procfs import TICKS_PER_S, read_stat
from rankwatch.agent.ranks import LocalRank
from rankwatch.reader import ProgressBlock


def progress_of(rank: LocalRank, block: ProgressBlock, now_s: float) -> wire.Progress:
    """A rank's progress message; `now_s` is monotonic time of this host."""
    gone = rank.gone_since_s is not None
    stat = None if gone or rank.is_followed else read_stat(rank.header.pid)
    if stat is not None and stat.start_ticks != rank.header.start_ticks:
        stat = None  # another process has its PID by now
    traced = stat is not None and stat.state == "t" and rank.process is not None and rank.process.is_traced
    return wire.Progress(
        rank=rank.rank,
        step=block.step,
        phase=block.phase,
        phase_age_s=max(0.0, now_s - block.phase_since_ns / 1e9),
        step_age_s=max(0.0, now_s - block.step_entered_ns / 1e9),
        collective_seq=block.collective_seq,
        # A rank that an exception has ended does no more work, though its process may take a while to exit.
        state="exited" if (gone and not rank.closed) or (rank.ending and block.state != "left") else block.state,
        order=block.answer.order,
        answer=block.answer.answer,
        answer_step=block.answer.step,
        answer_k=block.answer.k,
        answer_fingerprint=block.answer.fingerprint,
        os_state="X" if gone else "?" if stat is None or traced else stat.state,
        cpu_s=stat.cpu_ticks / TICKS_PER_S if stat is not None else 0.0,
        answer_detail=block.answer.detail,
        outside_s=max(0.0, now_s - block.outside_ns / 1e9) if block.outside_ns else -1.0,
    )


def start_event(rank: LocalRank) -> wire.Event:
    """The event that a rank's process has begun to record."""
    fields = {"pid": rank.header.pid, "source": rank.identity.get("source", "")}
    return wire.Event("rank_start", rank.header.start_unix_ns, rank.rank, fields=fields)


def exit_event(rank: LocalRank, block: ProgressBlock, ended: ProcessExit, seen_unix_ns: int) -> wire.Event:
    """The event that says how a rank's process ended, and when it began to end.

    If the kernel does not have the exit status, Python's note of an exception does. If there is no note either, Python
    had no time to write one: the end was `abrupt`, by a signal or `os._exit`.
    """
    code, number, how = ended.code, ended.signal, ended.how
    if how == "unknown" and rank.status is not None:
        (code, number), how = rank.status, "excepthook"
    failed = number is not None or code not in (0, None)
    # A loop that `break` left counts as finished only if the process did not fail afterwards.
    left = block.state == "left" and (rank.left_by in ("end", "stop") or not failed)
    broken_off = block.state == "left" and rank.left_by == "break"
    said = rank.status is not None or broken_off
    error = rank.error if said and not left else ""
    if broken_off and code and not error:
        error = f"SystemExit: {code}"  # Python shut down normally, and no exception explains the status
    fields: dict[str, Any] = {
        "code": code,
        "signal": number,
        "how": how,
        "error": error,
        "where": rank.where if said else "",
        "pid": rank.header.pid,
        "left": left,
        "exit_order": rank.exit_order,
        "phase": block.phase,
        "abrupt": how == "unknown" and not (said or left),
    }
    if "grace_s" in rank.identity:
        fields["grace_s"] = rank.identity["grace_s"]
    unix_ns = (rank.said_unix_ns if said else rank.last_sign_unix_ns) or seen_unix_ns
    return wire.Event("process_exit", unix_ns, rank.rank, block.step, fields)
