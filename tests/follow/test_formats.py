"""What is read of each format, in whatever parts it arrives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rankwatch.follow.record_logs import EventFile, LogFormatError
from rankwatch.follow.rows import CsvTable, End, LoggedStep, LoggedValues, TrainerState, known_name
from rankwatch.follow.text_logs import TextLog
from tests.support.trainer_logs import FORMATS, nanogpt


def entries(parser, data: bytes, part_bytes: int = 1 << 20):
    found = []
    for at in range(0, len(data), part_bytes):
        found += parser.feed(data[at : at + part_bytes])
    return [*found, *parser.flush()]


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


def test_lines_of_hugging_face_have_the_step_of_the_progress_bar_and_without_one_are_counted():
    line = "{'loss': 2.3, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
    rows = entries(TextLog("huggingface"), (line * 2).encode())
    assert [row.step for row in rows] == [1, 2]
    assert math.isnan(rows[0].values["grad_norm"])
    bar = "\r 10%|█         | 50/500 [00:01<00:09]\r 20%|██        | 2/10 [00:00<00:01]"
    (row,) = entries(TextLog("huggingface"), (bar + line).encode())
    assert row.step == 50


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("step    3/10 | train loss 5.27 | norm 30.2 | lr 1.0e-04 | (1000.00 ms | 4000 tok/s)", 3, (5.27, 30.2, 1e-4)),
        ("step 3: train loss 5.270000 (took 1000.000000 ms)", 3, (5.27, None, None)),
        (
            "step 00003/21400 (0.01%) | loss: 5.27 | lrm: 1.00 | dt: 1000.00ms | mfu: 40.1 | total time: 0.5m",
            3,
            (5.27, None, None),
        ),
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


def test_the_end_is_printed_by_another_rank_of_megatron_than_its_steps():
    text = "[default7]:" + FORMATS["megatron"](1, 2.5) + "[default0]:[after training is done] datetime: 2026-08-22\n"
    assert entries(TextLog(), text.encode())[-1] == End()


def test_a_more_particular_format_takes_the_place_of_plain_lines():
    text = "step 7: loss 9.0 of the first batch\n" + nanogpt(8, 2.5) + "step 9: loss 9.0\n"
    assert [(row.step, row.values["loss"]) for row in entries(TextLog(), text.encode())] == [(7, 9.0), (8, 2.5)]


def test_names_of_hugging_face_may_have_any_signs():
    line = "{'loss': 2.3, 'memory/max_active (GiB)': '1.5', 'rewards/a-b/mean': 0.5, 'ppl': None, 'epoch': 1}\n"
    (row,) = entries(TextLog(), line.encode())
    assert row.values == {"loss": 2.3, "memory/max_active (GiB)": 1.5, "rewards/a-b/mean": 0.5, "epoch": 1.0}


def test_the_efficiency_that_nanogpt_does_not_know_yet_is_left_out():
    (row,) = entries(TextLog(), b"iter 0: loss 4.2874, time 40072.30ms, mfu -100.00%\n")
    assert row.values == {"loss": 4.2874}


def test_a_binary_file_is_no_log():
    assert entries(TextLog(), bytes(range(256)) * 20_000) == []


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table(separator, part_bytes):
    lines = [
        ["global_step", "train/loss", "note", "rank"],
        ["1", "2.5", "x", "0"],
        ["1", "9", "x", "1"],
        ["2", "nan", "", "0"],
    ]
    text = "".join(separator.join(line) + "\r\n" for line in lines)
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
    parser = TrainerState()
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
