"""The text log of each role: one JSON object for each line, whoever writes it."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.support.service.process import LOGIN, Http, Role, until

SITE = """
import logging, threading, time, warnings

def write():
    import structlog
    while not structlog.is_configured():
        time.sleep(0.01)
    warnings.warn("a warning\\nof two lines")
    logging.getLogger("uvicorn.error").error("an error of uvicorn")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("some.library").exception("an error %s", "of a library")
    raise LookupError("nobody catches this")

threading.Thread(target=write, daemon=True).start()
"""
"""Runs in each process: what libraries do now and then."""
SAID = {
    "py.warnings": "of two lines",
    "uvicorn.error": "an error of uvicorn",
    "some.library": "an error of a library",
    None: "not_caught",
}


def lines_of(role: Role) -> list[dict[str, object]]:
    return [json.loads(line) for line in (role.folder / "err.txt").read_text().splitlines()]


def said_by(name: str, lines: list[dict[str, object]]) -> bool:
    mine = [line for line in lines if line["role"] == name]
    return all(
        any(line.get("logger") == logger and text in str(line["event"]) for line in mine)
        for logger, text in SAID.items()
    )


@pytest.mark.ci
@pytest.mark.integration
def test_every_line_of_every_role_is_a_json_object_whoever_writes_it(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    folder = tmp_path / "up"
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    role = Role(folder, "up", "--data", str(folder / "data"), "--port", "0", environment=environment)
    role.start()
    url, _login = until("login link", lambda: LOGIN.findall(role.said()))[-1]
    http = Http(url, role.token())
    assert http.ask("POST", "/api/v1/jobs/j/commands", content=b"{").status_code == 422
    http.close()
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03 this is no HTTP\r\n\r\n")
        assert b" 400 " in connection.recv(4096)
    for name in ("up", "api", "stream", "notify"):
        until(f"lines of {name}", lambda name=name: said_by(name, lines_of(role)))
    assert role.stop() == 0
    lines = lines_of(role)
    assert all(line["level"] and line["timestamp"] and line["event"] for line in lines)
    uncaught = [line for line in lines if line["event"] == "not_caught"]
    assert all("LookupError: nobody catches this" in str(line["exception"]) for line in uncaught)
    assert all("ZeroDivisionError" in str(line["exception"]) for line in lines if line.get("logger") == "some.library")


@pytest.mark.integration
def test_a_role_that_cannot_go_on_says_why_in_a_json_object(tmp_path):
    role = Role(tmp_path, "up", "--data", str(tmp_path / "data"), "--port", "0")
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o755)
    role.start()
    assert role.process is not None
    assert role.process.wait(60) == 2
    (line,) = lines_of(role)
    assert (line["role"], line["event"], line["level"]) == ("up", "ended", "error")
    assert "chmod 700" in str(line["reason"])
