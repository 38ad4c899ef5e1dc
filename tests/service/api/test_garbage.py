"""When a process of the api looks through all its objects."""

import gc
import sys
from collections.abc import Callable

import pytest

from rankwatch_service.api import garbage
from tests.support.clock import FakeClock


class EndedError(Exception):
    """The story is over."""


class Looks(FakeClock):
    """Does one thing after the other while the thread sleeps."""

    def __init__(self, *happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = iter(happens)

    def sleep(self, seconds: float) -> None:
        assert seconds == garbage.LOOK_S
        step = next(self._happens, None)
        if step is None:
            raise EndedError
        step()


def test_all_objects_are_looked_through_once_they_have_doubled():
    kept: list[object] = []
    full: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(len(kept))

    def grow(part: float) -> Callable[[], None]:
        return lambda: kept.extend(object() for _ in range(int(before * part)))

    def shrink() -> None:
        kept.clear()

    gc.collect()
    limits = gc.get_threshold()
    gc.set_threshold(limits[0], limits[1], garbage.NEVER)
    gc.callbacks.append(collected)
    before = sys.getallocatedblocks()
    try:
        with pytest.raises(EndedError):
            garbage._keep_looking(
                Looks(lambda: None, grow(0.6), grow(0.6), lambda: None, shrink, grow(0.6), grow(0.6), lambda: None)
            )
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*limits)
    assert full == [2 * int(before * 0.6), 2 * int(before * 0.6)]
