"""Roles of a running installation die, stop and come back, while jobs go on: nothing is lost, doubled or made up.

Each trial plays three jobs in real time and compares with the run in which nothing fails. By default there is one of
everything at once; `RANKWATCH_FAULT_TRIALS=all` (`make faults`) runs each fault by itself, on every form it applies to.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest

from tests.support.service.forms import cluster_of
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.trials import trial
from tests.support.trials.cluster import Cluster
from tests.support.trials.selection import long_trial
from tests.support.trials.trial import Act, kills, pauses, rank_steps

pytestmark = [pytest.mark.integration, pytest.mark.ci]
PLAY_S = 28.0
"""Of the small scenario, as far as faults are injected; its last job ends after 79 s."""


def streams_killed(cluster: Cluster, seed: int) -> Iterable[Act]:
    return kills(cluster, seed, 4.0, PLAY_S, only=("stream",))


def api_and_notifier_killed(cluster: Cluster, seed: int) -> Iterable[Act]:
    return kills(cluster, seed, 7.5, PLAY_S, only=("api", "notify"))


def broker_killed(cluster: Cluster, seed: int) -> Iterable[Act]:
    return kills(cluster, seed, 11.0, PLAY_S, only=("broker",))


def broker_silent(cluster: Cluster, seed: int) -> Iterable[Act]:
    return pauses(cluster, "broker", 8.0, 10.0)


def database_killed(cluster: Cluster, seed: int) -> Iterable[Act]:
    return kills(cluster, seed, 6.0, PLAY_S, only=("postgresql",))


def members_come_and_go(cluster: Cluster, seed: int) -> Iterator[Act]:
    """A rebalance every five seconds; one member sleeps through several and wakes up as a zombie."""
    for number, at_s in enumerate((5.0, 10.0, 15.0, 20.0, 25.0)):
        act = cluster.restart if number % 2 else cluster.kill
        yield at_s, f"{act.__name__} stream-3", lambda act=act: act("stream-3")
    yield 30.0, "restart stream-3", lambda: cluster.restart("stream-3")
    yield from pauses(cluster, "stream-1", 12.0, 16.0)


def notifier_paused(cluster: Cluster, seed: int) -> Iterator[Act]:
    yield from pauses(cluster, "notify-1", 8.0, 20.0)


def everything(cluster: Cluster, seed: int) -> Iterator[Act]:
    yield from kills(cluster, seed, 5.5, PLAY_S)


@dataclass(frozen=True)
class Fault:
    acts: Callable[[Cluster, int], Iterable[Act]]
    forms: tuple[str, ...] = ("sqlite", "postgresql", "kafka")
    doubled_max: int = 0
    """Webhooks that may come twice: each kill of the notifier or its database may cut off the few under way."""
    notifiers: int = 1
    failing: bool = False
    """Receivers refuse every message once."""
    usual: bool = False
    """Also without being asked for."""


FAULTS = {
    "streams killed": Fault(streams_killed),
    "api and notifier killed during retries": Fault(api_and_notifier_killed, doubled_max=8, failing=True),
    "broker killed": Fault(broker_killed, ("kafka", "kafka of three nodes")),
    "broker silent": Fault(broker_silent, ("kafka",)),
    "database killed": Fault(database_killed, ("postgresql", "kafka"), doubled_max=8),
    "members come and go": Fault(members_come_and_go, ("kafka",)),
    "notifier paused": Fault(notifier_paused, doubled_max=1, notifiers=2),
    "everything": Fault(everything, ("kafka",), doubled_max=8, usual=True),
}
TRIALS = [
    pytest.param(name, form, id=f"{name}-{form}", marks=() if fault.usual else long_trial)
    for name, fault in FAULTS.items()
    for form in fault.forms
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "form"), TRIALS)
def test_faults_change_nothing_of_what_is_found_ordered_and_told(tmp_path, name, form):
    fault = FAULTS[name]
    seed = random.randrange(2**32)
    refused = set()

    def answer(_number, call):
        if fault.failing and call.message_id not in refused:
            refused.add(call.message_id)
            return Answer(503)
        return Answer()

    with webhook_receiver(answer) as receiver, cluster_of(form, tmp_path, notifiers=fault.notifiers) as cluster:
        cluster.start(receiver.url)
        came = trial.run(cluster, receiver, "small", fault.acts(cluster, seed))
        print(f"seed {seed}: {came.acts}; settled in {came.settle_s:.1f} s")
        cluster.end_roles()
        came.check(fault.doubled_max + len(refused))
        total, right = rank_steps(cluster, "small")
        assert right == total
