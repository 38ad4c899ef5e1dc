"""One chunk of a metric: values of CHUNK_STEPS steps and all ranks as bytes, and back. Pure.

Float32, bytes shuffled (all first bytes, all second ones, ...: neighbours are alike), zstd. NaN is a value; "not
measured" is the NaN with the payload of `ABSENT_BITS`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

CHUNK_STEPS: Final = 64
"""Steps in one chunk: of 1,024 ranks 262 KB before compression, small enough to write again every second."""

ABSENT_BITS: Final = 0x7FC0_AB5E
_LEVEL: Final = 3  # level 9 gains 1 to 5 % for 5 to 10 times the time

Cells = NDArray[np.float32]
"""[step - first step of the chunk, rank]"""


def blank(ranks: int, steps: int = CHUNK_STEPS) -> Cells:
    """Cells in which nothing is measured."""
    return np.full((steps, ranks), ABSENT_BITS, dtype=np.uint32).view(np.float32)


def absent(cells: Cells) -> NDArray[np.bool_]:
    """Where nothing is measured."""
    return np.asarray(cells.view(np.uint32) == ABSENT_BITS)


def encoded(cells: Cells) -> bytes:
    """The chunk as bytes."""
    shuffled = np.ascontiguousarray(np.ascontiguousarray(cells).view(np.uint8).reshape(-1, 4).T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(shuffled.tobytes())


def decoded(data: bytes, ranks: int) -> Cells:
    """The chunk that gave these bytes.

    Raises:
        ValueError: these are not the bytes of a chunk of so many ranks.
    """
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=CHUNK_STEPS * ranks * 4)
    except zstandard.ZstdError as error:
        raise ValueError(f"no series chunk: {error}") from error
    plain = np.frombuffer(raw, np.uint8).reshape(4, -1).T
    return np.ascontiguousarray(plain).view(np.float32).reshape(CHUNK_STEPS, ranks)


def widened(cells: Cells, ranks: int) -> Cells:
    """The same cells with room for more ranks."""
    if cells.shape[1] >= ranks:
        return cells
    wide = blank(ranks, len(cells))
    wide[:, : cells.shape[1]] = cells
    return wide
