"""TRL's SFTTrainer with a tiny Qwen from scratch, which it evaluates and saves now and then."""

import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

import rankwatch

STEPS = int(os.environ.get("STEPS", "100"))
WORDS = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(253))]


def text(seed, words):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[3 + number] for number in torch.randint(0, 253, (words,), generator=generator))


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
dataset = Dataset.from_dict({"text": [text(seed, 24 + seed % 8) for seed in range(1024)]}).train_test_split(0.05)
trainer = SFTTrainer(
    model=Qwen2ForCausalLM(config),
    processing_class=tokenizer,
    args=SFTConfig(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        learning_rate=5e-4,
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=40,
        save_total_limit=3,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
)
rankwatch.hf(trainer)
trainer.train()
if torch.distributed.is_initialized():  # else gloo's threads may abort the process as it ends
    torch.distributed.destroy_process_group()
