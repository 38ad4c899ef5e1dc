"""Feeds a running service over HTTP with what an agent would send for small jobs, about ten steps a second."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import numpy as np

from rankwatch import wire
from tests.support.values.batches import batch, progress, ranks, table

STEP_S = 0.1
WORLD_SIZE = 4
CAN = ("pause", "resume", "checkpoint", "rollback", "rollback_memory", "rollback_disk", "stop")

Values = dict[str, list[Any]]


class Feed:
    """One job on one host. `change` may alter a step's values and exact values before they are sent."""

    def __init__(self, url: str, token: str, job: str, change: Callable[[int, Values, Values], None] | None = None):
        self._client = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
        self._job = job
        self._change = change
        self._chance = np.random.default_rng(1)
        self._seq = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self.step = 0

    def send(self, steps: int) -> None:
        """Send the next steps at once, in batches of ten."""
        for first in range(self.step, self.step + steps, 10):
            self._post(range(first, min(first + 10, self.step + steps)))
        self.step += steps

    def start(self) -> None:
        """Go on at the pace of real training until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _go_on(self) -> None:
        while not self._stop.wait(STEP_S * 5):
            try:
                self._post(range(self.step, self.step + 5))
                self.step += 5
            except httpx2.HTTPError:
                continue  # the service is away; a repeated step changes nothing

    def _post(self, steps: range) -> None:
        numbers = [step for step in steps for _ in range(WORLD_SIZE)]
        who = [rank for _ in steps for rank in range(WORLD_SIZE)]
        values, exact = self._values(steps)
        message = batch(
            next(self._seq),
            job=self._job,
            ranks=tuple(msgspec.structs.replace(info, can=CAN) for info in ranks(WORLD_SIZE)),
            steps=table(numbers, who, exact, **values),
            progress=tuple(progress(rank, steps[-1]) for rank in range(WORLD_SIZE)),
        )
        self._report("/api/v1/telemetry", message)
        # Without a view of its ranks nothing can be asked of the job.
        view = wire.View(message.job, message.attempt, message.host, message.boot, time.time_ns(), message.progress)
        self._report("/api/v1/agents/view", view)

    def _report(self, path: str, message: wire.Batch | wire.View) -> None:
        headers = {"content-type": "application/msgpack"}
        self._client.post(path, content=wire.encode(message), headers=headers).raise_for_status()

    def _values(self, steps: range) -> tuple[Values, Values]:
        """Columns over all ranks in all steps; what a step does not have is absent in it."""
        columns: tuple[Values, Values] = {}, {}
        for number, step in enumerate(steps):
            noise = self._chance.standard_normal
            values: Values = {
                "loss": [2 + 3 * np.exp(-step / 300) + 0.02 * noise() for _ in range(WORLD_SIZE)],
                "grad_norm": [1 + 0.05 * noise() for _ in range(WORLD_SIZE)],
                "busy_s": [0.08 * (1 + 0.02 * noise()) for _ in range(WORLD_SIZE)],
                "step_time_s": [STEP_S * (1 + 0.02 * noise()) for _ in range(WORLD_SIZE)],
            }
            exact: Values = {"nonfinite": [0] * WORLD_SIZE}
            if self._change is not None:
                self._change(step, values, exact)
            for whole, part in zip(columns, (values, exact), strict=True):
                for name, cells in part.items():
                    column = whole.setdefault(name, [None] * (len(steps) * WORLD_SIZE))
                    column[number * WORLD_SIZE : (number + 1) * WORLD_SIZE] = cells
        return columns
