"""Random kills: which process, when, and how soon it is restarted."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.trials.cluster import Cluster
from tests.support.trials.trial import Act

AWAY_S = (0.3, 2.0)
"""Between a kill and the order to start again."""


def kinds(cluster: Cluster) -> dict[str, list[str]]:
    """What can be killed, by role: of several streams or notifiers one at a time."""
    found: dict[str, list[str]] = {}
    for name in cluster.names:
        found.setdefault(name.partition("-")[0], []).append(name)
    return found


def kills(
    cluster: Cluster,
    seed: int,
    every_s: float,
    until_s: float,
    only: tuple[str, ...] = (),
    first_s: float | None = None,
) -> Iterator[Act]:
    """One kill each `every_s`, of any role or of `only` these, until so many seconds after the beginning."""
    chance = random.Random(seed)
    roles = {role: names for role, names in kinds(cluster).items() if not only or role in only}
    assert roles, only
    at_s = every_s if first_s is None else first_s
    while at_s < until_s:
        name = chance.choice(roles[chance.choice(sorted(roles))])
        away_s = chance.uniform(*AWAY_S)
        yield at_s, f"kill {name}", lambda name=name: cluster.kill(name)
        yield at_s + away_s, f"start {name}", lambda name=name: cluster.restart(name)
        at_s += every_s


def pauses(cluster: Cluster, name: str, at_s: float, seconds: float) -> Iterator[Act]:
    """One process is paused for so long, then continues."""
    yield at_s, f"pause {name}", lambda: cluster.pause(name)
    yield at_s + seconds, f"resume {name}", lambda: cluster.resume(name)
