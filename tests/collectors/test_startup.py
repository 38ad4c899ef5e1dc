"""`rankwatch.start` in real processes: how they end, what they leave and cannot break, and the agent they start."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rankwatch import layout, spawn
from rankwatch.loop.loop_exit import described
from rankwatch.output.tail import kept_lines
from rankwatch.reader import RingReader

PROLOGUE = """
import os, sys, time, signal; signal.signal(signal.SIGINT, signal.default_int_handler)
import rankwatch
watch = rankwatch.start("gpt", agent=False)
def train(steps=3):
    for step in watch.steps(steps):
        watch.log(loss=1.0)
"""
"""Interruptions are received: a shell's background job, as these tests may be, ignores them, and so do its children."""


class Script:
    """A training script in a process of its own."""

    def __init__(self, directory, body: str, **env: str) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + body],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANKWATCH_DIR": str(directory), **env},
        )

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    @property
    def ring(self) -> str:
        (name,) = [name for name in os.listdir(self.directory) if name.endswith(layout.RING_SUFFIX)]
        return str(self.directory / name)

    def read(self):
        reader = RingReader(self.ring)
        try:
            return reader.poll().entries, reader.progress(), reader.header
        finally:
            reader.close()

    def notes(self, kind: str) -> list[dict]:
        return [dict(entry.fields) for entry in self.read()[0] if getattr(entry, "kind", None) == kind]


@pytest.fixture
def script(tmp_path):
    started = []

    def start(body: str, **env: str) -> Script:
        started.append(Script(tmp_path, body, **env))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("body", ["train()", "for _ in range(3):\n    with watch.step(): pass"])
def test_a_script_that_ends_leaves_its_steps_and_has_left(script, body):
    done = script(body)
    assert done.end() == (0, "")
    entries, progress, header = done.read()
    assert [entry.step for entry in entries if hasattr(entry, "busy_s")] == [0, 1, 2]
    assert (progress.state, progress.step) == ("left", 2)
    assert header.identity["source"] == "single"
    assert header.pid == done.process.pid


def test_an_exception_is_noted_shown_as_always_and_the_rank_has_not_left(script):
    failed = script("for step in watch.steps(9):\n    if step == 2: raise ConnectionError('peer gone')")
    status, errors = failed.end()
    assert status == 1
    assert "ConnectionError: peer gone" in errors
    (note,) = failed.notes("exception")
    where = {"where": "<string>:9 in <module>", "code": 1, "left": False}
    assert note == {"type": "ConnectionError", "message": "peer gone", **where}
    assert failed.read()[1].state == "running"
    assert failed.read()[1].step == 2


def test_a_loop_that_was_broken_off_is_reported_when_the_script_ends(script):
    done = script("for step in watch.steps(9):\n    if step == 2: break")
    assert done.end() == (0, "")
    assert done.read()[1].state == "left"
    assert done.notes("rank_left") == [{"reason": "break", "where": "<string>:9 in <module>"}]


INTERRUPTED = "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"


@pytest.mark.parametrize(
    ("body", "status", "reported"),
    [
        (
            "def check():\n    sys.exit(3)\nwith watch.step():\n    check()",
            3,
            {"type": "SystemExit", "code": 3, "where": "<string>:9 in check"},
        ),
        (
            "begin = rankwatch.loop.Loop.begin\n"
            "def leave(loop, step, **how): return sys.exit(3) if step == 2 else begin(loop, step, **how)\n"
            "rankwatch.loop.Loop.begin = leave\n"
            "train()",
            3,
            {"type": "SystemExit", "code": 3},
        ),
        (
            "try:\n"
            "    with watch.step():\n"
            f"        try: {INTERRUPTED}\n"
            "        except KeyboardInterrupt: sys.exit(1)\n"
            "finally: pass",
            1,
            {"type": "KeyboardInterrupt", "message": "then SystemExit: 1", "code": 1},
        ),
        (
            f"try:\n    for step in watch.steps(9): {INTERRUPTED}\n"
            "finally: raise RuntimeError('Connection closed by peer')",
            1,
            {"type": "KeyboardInterrupt", "message": "then RuntimeError: Connection closed by peer"},
        ),
        (
            "described, twice = rankwatch.loop.loop_exit.described, []\n"
            "def interrupted_again(error, trace):\n"
            "    if not twice: twice.append(1); raise KeyboardInterrupt\n"
            "    return described(error, trace)\n"
            "rankwatch.loop.loop_exit.described = interrupted_again\n"
            f"for step in watch.steps(9): {INTERRUPTED}",
            -signal.SIGINT,
            {"type": "KeyboardInterrupt"},
        ),
    ],
    ids=[
        "in the middle of a step",
        "between two steps",
        "an interruption that the script turns into a status",
        "a clean-up that fails after an interruption",
        "a second interruption",
    ],
)
def test_a_process_that_ends_before_its_loop_has_not_left_and_tells_why(script, body, status, reported):
    ended = script(body)
    assert ended.end()[0] == status
    assert ended.read()[1].state == "running"
    (note,) = ended.notes("exception")
    assert reported.items() <= note.items()


def test_an_error_at_a_prompt_ends_nothing(tmp_path):
    lines = "with watch.step(): 1 / 0\n\ntrain()\n"
    prompt = subprocess.run(
        [sys.executable, "-i", "-c", PROLOGUE],
        input=lines,
        env={**os.environ, "RANKWATCH_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (prompt.returncode, "ZeroDivisionError" in prompt.stderr) == (0, True)
    (ring,) = tmp_path.glob(f"*{layout.RING_SUFFIX}")
    reader = RingReader(str(ring))
    entries = reader.poll().entries
    assert [entry.step for entry in entries if hasattr(entry, "busy_s")] == [0, 1, 2]
    assert [entry.kind for entry in entries if getattr(entry, "kind", None) == "exception"] == []
    assert reader.progress().state == "left"
    reader.close()


CHILD = """
import multiprocessing, sys, rankwatch
def work():
    watch = rankwatch.start("gpt", agent=False)
    for step in watch.steps(9):
        if step == 2: raise IndexError("Target 8 is out of bounds")
def wrapped():
    try: work()
    except Exception: sys.exit(1)
if __name__ == "__main__":
    process = multiprocessing.get_context("METHOD").Process(target=TARGET)
    process.start(); process.join(); sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("target", ["work", "wrapped"], ids=["uncaught", "as torch's spawn turns it into a status"])
def test_what_ends_a_process_of_multiprocessing_is_noted(tmp_path, method, target):
    file = tmp_path / "train.py"
    file.write_text(CHILD.replace("METHOD", method).replace("TARGET", target))
    environment = {**os.environ, "RANKWATCH_DIR": str(tmp_path)}
    assert subprocess.run([sys.executable, file], env=environment, capture_output=True, check=False).returncode == 1
    (ring,) = tmp_path.glob(f"*{layout.RING_SUFFIX}")
    reader = RingReader(str(ring))
    (note,) = [dict(entry.fields) for entry in reader.poll().entries if getattr(entry, "kind", None) == "exception"]
    reader.close()
    assert (note["type"], note["message"], note["code"]) == ("IndexError", "Target 8 is out of bounds", 1)
    assert note["where"].endswith("train.py:6 in work")


def test_a_loop_that_exits_tells_where_it_was_broken_off(script):
    ended = script("def check():\n    sys.exit(3)\nfor step in watch.steps(9):\n    if step == 2: check()")
    assert ended.end()[0] == 3
    reported = ended.notes("rank_left") or ended.notes("exception")  # from Python 3.12 on the exception itself is seen
    assert reported[0]["where"] in ("<string>:11 in <module>", "<string>:9 in check")


def test_a_process_that_takes_its_time_to_shut_down_holds_its_recorder_until_it_is_gone(script):
    ended = script(
        "import atexit\n"
        "atexit.unregister(watch.at_exit)\n"
        "atexit.register(lambda: (print('down', flush=True), time.sleep(60)))\n"
        "atexit.register(watch.at_exit)\n"
        "train()"
    )
    assert ended.line() == "down"
    reader = RingReader(ended.ring)
    assert (reader.progress().state, reader.owner_alive()) == ("left", True)
    ended.process.kill()
    ended.end()
    assert not reader.owner_alive()
    reader.close()


def test_an_exception_after_the_loop_says_that_the_loop_was_over(script):
    failed = script("train()\nraise OSError('disk full')")
    assert failed.end()[0] == 1
    assert [note["left"] for note in failed.notes("exception")] == [True]


def test_a_killed_process_leaves_everything_up_to_its_last_step(script):
    killed = script("for step in watch.steps(10**9):\n    print(step, flush=True)\n    time.sleep(0.001)")
    while killed.line() != "20":
        pass
    killed.process.send_signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    entries, progress, _ = killed.read()
    assert [entry.step for entry in entries] == list(range(len(entries)))
    assert progress.step >= 20
    assert progress.state == "running"


def test_forked_children_write_nothing_and_their_end_changes_nothing(script):
    done = script(
        "import multiprocessing\n"
        "def work(number):\n"
        "    for step in watch.steps(5, start=100): watch.log(loss=1.0)\n"
        "    return watch.recording\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    assert pool.map(work, range(4)) == [False] * 4\n"
        "assert watch.recording\n"
        "train()"
    )
    assert done.end() == (0, "")
    assert [entry.step for entry in done.read()[0] if hasattr(entry, "busy_s")] == [0, 1, 2]


def test_the_stack_signal_writes_where_the_process_stands_even_in_c_code(script):
    persistent = script(
        "import threading\n"
        "def stand_here():\n"
        "    print('ready', flush=True)\n"
        "    threading.Lock().acquire() or None\n"
        "    lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
        "with watch.step(): stand_here()"
    )
    assert persistent.line() == "ready"
    number = persistent.read()[2].identity["stack_signal"]
    assert number == signal.SIGRTMIN + 7
    deadline = time.monotonic() + 30
    text = ""
    while "in stand_here" not in text:
        assert time.monotonic() < deadline
        persistent.process.send_signal(number)
        time.sleep(0.05)
        with open(layout.stack_path(persistent.ring)) as file:
            text = file.read()
    assert persistent.process.poll() is None
    beside = Path(persistent.ring).parent
    assert {path.name: path.stat().st_mode & 0o077 for path in beside.iterdir()} == dict.fromkeys(os.listdir(beside), 0)


def test_a_signal_that_the_job_uses_itself_is_left_to_it(tmp_path):
    body = (
        "import signal, os, sys\n"
        "signal.signal(signal.SIGRTMIN + 7, lambda *_: print('mine', flush=True))\n"
        "import rankwatch\n"
        "watch = rankwatch.start('gpt', agent=False)\n"
        "os.kill(os.getpid(), signal.SIGRTMIN + 7)\n"
    )
    env = {**os.environ, "RANKWATCH_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", body], check=True, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout == "mine\n"


def test_an_unusable_place_is_one_warning_and_training_goes_on(script, tmp_path):
    (tmp_path / "file").write_text("")
    body = "train(); print(watch.recording, watch.errors)"
    nowhere = str(tmp_path / "file" / "x")
    code = "import rankwatch.startup as s; s.directories = lambda env, uid: [env['RANKWATCH_DIR']]\n" + PROLOGUE + body
    env = {**os.environ, "RANKWATCH_DIR": nowhere}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout == "False 0\n"
    assert done.stderr.count("RuntimeWarning") == 1
    assert "rankwatch records nothing" in done.stderr


def test_an_agent_that_cannot_be_started_does_not_stop_the_job(script):
    body = (
        "import rankwatch.startup\n"
        "def refuse(*a, **k): raise OSError('no processes left')\n"
        "rankwatch.startup.ensure_agent = refuse\n"
        "watch = rankwatch.start('gpt', launch='other')\n"
        "train()"
    )
    status, said = script(body).end()
    assert status == 0
    assert said == "rankwatch: no agent could be started, so nothing is sent to the service: no processes left\n"


@pytest.mark.parametrize(("restarts", "relaunches"), [("3", True), ("1", False)])
def test_torchrun_with_restarts_left_relaunches(script, restarts, relaunches):
    env = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "1"}
    done = script("train()", **env, TORCHELASTIC_MAX_RESTARTS=restarts)
    assert done.end() == (0, "")
    header = done.read()[2]
    assert ("relaunch" in header.identity["can"]) is relaunches
    assert header.identity["launch"] == "r-1"


def test_capture_and_restore_mean_the_watch_that_was_started(script):
    done = script(
        "class Model:\n"
        "    w = 1\n"
        "    def state_dict(self): return {'w': self.w}\n"
        "    def load_state_dict(self, state): self.w = state['w']\n"
        "model = Model()\n"
        "watch.state(model=model)\n"
        "kept = rankwatch.capture(5)\n"
        "model.w = 2\n"
        "assert rankwatch.restore(kept) == 5\n"
        "assert model.w == 1"
    )
    assert done.end() == (0, "")


def test_without_a_start_there_is_nothing_to_capture():
    code = "import rankwatch\ntry:\n    rankwatch.capture(0)\nexcept ValueError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "rankwatch.start" in done.stdout


def test_the_watch_starts_no_thread_opens_no_socket_and_takes_no_signal_that_ends_a_process(script):
    done = script(
        "train()\n"
        "assert [*map(signal.getsignal, (2, 15))] == [signal.default_int_handler, signal.SIG_DFL], 'SIGINT, SIGTERM'\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
        "assert not any('socket' in os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{fd}'))"
    )
    assert done.end() == (0, "")


def test_two_jobs_of_one_name_on_one_host_are_reported_in_the_training_output(script):
    first = script("print('in', flush=True); time.sleep(60)", RANKWATCH_LAUNCH="first")
    assert first.line() == "in"
    for launch, reported in (("first", False), ("second", True)):
        other = script("print('in', flush=True)", RANKWATCH_LAUNCH=launch)
        _, errors = other.end()
        assert ("job 'gpt' already trains on this host as launch 'first'" in errors) is reported
    first.process.kill()
    first.end()
    after = script("print('in', flush=True)", RANKWATCH_LAUNCH="third")
    assert "already trains on this host" not in after.end()[1]


SAVED = os.path.abspath("saved")
DECLARED = [
    ({}, "", None),
    ({"lockstep": False}, "", False),
    ({"checkpoint_roots": ["/ckpt/", "s3://bucket/run"]}, "", ["/ckpt", "s3://bucket/run"]),
    ({}, "/ckpt, s3://bucket/run", ["/ckpt", "s3://bucket/run"]),
    ({"checkpoint_roots": ["/mine"]}, "/ckpt", ["/mine"]),
    ({"checkpoint_roots": ["saved"]}, "", ["saved", SAVED]),
    ({"checkpoint_roots": [SAVED]}, "", [SAVED, "saved"]),
    ({"job": ""}, "", "the job has no name"),
    ({"grace_s": -1}, "", "grace_s must be 0 to 3600 seconds"),
    ({"checkpoint_roots": ["/"]}, "", "'/' cannot be a checkpoint root: it holds every file"),
    ({"checkpoint_roots": "/ckpt"}, "", "checkpoint_roots must be a list of folders and URLs"),
    ({"checkpoint_roots": list("abcdefghi")}, "", "checkpoint_roots takes at most 8 folders and URLs, not 9"),
]


def test_what_a_start_declares_is_in_the_identity_and_a_mistake_is_a_value_error(script):
    done = script(
        f"for said, os.environ['RANKWATCH_CHECKPOINT_ROOTS'], told in {DECLARED}:\n"
        "    try: found = rankwatch.start(**{'job': 'gpt', 'agent': False, **said})._recorder._identity\n"
        "    except ValueError as error: assert str(error).startswith(told), error\n"
        "    else: assert found.get('checkpoint_roots', found.get('lockstep')) == told, (said, found)"
    )
    assert done.end() == (0, "")


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

STAND_IN = """
import json, os, sys
with open(os.environ["REPORTED"], "w") as file:
    facts = {"arguments": sys.argv[1:], "session": os.getsid(0), "parent": os.getppid(), "pid": os.getpid(),
             "environment": sorted(os.environ), "files": sorted(os.listdir("/proc/self/fd"))}
    json.dump(facts, file)
os.replace(os.environ["REPORTED"], os.environ["REPORTED"] + ".done")
"""


@pytest.fixture
def lock_path(tmp_path):
    return layout.agent_lock_path(str(tmp_path), "gpt")


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A stand-in for the agent, started by the real spawning: it writes down how it was started."""
    package = tmp_path / "package" / "rankwatch"
    (package / "agent").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "agent" / "__init__.py").write_text("")
    (package / "agent" / "__main__.py").write_text(STAND_IN)
    reported = tmp_path / "told"
    env = {**os.environ, "PYTHONPATH": str(package.parent), "REPORTED": str(reported), "RANK": "3",
           "TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "1", "RANKWATCH_URL": "http://x"}  # fmt: skip

    def facts() -> dict:
        deadline = time.monotonic() + 30
        while not os.path.exists(f"{reported}.done"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with open(f"{reported}.done") as file:
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
    reported = facts()
    assert reported["arguments"] == [
        "--dir", str(tmp_path), "--job", "gpt", "--url", "http://u", "--token-file", "/t",
    ]  # fmt: skip
    assert {"RANKWATCH_URL", "PATH"} <= set(reported["environment"])
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"} & set(reported["environment"])


def test_an_agent_has_a_session_of_its_own_no_open_files_of_ours_and_is_no_child_to_reap(agent, tmp_path):
    env, facts = agent
    before = children()
    with open(tmp_path / "ours", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        spawn.ensure_agent(str(tmp_path), "gpt", env)
        reported = facts()
    assert reported["session"] not in (os.getsid(0), 0)
    assert reported["parent"] != os.getpid()
    assert len(reported["files"]) <= 5  # the standard three, the file it writes, the folder it lists
    assert children() <= before  # servers that other tests started may be there


def test_no_agent_is_started_where_one_holds_the_lock(agent, tmp_path, lock_path):
    env, _ = agent
    command = [sys.executable, "-c", HOLDER, lock_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        assert not spawn.ensure_agent(str(tmp_path), "gpt", env)
        holder.stdin.close()


def test_the_end_of_what_it_prints_is_kept_and_the_log_that_a_launcher_writes_is_declared(script, tmp_path):
    running = script(
        "print('hello'); raise ValueError('bad')", RANKWATCH_RANK_LOGS="logs/%j-{rank}.err", SLURM_JOB_ID="7"
    )
    assert running.end()[0] == 1
    texts = [line.text for line in kept_lines(layout.output_path(running.ring))]
    assert texts[0] == "hello"
    assert texts[-1] == "ValueError: bad"
    assert running.read()[2].identity["rank_log"] == os.path.abspath("logs/7-0.err")


def test_nothing_of_its_output_is_kept_where_nobody_wants_it(script):
    running = script("print('hello')", RANKWATCH_RANK_LOGS="none")
    assert running.end()[0] == 0
    assert not os.path.exists(layout.output_path(running.ring))
    assert "rank_log" not in running.read()[2].identity


def test_an_error_in_a_worker_of_a_data_loader_is_noted_with_its_cause():
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  x\n"
    reported = described(ValueError(f"{text}ValueError: sample 320: corrupt shard\n"), None)
    assert reported["message"] == "sample 320: corrupt shard (Caught ValueError in DataLoader worker process 0)"
    assert described(ValueError("Caught up"), None)["message"] == "Caught up"
