"""Counters of the host's network ports: of Ethernet devices that are hardware, and of InfiniBand and RoCE ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rankwatch.agent.host.files import as_number, known, number_of, rate, text_of

PORTS_MAX: Final = 64
"""Ports read on one host: four times what the largest servers have."""
WORD_BYTES: Final = 4
"""InfiniBand counts data in words."""

ERRORS: Final = (
    "symbol_error",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "link_error_recovery",
)
"""Counters of an RDMA port, each of which rises with a bad cable, transceiver or switch port."""
RETRANSMISSIONS: Final = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
)
"""Hardware counters of an RDMA port that rise as packets are lost on the way, or their receiver is not ready."""
_GIGABITS: Final = re.compile(r"([\d.]+) Gb/sec")


class NetworkPorts:
    """Reads the counters of each port; rates are those since the reading before, so that the first one has none.

    Args:
        root: folder in which the host's /sys is.
    """

    def __init__(self, root: Path) -> None:
        self._ethernet = root / "sys/class/net"
        self._rdma = root / "sys/class/infiniband"
        self._before: dict[str, dict[str, float]] = {}
        self._before_s = 0.0

    def read(self, now_s: float) -> dict[str, dict[str, float]]:
        """By port (eth0, mlx5_0/1): the counters that it has, by name; units are part of the names.

        Args:
            now_s: of a clock that never goes back.
        """
        told, seconds = dict[str, dict[str, float]](), now_s - self._before_s
        counts = dict(self._counts())
        for port, now in counts.items():
            before = self._before.get(port, {})
            rates = {f"{name}_per_s": rate(now.get(name), before.get(name), seconds) for name in _RATES}
            told[port] = {name: value for name, value in now.items() if name not in _RATES} | known(rates)
        self._before, self._before_s = counts, now_s
        return told

    def _counts(self) -> Iterator[tuple[str, dict[str, float]]]:
        folders = [
            (folder.name, _ethernet(folder)) for folder in _below(self._ethernet) if (folder / "device").exists()
        ]
        for card in _below(self._rdma):
            folders += [(f"{card.name}/{port.name}", _rdma(port)) for port in _below(card / "ports")]
        yield from folders[:PORTS_MAX]


_RATES: Final = ("received_bytes", "sent_bytes", "retransmissions", "congestion_notifications")


def _ethernet(folder: Path) -> dict[str, float]:
    """A port that was never up, as one without a cable is, has no counters."""
    state, changes = text_of(folder / "operstate"), number_of(folder / "carrier_changes")
    if state not in ("up", "down", "lowerlayerdown") or (state != "up" and not (changes and changes > 1)):
        return {}
    megabits = number_of(folder / "speed")
    statistics = folder / "statistics"
    return known(
        {
            "link_up": float(state == "up"),
            "link_bits_per_s": megabits * 1e6 if megabits is not None and megabits > 0 else None,
            "link_downs": number_of(folder / "carrier_down_count"),
            "received_bytes": number_of(statistics / "rx_bytes"),
            "sent_bytes": number_of(statistics / "tx_bytes"),
            "port_errors": _sum(statistics, ("rx_errors", "tx_errors")),
        }
    )


def _rdma(folder: Path) -> dict[str, float]:
    """State "4: ACTIVE", rate "400 Gb/sec (4X NDR)"."""
    state = as_number((text_of(folder / "state") or "").partition(":")[0])
    downs = number_of(folder / "counters/link_downed")
    if state is None or (state < 4 and not downs):
        return {}
    gigabits = _GIGABITS.match(text_of(folder / "rate") or "")
    counters, hardware = folder / "counters", folder / "hw_counters"
    received, sent = number_of(counters / "port_rcv_data"), number_of(counters / "port_xmit_data")
    return known(
        {
            "link_up": float(state == 4),
            "link_bits_per_s": float(gigabits[1]) * 1e9 if gigabits else None,
            "link_downs": downs,
            "received_bytes": None if received is None else received * WORD_BYTES,
            "sent_bytes": None if sent is None else sent * WORD_BYTES,
            "port_errors": _sum(counters, ERRORS),
            "retransmissions": _sum(hardware, RETRANSMISSIONS),
            "congestion_notifications": number_of(hardware / "np_cnp_sent"),
        }
    )


def _sum(folder: Path, names: tuple[str, ...]) -> float | None:
    """The sum of the counts that there are."""
    found = [value for name in names if (value := number_of(folder / name)) is not None]
    return sum(found) if found else None


def _below(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
