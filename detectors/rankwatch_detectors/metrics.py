"""The metrics that rankwatch knows by name. Any other one is a user's: stored, charted and judged by rules on metrics.

A new one needs a row here and a place where it is measured. The end of a name is its unit, by which pages show it:
`_s`, `_bytes`, `_w`, `_hz`, `_celsius`, `_ratio`, `_per_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MetricSource(StrEnum):
    """What a metric is measured of."""

    HOST = "host"
    """The training thread's clocks."""
    DEVICE = "device"
    """A device's clock; these come some steps later."""
    WORK = "work"
    """How much a step has to do."""
    TRAINING = "training"
    """The training itself: NaN in it is a fault of the model, not of a measurement."""


@dataclass(frozen=True, slots=True)
class KnownMetric:
    """One known metric."""

    name: str
    source: MetricSource
    column: str = ""
    """Its column in recorded files; empty: of its own name, like any user's."""
    words: str = ""
    """What a summary calls it; empty: by its name."""


METRICS: Final = (
    KnownMetric("step_time_s", MetricSource.HOST, "step_time_s", "step time"),
    KnownMetric("busy_s", MetricSource.HOST, "busy_s"),
    KnownMetric("busy_cpu_s", MetricSource.HOST, "busy_cpu_s"),
    KnownMetric("queued_s", MetricSource.HOST, "queued_s"),
    KnownMetric("wait_s", MetricSource.HOST, "wait_s"),
    KnownMetric("device_step_s", MetricSource.DEVICE, "device_step_s"),
    KnownMetric("device_busy_s", MetricSource.DEVICE, "device_busy_s"),
    KnownMetric("device_wait_s", MetricSource.DEVICE, "device_wait_s"),
    KnownMetric("phase.data_wait", MetricSource.HOST, "data_wait_s", "time waiting for data"),
    KnownMetric("phase.forward", MetricSource.HOST, "forward_s"),
    KnownMetric("phase.backward", MetricSource.HOST, "backward_s"),
    KnownMetric("phase.collective", MetricSource.HOST, "collective_s"),
    KnownMetric("phase.optimizer", MetricSource.HOST, "optimizer_s"),
    KnownMetric("loss", MetricSource.TRAINING, "loss"),
    KnownMetric("grad_norm", MetricSource.TRAINING, "grad_norm", "gradient norm"),
    KnownMetric("local_grad_norm", MetricSource.TRAINING, "local_grad_norm", "gradient norm before the reduction"),
    KnownMetric("tokens", MetricSource.WORK, "tokens"),
    KnownMetric("tokens_squared", MetricSource.WORK, "tokens_squared"),
    KnownMetric("step_work", MetricSource.WORK),
    KnownMetric("update_norm", MetricSource.TRAINING, words="norm of the update"),
    KnownMetric("param_norm", MetricSource.TRAINING, words="norm of the weights"),
    KnownMetric("loss_scale", MetricSource.TRAINING, words="loss scale"),
    KnownMetric("learning_rate", MetricSource.TRAINING, words="learning rate"),
    KnownMetric("lr", MetricSource.TRAINING, words="learning rate"),
)

_MEASUREMENTS: Final = ("phase.", "device.", "tokens")
"""Beginnings of further names that are not of the training: phases of any name, and users' counts of tokens."""

COLUMNS: Final[Mapping[str, str]] = {metric.column: metric.name for metric in METRICS if metric.column}
"""Known numeric columns of recorded files and their metrics. Any other numeric column is a metric of its own name."""

DEVICE_TIMES: Final = tuple(metric.name for metric in METRICS if metric.source is MetricSource.DEVICE)
"""What devices measure of a step: all of it, the rank's own work in it, and its wait for other ranks."""

_BY_NAME: Final = {metric.name: metric for metric in METRICS}
_WORDS: Final = {key: metric.words for metric in METRICS if metric.words for key in (metric.column, metric.name) if key}


def is_of_training(name: str) -> bool:
    """Whether NaN in this metric is a fault of the training, rather than of a clock.

    >>> is_of_training("loss"), is_of_training("val/accuracy"), is_of_training("busy_s"), is_of_training("phase.mine")
    (True, True, False, False)
    """
    known = _BY_NAME.get(name)
    return not name.startswith(_MEASUREMENTS) if known is None else known.source is MetricSource.TRAINING


def is_of_host(name: str) -> bool:
    """Whether detectors of times need it of a step whose device times have not come."""
    known = _BY_NAME.get(name)
    return (
        name.startswith("phase.") if known is None else known.source is MetricSource.HOST or name.startswith("tokens")
    )


def column_words(name: str) -> str:
    """How a summary calls a metric or a column; a name that somebody else gave stays as it is.

    >>> column_words("grad_norm"), column_words("val/accuracy")
    ('gradient norm', 'val/accuracy')
    """
    return _WORDS.get(name, name)
