from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.orders.driven_world import DrivenWorld


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Callable[..., DrivenWorld]]:
    """Makes worlds, in which nothing may have been mixed at the end."""
    worlds: list[DrivenWorld] = []

    def make(seed: int, action: str, *also_asked: tuple[float, str], **how: bool) -> DrivenWorld:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        worlds.append(DrivenWorld(seed, action, folder, **how))
        worlds[-1].also_asked += also_asked
        return worlds[-1]

    yield make
    for world in worlds:
        world.engine.dispose()
        assert not world.violations
        assert all(len(steps) == 1 for steps in world.acted_steps().values())
