"""Requests that wait for the same read share it (*single flight*): open pages ask for the totals all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

Value = TypeVar("Value")


class SingleFlight:
    """Makes one read at a time. A request gets the value of a read that began after the request came, so that nobody is
    given less than was committed before; all that came meanwhile with the same key share it. Holds nothing between.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._waiting: dict[Hashable, Future[Any]] = {}
        """Reads that have not begun, by key."""

    def read(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """The value of the next read of this key; blocks until it is made, and raises its error."""
        with self._guard:
            leads = key not in self._waiting
            shared: Future[Value] = self._waiting.setdefault(key, Future())
        if leads:
            with self._turn:
                with self._guard:
                    del self._waiting[key]
                try:
                    shared.set_result(read())
                except Exception as error:  # noqa: BLE001 - each of those that share it raises it
                    shared.set_exception(error)
        return shared.result()
