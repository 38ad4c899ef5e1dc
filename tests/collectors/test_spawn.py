import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rankwatch import layout, spawn

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

STAND_IN = """
import json, os, sys
with open(os.environ["TOLD"], "w") as file:
    facts = {"arguments": sys.argv[1:], "session": os.getsid(0), "parent": os.getppid(), "pid": os.getpid(),
             "environment": sorted(os.environ), "files": sorted(os.listdir("/proc/self/fd"))}
    json.dump(facts, file)
os.replace(os.environ["TOLD"], os.environ["TOLD"] + ".done")
"""


@pytest.fixture
def lock_path(tmp_path):
    return layout.agent_lock_path(str(tmp_path), "gpt")


def test_a_lock_is_seen_while_another_process_holds_it(lock_path):
    assert not spawn.lock_is_held(lock_path)
    command = [sys.executable, "-c", HOLDER, lock_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert spawn.lock_is_held(lock_path)
        holder.stdin.close()
    assert not spawn.lock_is_held(lock_path)


def test_looking_at_the_lock_takes_nothing(lock_path):
    with open(lock_path, "w") as file:
        assert not spawn.lock_is_held(lock_path)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A stand-in for the agent, started by the real spawning: it writes down how it was started."""
    package = tmp_path / "package" / "rankwatch"
    (package / "agent").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "agent" / "__init__.py").write_text("")
    (package / "agent" / "__main__.py").write_text(STAND_IN)
    told = tmp_path / "told"
    env = {**os.environ, "PYTHONPATH": str(package.parent), "TOLD": str(told), "RANK": "3", "TORCHELASTIC_RUN_ID": "r",
           "SLURM_JOB_ID": "1", "RANKWATCH_URL": "http://x"}  # fmt: skip

    def facts() -> dict:
        deadline = time.monotonic() + 30
        while not os.path.exists(f"{told}.done"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with open(f"{told}.done") as file:
            return json.load(file)

    return env, facts


def children() -> set[int]:
    """Our children, those not reaped yet included."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.parent.name))
    return found


def test_an_agent_is_started_with_what_it_needs_and_without_what_makes_a_rank(agent, tmp_path):
    env, facts = agent
    assert spawn.ensure_agent(str(tmp_path), "gpt", env, url="http://u", token_file="/t")
    told = facts()
    assert told["arguments"] == [
        "--dir", str(tmp_path), "--job", "gpt", "--url", "http://u", "--token-file", "/t",
    ]  # fmt: skip
    assert {"RANKWATCH_URL", "PATH"} <= set(told["environment"])
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"} & set(told["environment"])


def test_an_agent_has_a_session_of_its_own_no_open_files_of_ours_and_is_no_child_to_reap(agent, tmp_path):
    env, facts = agent
    before = children()
    with open(tmp_path / "ours", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        spawn.ensure_agent(str(tmp_path), "gpt", env)
        told = facts()
    assert told["session"] not in (os.getsid(0), 0)
    assert told["parent"] != os.getpid()
    assert len(told["files"]) <= 5  # the standard three, the file it writes, the folder it lists
    assert children() <= before  # servers that other tests started may be there


def test_no_agent_is_started_where_one_holds_the_lock(agent, tmp_path, lock_path):
    env, _ = agent
    command = [sys.executable, "-c", HOLDER, lock_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        assert not spawn.ensure_agent(str(tmp_path), "gpt", env)
        holder.stdin.close()
