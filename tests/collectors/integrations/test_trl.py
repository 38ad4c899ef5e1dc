"""What the line of Hugging Face's Trainer sees of TRL's trainers, and what it has them do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwatch
from tests.support.frameworks import Framework

Framework("trl")
datasets = Framework("datasets")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WORDS = [f"word{number}" for number in range(29)]
BATCH = 4
COMPLETION_WORDS = 4
NAMES_MAX = 64
LOSS = {"SFT": "loss", "DPO": "loss", "GRPO": "surrogate_loss"}
"""What learns from rewards has a loss that lies around zero, of which a curve says nothing."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody is told that a trainer was made, and it computes with one thread."""
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *_, **__: None)
    datasets.disable_progress_bars()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors, of which several threads on a busy machine take a hundred times as long
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model(tmp_path: Path) -> str:
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


def a_trainer(kind: str, model: str, steps: int, **arguments: Any) -> Any:
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


def trained(recorded: Any, trainer: Any) -> rankwatch.Watch:
    watch = rankwatch.hf(trainer, **recorded.options)
    trainer.train()
    assert watch.errors == 0, watch.last_error
    watch.close()
    return watch


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
    trainer = a_trainer(
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
    assert all(("generation" in step.phases) == (kind == "GRPO") for step in recorded.steps)
    assert logged <= logged_names(recorded)
    assert ("loss" in logged_names(recorded)) == (LOSS[kind] == "loss")
    assert len(logged_names(recorded)) < NAMES_MAX
    saved = recorded.notes("checkpoint_saved")
    assert [(one["step"], one["location"]) for one in saved] == [
        (step, str(tmp_path / "out" / f"checkpoint-{step}")) for step in (2, 4)
    ]


def test_tokens_are_counted_where_the_batch_has_them(recorded, model):
    trained(recorded, a_trainer("SFT", model, 2))
    assert recorded.values("tokens") == [BATCH * 7] * 2  # six words, and the end


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_loss_that_is_not_a_number_is_seen_in_its_step(recorded, model, kind):
    trainer = a_trainer(kind, model, 2)
    compute_loss = trainer.compute_loss

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        return compute_loss(*args, **kwargs) * (float("nan") if trainer.state.global_step == 1 else 1.0)

    trainer.compute_loss = spoiled
    trained(recorded, trainer)
    assert [math.isnan(loss) for loss in recorded.values(LOSS[kind])] == [False, True]
    assert [bool(count) for count in recorded.values("nonfinite")] == [False, True]
