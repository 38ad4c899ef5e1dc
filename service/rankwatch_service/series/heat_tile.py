"""Encodes a heat map as bytes, for the dashboard: two for each cell before compression, about half a byte after it."""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_service.series.query import HeatMap
from rankwatch_service.series.rollups import ValueMark

MEDIA_TYPE: Final = "application/vnd.rankwatch.heatmap"

LAYOUT: Final = """The same heat map, or the lowest values instead of the highest ones, as bytes, for more cells.

Little-endian, one after the other:

| what | type |
| --- | --- |
| `RWH1` | 4 bytes |
| columns, rows, ranks | u32 each |
| scale, levels | f32 each |
| first step of each column | f64[columns] |
| first rank of each row; the last row ends at `ranks` | u32[rows] |
| centre of each column | f32[columns] |
| lower bytes of the codes, row by row | u8[rows * columns] |
| upper bytes of the codes | u8[rows * columns] |

Codes 0 to 3 are not measured, NaN, Inf and -Inf. Of any other, n = (code - 4) / 2 where that is whole, else
-(code - 3) / 2, and the value is centre + scale * sinh(n / levels): near the centre of its column in steps of a fixed
size, at most a quarter of the usual difference between ranks, and far from it to one part in 100."""

AIM_BYTES: Final = 150_000
"""Compressed bytes of a large map's codes, if differences are normally distributed. Fewer cells get finer steps."""

LEVELS_MIN, LEVELS_MAX = 4, 64
"""Steps in one sigma of the differences from the column's centre."""

LINEAR_SIGMAS: Final = 32
"""Steps have a fixed size up to this many sigmas from the centre, and grow beyond."""

_HEADER: Final = struct.Struct("<4sIIIff")
_CODES: Final = {ValueMark.ABSENT: 0, ValueMark.NAN: 1, ValueMark.POSITIVE_INF: 2, ValueMark.NEGATIVE_INF: 3}
_PLAIN: Final = 4
_CODE_MAX: Final = 32_700
_SAMPLE: Final = 65_536
_SAMPLE_ROWS: Final = 128


def tile(found: HeatMap) -> bytes:
    """Encode a map as described in `LAYOUT`, not compressed."""
    finite = found.mark == ValueMark.FINITE
    whole = bool(finite.all())
    value = np.ascontiguousarray(found.value, np.float64)
    centre = _centre(value, finite).astype(np.float32)
    apart = value - centre if whole else np.where(finite, value - centre, 0.0)
    scale, levels = _steps(apart.ravel() if whole else apart[finite], apart.size)
    # The scale keeps the quotient below 1e30. float32 is exact enough to tell steps apart, and four times as fast.
    count = np.rint(levels * np.arcsinh((apart / scale).astype(np.float32))).astype(np.int32)
    code = ((count << 1) ^ (count >> 31)) + _PLAIN
    if not whole:
        for mark, special in _CODES.items():
            code[found.mark == mark] = special
    planes = np.stack([(code & 0xFF).astype(np.uint8), (code >> 8).astype(np.uint8)])
    columns, rows = len(found.step), len(found.rank)
    return b"".join(
        (
            _HEADER.pack(b"RWH1", columns, rows, found.ranks, scale, levels),
            found.step.astype("<f8").tobytes(),
            found.rank.astype("<u4").tobytes(),
            centre.astype("<f4").tobytes(),
            planes.tobytes(),
        )
    )


def gzipped(data: bytes) -> bytes:
    """Compress by Huffman codes and runs alone: noise has no matches worth a search, and this is 8 times as fast."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _centre(value: NDArray[Any], finite: NDArray[np.bool_]) -> NDArray[Any]:
    """[column]: about the median of its finite values; 0 if it has none."""
    if finite.all() and len(value):
        return np.asarray(np.median(value[:: max(1, len(value) // _SAMPLE_ROWS)], axis=0))
    held = np.sort(np.where(finite, value, np.inf), axis=0)
    count = np.count_nonzero(finite, axis=0)
    if not len(held):
        return np.zeros(value.shape[1])
    middle = np.take_along_axis(held, (np.maximum(count, 1)[None] - 1) // 2, axis=0)[0]
    return np.where(count > 0, middle, 0.0)


def _steps(apart: NDArray[Any], cells: int) -> tuple[float, float]:
    """Scale and levels of the layout, as float32 holds them."""
    largest = float(np.abs(apart).max(initial=0.0))
    if largest == 0.0:
        return 1.0, 1.0
    low, high = np.quantile(apart[:: max(1, len(apart) // _SAMPLE)], (0.25, 0.75))
    sigma = max(float(high - low) / 1.349, largest * 1e-30) or largest
    if high == low:
        sigma = largest / LINEAR_SIGMAS
    per_sigma = min(max(2 ** min(8 * AIM_BYTES / cells, 16) / 4.13, LEVELS_MIN), LEVELS_MAX)
    scale = np.float32(min(max(sigma * LINEAR_SIGMAS, 1e-37), 1e38))  # as float32 holds them
    levels = min(per_sigma * LINEAR_SIGMAS, _CODE_MAX / np.arcsinh(largest / scale))
    return float(scale), float(np.float32(levels))
