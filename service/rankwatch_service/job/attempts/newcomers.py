"""Attempts that wait to take over: somebody brings them who does not carry the running attempt. Pure.

Honest ones wait for seconds: the hosts of a restart on other nodes, until those of the attempt before have ended or
fallen silent; the new host of a restart, until another brings the same attempt. One that goes on beside the running
attempt is another job of this name, or a forgery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from rankwatch import wire
from rankwatch_service.job.attempts.allowance import CellCount
from rankwatch_service.telemetry.bundle import Bundle, read_bundle
from rankwatch_service.telemetry.envelope import decode_envelope

BESIDE_S: Final = 10.0
"""After this long beside the running attempt, an attempt is reported, and its rows are not kept any more."""

ATTEMPTS_MAX: Final = 8
"""Attempts that wait at a time; the one that was heard longest ago makes room."""

BATCHES_MAX: Final = 4_096
"""Batches of one attempt that wait, as many as of an attempt that starts; later ones are dropped."""

BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes that wait, of one attempt; later batches wait without their tables, and in the end not at all."""

ITEM_BYTES: Final = 512
"""What a rank info, an event or a progress block counts for."""


@dataclass(slots=True)
class Newcomer:
    """One attempt that waits."""

    attempt: str
    since_s: float
    host: str
    """That brought it first."""
    cells: CellCount
    """Of all its bundles, those included that were dropped."""
    heard_s: float = 0.0
    reported: bool = False
    size: int = 0
    bundles: list[Bundle] = field(default_factory=list)


class Newcomers:
    """The attempts that wait. Memory: `ATTEMPTS_MAX` x (`BYTES_MAX` and `BATCHES_MAX` headers)."""

    def __init__(self) -> None:
        self._waiting: dict[str, Newcomer] = {}

    def cells(self, attempt: str) -> CellCount | None:
        """The count of an attempt that waits; None if it does not."""
        newcomer = self._waiting.get(attempt)
        return newcomer.cells if newcomer else None

    def add(self, bundle: Bundle, count: CellCount, now_s: float) -> int:
        """Keep a bundle of one batch until its attempt takes over; returns how many batches were dropped instead.

        Args:
            bundle: of an attempt.
            count: for its cells, if it does not wait yet.
            now_s: stream time.
        """
        batch = bundle.batches[0]
        newcomer = self._waiting.pop(batch.attempt, None) or Newcomer(batch.attempt, now_s, batch.host, count)
        newcomer.cells.take(bundle)
        dropped = 0
        if len(self._waiting) >= ATTEMPTS_MAX:
            dropped += len(self._waiting.pop(next(iter(self._waiting))).bundles)
        self._waiting[batch.attempt] = newcomer
        newcomer.heard_s = now_s
        if len(newcomer.bundles) >= BATCHES_MAX:
            return dropped + 1
        size = _size(bundle)
        if newcomer.reported or newcomer.size + size > BYTES_MAX:
            bundle = _without_tables(bundle)
            size = _size(bundle)
            if not (batch.ranks or batch.events) or newcomer.size + size > BYTES_MAX:
                return dropped + 1
        newcomer.bundles.append(bundle)
        newcomer.size += size
        return dropped

    def take(self, attempt: str) -> list[Bundle]:
        """The bundles of an attempt that takes over, oldest first; nothing of it waits afterwards."""
        newcomer = self._waiting.pop(attempt, None)
        return newcomer.bundles if newcomer else []

    def newest(self) -> str:
        """The attempt that was heard last; empty if none waits."""
        return next(reversed(self._waiting), "")

    def beside(self, now_s: float) -> list[Newcomer]:
        """Those that have become `BESIDE_S` old, each once. Their tables are dropped."""
        old = [one for one in self._waiting.values() if not one.reported and one.heard_s - one.since_s >= BESIDE_S]
        for newcomer in old:
            newcomer.reported = True
            newcomer.bundles = [_without_tables(bundle) for bundle in newcomer.bundles]
            newcomer.size = sum(map(_size, newcomer.bundles))
        for attempt in [name for name, one in self._waiting.items() if now_s - one.heard_s > BESIDE_S]:
            del self._waiting[attempt]
        return old

    def state(self) -> list[dict[str, Any]]:
        """Everything: JSON types and bytes."""
        return [
            {
                "attempt": one.attempt,
                "since_s": one.since_s,
                "host": one.host,
                "heard_s": one.heard_s,
                "reported": one.reported,
                "cells": one.cells.state(),
                "batches": [wire.encode(bundle.batches[0]) for bundle in one.bundles],
            }
            for one in self._waiting.values()
        ]

    @classmethod
    def restored(cls, state: list[Mapping[str, Any]]) -> Newcomers:
        """The object that gave this state."""
        newcomers = cls()
        for told in state:
            bundles = [read_bundle([decode_envelope(body)]) for body in told["batches"]]
            newcomers._waiting[told["attempt"]] = Newcomer(
                told["attempt"],
                told["since_s"],
                told["host"],
                CellCount.restored(told["cells"]),
                told["heard_s"],
                told["reported"],
                sum(map(_size, bundles)),
                bundles,
            )
        return newcomers


def _size(bundle: Bundle) -> int:
    batch = bundle.batches[0]
    items = len(batch.ranks) + len(batch.events) + len(batch.progress)
    return len(batch.steps) + len(batch.values) + ITEM_BYTES * items


def _without_tables(bundle: Bundle) -> Bundle:
    bare = msgspec.structs.replace(bundle.batches[0], steps=msgspec.Raw(), values=msgspec.Raw(), progress=())
    return read_bundle([bare])
