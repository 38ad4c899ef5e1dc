"""What keeps telemetry away is said once in the training output: a real script, a real agent, and a service."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch.notices import Notice, NoticeReader, notice_path, notices_here, read_notice, write_notice
from tests.support.agent.process import AgentProcess
from tests.support.agent.service import AgentService, until

SCRIPT = """
import os, sys, time
import rankwatch
watch = rankwatch.start("gpt")
left = 60
for step in watch.steps(2_000):
    watch.log(loss=1.0)
    time.sleep(0.05)
    left -= os.path.exists(sys.argv[1])
    if not left:
        break
"""


def trained(folder: Path, environment: dict[str, str]) -> str:
    """What a script said that trained until the agent had a notice, and for three seconds more."""
    env = {**os.environ, **environment, "RANKWATCH_DIR": str(folder)}
    command = [sys.executable, "-c", SCRIPT, notice_path(str(folder), "gpt")]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=120).stderr


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_refused_is_said_once_while_training_goes_on(tmp_path, status):
    with AgentService() as service, AgentProcess(tmp_path, service.environment):
        service.status = status
        said = trained(tmp_path, service.environment)
        assert said.count("rankwatch:") == 1
        assert f"{service.url} says {status}" in said


def test_what_is_mended_is_taken_back(tmp_path):
    with AgentService() as service, AgentProcess(tmp_path, service.environment) as agent:
        service.status = 401
        trained(tmp_path, service.environment)
        service.status = 202
        until(lambda: read_notice(notice_path(str(tmp_path), "gpt")) is None)
        agent.kill()


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
    reader = NoticeReader(path, said.append)
    reader.look()
    write_notice(path, Notice("a/b", "no\x1b[31m token" + "x" * 10_000, 7))
    for _ in range(3):
        reader.look()
    assert [len(line) for line in said] == [600]
    assert "\x1b" not in said[0]
    assert [notice.job for notice in notices_here({"RANKWATCH_DIR": str(tmp_path)}, 1) if notice.unix_ns == 7] == [
        "a/b"
    ]
    for rubbish in (b"", b"{", b"[]", b'{"job": 1}', b"\xff"):
        Path(path).write_bytes(rubbish)
        reader.look()
    write_notice(path, Notice("a/b", "", 8))
    reader.look()
    assert len(said) == 1
    assert not os.path.exists(path)
