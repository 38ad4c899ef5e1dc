"""What the scripts of Hugging Face and TRL share."""

import torch
from torch.utils.data import Dataset


class Tokens(Dataset):
    """Sequences for a language model, the same in every run."""

    def __init__(self, size, length=32, vocabulary=256):
        self.size, self.length, self.vocabulary = size, length, vocabulary

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = torch.randint(0, self.vocabulary, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def left():
    """Leave the process group, if the trainer has not: else gloo's threads may abort the process as it ends."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
