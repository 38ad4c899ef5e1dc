"""Encodes values of some metrics over consecutive steps and all ranks as bytes, and decodes them. Pure.

Ranks have similar values in a step. So each value becomes an integer at the resolution that a chart needs, less the
median of its step; the integers' bytes are shuffled (all first bytes, then all second ones) and compressed by zstd.
Values that do not fit come back exactly: NaN, infinities, and what is far from all others, too small or too large. NaN
is a value; "not measured" is the NaN with the payload of `ABSENT_BITS`.

Resolution: times (`is_time`) have TIME_RESOLUTION_S, or a thousandth of their median if that is finer; everything else
has 18 bits, one part in 260,000.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

CHUNK_STEPS: Final = 64
"""Steps in one chunk: 262 KB of 1,024 ranks before compression, small enough to write again every second."""

ABSENT_BITS: Final = 0x7FC0_AB5E

TIME_RESOLUTION_S: Final = 1e-5
TIME_SHARE: Final = 1e-3
"""Resolution of times as a share of their median, if that is finer: a phase of 50 us needs digits too."""

TOGETHER_BYTES: Final = 32 * 1024 * 1024
"""Cells that are encoded or rolled up together, which takes about six times their memory: 16 metrics of 8,192 ranks."""

_LEVEL: Final = 1  # level 3 gains 0.3 % on shuffled integers
_VERSION: Final = 1  # the first byte
_FIXED, _ROUNDED = 0, 1
_HEADER: Final = struct.Struct("<BBBxHxxIId")  # version, form, bytes of a code, steps, ranks, escapes, resolution
_ROUNDED_BITS: Final = 6  # of a float32's 24: 18 stay
_LARGEST: Final = 1 << 29  # codes beyond it are escapes, so that differences fit in 32 bits
_WIDE_SHARE: Final = 1 / 32  # more cells than this beyond 16 bits: 32 bits cost less than escapes
_SAMPLE: Final = 128  # ranks that give a step's median

Cells = NDArray[np.float32]
"""[step - first step of the chunk, rank]"""
Block = NDArray[np.float32]
"""[metric, step - first step of the chunk, rank]"""


def is_time(metric: str) -> bool:
    """Whether a metric is in seconds."""
    return metric.endswith("_s") or metric.startswith("phase.")


def blank(*shape: int) -> NDArray[np.float32]:
    """Cells in which nothing is measured."""
    return np.full(shape, ABSENT_BITS, dtype=np.uint32).view(np.float32)


def absent(cells: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mask of the same shape: where nothing is measured."""
    return np.asarray(cells.view(np.uint32) == ABSENT_BITS)


def encoded(block: Block, times: bool) -> list[bytes]:
    """Encode each metric of a block.

    Args:
        block: metrics that are all times, or none of them.
        times: whether they are (`is_time`).
    """
    form, usable = (_FIXED, np.isfinite(block)) if times else (_ROUNDED, _roundable(block))
    resolution = _resolution(block, usable) if times else np.zeros(len(block))
    codes = _fixed(block, usable, resolution) if times else _rounded(block, usable)
    if times:
        usable &= np.abs(codes) < _LARGEST
    whole = bool(usable.all())
    middle = _middle(codes, usable, whole)
    codes -= middle[:, :, None]
    near = np.abs(codes) < 0x7FFF
    missing = None if whole else absent(block)
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    chunks = []
    for index, cells in enumerate(block):
        kept = usable[index]
        size = 2 if np.count_nonzero(kept & ~near[index]) <= cells.size * _WIDE_SHARE else 4
        if size == 2:
            kept = kept & near[index]
        code = codes[index]
        escapes = cells[:0, 0]
        if not kept.all():
            gone = np.zeros_like(kept) if missing is None else missing[index]
            reported = ~kept & ~gone
            escapes = cells[reported]
            lowest = -(1 << (8 * size - 1))
            code = np.where(kept, code, np.where(gone, lowest, lowest + 1))
        planes = np.ascontiguousarray(_zigzag(code.astype(f"<i{size}")).view(np.uint8).reshape(-1, size).T)
        body = middle[index].astype("<i4").tobytes() + planes.tobytes() + escapes.astype("<f4").tobytes()
        header = _HEADER.pack(_VERSION, form, size, *cells.shape, len(escapes), resolution[index])
        chunks.append(header + compressor.compress(body))
    return chunks


def decoded(data: bytes, decompressor: zstandard.ZstdDecompressor | None = None) -> Cells:
    """Decode the cells of one metric: as many steps as were encoded.

    Args:
        data: what `encoded` gave.
        decompressor: is reused if given; for one thread.

    Raises:
        ValueError: the bytes are not a chunk.
    """
    if data[:1] != bytes([_VERSION]):
        raise ValueError("not a series chunk of this version")
    decompressor = decompressor or zstandard.ZstdDecompressor()
    try:
        _, form, size, steps, ranks, escapes, resolution = _HEADER.unpack_from(data)
        length = steps * 4 + steps * ranks * size + escapes * 4
        body = decompressor.decompress(memoryview(data)[_HEADER.size :], max_output_size=length)
        return _cells(body, form, size, steps, ranks, escapes, resolution)
    except (zstandard.ZstdError, struct.error, ValueError) as error:
        raise ValueError(f"not a series chunk: {error}") from error


def widened(cells: NDArray[np.float32], ranks: int) -> NDArray[np.float32]:
    """The same cells with room for more ranks."""
    if cells.shape[-1] >= ranks:
        return cells
    wide = blank(*cells.shape[:-1], ranks)
    wide[..., : cells.shape[-1]] = cells
    return wide


def by_resolution(metrics: Sequence[str]) -> tuple[tuple[bool, list[int]], tuple[bool, list[int]]]:
    """(True, indices of the metrics that are times), (False, indices of the others): `encoded` takes them apart."""
    times = [index for index, name in enumerate(metrics) if is_time(name)]
    others = [index for index, name in enumerate(metrics) if not is_time(name)]
    return (True, times), (False, others)


def metrics_together(block: Block) -> int:
    """How many metrics of a block are worked on at once: about `TOGETHER_BYTES`, and one at least."""
    return max(TOGETHER_BYTES * len(block) // max(block.nbytes, 1), 1)


# ---- values to integers --------------------------------------------------------------------------------------------


def _resolution(block: Block, usable: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[metric], in seconds. Powers of ten, so that equal times give equal integers in every chunk."""
    found = np.full(len(block), TIME_RESOLUTION_S)
    for index, cells in enumerate(block):
        sample = np.abs(cells[usable[index]][:: max(1, cells.size // 256)])
        # In double precision: half the sum of two large times is more than a float32 holds.
        typical = float(np.median(sample.astype(np.float64))) if len(sample) else 0.0
        if 0 < typical * TIME_SHARE < TIME_RESOLUTION_S:
            found[index] = 10.0 ** max(np.floor(np.log10(typical * TIME_SHARE)), -12)
    return found


def _fixed(block: Block, usable: NDArray[np.bool_], resolution: NDArray[np.float64]) -> NDArray[np.int32]:
    counts = block / resolution[:, None, None]
    with np.errstate(invalid="ignore"):
        np.clip(np.rint(counts, out=counts), -_LARGEST, _LARGEST, out=counts)
    counts[~usable] = 0
    return counts.astype(np.int32)


def _roundable(block: Block) -> NDArray[np.bool_]:
    """A mask of cells that are finite, and neither denormal nor so large that rounding makes them infinite."""
    # One unsigned comparison for both bounds: what is below the lower one wraps around.
    size = block.view(np.uint32) & 0x7FFF_FFFF
    return np.asarray((size - np.uint32(0x0080_0000) < 0x7F7F_FFE0 - 0x0080_0000) | (size == 0))


def _rounded(block: Block, usable: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Float32 as integers in the same order, rounded to 18 bits."""
    bits = block.view(np.int32)
    size = ((bits & 0x7FFF_FFFF) + (1 << (_ROUNDED_BITS - 1))) >> _ROUNDED_BITS
    codes = np.where(bits < 0, -size, size)
    codes[~usable] = 0
    return codes


def _middle(codes: NDArray[np.int32], usable: NDArray[np.bool_], whole: bool) -> NDArray[np.int32]:
    """[metric, step]: the median over ranks, or over a sample of many ranks."""
    if whole:
        sample = codes[:, :, :: max(1, codes.shape[2] // _SAMPLE)]
        half = sample.shape[2] // 2
        return np.partition(sample, half, axis=2)[:, :, half]
    held = np.sort(np.where(usable, codes, np.int32(_LARGEST)), axis=2)
    half = (np.maximum(np.count_nonzero(usable, axis=2), 1) - 1) // 2
    middle = np.take_along_axis(held, half[:, :, None], axis=2)[:, :, 0]
    return np.where(middle == _LARGEST, np.int32(0), middle)


def _zigzag(codes: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Make small numbers of either sign small and positive, so that their upper bytes are 0 and compress well."""
    return np.asarray((codes << 1) ^ (codes >> (8 * codes.itemsize - 1)))


# ---- and back ------------------------------------------------------------------------------------------------------


def _cells(body: bytes, form: int, size: int, steps: int, ranks: int, escapes: int, resolution: float) -> Cells:
    planes = np.frombuffer(body, np.uint8, steps * ranks * size, steps * 4).reshape(size, -1)
    # Joining planes by shifts is four times as fast as a transposed copy.
    mixed = planes[0].astype(f"<u{size}")
    for number in range(1, size):
        mixed |= planes[number].astype(mixed.dtype) << np.array(8 * number, mixed.dtype)
    half = (mixed >> 1).view(f"<i{size}")
    code = (half ^ -(mixed & 1).view(f"<i{size}")).reshape(steps, ranks)
    middle = np.frombuffer(body, "<i4", steps)
    lowest = -(1 << (8 * size - 1))
    full = code + middle[:, None]
    cells: Cells
    if form == _FIXED:
        cells = (full * resolution).astype(np.float32)
    elif form == _ROUNDED:
        bits = np.abs(full) << _ROUNDED_BITS
        bits[full < 0] |= np.int32(-(1 << 31))
        cells = bits.view(np.float32)
    else:
        raise ValueError(f"unknown form {form}")
    if code.size and code.min() <= lowest + 1:
        cells.view(np.uint32)[code == lowest] = ABSENT_BITS
        cells[code == lowest + 1] = np.frombuffer(body, "<f4", escapes, steps * 4 + steps * ranks * size)
    return cells
