"""Whoever writes a line into a followed log ends neither its follower nor the watch of its job: it is counted."""

import ast
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rich.text

from rankwatch.children import python_module
from rankwatch.follow.command import FollowedRank, FollowLoop
from rankwatch.follow.fields import FIELDS_MAX
from rankwatch.follow.intake import LogIntake, PassedOver
from rankwatch.follow.record_logs import EventFile
from rankwatch.follow.rows import LoggedStep, Parser
from rankwatch.follow.sources import FollowedLog
from rankwatch.follow.text_logs import (
    LINE_BYTES_MAX,
    ROW_BYTES_MAX,
    RUN_CHARACTERS_MAX,
    STATE_BYTES_MAX,
    TextLog,
    TrainerState,
)
from rankwatch.notices import say
from rankwatch.reader import RingReader, StepEntry
from rankwatch.terminal import json_line, printable
from rankwatch_service import text_log
from rankwatch_service.cli import output
from tests.support.ranks.recorders import Rank
from tests.support.trainer_logs import FORMATS

RECORDED = Path(__file__).parents[1] / "golden" / "events.out.tfevents.1"
PARSERS: dict[str, Callable[[], Parser]] = {
    **dict.fromkeys(FORMATS, TextLog),
    "tensorboard": EventFile,
    "trainer_state": TrainerState,
    "csv": lambda: TextLog(is_table=True),
}


def sample(name: str, *steps: int) -> bytes:
    """What a trainer writes of these steps."""
    if name == "tensorboard":
        return RECORDED.read_bytes()
    if name == "trainer_state":
        return json.dumps({"log_history": [{"step": step, "loss": 2.5} for step in steps]}).encode()
    if name == "csv":
        return b"step,loss\n" + b"".join(b"%d,2.5\n" % step for step in steps)
    return "".join(FORMATS[name](step, 2.5) for step in steps).encode()


def read(name: str, data: bytes) -> tuple[list[int], PassedOver]:
    passed_over = PassedOver()
    intake = LogIntake(PARSERS[name](), passed_over)
    entries = [*intake.feed(data), *intake.flush()]
    return [entry.step for entry in entries if isinstance(entry, LoggedStep)], passed_over


DIGITS = "9" * 5_000
HOSTILE_LINES = {
    "more digits than Python reads": f"step {DIGITS} loss 2.5",
    "more digits than a step has": "step 99999999999999999999 loss 2.5",
    "a step that a recorder cannot hold": f"step {2**47} loss 2.5",
    "a line that is too long": "step 2 loss 2.5 " + "word " * LINE_BYTES_MAX,
    "blanks": "step" + " " * (RUN_CHARACTERS_MAX + 1) + "2 loss 2.5",
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_hostile_line_is_counted_and_those_after_it_are_read(line: str) -> None:
    steps, passed_over = read("plain", sample("plain", 1) + f"{line}\n".encode() + sample("plain", 2))
    assert steps == [1, 2]
    assert passed_over.count == 1, passed_over.first


HOSTILE_ROWS = {
    "a field of 140 KB": f"2,{'x' * 140_000}",
    "a row that is too long": "2," + "1," * ROW_BYTES_MAX,
    "a step of many digits": f"{DIGITS},2.5",
    "an infinite step": "inf,2.5",
    "a step that is none": "nan,2.5",
}


@pytest.mark.parametrize("row", HOSTILE_ROWS.values(), ids=HOSTILE_ROWS)
def test_a_hostile_row_is_counted_and_those_after_it_are_read(row: str) -> None:
    steps, passed_over = read("csv", sample("csv", 1) + f"{row}\n3,2.5\n".encode())
    assert steps == [1, 3]
    assert passed_over.count == 1, passed_over.first


def test_a_table_of_too_many_columns_is_no_step() -> None:
    wide = f"step,{','.join(f'c{number}' for number in range(FIELDS_MAX + 1))}\n1{',1' * (FIELDS_MAX + 1)}\n2,1\n"
    steps, passed_over = read("csv", wide.encode())
    assert (steps, passed_over.count) == ([2], 1)


@pytest.mark.parametrize(
    "entry", ['{"step": 1e999, "loss": 1}', f'{{"step": {"9" * 400}, "loss": 1}}', "7", "[]", '{"step": -1, "loss": 1}']
)
def test_a_hostile_entry_of_a_state_is_counted_and_those_after_it_are_read(entry: str) -> None:
    steps, passed_over = read("trainer_state", f'{{"log_history": [{entry}, {{"step": 2, "loss": 1}}]}}'.encode())
    assert (steps, passed_over.count) == ([2], 1)


@pytest.mark.parametrize(
    "state", ['{"log_history": ' + "[" * 100_000, f'{{"a": {DIGITS}}}', " " * (STATE_BYTES_MAX + 1)]
)
def test_a_hostile_state_is_counted_and_the_next_one_read(state: str) -> None:
    passed_over = PassedOver()
    intake = LogIntake(TrainerState(), passed_over)
    assert [*intake.feed(state.encode()), *intake.flush()] == []
    assert passed_over.count == 1
    further = [*intake.feed(sample("trainer_state", 1)), *intake.flush()]
    assert sum(isinstance(entry, LoggedStep) for entry in further) == 1


def rows_of(log: FollowedLog) -> list[LoggedStep]:
    return [entry for entry in [*log.read(), *log.flush()] if isinstance(entry, LoggedStep)]


def record(message: bytes) -> bytes:
    return len(message).to_bytes(8, "little") + b"\0" * 4 + message + b"\0" * 4


@pytest.mark.parametrize("message", [b"\x0a\xff\xff", b"\xff" * 20, b"\x2a\x02\x0a\x7f", b"\x0f"])
def test_a_hostile_record_is_counted_and_those_after_it_are_read(message: bytes) -> None:
    steps, passed_over = read("tensorboard", record(message) + sample("tensorboard"))
    assert (steps, passed_over.count) == ([0, 10, 20, 30, 40], 1)


def test_after_a_record_without_end_the_rest_of_the_file_is_passed_over_and_a_newer_one_read(tmp_path: Path) -> None:
    (tmp_path / "a.tfevents.1").write_bytes(sample("tensorboard") + b"\xff" * 100)
    log = FollowedLog(tmp_path, None)
    assert len(rows_of(log)) == 5
    assert log.passed_over.count == 1
    (tmp_path / "a.tfevents.2").write_bytes(sample("tensorboard"))
    os.utime(tmp_path / "a.tfevents.1", (0, 0))
    assert len(rows_of(log)) == 5


@pytest.mark.parametrize("name", PARSERS)
def test_whatever_is_written_only_other_lines_are_lost(name: str) -> None:
    """Good lines between pieces that a fuzzer made of good ones; at the end a reader still reads, and has not grown."""
    chance = random.Random(38)
    good = sample(name, 1, 2, 3)
    bits = [
        DIGITS.encode(),
        b"[" * 3_000,
        b"{'a': " * 500,
        b"\0\xff\x1b[31m",
        b'"',
        b",",
        b"\r",
        b"nan",
        b"1e999",
        b"-",
    ]

    def mangled() -> bytes:
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(8)] = chance.choice([*bits, chance.randbytes(9)])
        return bytes(data)

    began_s = time.process_time()
    for _ in range(60):
        passed_over = PassedOver()
        intake = LogIntake(PARSERS[name](), passed_over)
        list(intake.feed(good))
        for _ in range(3):
            list(intake.feed(mangled() + b"\n"))
            list(intake.flush())
        if name != "tensorboard":  # whose records have no end by which the next one could be found
            further = [*intake.feed(b"\n" + sample(name, *range(100, 110))), *intake.flush()]
            assert any(isinstance(entry, LoggedStep) for entry in further), passed_over.first
    assert time.process_time() - began_s < 30


QUADRATIC = {
    "labels": "[" + "1" * LINE_BYTES_MAX,
    "digits": "1" * LINE_BYTES_MAX,
    "words": "a" * LINE_BYTES_MAX,
    "blanks": "step" + " " * LINE_BYTES_MAX,
    "dicts": "{'a': " * (LINE_BYTES_MAX // 6),
    "bars": "1it [" * (LINE_BYTES_MAX // 5),
    "validations": "validation" * (LINE_BYTES_MAX // 10),
}


@pytest.mark.parametrize("line", QUADRATIC.values(), ids=QUADRATIC)
def test_no_line_takes_long(line: str) -> None:
    began_s = time.process_time()
    for _ in range(5):
        list(LogIntake(TextLog(), PassedOver()).feed(f"{line[: LINE_BYTES_MAX - 1]}\n".encode()))
    assert (time.process_time() - began_s) / 5 < 0.5


def followed(folder: Path, text: str) -> tuple[int, list[str], list[int]]:
    """Status, what was said, and the steps recorded."""
    path = folder / "train.log"
    path.write_text(text)
    said: list[str] = []
    rank = Rank(folder)
    rounds = iter([False] * 3 + [True])
    loop = FollowLoop(rank.watch, FollowedLog(path, None), said.append, sleep=lambda _: None)
    place = rank.recorder.path
    status = loop.run(lambda: next(rounds))
    steps = [entry.step for entry in RingReader(place).poll().entries if isinstance(entry, StepEntry)]
    return status, said, steps


def test_the_follower_goes_on_after_hostile_lines_and_says_how_many(tmp_path: Path) -> None:
    bad = f"step {DIGITS} loss 1\nstep 99999999999999999999 loss 1\n"
    status, said, steps = followed(tmp_path, "step 1 loss 2.5\n" + bad + "step 2 loss 2.4\n")
    assert (status, steps) == (0, [1, 2])
    assert "cannot be read" in said[0]
    assert said[-1] == "2 lines were passed over, since they could not be read"


@pytest.mark.parametrize("took", ["nan", "inf", "-5", "1e300"])
def test_a_step_time_that_is_none_is_unknown(tmp_path: Path, took: str) -> None:
    status, _, steps = followed(tmp_path, f"iter 1: loss 2.5, time {took}ms\niter 2: loss 2.4, time 5.00ms\n")
    assert (status, steps) == (0, [1, 2])


def test_a_column_whose_name_is_no_text_is_not_recorded_since_a_service_would_refuse_all_that_is_sent_with_it(
    tmp_path: Path,
) -> None:
    rank = Rank(tmp_path)
    followed = FollowedRank(rank.watch)
    intake = LogIntake(TextLog(is_table=True), PassedOver())
    for entry in [*intake.feed(b"step,loss,\x1b]0;owned\x07\n1,2.5,1\n"), *intake.flush()]:
        if isinstance(entry, LoggedStep):
            followed.take(entry)
    (recorded,) = (entry for entry in rank.entries if isinstance(entry, StepEntry))
    assert recorded.values == {"loss": 2.5}


@pytest.mark.parametrize("name", ["train.log", "metrics.csv", "trainer_state.json", "run.tfevents"])
def test_a_pipe_is_refused_and_waits_for_nobody(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    said: list[str] = []
    loop = FollowLoop(Rank(tmp_path).watch, FollowedLog(tmp_path / name, None), said.append, sleep=lambda _: None)
    assert loop.run(lambda: False) == 1
    assert "only regular files are followed" in said[-1]


def test_a_pipe_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b.log")
    (tmp_path / "a.log").write_text("step 1 loss 2.5\n")
    os.utime(tmp_path / "a.log", (0, 0))
    log = FollowedLog(tmp_path, None)
    assert [row.step for row in rows_of(log)] == [1]


def test_a_file_that_cannot_be_opened_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to(tmp_path / "a.log")
    said: list[str] = []
    log = FollowedLog(tmp_path / "a.log", None)
    log._newest = lambda: ("text", tmp_path / "a.log")  # type: ignore[method-assign]  # it was there when looked for
    assert FollowLoop(Rank(tmp_path).watch, log, said.append, sleep=lambda _: None).run(lambda: False) == 1
    assert "symbolic links" in said[-1]


@pytest.mark.integration
def test_a_real_follower_of_a_pipe_ends_and_one_of_a_file_hears_sigterm(tmp_path: Path) -> None:
    environment = {**os.environ, "RANKWATCH_DIR": str(tmp_path / "rings"), "HOME": str(tmp_path)}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file.log").write_text("step 1 loss 2.5\n\x1b]0;owned\x07\n")

    def follow(name: str) -> subprocess.Popen[str]:
        command = [*python_module("rankwatch_service.cli", "follow", str(tmp_path / name))]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    pipe = follow("pipe")
    assert "only regular files" in pipe.communicate(timeout=60)[1]
    file = follow("file.log")
    assert file.stderr is not None
    while "following" not in (line := file.stderr.readline()):
        assert line
    file.send_signal(signal.SIGTERM)
    file.communicate(timeout=60)
    assert (pipe.returncode, file.returncode) == (1, 0)


ROOT = Path(__file__).parents[2]
HOSTILE = "all\x1b]0;owned\x07_re\x1b[31mduce\x9b2J\u202e"
CLEAN = "all�]0;owned�_re�[31mduce�2J�"
WRITES = frozenset(
    {
        "collectors/rankwatch/notices.py",
        "collectors/rankwatch/agent/device_reader.py",
        "collectors/rankwatch/run/site/sitecustomize.py",
        "service/rankwatch_service/api/__main__.py",
        "service/rankwatch_service/cli/__init__.py",
        "service/rankwatch_service/cli/app.py",
        "service/rankwatch_service/cli/commands/access.py",
        "service/rankwatch_service/cli/commands/incidents.py",
        "service/rankwatch_service/cli/commands/notifications.py",
        "service/rankwatch_service/cli/commands/policy.py",
        "service/rankwatch_service/cli/commands/replay.py",
        "service/rankwatch_service/cli/commands/simulate.py",
        "service/rankwatch_service/cli/job_view.py",
        "service/rankwatch_service/cli/output.py",
        "service/rankwatch_service/cli/views.py",
        "service/rankwatch_service/text_log.py",
        "service/rankwatch_service/up.py",
    }
)
"""Files that write to a terminal: what comes from others passes `printable` or `json_line` there."""


def test_what_a_terminal_obeys_is_replaced_and_lines_stay():
    assert printable(HOSTILE) == CLEAN
    assert printable("two\n\tlines, ünd mehr 中文") == "two\n\tlines, ünd mehr 中文"


def test_json_stays_what_it_was_and_holds_no_sign_that_a_terminal_obeys():
    line = json_line({"name": HOSTILE})
    assert json.loads(line) == {"name": HOSTILE}
    assert line[:-1].isprintable()


def test_lines_for_people_are_text(capsys):
    say(HOSTILE)
    text_log.say(HOSTILE)
    output.note(HOSTILE)
    reported = capsys.readouterr().err
    assert reported.count(CLEAN) == 3
    assert "\x1b" not in reported


def test_tables_and_fields_are_text_and_not_markup(capsys):
    output.print_table(["name"], [[HOSTILE], [rich.text.Text("plain")]], "none")
    output.print_fields([("name", f"[bold]{HOSTILE}")])
    reported = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(reported)
    assert f"[bold]{CLEAN}" in reported


def test_only_known_files_write_to_a_terminal():
    writes, found = ("print", "sys.stdout.write", "sys.stderr.write"), set()
    for path in (*ROOT.glob("collectors/**/*.py"), *ROOT.glob("service/**/*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func) in writes for call in calls):
            found.add(str(path.relative_to(ROOT)))
    assert found <= WRITES
