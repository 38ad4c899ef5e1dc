"""What keeps telemetry away is said once in the training output: a real script, a real agent, and a service."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rankwatch.log_lines import JsonLines
from rankwatch.notices import (
    FLOWS_AGAIN,
    LOOK_EVERY_NS,
    SAID_MAX,
    Notice,
    NoticeReader,
    notice_path,
    notices_here,
    read_notice,
    write_notice,
)
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService, until

SCRIPT = """
import os, sys, time
import rankwatch
watch = rankwatch.start("gpt")
left, began = int(sys.argv[2]), time.time()
for step in watch.steps(2_000):
    watch.log(loss=1.0)
    time.sleep(0.05)
    noticed = left < int(sys.argv[2]) or (os.path.exists(sys.argv[1]) and os.path.getmtime(sys.argv[1]) >= began)
    left -= noticed
    if not left:
        break
"""


def trained(folder: Path, environment: dict[str, str], for_s: float = 3.0) -> str:
    """What a script said that trained until the agent had a notice, and for some seconds more."""
    env = {**os.environ, **environment, "RANKWATCH_DIR": str(folder)}
    command = [sys.executable, "-c", SCRIPT, notice_path(str(folder), "gpt"), str(int(for_s / 0.05))]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=120).stderr


@pytest.mark.integration
@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_refused_is_said_once_while_training_goes_on(tmp_path, status):
    with AgentService() as service, AgentProcess(tmp_path, service.environment):
        service.status = status
        said = trained(tmp_path, service.environment)
        assert said.count("rankwatch:") == 1
        assert f"{service.url} says {status}" in said


@pytest.mark.ci
@pytest.mark.integration
def test_the_notice_of_an_earlier_launch_is_not_said_and_a_standing_one_is(tmp_path):
    path = notice_path(str(tmp_path), "gpt")
    write_notice(path, Notice("gpt", "a disk was full last week", 7, held=True))
    with AgentService() as service, AgentProcess(tmp_path, service.environment):
        service.status = 401
        first = trained(tmp_path, service.environment)
        second = trained(tmp_path, service.environment)  # the agent runs on: its trouble is that of this launch too
    for said in (first, second):
        assert "last week" not in said
        assert said.count(f"{service.url} says 401") == 1


@pytest.mark.integration
def test_the_training_output_says_that_telemetry_flows_again(tmp_path):
    with AgentService() as service, AgentProcess(tmp_path, service.environment):
        service.status = 401
        path = notice_path(str(tmp_path), "gpt")

        def mend() -> None:
            until(lambda: read_notice(path) is not None)
            time.sleep(2 * LOOK_EVERY_NS / 1e9)
            service.status = 202

        mending = threading.Thread(target=mend)
        mending.start()
        said = trained(tmp_path, service.environment, for_s=5 * LOOK_EVERY_NS / 1e9)
        mending.join()
        assert read_notice(path) is None
    lines = [line for line in said.splitlines() if line.startswith("rankwatch:")]
    assert len(lines) == 2
    assert "says 401" in lines[0]
    assert lines[1] == f"rankwatch: {FLOWS_AGAIN}"


def test_trouble_that_comes_back_is_said_again_up_to_a_limit(tmp_path):
    path, said = notice_path(str(tmp_path), "gpt"), list[str]()
    reader = NoticeReader(path, 10, said.append)
    for at in range(10, 10 + 2 * SAID_MAX):
        write_notice(path, Notice("gpt", "telemetry stays here", at, held=True))
        reader.look()
        reader.look()
        write_notice(path, Notice("gpt", "", at))
        reader.look()
        reader.look()
    assert said == ["telemetry stays here", FLOWS_AGAIN] * SAID_MAX


def test_what_does_not_keep_telemetry_away_ends_without_a_word(tmp_path):
    path, said = notice_path(str(tmp_path), "gpt"), list[str]()
    reader = NoticeReader(path, 10, said.append)
    write_notice(path, Notice("gpt", "left by an agent that is gone", 9, held=True))
    reader.look()
    write_notice(path, Notice("gpt", "telemetry stays here; a root is wrong", 11, held=True))
    reader.look()
    write_notice(path, Notice("gpt", "a root is wrong", 12))
    reader.look()
    write_notice(path, Notice("gpt", "", 13))
    reader.look()
    assert said == ["telemetry stays here; a root is wrong", FLOWS_AGAIN, "a root is wrong"]


def test_a_place_for_recorders_that_takes_nothing_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    named = str(tmp_path / "file" / "x")
    script = "import rankwatch; watch = rankwatch.start('gpt', agent=False); print(watch.recording)"
    env = {**os.environ, "RANKWATCH_DIR": named, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=env)
    assert done.stdout == "True\n"
    assert f"RANKWATCH_DIR={named} cannot be written; recording in " in done.stderr


def test_a_notice_is_printable_short_and_said_once(tmp_path):
    path, said = notice_path(str(tmp_path), "a/b"), list[str]()
    reader = NoticeReader(path, 0, said.append)
    reader.look()
    write_notice(path, Notice("a/b", "no\x1b[31m token" + "x" * 10_000, 7))
    for _ in range(3):
        reader.look()
    assert [len(line) for line in said] == [600]
    assert "\x1b" not in said[0]
    here = notices_here({"RANKWATCH_DIR": str(tmp_path)}, os.getuid())
    assert [notice.job for notice in here if notice.unix_ns == 7] == ["a/b"]
    for rubbish in (b"", b"{", b"[]", b'{"job": 1}', b"\xff"):
        Path(path).write_bytes(rubbish)
        reader.look()
    write_notice(path, Notice("a/b", "", 8))
    reader.look()
    assert len(said) == 1
    assert not os.path.exists(path)


def line(message: str, *args: object, exc_info: object = None) -> str:
    record = logging.LogRecord("rankwatch.agent.sender", logging.WARNING, __file__, 1, message, args, exc_info)
    record.created = 1_800_000_000.25
    return JsonLines("agent").format(record)


def test_a_line_has_the_fields_of_the_services_log():
    assert json.loads(line("refused: %s", "status 413")) == {
        "role": "agent",
        "logger": "rankwatch.agent.sender",
        "event": "refused: status 413",
        "level": "warning",
        "timestamp": "2027-01-15T08:00:00.250000Z",
    }


def test_quotes_line_ends_and_tracebacks_stay_within_their_line():
    error = OSError('no "space"\nleft')
    written = line("spool ü", exc_info=(OSError, error, None))
    assert "\n" not in written
    assert json.loads(written)["event"] == "spool ü"
    assert 'OSError: no "space"\nleft' in json.loads(written)["exception"]
