"""TRL's trainers with a tiny Qwen from scratch, which they evaluate and save now and then, as `VARIANT` says:

`trl_sft`: SFTTrainer; `trl_grpo`: GRPOTrainer, where it writes words, and is rewarded for every second one.
"""

import os

import torch
from common import left
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import rankwatch

grpo = os.environ["VARIANT"] == "trl_grpo"
WORDS = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(253))]


def text(seed, words):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[3 + number] for number in torch.randint(0, 253, (words,), generator=generator))


def even_words(completion_ids, **_):
    return [sum(number % 2 == 0 for number in ids) / len(ids) for ids in completion_ids]


torch.manual_seed(0)
vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
config = Qwen2Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
arguments = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "ddp_backend": "gloo",
    "max_steps": int(os.environ.get("STEPS", "60" if grpo else "100")),
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-4,
    "logging_steps": 5 if grpo else 10,
    "eval_strategy": "steps",
    "eval_steps": 40,
    "save_steps": 40,
    "save_total_limit": 3,
    "report_to": [],
    "disable_tqdm": True,
}
if grpo:
    batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=even_words,
        processing_class=tokenizer,
        args=GRPOConfig(num_generations=4, max_completion_length=8, **batches, **arguments),
        train_dataset=Dataset.from_dict({"prompt": [text(seed, 8) for seed in range(256)]}),
        eval_dataset=Dataset.from_dict({"prompt": [text(seed, 8) for seed in range(256, 258)]}),
    )
else:
    dataset = Dataset.from_dict({"text": [text(seed, 24 + seed % 8) for seed in range(1024)]}).train_test_split(0.05)
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        processing_class=tokenizer,
        args=SFTConfig(warmup_steps=10, **arguments),
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
    )
rankwatch.hf(trainer)
trainer.train()
left()
