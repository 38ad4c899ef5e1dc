"""A heat map as bytes, read back."""

import struct

import numpy as np


def read(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, ranks, values and codes, by the layout that the OpenAPI description states."""
    magic, columns, rows, _, scale, levels = struct.unpack_from("<4sIIIff", data)
    assert magic == b"RWH1"
    at = 24
    step = np.frombuffer(data, "<f8", columns, at)
    rank = np.frombuffer(data, "<u4", rows, at := at + 8 * columns)
    centre = np.frombuffer(data, "<f4", columns, at := at + 4 * rows)
    lower = np.frombuffer(data, "u1", rows * columns, at := at + 4 * columns)
    upper = np.frombuffer(data, "u1", rows * columns, at := at + rows * columns)
    assert at + rows * columns == len(data)
    code = (lower + 256 * upper.astype(int)).reshape(rows, columns)
    n = np.where(code % 2 == 0, (code - 4) / 2, (3 - code) / 2)
    return step, rank, np.where(code < 4, np.nan, centre + scale * np.sinh(n / levels)), code
