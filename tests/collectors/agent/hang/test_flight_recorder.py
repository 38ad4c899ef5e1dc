"""A worker server is asked for a dump, on a real socket: whose it must be, and what if it does not answer."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwatch.agent.hang import flight_recorder
from rankwatch.agent.hang.flight_recorder import fetch


@contextlib.contextmanager
def worker_server(path: Path, answer: bytes) -> Iterator[str]:
    """Answers one request with these bytes; without any it is silent."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as connection:
                connection.recv(4096)
                if answer:
                    connection.sendall(answer)
                else:
                    over.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield str(path)
        over.set()
        thread.join(10)


def test_a_dump_is_what_the_server_of_the_rank_answers(tmp_path: Path) -> None:
    with worker_server(tmp_path / "s", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as path:
        assert fetch(path, os.getpid()) == b"{}"


def test_the_server_of_another_process_is_not_asked(tmp_path: Path) -> None:
    with (
        worker_server(tmp_path / "s", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as path,
        pytest.raises(ConnectionRefusedError, match="not of the rank"),
    ):
        fetch(path, os.getpid() + 1)


def test_a_server_without_a_flight_recorder_gives_no_dump(tmp_path: Path) -> None:
    with (
        worker_server(tmp_path / "s", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as path,
        pytest.raises(ValueError, match="404"),
    ):
        fetch(path, os.getpid())


def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "ANSWER_WITHIN_S", 0.2)
    with worker_server(tmp_path / "s", b"") as path, pytest.raises(TimeoutError):
        fetch(path, os.getpid())


def test_a_dump_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "DUMP_BYTES_MAX", 1)
    with (
        worker_server(tmp_path / "s", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as path,
        pytest.raises(ValueError, match="larger"),
    ):
        fetch(path, os.getpid())
