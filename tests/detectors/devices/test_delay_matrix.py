"""A matrix of delays between hosts: a slow sender, receiver and link have three names, and noise has none."""

from __future__ import annotations

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Occurrence, Severity
from rankwatch_detectors.devices.delay_matrix import HOSTS_MAX, HOSTS_MIN, slow_paths
from rankwatch_detectors.devices.network_degraded import NetworkDegradedConfig, NetworkDegradedDetector
from tests.support.values.presences import topology

SIZE = 8
HOSTS = [f"host-{number}" for number in range(SIZE)]


def matrix(seed: int = 0) -> np.ndarray:
    """Healthy delays of 0.1 ms with 10 % noise."""
    return 1e-4 * (1 + 0.1 * np.random.default_rng(seed).standard_normal((SIZE, SIZE)))


def told(delay_s: np.ndarray) -> dict[str, object]:
    return {"hosts": HOSTS, "delay_s": delay_s.tolist()}


@pytest.mark.parametrize("seed", range(20))
def test_noise_says_nothing(seed: int) -> None:
    assert slow_paths(told(matrix(seed))) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_row_is_a_sender_a_column_a_receiver_and_a_cell_a_link(seed: int) -> None:
    sender, receiver, both, link = (matrix(seed) for _ in range(4))
    sender[3] *= 3
    receiver[:, 5] *= 3
    both[2], both[:, 2] = 3 * both[2], 3 * both[:, 2]
    link[1, 6] *= 3
    found = [[(path.host, path.part) for path in slow_paths(told(one))] for one in (sender, receiver, both, link)]
    assert found == [
        [("host-3", "sender")], [("host-5", "receiver")], [("host-2", "both")], [("host-1", "link to host-6")]
    ]  # fmt: skip


def test_what_was_not_measured_does_not_count() -> None:
    delay_s = matrix().astype(object)
    delay_s[0, 1] = delay_s[4, 4] = None
    delay_s[2, 3] = float("nan")
    delay_s[5, 6] = -1.0
    assert slow_paths({"hosts": HOSTS, "delay_s": delay_s.tolist()}) == []


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"hosts": HOSTS}, {"hosts": HOSTS, "delay_s": 3}, {"hosts": HOSTS, "delay_s": [["a"] * SIZE] * SIZE},
        {"hosts": HOSTS, "delay_s": [[1.0], [1.0, 2.0]]}, {"hosts": "abc", "delay_s": [[1.0] * 3] * 3},
        {"hosts": [1, 2, 3], "delay_s": [[1.0] * 3] * 3},
        {"hosts": HOSTS[: HOSTS_MIN - 1], "delay_s": [[1.0, 9.0], [9.0, 1.0]]},
        {"hosts": [str(n) for n in range(HOSTS_MAX + 1)], "delay_s": np.ones((HOSTS_MAX + 1, HOSTS_MAX + 1)).tolist()},
        {"hosts": HOSTS, "delay_s": [[None] * SIZE] * SIZE},
        {"hosts": HOSTS, "delay_s": [[0.0] * SIZE, [1.0] * SIZE, *[[0.0] * SIZE] * (SIZE - 2)]},
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_matrix_says_nothing(fields: dict[str, object]) -> None:
    assert slow_paths(fields) == []


def test_each_matrix_replaces_the_one_before_it() -> None:
    detector = NetworkDegradedDetector(NetworkDegradedConfig())
    detector.observe(AttemptStart("a.0", topology(SIZE, hosts=SIZE), 0.0))
    slow = matrix()
    slow[3] *= 4

    def post(delay_s: np.ndarray, now_s: float) -> list[tuple[Change, str]]:
        event = Occurrence("delay_matrix", "a.0", "host-0", now_s, None, None, told(delay_s))
        return [(one.change, str(one.scope)) for one in detector.observe(event)]

    assert post(matrix(), 1.0) == []
    assert post(slow, 2.0) == [(Change.OPEN, "host:host-3")]
    (episode,) = [detector.episodes.told(scope) for scope in detector.episodes]
    assert episode["severity"] == Severity.WARNING
    assert episode["summary"].startswith("Host host-3 sends slowly: ")
    assert post(slow, 3.0) == []
    assert post(matrix(), 4.0) == [(Change.CLOSE, "host:host-3")]
