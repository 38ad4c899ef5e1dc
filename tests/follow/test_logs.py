"""What is read of each format, in whatever parts it arrives; files that grow, are cut or replaced; what is recorded."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from rankwatch.follow.command import FollowedRank, FollowLoop
from rankwatch.follow.intake import LogIntake, PassedOver
from rankwatch.follow.record_logs import EventFile, LogFormatError
from rankwatch.follow.rows import CsvTable, End, LoggedStep, LoggedValues, TrainerState, known_name
from rankwatch.follow.sources import FollowedLog
from rankwatch.follow.text_logs import TextLog
from rankwatch.reader import RingReader, StepEntry, ValuesEntry
from tests.support.ranks.recorders import Rank
from tests.support.trainer_logs import FORMATS, nanogpt


def entries(parser, data: bytes, part_bytes: int = 1 << 20):
    intake, found = LogIntake(parser, PassedOver()), []
    for at in range(0, len(data), part_bytes):
        found += intake.feed(data[at : at + part_bytes])
    return [*found, *intake.flush()]


@pytest.mark.parametrize("part_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", FORMATS)
def test_lines_of_trainers(name, part_bytes):
    text = "a line of another kind\n" + "".join(FORMATS[name](step, 2.5 - step / 100) for step in range(1, 6))
    rows = entries(TextLog(), text.encode(), part_bytes)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    assert [row.values["loss"] for row in rows] == pytest.approx([2.49, 2.48, 2.47, 2.46, 2.45])
    if name != "nanogpt":
        assert rows[0].values["grad_norm"] == 1.25
    if name in ("megatron", "nanogpt", "plain"):
        assert rows[0].step_time_s == 0.052
    if name == "torchtitan":
        assert rows[1].time_s - rows[0].time_s == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_loss_that_is_not_finite(name):
    (row,) = entries(TextLog(), FORMATS[name](7, math.nan).encode())
    assert (row.step, math.isnan(row.values["loss"])) == (7, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            " validation loss at iteration 10 | lm loss value: 2.1E+00 | lm loss PPL: 8.1E+00 | \n",
            "validation lm loss value",
        ),
        (
            " validation-code loss at iteration 10 on test set | lm loss value: 2.1E+00 | lm loss PPL: 8.1E+00 | \n",
            "validation lm loss value",
        ),
        ("step 250: train loss 2.1000, val loss 2.2000\n", "validation loss"),
        ("step:250/1750 val_loss:3.2 train_time:1000ms step_avg:4.00ms\n", "val loss"),
        ("[titan] x - validate step: 10  loss:  2.1000  memory:  1.00GiB(2.00%)  tps: 1,000\n", "validation loss"),
        ("{'eval_loss': '2.1', 'eval_runtime': '1.5', 'epoch': '1'}\n", "eval_loss"),
    ],
)
def test_evaluations_are_no_steps(text, expected):
    (values,) = entries(TextLog(), text.encode())
    assert isinstance(values, LoggedValues)
    assert expected in values.values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("megatron", "[after training is done] datetime: 2025-11-23 00:00:00\n"),
        ("torchtitan", "[rank0]:[titan] 2025 - root - INFO - Training completed\n"),
        ("huggingface", "{'train_runtime': '7.5', 'train_loss': '3.9', 'epoch': '0.6'}\n"),
    ],
)
def test_the_end_of_training(name, text):
    *_, end = entries(TextLog(), (FORMATS[name](1, 2.0) + text).encode())
    assert end == End()
    if name == "megatron":  # another rank prints it than the steps
        *_, end = entries(TextLog(), f"[default7]:{FORMATS[name](1, 2.0)}[default0]:{text}".encode())
        assert end == End()


def test_lines_of_hugging_face_have_the_step_of_the_progress_bar_and_without_one_are_counted():
    line = "{'loss': 2.3, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
    rows = entries(TextLog("huggingface"), (line * 2).encode())
    assert [row.step for row in rows] == [1, 2]
    assert math.isnan(rows[0].values["grad_norm"])
    bar = "\r 10%|█         | 50/500 [00:01<00:09]\r 20%|██        | 2/10 [00:00<00:01]"
    (row,) = entries(TextLog("huggingface"), (bar + line).encode())
    assert row.step == 50


def test_a_progress_bar_that_goes_back_is_a_training_that_was_resumed():
    line = "{'loss': 2.3, 'epoch': 0.1}\n"
    text = "".join(f"\r 10%|█         | {step}/500 [00:01<00:09]{line}" for step in (90, 100, 60, 70))
    assert [row.step for row in entries(TextLog("huggingface"), text.encode())] == [90, 100, 60, 70]


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("step    3/10 | train loss 5.27 | norm 30.2 | lr 1.0e-04 | (1000.00 ms | 4000 tok/s)", 3, (5.27, 30.2, 1e-4)),
        ("step 3: train loss 5.270000 (took 1000.000000 ms)", 3, (5.27, None, None)),
        ("step 00003/21400 (0.01%) | loss: 5.27 | lrm: 1.00 | dt: 1000.00ms | mfu: 40.1", 3, (5.27, None, None)),
        ("step:3/1750 train_loss:5.27 train_time:9000ms step_avg:1000.00ms", 3, (5.27, None, None)),
        ("Epoch 1, Iteration 3: Loss = 5.27, learning rate = 1e-4, took 1000ms", 3, (5.27, None, 1e-4)),
    ],
)
def test_plain_lines_of_loops(line, step, values):
    (row,) = entries(TextLog(), f"{line}\n".encode())
    assert (row.step, row.step_time_s) == (step, 1.0)
    assert tuple(row.values.get(name) for name in ("loss", "grad_norm", "lr")) == values


@pytest.mark.parametrize(
    "line", ["step 3: val accuracy 0.5", "loss 2.3", "step 3: aux loss 0.1", "saved step 3 after 4 epochs"]
)
def test_lines_without_a_step_or_its_loss_are_passed_over(line):
    assert entries(TextLog(), f"{line}\n".encode()) == []


def test_bars_of_several_epochs_are_numbered_on_and_those_of_evaluations_are_passed_over():
    bars = [
        "Epoch 0:  50%|#####     | 1/2 [00:00<00:00,  9.90it/s, v_num=0, train_loss=2.50]",
        "Epoch 0: 100%|##########| 2/2 [00:00<00:00,  9.90it/s, v_num=0, train_loss=2.40]",
        "Validation:  10%|#         | 1/10 [00:00<00:00, 50.00it/s, loss=9.00]",
        "Epoch 1:  50%|#####     | 1/2 [00:00<00:00,  9.90it/s, v_num=0, train_loss=2.30]",
    ]
    rows = entries(TextLog(), "".join(f"\r{bar}" for bar in bars).encode() + b"\n")
    assert [(row.step, row.values["loss"]) for row in rows] == [(1, 2.5), (2, 2.4), (3, 2.3)]


@pytest.mark.parametrize("prefix", ["[rank{}]:", "[default{}]:", "[1,{}]<stdout>: ", "{}: ", "  {}: "])
@pytest.mark.parametrize("name", FORMATS)
def test_of_several_ranks_the_first_that_reports_a_step_is_followed(name, prefix):
    def line(rank, step, loss):
        return prefix.format(rank) + FORMATS[name](step, loss).removeprefix("[rank0]:")

    text = prefix.format(0) + "starting\n" + line(3, 1, 2.5) + line(1, 1, 9.0) + line(3, 2, 2.4) + line(1, 1, 9.0)
    rows = entries(TextLog(), text.encode())
    assert [(row.step, row.values["loss"]) for row in rows] == [(1, 2.5), (2, 2.4)]


def test_a_message_of_another_rank_between_lines_without_a_label_is_passed_over():
    text = nanogpt(1, 2.5) + "[rank1]: Traceback of iter 9: loss 9.0, time 1.0ms\n" + nanogpt(2, 2.4)
    assert [row.step for row in entries(TextLog(), text.encode())] == [1, 2]


def test_a_more_particular_format_takes_the_place_of_plain_lines():
    text = "step 7: loss 9.0 of the first batch\n" + nanogpt(8, 2.5) + "step 9: loss 9.0\n"
    assert [(row.step, row.values["loss"]) for row in entries(TextLog(), text.encode())] == [(7, 9.0), (8, 2.5)]


def test_names_of_hugging_face_may_have_any_signs_and_the_efficiency_that_nanogpt_does_not_know_yet_is_left_out():
    line = "{'loss': 2.3, 'memory/max_active (GiB)': '1.5', 'rewards/a-b/mean': 0.5, 'ppl': None, 'epoch': 1}\n"
    (row,) = entries(TextLog(), line.encode())
    assert row.values == {"loss": 2.3, "memory/max_active (GiB)": 1.5, "rewards/a-b/mean": 0.5, "epoch": 1.0}
    (row,) = entries(TextLog(), b"iter 0: loss 4.2874, time 40072.30ms, mfu -100.00%\n")
    assert row.values == {"loss": 4.2874}


def test_a_binary_file_is_no_log():
    assert entries(TextLog(), bytes(range(256)) * 2_000) == []


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table(separator, part_bytes):
    text = "global_step,train/loss,note,rank\r\n1,2.5,x,0\r\n1,9,x,1\r\n2,nan,,0\r\n".replace(",", separator)
    rows = entries(CsvTable(), text.encode(), part_bytes)
    assert [(row.step, row.values["loss"]) for row in rows[:1]] == [(1, 2.5)]
    assert [row.step for row in rows] == [1, 2]
    assert math.isnan(rows[1].values["loss"])


def test_rows_of_evaluations_in_a_table_are_no_steps():
    text = "epoch,step,train_loss_epoch,train_loss_step,val_loss\n0,49,,2.5,\n0,69,,,2.4\n0,99,2.45,,\n1,99,,2.3,\n"
    rows = entries(CsvTable(), text.encode())
    assert [type(row) for row in rows] == [LoggedStep, LoggedValues, LoggedValues, LoggedStep]
    assert [row.values["loss"] for row in (rows[0], rows[3])] == [2.5, 2.3]


def test_the_step_of_the_trainer_counts_where_a_table_numbers_its_rows_too():
    text = "_step,_runtime,_timestamp,train/global_step,train/loss\n0,3.5,1.7e9,10,2.5\n1,4.5,1700000001,20,2.4\n"
    rows = entries(CsvTable(), text.encode())
    assert [(row.step, row.values, row.time_s) for row in rows] == [
        (10, {"loss": 2.5}, 1.7e9),
        (20, {"loss": 2.4}, 1.7e9 + 1),
    ]


def test_the_history_of_a_trainer_state_goes_on_where_it_was():
    parser = LogIntake(TrainerState(), PassedOver())
    history = [{"step": 10, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-4}, {"step": 10, "eval_loss": 2.4}]
    first = list(parser.feed(json.dumps({"log_history": history}).encode()))
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


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("train/loss", "loss"),
        ("train_loss", "loss"),
        ("lm loss", "loss"),
        ("loss_metrics/global_avg_loss", "loss"),
        ("eval/loss", "eval/loss"),
        ("train/grad-norm", "grad_norm"),
        ("Train/LR", "lr"),
        ("lm loss validation", "lm loss validation"),
    ],
)
def test_names_that_detectors_know(name, known):
    assert known_name(name) == known


def steps(log: FollowedLog) -> list[int]:
    return [entry.step for entry in log.read() if isinstance(entry, LoggedStep)]


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


def test_a_step_that_goes_back_begins_a_new_attempt_and_one_that_is_repeated_adds_values(recorded):
    for step in (10, 20, 20, 10, 20):
        recorded.take(step)
    assert [(entry.step, entry.k) for entry in recorded.entries] == [(10, 0), (20, 0), (10, 1), (20, 1)]
    assert [e.step for e in recorded.rank.entries if isinstance(e, ValuesEntry)] == [20]


def test_a_log_whose_job_has_ended_is_left_in_order_and_a_torn_one_says_why(tmp_path):
    said: list[str] = []
    for name, text, code, last in (
        ("hf", "{'loss': '2.5', 'epoch': '1'}\n{'train_runtime': '7.5'}\n", 0, "says that its job has ended"),
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
