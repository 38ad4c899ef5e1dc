"""What one line sees of Hugging Face's Trainer and TRL's trainers, and what it has them do."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwatch
from tests.support.ranks.gloo import Framework
from tests.support.ranks.ordered import STEP_S

transformers = Framework("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

SEQUENCES, LENGTH, BATCH = 64, 8, 4


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 16, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def a_trainer(steps: int, *, callbacks: Any = (), kind: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=1)
    )
    settled = {"save_strategy": "no", "logging_steps": 2, "report_to": [], "disable_tqdm": True, **arguments}
    args = transformers.TrainingArguments(
        output_dir="out", use_cpu=True, max_steps=steps, per_device_train_batch_size=BATCH, **settled
    )
    return (kind or transformers.Trainer)(
        model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=list(callbacks)
    )


def slow() -> Any:
    """A callback that gives an order time, and ends the training with a save."""

    class Slow(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(STEP_S)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    return Slow()


def trained(recorded: Any, trainer: Any) -> rankwatch.Watch:
    watch = rankwatch.hf(trainer, **recorded.options)
    trainer.train()
    assert watch.errors == 0, watch.last_error
    watch.close()
    return watch


def test_a_step_has_its_loss_learning_rate_tokens_norm_and_the_wait_for_its_batches(recorded):
    trained(recorded, a_trainer(6, gradient_accumulation_steps=2, learning_rate=0.5, lr_scheduler_type="constant"))
    assert [step.step for step in recorded.steps] == list(range(6))
    assert all(2 < loss < 4 for loss in recorded.values("loss"))
    assert recorded.values("learning_rate") == [0.5] * 6
    assert recorded.values("tokens") == [2 * BATCH * LENGTH] * 6
    assert recorded.values("tokens_squared") == [2 * BATCH * LENGTH**2] * 6
    assert all(norm > 0 for norm in recorded.values("grad_norm"))
    assert all({"data_wait", "forward", "backward", "optimizer"} <= set(step.phases) for step in recorded.steps)


def test_the_losses_of_accumulated_batches_are_the_loss_that_the_trainer_logs(recorded):
    trainer = a_trainer(2, gradient_accumulation_steps=4, logging_steps=1)
    trained(recorded, trainer)
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert recorded.values("loss") == pytest.approx(logged, rel=1e-5)


def test_a_loss_that_is_not_a_number_is_seen_though_the_trainer_logs_another(recorded):
    class Spoiled(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            return found * float("nan") if self.state.global_step == 3 else found

    trainer = a_trainer(5, kind=Spoiled, logging_steps=1)
    trained(recorded, trainer)
    assert [math.isnan(loss) for loss in recorded.values("loss")][:4] == [False, False, False, True]
    assert not math.isnan(trainer.state.log_history[3]["loss"])


def test_evaluations_and_saves_lie_between_steps_and_whole_saves_are_registered(recorded, tmp_path):
    trained(recorded, a_trainer(6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2))
    assert [step.kind for step in recorded.steps] == [0] * 6
    saved = recorded.notes("checkpoint_saved")
    assert [(one["step"], one["location"]) for one in saved] == [
        (step, str(tmp_path / "out" / f"checkpoint-{step}")) for step in (2, 4, 6)
    ]
    assert all(one["bytes"] > 0 and one["seconds"] > 0 for one in saved)
    assert recorded.values("eval_loss") == [None] * 6
    assert sum("eval_loss" in entry.values for entry in recorded.entries if hasattr(entry, "values")) == 3


def test_saves_that_the_trainer_deletes_are_reported_as_gone(recorded):
    trained(recorded, a_trainer(6, save_strategy="steps", save_steps=2, save_total_limit=1))
    assert [one["checkpoint"] for one in recorded.notes("checkpoint_gone")] == ["local:l.0:2", "local:l.0:4"]


def test_a_save_and_a_resume_that_fail_are_reported(recorded, tmp_path):
    trainer = a_trainer(4, save_strategy="steps", save_steps=2)
    rankwatch.hf(trainer, **recorded.options)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "checkpoint-2").write_text("a file in its place")
    with pytest.raises(FileExistsError):
        trainer.train()
    with pytest.raises(ValueError, match="valid checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out"))
    save, load = recorded.notes("checkpoint_failed")
    assert (save["what"], save["type"]) == ("save", "FileExistsError")
    assert save["location"] == str(tmp_path / "out" / "checkpoint-2")
    assert (load["what"], load["type"], load["location"]) == ("restore", "ValueError", str(tmp_path / "out"))


def test_a_save_of_the_model_alone_is_no_checkpoint(recorded):
    trained(recorded, a_trainer(2, save_strategy="steps", save_steps=2, save_only_model=True))
    assert recorded.notes("checkpoint_saved") == []


def test_the_last_steps_of_an_epoch_and_a_further_training_are_numbered_on(recorded):
    trainer = a_trainer(-1, num_train_epochs=1, gradient_accumulation_steps=3)
    watch = rankwatch.hf(trainer, **recorded.options)
    trainer.train()
    trainer.evaluate()
    trainer.train()
    assert watch.errors == 0, watch.last_error
    watch.close()
    in_epoch = math.ceil(SEQUENCES / BATCH / 3)
    assert [step.step for step in recorded.steps] == list(range(2 * in_epoch))
    assert [one["what"] for one in recorded.notes("declared")] == ["training began again"]
    assert [one["reason"] for one in recorded.notes("rank_left")] == ["end", "end"]


def test_data_that_end_early_end_no_step(recorded):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([Tokens()[index] for index in range(2 * BATCH)])

    trainer = a_trainer(5)
    trainer.train_dataset = Stream()
    trained(recorded, trainer)
    assert [step.step for step in recorded.steps] == list(range(5))


def test_a_stop_ends_the_training_after_its_step(recorded):
    ordered = recorded.order("stop", after_step=2)
    trainer = a_trainer(100_000, callbacks=[slow()])
    trained(recorded, trainer)
    ordered.result()
    assert trainer.state.global_step == len(recorded.steps) < 100_000
    assert [one["reason"] for one in recorded.notes("rank_left")] == ["stop"]


def test_an_ordered_checkpoint_is_saved_by_the_trainer(recorded):
    trainer = a_trainer(100_000, callbacks=[slow()])
    ordered = recorded.order("checkpoint", after_step=2)
    trained(recorded, trainer)
    ordered.result()
    (saved,) = recorded.notes("checkpoint_saved")
    assert (Path(saved["location"]) / "trainer_state.json").exists()
    assert saved["step"] == trainer.state.global_step == len(recorded.steps)


def test_after_a_relaunch_training_goes_on_from_the_advised_checkpoint(recorded, tmp_path):
    first = a_trainer(4, save_strategy="steps", save_steps=4)
    first.train()
    recorded.relaunched(tmp_path / "out" / "checkpoint-4", 4)
    trainer = a_trainer(8)
    trained(recorded, trainer)
    assert [step.step for step in recorded.steps] == [4, 5, 6, 7]
    assert [one["checkpoint"] for one in recorded.notes("checkpoint_loaded")] == ["local:l.0:4"]


@pytest.mark.parametrize("why", ["first start", "deleted", "the script says another"])
def test_training_begins_as_the_script_says(recorded, tmp_path, why):
    a_trainer(2, save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    recorded.relaunched(tmp_path / "nowhere" if why == "deleted" else checkpoint, 4)
    if why == "first start":
        del recorded.options["env"]["TORCHELASTIC_RESTART_COUNT"]
    trainer = a_trainer(3)
    watch = rankwatch.hf(trainer, **recorded.options)
    trainer.train(**({"resume_from_checkpoint": str(checkpoint)} if why == "the script says another" else {}))
    watch.close()
    first = {"first start": 0, "deleted": 0, "the script says another": 2}[why]
    assert recorded.steps[0].step == first
    assert [one["checkpoint"] for one in recorded.notes("checkpoint_gone")] == ["local:l.0:4"] * (why == "deleted")


def test_a_job_is_named_after_its_run_or_its_output_folder(recorded):
    options = recorded.options | {"job": None}
    assert rankwatch.hf(a_trainer(1), **options).identity.job == "out"
    assert rankwatch.hf(a_trainer(1, run_name="tiny gpt"), **options).identity.job == "tiny gpt"


def test_what_is_no_trainer_is_refused(recorded):
    with pytest.raises(TypeError, match="not Linear"):
        rankwatch.hf(torch.nn.Linear(1, 1))


Framework("trl")
datasets = Framework("datasets")

WORDS = [f"word{number}" for number in range(29)]
COMPLETION_WORDS = 4
NAMES_MAX = 64
LOSS = {"SFT": "loss", "DPO": "loss", "GRPO": "surrogate_loss"}
"""What learns from rewards has a loss that lies around zero, of which a curve says nothing."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that a trainer was made."""
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *_, **__: None)
    datasets.disable_progress_bars()


@pytest.fixture
def model(tmp_path: Path, alone: None) -> str:
    """A model from scratch where trainers find it by its path, also as their reference model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<pad>", "<eos>", "<unk>", *WORDS]
    vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    config = GPT2Config(
        vocab_size=len(words), n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=1
    )
    folder = str(tmp_path / "model")
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text(seed: int, words: int = 6) -> str:
    chosen = torch.randint(0, len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    return " " + " ".join(WORDS[number] for number in chosen)


def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(set(ids))) for ids in completion_ids]


def of_trl(kind: str, model: str, steps: int, **arguments: Any) -> Any:
    import trl

    rows = range(32)
    columns: dict[str, list[str]] = {
        "SFT": {"text": [text(row) for row in rows]},
        "DPO": {
            name: [text(100 * at + row) for row in rows] for at, name in enumerate(("prompt", "chosen", "rejected"))
        },
        "GRPO": {"prompt": [text(row) for row in rows]},
    }[kind]
    further: dict[str, Any] = {"reward_funcs": rewarded} if kind == "GRPO" else {}
    if kind == "GRPO":
        arguments |= {"num_generations": 2, "max_completion_length": COMPLETION_WORDS}
    settled = {"save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True, **arguments}
    args = getattr(trl, f"{kind}Config")(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        **settled,
    )
    data = datasets.Dataset.from_dict(columns)
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=args, train_dataset=data, eval_dataset=data.select(range(BATCH)), **further
    )


def logged_names(recorded: Any) -> set[str]:
    return {name for entry in recorded.entries for name in getattr(entry, "values", ())}


@pytest.mark.parametrize(
    ("kind", "logged"),
    [
        ("SFT", {"mean_token_accuracy", "entropy", "eval_loss", "eval_mean_token_accuracy"}),
        ("DPO", {"rewards/chosen", "rewards/margins", "logps/rejected", "eval_loss", "eval_rewards/chosen"}),
        ("GRPO", {"reward", "rewards/rewarded/mean", "completions/mean_length", "eval_loss", "eval_reward"}),
    ],
)
def test_steps_evaluations_saves_and_what_the_trainer_logs(recorded, tmp_path, model, kind, logged):
    trainer = of_trl(
        kind,
        model,
        4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    trained(recorded, trainer)
    assert [step.step for step in recorded.steps] == list(range(4))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert recorded.values(LOSS[kind]) == pytest.approx(losses, rel=1e-4, abs=1e-6)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert recorded.values("grad_norm") == pytest.approx(norms, rel=1e-3)
    assert all({"data_wait", "forward", "backward", "optimizer"} <= set(step.phases) for step in recorded.steps)
    if kind == "SFT":
        assert recorded.values("tokens") == [2 * BATCH * 7] * 4  # six words, and the end
    assert all(("generation" in step.phases) == (kind == "GRPO") for step in recorded.steps)
    assert logged <= logged_names(recorded)
    assert ("loss" in logged_names(recorded)) == (LOSS[kind] == "loss")
    assert len(logged_names(recorded)) < NAMES_MAX
    saved = recorded.notes("checkpoint_saved")
    assert [(one["step"], one["location"]) for one in saved] == [
        (step, str(tmp_path / "out" / f"checkpoint-{step}")) for step in (2, 4)
    ]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_loss_that_is_not_a_number_is_seen_in_its_step(recorded, model, kind):
    trainer = of_trl(kind, model, 2)
    compute_loss = trainer.compute_loss

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        return compute_loss(*args, **kwargs) * (float("nan") if trainer.state.global_step == 1 else 1.0)

    trainer.compute_loss = spoiled
    trained(recorded, trainer)
    assert [math.isnan(loss) for loss in recorded.values(LOSS[kind])] == [False, True]
    assert [bool(count) for count in recorded.values("nonfinite")] == [False, True]
