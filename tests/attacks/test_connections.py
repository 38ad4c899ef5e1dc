"""Whoever reaches the port can neither fill the memory of the api nor keep others out."""

import socket
import time
from pathlib import Path

import pytest

from rankwatch_service.api.http.connection import HEAD_S, HEADERS_MAX
from tests.support.service.process import Http, children

pytestmark = [pytest.mark.integration, pytest.mark.ci]

MB = 1024 * 1024
HALF_OPEN = 350
BEGUN = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def connect(up):
    opened = []

    def connect() -> socket.socket:
        opened.append(up.socket())
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def answer(one: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    received = b""
    try:
        while data := one.recv(65_536):
            received += data
    except ConnectionResetError:
        pass
    return received


def flood(one: socket.socket, piece: bytes, bytes_max: int) -> int:
    """Send a piece again and again until the service has enough; how many bytes it took."""
    sent = 0
    try:
        while sent < bytes_max:
            one.sendall(piece)
            sent += len(piece)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


def resident_mb(up) -> float:
    api = next(pid for name, pid in children(up.process.pid).items() if name == "api")
    pages = int(Path(f"/proc/{api}/statm").read_text().split()[1])
    return pages * 4096 / MB


@pytest.mark.parametrize("piece", [b"a" * 65_536, b"X-A: b\r\n" * 8_192], ids=["one header", "many headers"])
def test_a_head_without_end_is_refused_and_takes_no_memory(up, connect, piece):
    before_mb = resident_mb(up)
    one = connect()
    one.sendall(BEGUN + b"X-Long: ")
    assert flood(one, piece, 60 * MB) < 20 * MB, "the rest lies in buffers of the kernel"
    assert resident_mb(up) - before_mb < 30


def test_who_sends_too_many_headers_is_told_the_limit(connect):
    one = connect()
    one.sendall(BEGUN + b"X-A: b\r\n" * HEADERS_MAX + b"\r\n")
    assert answer(one).startswith(b"HTTP/1.1 431 ")
    other = connect()
    other.sendall(BEGUN + b"Connection: close\r\n" + b"X-A: b\r\n" * (HEADERS_MAX - 2) + b"\r\n")
    assert answer(other).startswith(b"HTTP/1.1 200 ")


def test_of_whoever_has_no_token_no_body_is_awaited(connect):
    for path in ("/livez", "/api/v1/telemetry", "/nothing"):
        one = connect()
        one.sendall(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n".encode() + bytes(1_000)
        )
        assert one.recv(100).split()[1] in (b"401", b"404", b"405")


def test_a_login_is_short(connect):
    one = connect()
    head = "POST /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n"
    one.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode())
    assert one.recv(100).split()[1] == b"413"


def test_half_open_connections_are_closed_and_others_are_answered_meanwhile(up, connect):
    waiting = [connect() for _ in range(HALF_OPEN)]
    for one in waiting:
        try:
            one.sendall(BEGUN)
        except (ConnectionResetError, BrokenPipeError):
            continue  # the oldest made room for the newest
    honest = Http(up.url)
    for _ in range(5):
        assert honest.ask("GET", "/livez", within_s=10).status_code == 200
    honest.close()
    begun_s = time.monotonic()
    answers = [answer(one) for one in waiting]
    assert time.monotonic() - begun_s < 5 * HEAD_S
    assert all(text[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 503") for text in answers)
    assert sum(text.startswith(b"HTTP/1.1 408") for text in answers) > HALF_OPEN / 2
