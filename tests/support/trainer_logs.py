"""Writes logs as training programs do, for steps and losses that a test chooses: lines, and event files.

A step takes 0.1 s by the clock of the lines that have one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

LineOf = Callable[[int, float], str]
"""Step and loss become a line."""


def megatron(step: int, loss: float) -> str:
    """As `training_log` of Megatron-LM core 0.20, which leaves out a loss that is not finite."""
    lm_loss = f" lm loss: {loss:.6E} |" if math.isfinite(loss) else ""
    return (
        f" [2025-11-23 00:00:00.000000] iteration {step:8d}/{1000:8d} | consumed samples: {step * 8:12d} |"
        f" elapsed time per iteration (ms): {52.0:.1f} | learning rate: {3e-4:.6E} | global batch size: {8:5d} |"
        f"{lm_loss} loss scale: {1.0:.1f} | grad norm: {1.25:.3f} | number of skipped iterations: {0:3d} |"
        f" number of nan iterations: {0 if math.isfinite(loss) else 1:3d} |\n"
    )


def nanogpt(step: int, loss: float) -> str:
    """As `train.py` of nanoGPT."""
    return f"iter {step}: loss {loss:.4f}, time {52.0:.2f}ms, mfu {31.4:.2f}%\n"


def torchtitan(step: int, loss: float) -> str:
    """As `components/metrics.py` of torchtitan, with colours, through torchrun and its logger."""
    red, green, orange, turquoise, blue, cyan, magenta, reset = (
        f"\x1b[{code}m" for code in (31, 32, 38, 36, 34, 36, 35, 39)
    )
    clock = f"{step // 36_000:02}:{step // 600 % 60:02}:{step // 10 % 60:02},{step % 10}00"
    return (
        f"[rank0]:[titan] 2025-11-23 {clock} - root - INFO - {red}step: {step:2}  {green}loss: {loss:7.4f}  "
        f"{orange}grad_norm: {1.25:7.4f}  {turquoise}memory: {1.5:5.2f}GiB({2.5:.2f}%)  {blue}tps: {12_345:,}  "
        f"{cyan}tflops: {1_234.5:,.2f}  {magenta}mfu: {31.4:.2f}%{reset}\n"
    )


def huggingface(step: int, loss: float) -> str:
    """As `PrinterCallback` of transformers 5.23, with the progress bar before it."""
    bar = f"\r {step / 10:3.0f}%|███       | {step}/1000 [00:10<00:50, 19.01it/s]"
    logged = {"loss": loss, "grad_norm": 1.25, "learning_rate": 3e-4, "epoch": step / 250}
    return f"{bar}{' ' * 10}\r{ {name: f'{value:.4g}' for name, value in logged.items()} }\n"


def tqdm(step: int, loss: float) -> str:
    """As a bar of tqdm, with what the loop adds to it."""
    return f"\rEpoch 0:  45%|████▌     | {step}/1000 [00:45<00:55,  9.90it/s, loss={loss:.4f}, grad_norm=1.25]\n"


def plain(step: int, loss: float) -> str:
    """As `train_gpt2.cu` of llm.c."""
    return (
        f"step {step:4}/1000 | loss {loss:7.6f} ({0.1:+.2f}z)| norm {1.25:6.4f} ({-0.3:+.2f}z)| lr {3e-4:.2e} |"
        f" {52.0:.2f} ms | {42.6:.1f}% bf16 MFU | {171_541:.0f} tok/s\n"
    )


FORMATS: dict[str, LineOf] = {
    "megatron": megatron,
    "nanogpt": nanogpt,
    "torchtitan": torchtitan,
    "huggingface": huggingface,
    "tqdm": tqdm,
    "plain": plain,
}


def write_event_file(path: Path, scalars: Iterable[tuple[float, int, str, float]]) -> None:
    """An event file of TensorBoard, without checksums: an event for each time, step, tag and value."""
    with path.open("wb") as file:
        for time_s, step, tag, value in scalars:
            scalar = _field(1, tag.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", value)
            event = _varint(1 << 3 | 1) + struct.pack("<d", time_s) + _field(2, step) + _field(5, _field(1, scalar))
            file.write(struct.pack("<QI", len(event), 0) + event + bytes(4))


def _field(number: int, value: int | bytes) -> bytes:
    """A varint or a length-delimited field."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])
