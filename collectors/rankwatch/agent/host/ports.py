"""Counters of the host's network ports: of Ethernet devices that are hardware, and of InfiniBand and RoCE ports."""

from __future__ import annotations

import re
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
    "local_link_integrity_errors",
    "link_error_recovery",
)
"""Counters of an RDMA port that rise with a bad cable, transceiver or switch port; congestion raises none of them."""
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
    """Reads the counters of each port in use; rates are those since the reading before, so that the first one has none.

    Args:
        root: folder in which the host's /sys is.
    """

    def __init__(self, root: Path) -> None:
        self._ethernet_folder = root / "sys/class/net"
        self._rdma_folder = root / "sys/class/infiniband"
        self._before: dict[str, dict[str, float]] = {}
        self._before_s = 0.0
        self._was_up: set[str] = set()
        self._summed: dict[Path, tuple[Path, ...]] = {}
        """By folder, the counts that were there at the first reading."""
        self.left_out = 0
        """Ports in use for which there was no room."""

    def read(self, now_s: float) -> dict[str, dict[str, float]]:
        """By port (eth0, mlx5_0/1): the counters that it has, by name; units are part of the names.

        A port that was up once is reported as down as long as it is anything else.

        Args:
            now_s: of a clock that never goes back.
        """
        told, seconds = dict[str, dict[str, float]](), now_s - self._before_s
        counts = {**{port: {"link_up": 0.0} for port in sorted(self._was_up)}, **self._counts()}
        self.left_out = max(0, len(counts) - PORTS_MAX)
        for port, now in list(counts.items())[:PORTS_MAX]:
            before = self._before.get(port, {})
            rates = {f"{name}_per_s": rate(now.get(name), before.get(name), seconds) for name in _RATES}
            told[port] = {name: value for name, value in now.items() if name not in _RATES} | known(rates)
            if now.get("link_up"):
                self._was_up.add(port)
        self._before, self._before_s = counts, now_s
        return told

    def _counts(self) -> dict[str, dict[str, float]]:
        """Of ports in use, those of collectives first."""
        found = dict[str, dict[str, float]]()
        for card in _below(self._rdma_folder):
            for port in _below(card / "ports"):
                found[f"{card.name}/{port.name}"] = self._rdma(port)
        for folder in _below(self._ethernet_folder):
            if (folder / "device").exists():
                found[folder.name] = self._ethernet(folder)
        return {name: counters for name, counters in found.items() if counters}

    def _ethernet(self, folder: Path) -> dict[str, float]:
        """Nothing of a port that nobody has enabled, or that has no cable."""
        state, flags = text_of(folder / "operstate"), text_of(folder / "flags") or ""
        if flags[-1:] in _NOT_ENABLED or state not in ("up", "unknown"):
            return {}
        megabits = number_of(folder / "speed")
        statistics = folder / "statistics"
        return known(
            {
                # Some drivers do not tell.
                "link_up": 1.0 if state == "up" else None,
                "link_bits_per_s": megabits * 1e6 if megabits is not None and 0 < megabits < _UNKNOWN_SPEED else None,
                "link_downs": number_of(folder / "carrier_down_count"),
                "received_bytes": number_of(statistics / "rx_bytes"),
                "sent_bytes": number_of(statistics / "tx_bytes"),
                "port_errors": self._sum(statistics, ("rx_errors", "tx_errors")),
            }
        )

    def _rdma(self, folder: Path) -> dict[str, float]:
        """State "4: ACTIVE", rate "400 Gb/sec (4X NDR)"."""
        if as_number((text_of(folder / "state") or "").partition(":")[0]) != _ACTIVE:
            return {}
        gigabits = _GIGABITS.match(text_of(folder / "rate") or "")
        counters, hardware = folder / "counters", folder / "hw_counters"
        received, sent = number_of(counters / "port_rcv_data"), number_of(counters / "port_xmit_data")
        return known(
            {
                "link_up": 1.0,
                "link_bits_per_s": float(gigabits[1]) * 1e9 if gigabits else None,
                "link_downs": number_of(counters / "link_downed"),
                "received_bytes": None if received is None else received * WORD_BYTES,
                "sent_bytes": None if sent is None else sent * WORD_BYTES,
                "port_errors": self._sum(counters, ERRORS),
                "retransmissions": self._sum(hardware, RETRANSMISSIONS),
                "congestion_notifications": number_of(hardware / "np_cnp_sent"),
            }
        )

    def _sum(self, folder: Path, names: tuple[str, ...]) -> float | None:
        """The sum of the counts that there are; None while one of them cannot be read: the sum must not jump."""
        if folder not in self._summed:
            self._summed[folder] = tuple(folder / name for name in names if number_of(folder / name) is not None)
        found = [number_of(path) for path in self._summed[folder]]
        whole = [value for value in found if value is not None]
        return sum(whole) if whole and len(whole) == len(found) else None


_RATES: Final = ("received_bytes", "sent_bytes", "retransmissions", "congestion_notifications")
_NOT_ENABLED: Final = frozenset("02468ace")
"""Last hexadecimal digits of flags without their lowest bit, IFF_UP."""
_UNKNOWN_SPEED: Final = 2**31
_ACTIVE: Final = 4


def _below(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
