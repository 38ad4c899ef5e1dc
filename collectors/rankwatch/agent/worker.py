"""The agent's worker: one loop that reads the ranks of a job, sends their records, and relays orders to them.

The loop itself never waits for the network, a disk or a driver; other threads do. A record counts as read only once the
service or the spool has it, so a killed worker loses nothing: the next one reads the record from the ring again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwatch import wire
from rankwatch.agent.batch_builder import (
    BatchBuilder,
    Losses,
    SenderIdentity,
    by_age,
    exit_event,
    progress_of,
    start_event,
)
from rankwatch.agent.checkpoints import CheckpointRoots, SavedCheckpoints, roots_file
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.cloud import CloudNotices
from rankwatch.agent.devices import DeviceSampler
from rankwatch.agent.enrolment import Enrolment, OrderCheck
from rankwatch.agent.hang_stacks import HangAnswers
from rankwatch.agent.host import HostSampler
from rankwatch.agent.processes import REAP_WAIT_S, UNKNOWN_EXIT, ExitWatch
from rankwatch.agent.rank_output import RankOutput
from rankwatch.agent.ranks import FULLY_SENT, LocalRank, LocalRanks
from rankwatch.agent.relay import Relay, Traces, resume_file
from rankwatch.agent.sender import Sender
from rankwatch.agent.service_connection import FindEndpoint
from rankwatch.agent.uplink import Inbox, OrderStream, ViewPoster
from rankwatch.notices import Notice, notice_path, write_notice
from rankwatch.reader import Note, ProgressBlock

TAIL_EVERY_S: Final = 0.15
TAIL_EVERY_BEHIND_S: Final = 1.0
"""Used while the service does not answer: fewer and larger messages catch up faster."""
PROGRESS_EVERY_S: Final = 1.0
VIEW_EVERY_S: Final = 0.05
"""Used while an order is open."""
END_AFTER_S: Final = 2.0
"""How long the agent outlives its last rank; a launcher that restarts at once still finds it."""
END_AT_LATEST_S: Final = 30.0
"""How long it does so at most while the service does not answer: then its messages wait in the spool ..."""
DRAINED_AT_LATEST_S: Final = 300.0
"""... and while it answers, but the host's cores are full."""
STOP_AT_LATEST_S: Final = 17.0
"""How long an agent that was asked to stop may outlive its last rank. With `CLOSE_WITHIN_S` less than the 20 s after
which a scheduler or systemd would kill it."""
CLOSE_WITHIN_S: Final = 2.0
"""Time for the last messages; what has not arrived by then is in the spool."""
CLOSED_AFTER_S: Final = 2.0
"""A process drops its lock before it ends. If it lives for longer than this without the lock, it has closed its
recorder and goes on."""
FIRST_RANK_WITHIN_S: Final = 10.0
"""How long a new agent waits for its first recorder; the rank that started it created one before."""

_log = logging.getLogger(__name__)

EXPLAINED_MAX: Final = 64
"""Ranks of a launch and host whose output is read when they end; what later ones print is a consequence."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A worker's job and the parts it works with."""

    directory: Path
    job: str
    clock: AgentClock
    find_endpoint: FindEndpoint
    enrolment: Enrolment
    sender: Sender
    hardware: Hardware
    restarts: int = 0
    """How often the worker was restarted."""


class Worker:
    """Watches the ranks of one job until they are gone and everything is reported."""

    def __init__(self, setting: Setting, stopping: Callable[[], bool]) -> None:
        self._setting = setting
        self._clock = setting.clock
        self._stopping = stopping
        self._ranks = LocalRanks(setting.directory, setting.job)
        self._exits = ExitWatch()
        self._by_fd: dict[int, LocalRank] = {}
        self._inbox = Inbox()
        self._exits.add_wakeup(self._inbox.fd)
        self._roots = CheckpointRoots(roots_file(setting.directory, setting.job), setting.clock.monotonic_s)
        self._saved = SavedCheckpoints(self._roots.path_of, setting.clock.monotonic_s)
        advice = resume_file(setting.directory, setting.job)
        self._relay = Relay(self._ranks, advice, setting.job, self._roots.why_not)
        self._hang_answers = HangAnswers(setting.clock)
        self._output = RankOutput()
        self._traces = Traces(setting.clock)
        self._held_back: wire.Orders | None = None
        self._builders: dict[str, BatchBuilder] = {}
        self._newest_attempt = ""
        self._sender_identity: SenderIdentity | None = None
        self._views: ViewPoster | None = None
        self._stream: OrderStream | None = None
        self._gone = Counter[str]()
        """How many ranks of each launch have ended; launches without a recorder are removed."""
        self._losses = Losses()
        now_s = self._clock.monotonic_s()
        self._next_tail_s = self._next_progress_s = self._next_view_s = now_s
        self._alone_since_s = now_s + FIRST_RANK_WITHIN_S - END_AFTER_S
        self._shown: str | None = None

    def run(self) -> None:
        """Work until the job has ended on this host; after a signal to stop, until its ranks' exits are reported."""
        self._setting.sender.start()
        self._setting.hardware.start()
        self.turn()
        while not self._done():
            self.turn()
        self._tail()
        if self._newest_attempt:
            reason = "told to stop" if self._stopping() else "no rank is left"
            event = wire.Event("agent_stop", self._clock.unix_ns(), fields={"reason": reason})
            self._builder(self._newest_attempt).add_event(event)
        self._flush()
        for thread in (self._views, self._stream, self._setting.hardware):
            if thread is not None:
                thread.close()
        self._setting.sender.close(CLOSE_WITHIN_S)
        self._ranks.acknowledge_sent(self._setting.sender.take_acknowledged())
        for rank in [rank for rank in self._ranks if rank.acknowledged == FULLY_SENT]:
            self._ranks.remove(rank)
        self._ranks.close()
        self._exits.close()

    def turn(self) -> None:
        """Wait until something is due or arrives, and do it."""
        next_s = min(self._next_tail_s, self._next_view_s)
        if self._hang_answers.pending or self._held_back is not None:
            next_s = min(next_s, self._clock.monotonic_s() + VIEW_EVERY_S)
        for fd in self._exits.wait(next_s - self._clock.monotonic_s()):
            if fd in self._by_fd:
                self._see_end(self._by_fd[fd])
        for orders in self._inbox.take():
            self._obey(orders)
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_tail_s:
            self._next_tail_s = now_s + (TAIL_EVERY_BEHIND_S if self._setting.sender.crowded else TAIL_EVERY_S)
            self._discover()
            self._look_at_locks(now_s)
            self._tail()
            self._report_exits(now_s)
            if now_s >= self._next_progress_s:
                # Progress goes into the same message as the records. Turns are `TAIL_EVERY_S` apart, so aiming half a
                # turn early keeps the average at one a second.
                self._next_progress_s = now_s + PROGRESS_EVERY_S - TAIL_EVERY_S / 2
                self._report_progress(now_s)
        self._report_answers()
        if self._held_back is not None:
            self._obey(self._held_back)
        self._report_checkpoints()
        self._flush()
        if now_s >= self._next_view_s:
            self._next_view_s = now_s + (VIEW_EVERY_S if self._relay.urgent else PROGRESS_EVERY_S)
            self._post_views(now_s)
        self._ranks.acknowledge_sent(self._setting.sender.take_acknowledged())
        self._clear_away(now_s)
        self._show_trouble()

    def _show_trouble(self) -> None:
        """Write a notice for the training output, and clear it once the trouble is over."""
        sender = self._setting.sender
        trouble = "; ".join(filter(None, (sender.trouble, self._roots.trouble, self._relay.trouble)))
        if trouble == self._shown or not (trouble or sender.answered):
            return  # until the service has answered, the notice of the worker before may still hold
        self._shown = trouble
        path = notice_path(str(self._setting.directory), self._setting.job)
        try:
            write_notice(path, Notice(self._setting.job, trouble, self._clock.unix_ns(), sender.held))
        except OSError as error:
            _log.warning("the notice cannot be written: %s", error)

    # ---- ranks come and go -------------------------------------------------------------------------------------------

    def _discover(self) -> None:
        for rank in self._ranks.scan():
            if self._sender_identity is None:
                self._introduce_ourselves(str(rank.identity.get("host", "")))
            if rank.process is not None:
                self._by_fd[rank.process.fd] = rank
                self._exits.add(rank.process)
                self._roots.meet(rank)
            self._output.meet(rank)
            self._alone_since_s = self._clock.monotonic_s()
            self._shown = None  # a launch prints only what is written after it began
            _log.info("rank %d of attempt %s, pid %d", rank.rank, rank.attempt(0), rank.header.pid)

    def _introduce_ourselves(self, host: str) -> None:
        self._sender_identity = SenderIdentity(host)
        find, enrolment, check = self._setting.find_endpoint, self._setting.enrolment, OrderCheck()
        enrolment.introduce(host)
        self._views = ViewPoster(find, self._inbox, enrolment, check)
        self._stream = OrderStream(find, self._inbox, enrolment, check, self._setting.job, self._sender_identity)
        self._views.start()
        self._stream.start()

    def _see_end(self, rank: LocalRank) -> None:
        """Store when, and as which of its launch, a rank's process ended or closed its recorder."""
        if rank.process is not None:
            self._exits.forget(rank.process)
            del self._by_fd[rank.process.fd]
        rank.gone_since_s = self._clock.monotonic_s()
        rank.exit_order = self._gone[rank.launch]
        self._gone[rank.launch] += 1
        self._next_tail_s = rank.gone_since_s  # report it at once, with its last records

    def _look_at_locks(self, now_s: float) -> None:
        """A rank without its lock is gone if the agent has no pidfd for it; else it may have closed its recorder."""
        for rank in self._ranks:
            if rank.gone_since_s is not None:
                continue
            if rank.reader.owner_alive():
                rank.unlocked_since_s = None
            elif rank.process is None:
                self._see_end(rank)
            elif rank.reader.progress().state == "left" and not rank.process.exiting():
                rank.unlocked_since_s = rank.unlocked_since_s or now_s
                if now_s - rank.unlocked_since_s >= CLOSED_AFTER_S:
                    rank.closed = True
                    self._see_end(rank)

    def _report_exits(self, now_s: float) -> None:
        # In the order in which they ended: the service takes the first for the first mover.
        for rank in sorted(self._ranks, key=lambda rank: (rank.last_sign_unix_ns, rank.exit_order or 0)):
            if rank.gone_since_s is None or rank.exit_reported:
                continue
            block = rank.reader.progress()
            if rank.closed:
                self._report_last(rank, block, now_s)
                continue
            ended = rank.process.exit_status() if rank.process is not None else UNKNOWN_EXIT
            if ended is None and now_s - rank.gone_since_s < REAP_WAIT_S:
                self._next_tail_s = min(self._next_tail_s, now_s + VIEW_EVERY_S)
                continue
            seen_unix_ns = self._clock.unix_ns() - int((now_s - rank.gone_since_s) * 1e9)
            event = exit_event(rank, block, ended or UNKNOWN_EXIT, seen_unix_ns)
            if event.fields["code"] != 0 and (rank.exit_order or 0) < EXPLAINED_MAX:
                event.fields.update(self._output.why_ended(rank, event.fields["signal"], seen_unix_ns))
            _log.info("rank %d ended: %s", rank.rank, event.fields)
            self._report_last(rank, block, now_s, event)

    def _report_last(self, rank: LocalRank, block: ProgressBlock, now_s: float, *events: wire.Event) -> None:
        batch_builder = self._builder_of(rank, block.k)
        for event in events:
            batch_builder.add_event(event)
        batch_builder.progress.append(progress_of(rank, block, now_s))
        batch_builder.positions[rank.path] = FULLY_SENT
        rank.exit_reported = True

    def _clear_away(self, now_s: float) -> None:
        for rank in [rank for rank in self._ranks if rank.acknowledged == FULLY_SENT]:
            # Views report "exited" while other ranks of its launch live and no new process has its rank number.
            same_launch = [other for other in self._ranks if other.launch == rank.launch and other is not rank]
            replaced = any(
                o.rank == rank.rank and o.header.start_unix_ns > rank.header.start_unix_ns for o in same_launch
            )
            alive = any(other.gone_since_s is None for other in same_launch)
            if replaced or not (alive or self._relay.urgent):
                self._ranks.remove(rank)
                self._output.forget(rank)
        if any(rank.gone_since_s is None for rank in self._ranks):
            self._alone_since_s = now_s
        for launch in self._gone.keys() - {rank.launch for rank in self._ranks}:
            del self._gone[launch]

    def _done(self) -> bool:
        alone_s = self._clock.monotonic_s() - self._alone_since_s
        if any(rank.gone_since_s is None for rank in self._ranks):
            return False
        fully_sent = self._setting.sender.idle and not len(self._ranks)
        if self._stopping():
            return fully_sent or alone_s >= STOP_AT_LATEST_S
        at_latest_s = END_AT_LATEST_S if self._setting.sender.behind else DRAINED_AT_LATEST_S
        return alone_s >= END_AFTER_S and (fully_sent or alone_s >= at_latest_s)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _tail(self) -> None:
        for rank in self._ranks:
            poll = rank.poll()
            for reason, count in poll.lost.items():
                self._losses[self._setting.job, rank.attempt(rank.reader.progress().k), reason] += count
            for entry in poll.entries:
                if isinstance(entry, Note):
                    self._roots.learn(rank, entry)  # before the event, so that the service knows them when it comes
                    self._saved.learn(entry)
                batch_builder = self._builder_of(rank, entry.k)
                refused = batch_builder.add(rank, entry)
                if refused:
                    self._losses[self._setting.job, batch_builder.attempt, "reserved_names"] += refused
                if isinstance(entry, Note):
                    rank.learn_end(entry)

    def _report_progress(self, now_s: float) -> None:
        for rank in self._ranks:
            if rank.gone_since_s is None:
                block = rank.reader.progress()
                rank.refresh_identity()
                self._hang_answers.look(rank, block)
                self._builder_of(rank, block.k).progress.append(progress_of(rank, block, now_s))
        devices, host_devices = self._setting.hardware.take(self._saved.place)
        for batch_builder in self._builders.values():
            batch_builder.carry(devices, host_devices)
        for event in self._setting.hardware.take_events() if self._newest_attempt else ():
            self._builder(self._newest_attempt).add_event(event)

    def _report_answers(self) -> None:
        for attempt, event in (*self._hang_answers.take(), *self._traces.take(self._ranks)):
            if self._builder(attempt).full:
                self._flush()
            if event.kind == "stack_dump" and event.fields["stack"]:  # of a place, the first rank
                rank = next((rank for rank in self._ranks if rank.rank == event.rank), None)
                event.fields["lines"] = [] if rank is None else self._output.last_lines(rank)
            self._builder(attempt).add_event(event)

    def _report_checkpoints(self) -> None:
        if not self._newest_attempt:
            return
        refused = [("location_refused", one._asdict()) for one in self._relay.take_refused()]
        gone = [("checkpoint_gone", one._asdict()) for one in self._saved.missing()]
        disks = [("checkpoint_disk", one._asdict()) for one in self._saved.disks()]
        for kind, fields in refused + gone + disks:
            self._builder(self._newest_attempt).add_event(wire.Event(kind, self._clock.unix_ns(), fields=fields))

    def _report_losses(self) -> None:
        self._losses += self._setting.sender.take_losses()
        if not self._newest_attempt:
            return
        for (_, attempt, reason), count in self._losses.items():
            fields = {"reason": reason, "count": count}
            batch_builder = self._builder(attempt or self._newest_attempt)
            batch_builder.add_event(wire.Event("records_lost", self._clock.unix_ns(), fields=fields))
        self._losses.clear()

    def _flush(self) -> None:
        """Hand all batches to the sender, older attempts first."""
        self._report_losses()
        for attempt in sorted(self._builders, key=by_age):
            batch_builder = self._builders.pop(attempt)
            if not batch_builder.empty and self._sender_identity is not None:
                self._setting.sender.put(batch_builder.encoded_batch(self._sender_identity, self._clock.unix_ns()))

    def _builder_of(self, rank: LocalRank, k: int) -> BatchBuilder:
        """The batch builder for a rank's records with this k; introduces the rank if it is new there."""
        attempt = rank.attempt(k)
        batch_builder = self._builder(attempt)
        if batch_builder.full:
            self._flush()
            batch_builder = self._builder(attempt)
        state = (attempt, rank.header.identity_number, self._roots.roots, rank.shards)
        if rank.introduced != state:
            if not rank.introduced[0] and not rank.acknowledged:
                batch_builder.add_event(start_event(rank))
            rank.introduced = state
            batch_builder.introduce(rank, self._roots.roots)
            if attempt != self._newest_attempt:
                self._newest_attempt = attempt
                fields = {"restarts": self._setting.restarts}
                batch_builder.add_event(wire.Event("agent_start", self._clock.unix_ns(), fields=fields))
        return batch_builder

    def _builder(self, attempt: str) -> BatchBuilder:
        batch_builder = self._builders.get(attempt)
        if batch_builder is None:
            batch_builder = self._builders[attempt] = BatchBuilder(self._setting.job, attempt)
        return batch_builder

    # ---- orders ------------------------------------------------------------------------------------------------------

    def _obey(self, orders: wire.Orders) -> None:
        for request in orders.stacks:
            for rank in self._ranks:
                wanted = not request.ranks or rank.rank in request.ranks
                if wanted and rank.gone_since_s is None and rank.attempt(rank.reader.progress().k) == request.attempt:
                    self._hang_answers.begin(request, rank)
        # Answers come before a kill, since a dead process has none. They take 0.1 s, or `STACK_WAIT_S` if none comes.
        # So does the advice for a relaunch, which takes up to `ANSWER_WITHIN_S` where a file system does not answer.
        first = self._hang_answers.pending or not self._relay.ready(orders)
        if first and any(view.phase == "kill" for view in orders.orders):
            self._held_back = orders
            return
        self._held_back = None
        self._traces.ask(orders.traces, self._ranks)
        was_urgent = self._relay.urgent
        self._relay.apply(orders)
        self._saved.advise(orders.resume)
        if self._relay.urgent and not was_urgent:
            self._next_view_s = self._clock.monotonic_s()

    def _post_views(self, now_s: float) -> None:
        if self._views is None or self._sender_identity is None:
            return
        shown: dict[str, dict[int, wire.Progress]] = {}
        # Oldest process first, so that the newest process of a rank replaces earlier ones in the view.
        for rank in sorted(self._ranks, key=lambda rank: rank.header.start_unix_ns):
            block = rank.reader.progress()
            attempt = self._relay.attempt_of(rank, block.k, block.answer.order)
            progress = self._relay.seen_by_service(rank, progress_of(rank, block, now_s))
            shown.setdefault(attempt, {})[rank.rank] = progress
        unix_ns, sender_identity = self._clock.unix_ns(), self._sender_identity
        self._views.offer(
            [
                wire.View(
                    self._setting.job,
                    attempt,
                    sender_identity.host,
                    sender_identity.boot,
                    unix_ns,
                    tuple(ranks.values()),
                )
                for attempt, ranks in shown.items()
            ]
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """The samplers, as one."""

    devices: DeviceSampler
    host: HostSampler
    cloud: CloudNotices

    def start(self) -> None:
        """Begin to read."""
        self.devices.start()
        self.host.start()
        self.cloud.start()

    def take(
        self, checkpoints: tuple[str, int] | None
    ) -> tuple[tuple[wire.DeviceSample, ...], tuple[wire.HostDeviceSample, ...]]:
        """The newest counters of GPUs, and of ports and the host, once; empty if none were read since the last call.

        Args:
            checkpoints: the folder in which the job saves, and the free bytes of its file system, once they are known.
        """
        if checkpoints is not None:
            self.host.watch_checkpoints(*checkpoints)
        return self.devices.take(), self.host.take()

    def take_events(self) -> list[wire.Event]:
        """What happened to devices, and what the provider announced, since the last call."""
        return self.devices.take_events() + self.cloud.take_events()

    def close(self) -> None:
        """End the samplers. What hangs in the driver ends as soon as the driver answers."""
        self.host.close()
        self.cloud.close()
        self.devices.close()
