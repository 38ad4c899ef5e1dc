"""Telemetry as agents send it, generated fast enough to fill a broker: one healthy job with realistic noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankwatch import wire

HOST_RANKS = 8
STEP_S = 0.1
PROGRESS_S = 1.0
START_UNIX_NS = 1_800_000_000 * 10**9

MEASURED = (
    "step_time_s",
    "busy_s",
    "busy_cpu_s",
    "wait_s",
    "phase.data_wait",
    "phase.forward",
    "phase.backward",
    "phase.optimizer",
    "tokens_per_s",
    "memory_ratio",
    "loss",
    "grad_norm",
    "local_grad_norm",
    "lr",
    "mfu",
)
METRICS = (*MEASURED, "nonfinite")
"""Sixteen metrics of a rank-step, the last of them a count; besides them travel the step, the rank and two times."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message and its time of sending on the job's clock."""

    unix_ns: int
    body: bytes
    rows: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one job: so many ranks, eight on a host, ten steps a second, progress once a second."""

    job: str
    ranks: int
    rows: int
    """Rank-steps in one message: a host's ranks, and as many steps as that takes."""
    seed: int = 0

    @property
    def host_ranks(self) -> int:
        """Ranks on a host."""
        return min(HOST_RANKS, self.ranks)

    def messages(self, steps: int) -> Iterator[SentMessage]:
        """The job's first `steps` steps (a multiple of a message's), host after host as they come."""
        steps_each = self.rows // self.host_ranks
        random = np.random.default_rng(self.seed)
        silicon = np.exp(0.01 * random.standard_normal(self.ranks))
        sent_s = -PROGRESS_S
        for seq, first in enumerate(range(0, steps, steps_each)):
            values = self._values(random, silicon, first, steps_each)
            now_s = (first + steps_each) * STEP_S
            progress = now_s - sent_s >= PROGRESS_S
            sent_s = now_s if progress else sent_s
            for host in range(self.ranks // self.host_ranks):
                yield self._message(seq, first, host, values, now_s, progress)

    def _values(
        self, random: np.random.Generator, silicon: NDArray[np.float64], first: int, steps: int
    ) -> NDArray[np.float32]:
        """[metric, step, rank]"""
        shape = (steps, self.ranks)
        busy = 0.07 * silicon * np.exp(0.02 * random.standard_normal(shape))
        data_wait = 0.001 * np.exp(0.3 * random.standard_normal(shape))
        seconds = np.broadcast_to((busy + data_wait).max(axis=1, keepdims=True) + 0.01, shape)
        step = np.arange(first, first + steps)[:, None]
        loss = (2.2 + 8.8 * np.exp(-step / 200)) * (1 + 0.01 * random.standard_normal(shape))
        norm = np.broadcast_to(np.exp(0.15 * random.standard_normal((steps, 1))), shape)
        columns = (
            seconds,
            busy,
            busy * np.exp(0.02 * random.standard_normal(shape)),
            seconds - busy - data_wait,
            data_wait,
            busy / 3,
            busy * 2 / 3,
            0.003 * np.exp(0.02 * random.standard_normal(shape)),
            seconds - busy,
            0.01 * np.exp(0.05 * random.standard_normal(shape)),
            loss,
            norm,
            norm * np.exp(0.1 * random.standard_normal(shape)),
            np.full(shape, 3e-4),
            0.4 * busy / seconds,
        )
        return np.stack(columns).astype(np.float32)

    def _message(
        self, seq: int, first: int, host: int, values: NDArray[np.float32], now_s: float, progress: bool
    ) -> SentMessage:
        host_ranks = self.host_ranks
        steps, low = values.shape[1], host * host_ranks
        rows = steps * host_ranks
        # A rank's entries follow each other, as an agent reads them from its recorder.
        step = np.tile(np.arange(steps, dtype=np.uint8), host_ranks)
        rank = np.repeat(np.arange(host_ranks, dtype=np.uint8), steps)
        since_ns = (step.astype(np.int64) * 100_000_000 + rank.astype(np.int64) * 20_000).astype(np.uint32)
        unix_ns = START_UNIX_NS + round(now_s * 1e9)
        columns = {
            "step": wire.Column("u1", step.tobytes(), first),
            "rank": wire.Column("u1", rank.tobytes(), low),
            "nonfinite": wire.Column("u1", bytes(rows)),
            "time_unix_ns": wire.Column("u4", since_ns.tobytes(), unix_ns - round(steps * STEP_S * 1e9)),
            "relative_step": wire.Column("u1", step.tobytes(), first),
        }
        for index, name in enumerate(MEASURED):
            cells = values[index, :, low : low + host_ranks].T
            columns[name] = wire.Column("f4", cells.tobytes())
        batch = wire.Batch(
            schema=wire.SCHEMA_VERSION,
            job=self.job,
            attempt="4d1c8e0f.0",
            host=f"node-{host:05}",
            boot=f"{host:016x}",
            seq=seq,
            sent_unix_ns=unix_ns,
            ranks=self._infos(host) if seq == 0 else (),
            steps=wire.Table(rows, columns),
            progress=self._progress(low, first + steps) if progress else (),
        )
        return SentMessage(unix_ns, wire.encode(batch), rows)

    def _infos(self, host: int) -> tuple[wire.RankInfo, ...]:
        return tuple(
            wire.RankInfo(
                host * self.host_ranks + local,
                self.ranks,
                local,
                f"node-{host:05}",
                f"GPU-{host:05}-{local}",
                1_000 + local,
                dp=host,
                tp=local,
            )
            for local in range(self.host_ranks)
        )

    def _progress(self, low: int, step: int) -> tuple[wire.Progress, ...]:
        return tuple(
            wire.Progress(rank, step, "backward", 0.01, 0.05, step, cpu_s=step * STEP_S)
            for rank in range(low, low + self.host_ranks)
        )
