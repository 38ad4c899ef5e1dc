"""What is understood of the logs of many trainers, and what of lines that are none."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from pathlib import Path

import pytest

from rankwatch.follow.fields import line_of, plain, words
from rankwatch.follow.hints import Hints, hints_of, remembered
from rankwatch.follow.intake import LogIntake, PassedOver
from rankwatch.follow.reader import LogReader
from rankwatch.follow.roles import known_name, loss_score, step_score, time_of
from rankwatch.follow.rows import End, Entry, LoggedFailure, LoggedStep, LoggedValues, NotUnderstood, Understood
from rankwatch.follow.text_logs import TextLog
from tests.follow.further_samples import SAMPLES
from tests.follow.samples import ROWS, Sample

LOSSES = [round(5 - n / 10, 3) for n in range(ROWS)]


def read(text: str, part_bytes: int = 1 << 20, hints: Hints | None = None) -> list[Entry]:
    intake, found, data = LogIntake(TextLog(hints), PassedOver()), [], text.encode()
    for at in range(0, len(data), part_bytes):
        found += intake.feed(data[at : at + part_bytes])
    return [*found, *intake.flush()]


def rows(entries: list[Entry]) -> dict[int, LoggedStep]:
    """The first row of each step."""
    found: dict[int, LoggedStep] = {}
    for entry in entries:
        if isinstance(entry, LoggedStep):
            found.setdefault(entry.step, entry)
    return found


def understood(text: str, hints: Hints | None = None) -> str:
    return next(entry.text for entry in read(text, hints=hints) if isinstance(entry, Understood))


def written(sample: Sample) -> str:
    return sample.head + "".join(itertools.starmap(sample.text, enumerate(LOSSES))) + "\n"


@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
@pytest.mark.parametrize("name", SAMPLES)
def test_step_loss_and_time_of_many_trainers_are_found_out(name: str, part_bytes: int):
    sample = SAMPLES[name]
    found = rows(read(written(sample), part_bytes))
    assert list(found) == [sample.step(n) for n in range(ROWS)]
    assert [row.values["loss"] for row in found.values()] == LOSSES
    if not sample.clock:
        assert [row.step_time_s for row in found.values()][1:] == [
            None if sample.step_s is None else pytest.approx(sample.step_s, rel=1e-3)
        ] * (ROWS - 1)
        return
    for before, row in itertools.pairwise(found.values()):
        assert before.time_s is not None
        assert row.time_s is not None
        assert (row.time_s - before.time_s) / (row.step - before.step) == pytest.approx(sample.step_s, rel=1e-3)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_loss_that_is_no_longer_finite_is_read_at_its_step(name: str):
    sample = SAMPLES[name]
    text = sample.head + "".join(sample.text(n, loss if n < 9 else math.nan) for n, loss in enumerate(LOSSES)) + "\n"
    bad = [step for step, row in rows(read(text)).items() if math.isnan(row.values.get("loss", 0.0))]
    assert bad == [sample.step(n) for n in (9, 10, 11)]


@pytest.mark.parametrize("name", SAMPLES)
def test_lines_like_those_before_say_the_same_when_they_are_read_quickly(name: str, monkeypatch: pytest.MonkeyPatch):
    sample, chance, quick = SAMPLES[name], random.Random(name), LogReader.quick
    text = sample.head
    for n in range(150):
        loss = math.nan if n % 50 == 49 else round(chance.lognormvariate(0, 4), chance.randrange(7))
        text += sample.text(n, loss)
        if n % 17 == 16:
            text += chance.choice(
                ["evaluation_loss: 9.5\n", "Saved 7 files in 3.5 s\n", "OVERFLOW! skipping step\n", "\n"]
            )
    found = read(text)
    read_quickly = 0

    def counted(reader: LogReader, text: str):
        nonlocal read_quickly
        entries = quick(reader, text)
        read_quickly += entries is not None
        return entries

    monkeypatch.setattr(LogReader, "quick", counted)
    read(text)
    monkeypatch.setattr(LogReader, "quick", lambda *_: None)
    assert told(read(text)) == told(found)
    assert (read_quickly > 60) is not sample.is_slow


def test_rows_below_another_header_are_read_by_that():
    first = "step  loss  lr\n" + "".join(f"{n}  {2 + n / 100}  0.5\n" for n in range(40))
    second = "step  lr  loss\n" + "".join(f"{n}  0.5  {1 + n / 100}\n" for n in range(40, 80))
    found = rows(read(first + second))
    assert [row.values["loss"] for row in found.values()] == [n / 100 + (2 if n < 40 else 1) for n in range(80)]


def test_where_only_evaluations_have_a_loss_the_first_of_them_counts():
    text = "".join(f"[{n}]\tvalidation_0-logloss:{9 - n / 10:.2f}\tvalidation_1-logloss:9.5\n" for n in range(80))
    assert understood(text).startswith("step `#`, loss `validation_0-logloss`")
    assert [row.values["loss"] for row in rows(read(text)).values()] == [round(9 - n / 10, 2) for n in range(80)]


def told(entries: list[Entry]) -> list[str]:
    """Entries as they compare: NaN is NaN, and values are in no order."""
    found = []
    for entry in entries:
        values = sorted(entry.values.items()) if isinstance(entry, LoggedStep | LoggedValues) else ()
        rest = entry._replace(values={}) if isinstance(entry, LoggedStep) else "" if values else entry
        found.append(f"{rest} {values}")
    return found


def test_it_says_what_it_understood():
    text = "".join(
        f"Iter [{n}0/900] loss (avg): 2.{n} Batch (t): 0.5 lr: 1e-4\n".replace("Iter [", "Iter: ").replace("]", "")
        for n in range(1, 9)
    )
    assert understood(text) == "step `Iter`, loss `loss (avg)`, time `Batch (t)` in s, every 10 steps"


def test_names_that_a_person_gives_count_instead():
    text = "".join(f"it_no={n} score={9 - n} loss_d=0.5 wall=7 spent={n % 2}.5ms\n" for n in range(1, 9))
    hints = Hints({"step": "it_no", "loss": "score", "time": "spent"})
    assert understood(text, hints) == "step `it_no`, loss `score`, time `spent` in ms"
    found = rows(read(text, hints=hints))
    assert [row.values["loss"] for row in found.values()] == [9 - n for n in range(1, 9)]
    assert found[1].step_time_s == pytest.approx(0.0015)


def test_a_pattern_reads_lines_of_any_kind():
    text = "".join(f"<{n}> energy is -{n}.5 after 250\n" for n in range(1, 9))
    hints = Hints(pattern=re.compile(r"<(?P<step>\d+)> energy is (?P<loss>\S+)"))
    assert [row.values["loss"] for row in rows(read(text, hints=hints)).values()] == [-n - 0.5 for n in range(1, 9)]


def test_names_are_remembered_for_each_job_until_others_are_given(tmp_path: Path):
    path, none = tmp_path / "config" / "follow.json", dict.fromkeys(("step", "loss", "time", "pattern"))
    assert remembered(path, "a", none) == {}
    assert remembered(path, "a", {**none, "step": "it_no"}) == {"step": "it_no"}
    remembered(path, "b", {**none, "pattern": r"(?P<step>\d+)"})
    assert remembered(path, "a", none) == {"step": "it_no"}
    assert hints_of(remembered(path, "b", none)).wanted == {"step": "step"}
    remembered(path, "a", {**none, "loss": "score"})
    assert remembered(path, "a", none) == {"loss": "score"}


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 7}', '{"a": {"step": 7}}', "[" * 9_000])
def test_a_file_of_names_that_is_none_remembers_nothing(tmp_path: Path, content: str):
    path = tmp_path / "follow.json"
    path.write_text(content)
    assert remembered(path, "a", {"step": None}) == {}


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("loss: 6.6 (6.7)  lr=1e-4", {"loss": 6.6, "lr": 1e-4}),
        ("memory: 9.46GiB(64.99%)", {"memory": 9.46}),
        ("tps: 35,485 loss nan", {"tps": 35485.0, "loss": math.nan}),
        ("number of nan iterations:   0 |", {"number of nan iterations": 0.0}),
        ("loss: nanxxx, lr: 1e-4", {"loss": math.nan, "lr": 1e-4}),
        ("loss: 1.#QNAN, scale: -1.#INF", {"loss": math.nan, "scale": -math.inf}),
        ("4.5 avg loss, 0.001 rate, 3.25 seconds, -nan images", {"avg loss": 4.5, "rate": 1e-3, "images": math.nan}),
        ("loss = 0,4900, lr = 0,0010", {"loss": 0.49, "lr": 1e-3}),
        ("训练损失：0.5，学习率：1e-4", {"训练损失": 0.5, "学习率": 1e-4}),
        ('{"key": "train_loss", "value": 2.5, "metadata": {"step_num": 7}}', {"train_loss": 2.5}),
        ("eta: 1 day, 4:07:11, time: 0.5", {"time": 0.5}),
        ("loss: tensor(2.31, device='cuda:0')", {"loss": 2.31}),
        ("'loss': np.float64(2.31), 'x': None", {"loss": 2.31}),
        ("saved to /tmp/checkpoint-500/v1.2.3 (3adf61e)", {}),
        ('x {"a": {"b": 1, "c": "2.5"}, "d": true, "e": [1]}', {"a/b": 1.0, "a/c": 2.5}),
    ],
)
def test_the_numbers_of_a_line_and_their_names(line: str, fields: dict[str, float]):
    found = {key: field.value for key, field in line_of(plain(line)).fields.items() if field.name}
    assert str(found) == str(fields) or found == {**found, **fields}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss", "loss_cls"),
        ("loss", "aux_loss"),
        ("cross-entropy-loss", "load-balance-loss"),
        ("lm loss", "mtp_1 loss"),
        ("train_loss_step", "train_loss_epoch"),
        ("total_loss", "box_loss"),
        ("loss", "nll_loss"),
        ("train_loss", "val_loss"),
        ("loss", "loss_scale"),
    ],
)
def test_the_loss_is_that_of_the_model(one: str, other: str):
    assert loss_score(one) > loss_score(other)


@pytest.mark.parametrize(
    "name", ["max_steps", "step_time", "skipped steps", "warmup_steps", "eval_steps", "batch_size", "steps/sec", "acc"]
)
def test_names_that_are_no_step(name: str):
    assert step_score(name) < step_score("step") - 2


@pytest.mark.parametrize(
    ("name", "unit", "kind", "scale_s"),
    [
        ("", "sec/step", "step", 1.0),
        ("iter time (s)", "", "step", 1.0),
        ("step_time", "", "step", 1.0),
        ("train_step_timing in s", "", "step", 1.0),
        ("", "ms/step", "step", 1e-3),
        ("elapsed time per iteration (ms)", "", "step", 1e-3),
        ("", "s/it", "step", 1.0),
        ("", "it/s", "rate", 1.0),
        ("steps_per_second", "", "rate", 1.0),
        ("train_speed(iter/s)", "", "rate", 1.0),
        ("tps", "", "amount", 1.0),
        ("tokens_per_second", "", "amount", 1.0),
        ("", "samples/s", "amount", 1.0),
        ("dt", "ms", "plain", 1e-3),
        ("elapsed", "s", "elapsed", 1.0),
    ],
)
def test_the_many_words_for_the_time_of_a_step(name: str, unit: str, kind: str, scale_s: float):
    found = time_of(name, unit)
    assert found is not None
    assert (found.kind, found.scale_s) == (kind, scale_s)


@pytest.mark.parametrize("name", ["data_time", "eta", "forward_time", "eval_time", "tflops", "lr"])
def test_times_of_other_things(name: str):
    assert time_of(name, "") is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("train/grad-norm", "grad_norm"),
        ("gnorm", "grad_norm"),
        ("param_norm", "param_norm"),
        ("Train/LR", "lr"),
        ("learning rate", "lr"),
        ("eval/lr", "eval/lr"),
        ("global batch size", "batch_size"),
        ("loss scale", "loss_scale"),
    ],
)
def test_names_that_detectors_know(name: str, known: str):
    assert known_name(name) == known


def test_words_of_names():
    assert words("LanguageCrossEntropy/train_0") == ("language", "cross", "entropy", "train")


def line(step: int, loss: float = 2.5, prefix: str = "") -> str:
    return f"{prefix}step {step} loss {loss}\n"


def steps(text: str) -> list[int]:
    return [entry.step for entry in read(text) if isinstance(entry, LoggedStep)]


def test_steps_that_go_back_are_a_restart_and_a_late_one_is_not():
    assert steps("".join(map(line, [10, 20, 30, 40, 20, 30, 40]))) == [10, 20, 30, 40, 20, 30, 40]
    assert steps("".join(map(line, [10, 20, 30, 20, 40, 50, 40, 60]))) == [10, 20, 30, 40, 50, 60]


def test_a_restart_of_which_one_line_is_there_counts_once_nothing_more_comes():
    intake = LogIntake(TextLog(), PassedOver())
    list(intake.feed("".join(map(line, range(10, 80, 10))).encode()))
    assert list(intake.feed(line(30).encode())) == []
    assert [entry.step for entry in intake.flush() if isinstance(entry, LoggedStep)] == [30]


def test_a_bar_that_goes_back_is_a_training_that_was_resumed():
    text = "".join(f"\r|# | {n}/500 [00:01<00:09, 2.0it/s]{{'loss': 2.5}}\n" for n in (80, 90, 100, 60, 70, 80))
    assert steps(text) == [80, 90, 100, 60, 70, 80]


def test_a_second_start_in_the_same_file_begins_anew_with_its_epochs():
    text = "".join(f"Epoch: [{epoch}][{n}/30] loss 2.5\n" for epoch in (0, 1, 0) for n in (0, 10, 20))
    assert steps(text) == [0, 10, 20, 30, 40, 50, 0, 10, 20]


def test_bars_without_an_epoch_are_numbered_on_once_they_are_full():
    text = "".join(f"\r|# | {n}/3 [00:01<00:09, 2.0it/s, loss=2.5]" for n in (1, 2, 3) * 3) + "\n"
    assert steps(text) == list(range(1, 10))


@pytest.mark.parametrize(
    "text",
    [
        "validation loss at iteration 10 | lm loss value: 2.1E+00 | lm loss PPL: 8.1E+00 |\n",
        "step 10: train loss 2.1000, val loss 2.2000\n",
        "[rank] x - validate step: 10  loss:  2.1000  memory:  1.00GiB(2.00%)\n",
        "Test: [  10/48]  Time: 1.20 (1.20)  Loss:   2.11 ( 2.11)\n",
        "\rValidating:  10%|#   | 10/90 [00:00<00:00, 50.00it/s, loss=9.00]\n",
        "step: 10, evaluation_loss: 1.1e+04\n",
        '{"mode": "val", "step": 10, "loss": 9.0}\n',
    ],
)
def test_evaluations_are_no_steps(text: str):
    before = "".join(f"iteration {n}: loss {3 - n / 10} lr 1e-4\n" for n in range(8))
    entries = read(before + text + "iteration 8: loss 2.2 lr 1e-4\n")
    assert list(rows(entries)) == list(range(9))
    assert rows(entries)[8].values["loss"] == 2.2


def test_values_of_an_evaluation_belong_to_the_newest_step():
    entries = read("".join(map(line, range(8))) + "validation loss: 2.25 ppl: 9.0\n{'eval_loss': 2.2, 'epoch': 1}\n")
    values = [entry.values for entry in entries if isinstance(entry, LoggedValues)]
    assert values == [{"validation loss": 2.25, "validation ppl": 9.0}, {"eval_loss": 2.2}] or "eval_loss" in values[-1]


@pytest.mark.parametrize("prefix", ["[rank{}]:", "[default{}]:", "[1,{}]<stdout>: ", "{}: ", "[pod/train-{}/main] "])
def test_of_several_ranks_the_first_that_reports_a_step_is_followed(prefix: str):
    text = prefix.format(0) + "starting\n"
    for n in range(8):
        text += line(n, 2.5, prefix.format(3)) + line(n, 9.0, prefix.format(1))
    found = [(row.step, row.values["loss"]) for row in rows(read(text)).values()]
    assert found == [(n, 2.5) for n in range(8)]


def test_another_rank_is_followed_once_the_first_one_is_silent():
    first = "".join(line(n, 2.5, "[rank0]: ") + line(n, 9.0, "[rank1]: ") for n in range(9))
    second = "".join(line(n, 2.0, "[rank1]: ") for n in range(9, 4_000))
    found = rows(read(first + second))
    assert found[8].values["loss"] == 2.5
    assert found[3_999].values["loss"] == 2.0


def test_a_second_phase_of_another_form_is_read_once_with_a_note():
    first = "".join(f"warm step {n} loss {9 - n / 10}\n" for n in range(30))
    second = "".join(f"[{n}/9000] train_loss=2.{n} it/s=4.0\n" for n in range(100))
    third = "".join(f"number {n}: nll 1.0\n" for n in range(200))
    entries = read(first + second + third)
    notes = [entry.text for entry in entries if isinstance(entry, Understood)]
    assert notes[0].startswith("step `warm step`, loss `loss`")
    assert notes[-1].startswith("step `N/M`, loss `train_loss`")
    assert len(notes) == 2
    assert sum(isinstance(entry, LoggedStep) for entry in entries) == 130


def test_a_log_that_is_not_understood_is_told_with_the_lines_most_like_a_step():
    text = "".join(f"loading part {n} of the data\n" for n in range(60)) + "epoch 3 went well\n" * 45
    told = [entry for entry in read(text) if isinstance(entry, NotUnderstood)]
    assert len(told) == 2
    assert "epoch 3 went well" in told[1].lines


def test_skipped_updates_are_recorded_with_their_step():
    overflow = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 8, reducing to 4\n"
    found = rows(read("".join(map(line, range(8))) + overflow + line(8) + line(9)))
    assert [found[n].values.get("optimizer_skipped") for n in (7, 8, 9)] == [None, 1.0, 0.0]


def test_a_norm_that_is_not_finite_is_an_overflow_at_the_begin_or_if_it_is_one_infinite_one():
    norms = ["nan", "inf", "1.5", "1.5", "inf", "1.5", "nan", "1.5", "inf", "inf"]
    found = rows(read("".join(f"step {n} loss 2.5 grad_norm {norm}\n" for n, norm in enumerate(norms))))
    assert [row.values.get("optimizer_skipped", 0.0) for row in found.values()] == [1, 1, 0, 0, 1, 0, 0, 0, 1, 0]


def test_iterations_that_were_not_finite_are_a_loss_that_is_not():
    text = "".join(
        f" iteration {n}/ 90 | lm loss: 2.5 | grad norm: 1 | number of nan iterations: 0 |\n" for n in range(8)
    )
    found = rows(read(text + " iteration 8/ 90 | grad norm: nan | number of nan iterations: 1 |\n"))
    assert math.isnan(found[8].values["loss"])


@pytest.mark.parametrize(
    "text",
    [
        "[after training is done] datetime: 2025-11-23 00:00:00\n",
        "[titan] 2025 - root - INFO - Training completed\n",
        "{'train_runtime': '7.5', 'train_loss': '3.9', 'epoch': '0.6'}\n",
    ],
)
def test_the_end_of_training(text: str):
    assert End() in read("".join(map(line, range(8))) + text)


@pytest.mark.parametrize("text", ["Epoch 1 training completed in 5 min\n", "train_runtime is not known\n"])
def test_what_is_no_end_of_training(text: str):
    assert End() not in read("".join(map(line, range(8))) + text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemoryError"),
        ("ValueError: bad batch", "ValueError"),
        ("[rank1]: RuntimeError: NCCL communicator was aborted", "RuntimeError"),
        ("Killed", "Ended"),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-05-06T10:00:00 DUE TO TIME LIMIT ***", "Ended"),
        ("[E ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL", "Ended"),
        ("train.sh: line 12:  1234 Killed                  python train.py", "Ended"),
        ("Loss is nan, stopping training", "Ended"),
        ("ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0", "Ended"),
        ("srun: error: n1: task 3: Killed", "Ended"),
        ("F0506 10:00:00.123456 140 syncedmem.cpp:56] Check failed: error == cudaSuccess (2 vs. 0)", "Ended"),
    ],
)
def test_what_a_log_ends_with(text: str, kind: str):
    (failure,) = [entry for entry in read(f"{line(1)}{text}\n") if isinstance(entry, LoggedFailure)]
    assert failure.kind == kind


@pytest.mark.parametrize("text", ["requests.ConnectionError: retrying in 5 s", "val_loss improved from inf to 2.5"])
def test_what_no_log_ends_with(text: str):
    assert not any(isinstance(entry, LoggedFailure) for entry in read(f"{line(1)}{text}\n"))


def test_prose_with_numbers_is_no_step_and_records_nothing():
    text = "Saved step 3 after 4 epochs in 2.5 s\nloss of 3 nodes was handled\n" * 3
    assert not any(isinstance(entry, LoggedStep | LoggedValues) for entry in read(text))


def test_a_binary_file_is_no_log():
    intake = LogIntake(TextLog(), PassedOver())
    assert not any(isinstance(entry, LoggedStep) for entry in intake.feed(bytes(range(256)) * 2_000))


BITS = [
    b"9" * 5_000,
    b"[" * 3_000,
    b'{"a": ' * 500,
    b"\0\xff\x1b[31m",
    b"\x1b]0;owned\x07",
    b"\r",
    b"nan",
    b"1e999",
    b"/",
]


def test_whatever_is_written_no_line_raises_or_is_kept_and_good_lines_after_it_are_read():
    chance = random.Random(40)
    began_s = time.process_time()
    for name, sample in SAMPLES.items():
        good = written(sample).encode()
        passed_over = PassedOver()
        intake = LogIntake(TextLog(), passed_over)
        list(intake.feed(good))
        for _ in range(6):
            data = bytearray(good)
            for _ in range(chance.randrange(1, 8)):
                at = chance.randrange(len(data))
                data[at : at + chance.randrange(8)] = chance.choice([*BITS, chance.randbytes(9)])
            for entry in [*intake.feed(bytes(data) + b"\n"), *intake.flush()]:
                names = entry.values if isinstance(entry, LoggedStep | LoggedValues) else ()
                assert all(map(str.isprintable, names)), (name, names)
        further = [*intake.feed(good), *intake.flush()]
        assert any(isinstance(entry, LoggedStep) for entry in further), (name, passed_over.first)
    assert time.process_time() - began_s < 60
