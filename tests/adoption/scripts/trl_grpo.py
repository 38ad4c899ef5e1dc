"""TRL's GRPOTrainer: a tiny Qwen from scratch writes words, and is rewarded for every second one of its vocabulary."""

import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import rankwatch

STEPS = int(os.environ.get("STEPS", "60"))
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


def even_words(completion_ids, **_):
    return [sum(number % 2 == 0 for number in ids) / len(ids) for ids in completion_ids]


trainer = GRPOTrainer(
    model=Qwen2ForCausalLM(config),
    reward_funcs=even_words,
    processing_class=tokenizer,
    args=GRPOConfig(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        max_steps=STEPS,
        num_generations=4,
        max_completion_length=8,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-4,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=40,
        save_total_limit=3,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": [text(seed, 8) for seed in range(256)]}),
    eval_dataset=Dataset.from_dict({"prompt": [text(seed, 8) for seed in range(256, 258)]}),
)
rankwatch.hf(trainer)
trainer.train()
if torch.distributed.is_initialized():  # else gloo's threads may abort the process as it ends
    torch.distributed.destroy_process_group()
