"""Tables, states and event files; files that grow, are cut or replaced; what is recorded. Lines: `test_reader`."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest

from rankwatch.follow.command import FollowedRank, FollowLoop
from rankwatch.follow.intake import LogIntake, PassedOver
from rankwatch.follow.record_logs import EventFile, LogFormatError
from rankwatch.follow.rows import LoggedStep, LoggedValues, Understood
from rankwatch.follow.sources import FollowedLog
from rankwatch.follow.text_logs import TextLog, TrainerState
from rankwatch.reader import Note, RingReader, StepEntry, ValuesEntry
from tests.support.ranks.recorders import Rank
from tests.support.trainer_logs import nanogpt


def entries(parser, data: bytes, part_bytes: int = 1 << 20):
    intake, found = LogIntake(parser, PassedOver()), []
    for at in range(0, len(data), part_bytes):
        found += intake.feed(data[at : at + part_bytes])
    return [entry for entry in [*found, *intake.flush()] if not isinstance(entry, Understood)]


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table(separator, part_bytes):
    text = "global_step,train/loss,note,rank\r\n1,2.5,x,0\r\n1,9,x,1\r\n2,nan,,0\r\n".replace(",", separator)
    rows = entries(TextLog(is_table=True), text.encode(), part_bytes)
    assert [(row.step, row.values["loss"]) for row in rows[:1]] == [(1, 2.5)]
    assert [row.step for row in rows] == [1, 2]
    assert math.isnan(rows[1].values["loss"])


def test_rows_of_evaluations_in_a_table_are_no_steps():
    text = "epoch,step,train_loss_epoch,train_loss_step,val_loss\n0,49,,2.5,\n0,69,,,2.4\n0,99,2.45,,\n1,99,,2.3,\n"
    rows = entries(TextLog(is_table=True), text.encode())
    assert [type(row) for row in rows] == [LoggedStep, LoggedValues, LoggedValues, LoggedStep]
    assert [row.values["loss"] for row in (rows[0], rows[3])] == [2.5, 2.3]


def test_the_step_of_the_trainer_counts_where_a_table_numbers_its_rows_too():
    text = "_step,_runtime,_timestamp,train/global_step,train/loss\n0,3.5,1.7e9,10,2.5\n1,4.5,1700000001,20,2.4\n"
    rows = entries(TextLog(is_table=True), text.encode())
    assert [(row.step, row.values, row.time_s) for row in rows] == [
        (10, {"loss": 2.5}, 1.7e9),
        (20, {"loss": 2.4}, 1.7e9 + 1),
    ]


def test_the_history_of_a_trainer_state_goes_on_where_it_was():
    parser = LogIntake(TrainerState(), PassedOver())
    history = [{"step": 10, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-4}, {"step": 10, "eval_loss": 2.4}]
    first = [*parser.feed(json.dumps({"log_history": history}).encode()), *parser.flush()][1:]
    assert [type(entry) for entry in first] == [LoggedStep, LoggedValues]
    assert list(parser.feed(b'{"log_history": [{"ste')) == []
    history.append({"step": 20, "loss": 2.3})
    (row,) = parser.feed(json.dumps({"log_history": history}).encode())
    assert (row.step, row.values) == (20, {"loss": 2.3})


@pytest.mark.parametrize("part_bytes", [13, 1 << 20])
def test_event_files_that_tensorboard_writes(part_bytes):
    """TensorBoard 2.21 wrote it: a loss, a norm in the new style, a number of double precision and a text."""
    path = Path(__file__).parents[1] / "golden" / "events.out.tfevents.1"
    rows = entries(EventFile(), path.read_bytes(), part_bytes)
    assert [row.step for row in rows] == [0, 10, 20, 30, 40]
    assert rows[1].values["loss"] == pytest.approx(2.4)
    assert math.isnan(rows[4].values["grad_norm"])
    assert rows[0].time_s > 1.7e9


def test_bytes_of_another_kind_are_no_event_file():
    with pytest.raises(LogFormatError):
        entries(EventFile(), b"\xff" * 100)


def steps(log: FollowedLog) -> list[int]:
    return [entry.step for entry in [*log.read(), *log.flush()] if isinstance(entry, LoggedStep)]


def lines(*numbers: int) -> str:
    return "".join(nanogpt(number, 2.5) for number in numbers)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "train.log"


def test_what_is_appended_is_read_once_and_a_line_with_its_end(path):
    log = FollowedLog(path, None)
    assert steps(log) == []
    path.write_text(lines(1, 2) + nanogpt(3, 2.5)[:10])
    assert steps(log) == [1, 2]
    with path.open("a") as file:
        file.write(nanogpt(3, 2.5)[10:])
    assert steps(log) == [3]
    assert steps(log) == []


@pytest.mark.parametrize("after", [[4], [7, 8, 9, 10]], ids=["cut", "longer"])
def test_a_file_that_was_written_anew_begins_anew(path, after):
    log = FollowedLog(path, None)
    for numbers in ([1, 2, 3], after):
        path.write_text(lines(*numbers))
        assert steps(log) == numbers


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_lightning_which_it_writes_anew_for_a_further_column(tmp_path):
    from lightning.fabric.loggers import CSVLogger

    log, found = FollowedLog(tmp_path, None), []
    logger = CSVLogger(str(tmp_path), flush_logs_every_n_steps=1)
    for step in range(4):
        logger.log_metrics({"train_loss": 2.5 - step / 10}, step)
        found += steps(log)
    logger.log_metrics({"val_loss": 2.4}, 3)
    found += steps(log)
    logger.log_metrics({"train_loss": 2.0}, 4)
    found += steps(log)
    assert found == [0, 1, 2, 3, 4]


def test_of_a_file_that_was_replaced_the_rest_is_read_and_then_the_new_one(path):
    log = FollowedLog(path, None)
    path.write_text(lines(1))
    assert steps(log) == [1]
    old = path.open("a")
    path.rename(path.with_suffix(".1"))
    old.write(lines(2))
    old.close()
    assert steps(log) == [2]
    path.write_text(lines(3))
    assert steps(log) + steps(log) == [3]
    path.unlink()
    assert steps(log) == []


def test_a_long_file_is_read_in_parts(path):
    path.write_text(lines(*range(40_000)))
    log = FollowedLog(path, None)
    first = steps(log)
    assert log.behind
    assert 0 < len(first) < 40_000
    rest = []
    while log.behind:
        rest += steps(log)
    assert first + rest == list(range(40_000))


def test_the_newest_file_of_a_folder_is_followed_and_a_newer_one_takes_its_place(tmp_path):
    log = FollowedLog(tmp_path, None)
    assert steps(log) == []
    for number, name in enumerate(("version_0", "version_1")):
        (tmp_path / name).mkdir()
        table = tmp_path / name / "metrics.csv"
        table.write_text(f"step,loss\n{number},2.0\n")
        os.utime(table, ns=(number * 10**9, number * 10**9))
        assert steps(log) == [number]
        assert (log.format, log.path) == ("csv", table)


def test_the_newest_trainer_state_of_a_folder_goes_on_with_the_last_one(tmp_path):
    log = FollowedLog(tmp_path, None)
    history = []
    for number in (10, 20):
        history.append({"step": number, "loss": 2.0})
        (tmp_path / f"checkpoint-{number}").mkdir()
        state = tmp_path / f"checkpoint-{number}" / "trainer_state.json"
        state.write_text(json.dumps({"log_history": history}))
        os.utime(state, ns=(number * 10**9, number * 10**9))
        assert steps(log)[-1] == number


class Recorded:
    """A followed rank under a fake clock, and what it recorded."""

    def __init__(self, folder: Path) -> None:
        self.rank = Rank(folder)
        self.followed = FollowedRank(self.rank.watch, self.rank.clock.unix_ns)

    def take(self, *steps: int, after_s: float = 0.5, behind: bool = False, **row: float) -> None:
        """Read rows of these steps together, so long after the reading before."""
        self.rank.clock.advance(after_s)
        self.followed.reading(len(steps), behind=behind)
        for step in steps:
            self.followed.take(LoggedStep(step, {"loss": 2.0}, **row))

    @property
    def entries(self) -> list[StepEntry]:
        return [entry for entry in self.rank.entries if isinstance(entry, StepEntry)]

    @property
    def progress(self):
        return RingReader(self.rank.recorder.path).progress()


@pytest.fixture
def recorded(tmp_path) -> Recorded:
    return Recorded(tmp_path)


def test_a_step_takes_as_long_as_the_log_says_else_the_time_since_the_last(recorded):
    recorded.take(10, step_time_s=0.25)
    recorded.take(20)
    recorded.take(30, step_time_s=0.125)
    assert [entry.step_time_s for entry in recorded.entries] == pytest.approx([0.25, 0.05, 0.125])
    recorded.take(40, time_s=100.0)
    recorded.take(50, time_s=102.0)
    assert recorded.entries[-1].step_time_s == pytest.approx(0.2)


def test_the_pace_of_lines_that_were_there_already_is_unknown(recorded):
    recorded.take(1, 2, 3, behind=True)
    recorded.take(4, 5, behind=False)
    recorded.take(6, after_s=2.0)
    assert [entry.step_time_s for entry in recorded.entries] == pytest.approx([0, 0, 0, 0, 0, 2.0])


def test_lines_that_are_read_together_share_the_time_since_the_last_reading(recorded):
    recorded.take(10)
    recorded.take(20, 30, after_s=4.0)
    recorded.take(40, after_s=2.0)
    assert [entry.step_time_s for entry in recorded.entries] == pytest.approx([0, 0.2, 0.2, 0.2])
    assert recorded.rank.notes("declared") == [], "how lines are read is no change of the job"


def test_the_progress_shows_the_step_after_the_newest_and_that_nothing_is_known_of_it(recorded):
    recorded.take(10)
    progress = recorded.progress
    assert (progress.step, progress.phase, progress.state) == (11, "unreported", "running")


def test_a_step_that_goes_back_begins_a_new_attempt_and_one_that_is_repeated_adds_what_is_new(recorded):
    for step in (10, 20, 20, 10, 20):
        recorded.take(step)
    recorded.followed.take(LoggedStep(20, {"loss": 2.0, "grad_norm": 1.5}))
    assert [(entry.step, entry.k) for entry in recorded.entries] == [(10, 0), (20, 0), (10, 1), (20, 1)]
    assert [e.values for e in recorded.rank.entries if isinstance(e, ValuesEntry)] == [{"grad_norm": 1.5}]


def test_a_log_whose_job_has_ended_is_left_in_order_and_a_torn_one_says_why(tmp_path):
    said: list[str] = []
    for name, text, code, last in (
        ("hf", "step 1 loss 2.5\n{'train_runtime': '7.5'}\n", 0, "says that its job has ended"),
        ("run.tfevents", "no such record", 1, "cannot be read as tensorboard"),
    ):
        path = tmp_path / name
        path.write_text(text)
        (tmp_path / f"{name}.rings").mkdir()
        rank = Rank(tmp_path / f"{name}.rings")
        recorder_path = rank.recorder.path
        assert (
            FollowLoop(rank.watch, FollowedLog(path, None), said.append, sleep=lambda _: None).run(lambda: False)
            == code
        )
        assert last in said[-1]
        assert RingReader(recorder_path).progress().state == "left"


def test_it_waits_for_a_file_and_stops_when_it_is_asked_to(tmp_path):
    said: list[str] = []
    rank = Rank(tmp_path)
    asked = iter([False, False, True])
    loop = FollowLoop(rank.watch, FollowedLog(tmp_path / "later.log", None), said.append, sleep=lambda _: None)
    assert loop.run(lambda: next(asked)) == 0
    assert said == [f"waiting for {tmp_path / 'later.log'}"]


class Loop:
    """A follower under a clock that moves while it sleeps."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "train.log"
        self.path.touch()
        self.said: list[str] = []
        self.rank = Rank(folder)
        self.entries: list[object] = []
        self.phase = ""
        """As it was shown at the end."""
        self._s = 0.0

    def run(self, *appended: tuple[float, str]) -> None:
        """Append these texts at these times, and follow until ten seconds after the last one."""
        left = list(appended)

        def sleep(seconds: float) -> None:
            self._s += seconds
            while left and left[0][0] <= self._s:
                with self.path.open("a") as file:
                    file.write(left.pop(0)[1])

        loop = FollowLoop(
            self.rank.watch, FollowedLog(self.path, None), self.said.append, sleep=sleep, monotonic_s=lambda: self._s
        )
        with closing(RingReader(self.rank.recorder.path)) as reader:

            def stopping() -> bool:
                self.phase = reader.progress().phase
                return self._s > appended[-1][0] + 10

            loop.run(stopping)
            self.entries = reader.poll().entries

    def notes(self, kind: str) -> list[Note]:
        return [entry for entry in self.entries if isinstance(entry, Note) and entry.kind == kind]


def test_a_log_that_is_not_understood_is_told_at_once_and_every_ten_minutes(tmp_path):
    loop = Loop(tmp_path)
    loop.run(*((60.0 * minute, "part 7 of the data is there\n" * 50) for minute in range(25)))
    reported = [line for line in loop.said if line.startswith("LOG NOT UNDERSTOOD")]
    assert len(reported) == 3
    assert "--step, --loss and --time" in reported[0]


@pytest.mark.parametrize(("after", "phase"), [("", "log_not_understood"), (lines(1, 2), "unreported")])
def test_the_phase_shows_that_a_log_is_not_understood_until_a_step_is_read(tmp_path, after, phase):
    loop = Loop(tmp_path)
    loop.run((0.2, "part 7 of the data is there\n" * 50 + after))
    assert loop.phase == phase


@pytest.mark.parametrize(
    ("after", "ends"),
    [("", ["OutOfMemoryError"]), (nanogpt(3, 2.5), []), ("retrying\n", ["OutOfMemoryError"])],
    ids=["nothing", "a step", "words"],
)
def test_a_log_that_ends_with_an_exception_is_a_rank_that_is_lost_unless_further_steps_come(tmp_path, after, ends):
    loop = Loop(tmp_path)
    trace = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    loop.run((0.2, lines(1, 2) + trace), (1.5, after))
    assert [note.fields["type"] for note in loop.notes("exception")] == ends
    assert all(note.step == 3 for note in loop.notes("exception"))


def test_of_several_failures_the_first_that_is_no_lost_peer_is_what_a_log_ends_with(tmp_path):
    loop = Loop(tmp_path)
    loop.run(
        (
            0.2,
            lines(1, 2)
            + "[rank0]: RuntimeError: Connection closed by peer [10.0.0.7]:41002\n"
            + "[rank3]: ValueError: shard 17 token=abc is bad\n[rank1]: TypeError: in a handler\n"
            + "[rank2]: RuntimeError: Connection reset by peer\n",
        ),
        (1.5, ""),
    )
    (note,) = loop.notes("exception")
    assert (note.fields["type"], note.fields["message"]) == ("ValueError", "shard 17 token=*** is bad (rank3)")


def test_an_exception_before_the_first_step_was_caught(tmp_path):
    loop = Loop(tmp_path)
    loop.run((0.2, "ImportError: no module named flash_attn\n"), (8.0, lines(1, 2)))
    assert loop.notes("exception") == []
