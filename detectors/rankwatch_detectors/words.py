"""Words for people: names of columns, comparisons and durations, as summaries say them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, str]] = {
    "grad_norm": "gradient norm",
    "local_grad_norm": "gradient norm before the reduction",
    "update_norm": "norm of the update",
    "param_norm": "norm of the weights",
    "loss_scale": "loss scale",
    "step_time_s": "step time",
    "data_wait_s": "time waiting for data",
    "learning_rate": "learning rate",
    "lr": "learning rate",
}
"""Words of training for columns of the telemetry whose name is no word."""

TWICE: Final = 2.0
"""From this ratio on a multiple says more than a per cent."""


def column_words(name: str) -> str:
    """How a summary calls a column; a name that somebody else gave stays as it is.

    >>> column_words("grad_norm"), column_words("val/accuracy")
    ('gradient norm', 'val/accuracy')
    """
    return COLUMNS.get(name, name)


def compared(ratio: float) -> str:
    """How a value compares with what is usual or with its peers: what follows it is that, in the genitive or plain.

    >>> compared(1.27), compared(2.881), compared(0.8), compared(1.001)
    ('27 % above', '2.9 times', '20 % below', 'about')
    """
    if not math.isfinite(ratio) or ratio < 0:
        return "far from"
    percent = 100 * (ratio - 1)
    if ratio >= TWICE:
        return f"{ratio:,.2g} times" if ratio < 10 else f"{ratio:,.0f} times"
    if abs(percent) < 0.5:
        return "about"
    return f"{abs(percent):.0f} % {'above' if percent > 0 else 'below'}"


def lasting(seconds: float) -> str:
    """A duration, in two units at most.

    >>> lasting(0.42), lasting(12.3), lasting(200), lasting(3_725), lasting(-1)
    ('0.4 s', '12 s', '3 min 20 s', '1 h 2 min', '0 s')
    """
    if not math.isfinite(seconds) or seconds <= 0:
        return "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h" + (f" {minutes_left} min" if minutes_left else "")
    return f"{minutes} min" + (f" {rest} s" if rest else "") if minutes else f"{rest} s"
