"""Which number of a log's lines is the step, the loss and the time: candidates are scored by name and conduct.

Pure. `understood` looks at the first lines as a whole, so that a name which is only once in them, or a number that does
not rise as steps do, loses against one that does.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Final, NamedTuple

from rankwatch.follow.fields import COUNT, Field, Line, words
from rankwatch.follow.rows import STEP_MAX


def _set(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_EVALUATED: Final = _set("val valid validation validate eval evaluation evaluate evaluating test testing dev cv")
EVALUATION_WORDS: Final = ("val", "test", "dev", "cv", "测试", "验证", "検証", "검증")
"""One of these is in each of the words above."""
_EVALUATION: Final = re.compile(
    r"(?<![a-z/])(?:val|valid|validat(?:e|ed|ing|ion)|eval|evaluat(?:e|ed|ing|ion)|test|testing|dev|cv)(?:-\w+)?(?![\w./])",
    re.I,
)

LOSS_WORDS: Final = _set("loss losses nll elbo objective xent cost logloss mlogloss learn rmse mse mae")
_NO_LOSS: Final = _set(
    "scale scaler weight weights coef coeff factor best min max lowest highest prev previous delta lr ppl spike "
    "reader data time comm"
)
_OTHER_LOSS: Final = _set(
    "aux auxiliary balance balancing lb z zloss router moe kl reg regularization mtp penalty commitment grad "
    "d disc discriminator gp"
)
_OF_THE_MODEL: Final = _set(
    "loss losses gpt xent cost train training lm total model reduced global avg average mean step running batch "
    "smoothed iter iteration inner current is the epoch metrics cross entropy ce overall sum final language nll "
    "mlm value metric per logloss mlogloss learn g gen generator function reference tot trn"
)
_SHORT_LOSS: Final = re.compile(r"(?:^|\s)l[12]$|^l_(?!r)")
"""The losses of LightGBM, and such as `l_pix`."""
_MEAN: Final = _set("avg average mean running smoothed epoch")

_STEP: Final = _set("step steps iter iters iteration iterations update updates nupdates niter")
_BATCH: Final = _set("batch batches minibatch it bch")
_NO_STEP: Final = _set(
    "total time timing sec secs second seconds ms thrpt fps size warmup eval skipped nan inf samples sample tokens "
    "remaining save accumulation interval avg number speed per loss lr of norm every eta last best duration val"
)

_NO_TIME: Final = _set(
    "data load loading loader forward backward fwd bwd optimizer optim eta remaining left eval val validation "
    "wait comm checkpoint ckpt save prompt generation generate rollout inference allreduce communication sampling lr "
    "loss flops epoch epochs reader"
)
_PARTS: Final = _set("forward backward fwd bwd")
"""A step takes longer than these."""
_PER: Final = re.compile(
    r"(?<![a-z])(?P<time>ms|milliseconds?|s|secs?|seconds?|time|duration)(?:[ _-]per[ _-]|/)"
    r"(?:it|iter|iteration|step|batch|b|update|tick)s?\b|"
    r"(?P<rate>it|iter|iteration|step|batch|batche|update)s?(?:[ _-]per[ _-]|/)(?:s|secs?|seconds?)\b|^ups$",
    re.I,
)
_AMOUNT_PER_S: Final = re.compile(
    r"\w*/s(?:ec(?:ond)?)?\)?(?:/|$)|\w[ _-]?per[ _-]?s(?:ec(?:ond)?)?(?![a-z])|^(?:tps|wps|sps)$|throughput", re.I
)
_MILLISECONDS: Final = re.compile(r"(?:^|[^a-z])(?:ms|milliseconds?|msecs?)(?:[^a-z]|$)", re.I)
_TIME: Final = _set(
    "time timing timer took duration elapsed dt t ms sec secs second seconds latency wall walltime runtime"
)
_ELAPSED: Final = _set("elapsed wall walltime runtime")
_UNITS: Final = ("", "ms", "s", "us", "µs", "sec", "secs", "second", "seconds", "min", "mins")
_OF_STEP: Final = _STEP | _BATCH | {"it"}

TIMESTAMPS: Final = _set("_timestamp timestamp time_s ts wall_time")
"""Names of the time at which a line was written, in Unix seconds."""
_UNIX_S_MIN: Final = 1e9
SURE: Final = 8.5
"""Score of names that leave no doubt."""
COUNTED_MIN: Final = 3
"""Fewer lines with a loss and without a step are not counted as steps."""
SEVERAL: Final = 3
"""So many losses beside one another are those of a model."""
EVALUATED_MIN: Final = 20
"""Fewer lines with the loss of an evaluation alone are not steps."""
CLOCK_S_MIN: Final = 10.0
"""Clocks of whole seconds tell how long steps take only where lines are so far apart."""


class Time(NamedTuple):
    """What a number says of the time that steps take."""

    kind: str
    """`step`: of one step, `rate`: steps a second, `elapsed`: since the start, `amount`: of something else a second,
    `plain`: a time of which the name does not say what takes it."""
    scale_s: float
    score: float


@dataclass(frozen=True, slots=True)
class Format:
    """The keys of a log's fields that are the step, the loss and the time; what is None is not in it."""

    step: str | None = None
    """None: lines with a loss are counted."""
    loss: str | None = None
    time: str | None = None
    time_kind: str = ""
    """A kind of `Time`, `elapsed` also where a plain one rises, or `interval` where it is that between two lines."""
    time_scale_s: float = 1.0
    """Of one unit; of an `amount` what a step has of it."""
    epoch: str | None = None
    """With which the step begins anew."""
    total: float | None = None
    """Of a bar in lines of its own: how long it is, which tells it from others."""
    is_one_line: bool = True
    """Step and loss stand in one line; else the step in an earlier one."""
    evaluates: bool = False
    """Each line has a word of evaluations in it, so that it says nothing."""
    rows: int = 0
    """How many lines say so."""


def is_evaluated(name: str) -> bool:
    """Whether a name is that of a number from an evaluation."""
    return not _EVALUATED.isdisjoint(words(name))


def is_evaluation(line: Line) -> bool:
    """Whether a line tells of an evaluation: a word of it stands before its numbers."""
    begin = line.text[:120].lower()
    if not any(word in begin for word in EVALUATION_WORDS):
        return False
    return _EVALUATION.search(line.text, 0, 120) is not None and _EVALUATION.search(_head(line)) is not None


def _head(line: Line) -> str:
    """What stands before the loss of a line, or at its begin."""
    found = re.search(r"loss|entropy|\b(?:learn|nll|cost|[\w-]*(?:rmse|mse|mae))\b", line.text, re.I)
    return line.text[: found.start()] if found is not None else line.text[:80]


@lru_cache(1024)
def loss_score(name: str) -> float:
    """How likely a name is that of the model's loss, up to 10; 0 if it is none."""
    of = frozenset(words(name))
    if of & {"ppl", "perplexity"} and of <= {"train", "avg", "ppl", "perplexity"}:
        return 3.0
    named = LOSS_WORDS & of or {"cross", "entropy"} <= of or of == {"ce"} or _SHORT_LOSS.search(name)
    if not named or of & _NO_LOSS or of & _EVALUATED:
        return 0.0
    if of & _OTHER_LOSS:
        return 2.0
    if {"batch", "cost"} <= of:
        return 0.0  # a time
    score = 10.0 - 0.01 * len(name) - (not of & {"loss", "losses"}) - 3.0 * bool(of - _OF_THE_MODEL) - bool(of & _MEAN)
    return score + 0.5 * ("total" in of) - 2.0 * ("epoch" in of) - 0.5 * ("losses" in of)


@lru_cache(1024)
def step_score(name: str, unit: str = "") -> float:
    """How likely a name is that of the step, up to 10; 0 if it is none."""
    listed = words(name)
    of = frozenset(listed)
    if name in ("/", "[it]", COUNT):
        return {"/": 5.0, "[it]": 4.5, COUNT: 4.0}[name]
    if unit or of & _NO_STEP - ({"total"} if "/" in name else set()):
        return 0.0
    if of & _STEP or listed in (("up",), ("tick",)):
        return (
            9.0
            + ("global" in of)
            + 0.5 * (len(of) == 1)
            - 2.0 * name.startswith("_")
            - 3.0 * ("max" in of and "/" not in name)
        )
    return 6.0 if of & _BATCH else 1.0 if "epoch" in of or "epochs" in of else 0.0


def is_epoch(name: str) -> bool:
    """Whether a name is that of the epoch."""
    of = words(name)
    return "epoch" in of or of in (("ep",), ("train",), ("training",))


def _scale_s(name: str, unit: str) -> float:
    """Seconds in the unit of a time."""
    if _MILLISECONDS.search(f"{name} {unit}"):
        return 1e-3
    if {"us", "µs"} & {unit, *words(name)}:
        return 1e-6
    return 60.0 if unit.startswith("min") else 1.0


@lru_cache(1024)
def time_of(name: str, unit: str) -> Time | None:
    """What a field says of the time of steps; None if nothing."""
    of = frozenset(words(name))
    if of & _NO_TIME or is_evaluated(name):
        return None
    scale_s = _scale_s(name, unit)
    per = _PER.search(unit) or _PER.search(name)
    if per is not None:
        return Time("step", scale_s, 9.5) if per["time"] else Time("rate", 1.0, 8.0)
    if unit in ("s/it", "it/s"):
        return Time("step", 1.0, 7.0)
    if _AMOUNT_PER_S.search(unit) or _AMOUNT_PER_S.search(name):
        return Time("amount", 1.0, 2.0)
    if of & (_TIME | {"cost"}) and of & _OF_STEP and not unit.startswith("/"):
        return Time("step", scale_s, 8.5)
    if "step" in of and "avg" in of and unit:
        return Time("step", scale_s, 7.5)
    if unit not in _UNITS or not (of & _TIME or (unit and of == {"run"}) if name else unit):
        return None
    if of & _ELAPSED:
        return Time("elapsed", scale_s, 4.0)
    return Time("plain", scale_s, 6.0 - 0.5 * (not name) - 0.1 * len(of))


_OF_NORM: Final = _set("grad gradient norm gnorm global train total optim actor")


def known_name(name: str) -> str:
    """The name by which detectors know a value; a name that none of them knows as it is, for a chart."""
    of = frozenset(words(name))
    if not is_evaluated(name):
        if of & {"norm", "gnorm"} and of <= _OF_NORM:
            return "grad_norm"
        if of <= {"lr", "learning", "rate", "train", "group", "optim"} and ("lr" in of or {"learning", "rate"} <= of):
            return "lr"
        if {"batch", "size"} <= of <= {"global", "batch", "size"}:
            return "batch_size"
        if {"loss", "scale"} <= of <= {"loss", "scale", "current", "cur"}:
            return "loss_scale"
    return name


def understood(
    lines: Sequence[Line], wanted: Mapping[str, str] | None = None, *, lossless: bool = False
) -> Format | None:
    """The format that the first lines have; None if they do not show one.

    Args:
        lines: in their order, of one rank.
        wanted: keys or names that a person gave for `step`, `loss` and `time`.
        lossless: lines with a step and without a loss of training are a format too.
    """
    wanted = wanted or {}
    training = [line for line in lines if line.fields and not is_evaluation(line)]
    found = _format(training, wanted)
    if found is None and lossless:
        found = _evaluated(training, wanted) or _lossless(training, wanted)
    if found is not None or len(training) == len(lines):
        return found
    found = _format([line for line in lines if line.fields], wanted)
    enough = found is not None and found.rows >= 20
    return replace(found, evaluates=True) if found is not None and enough else None


def _format(lines: Sequence[Line], wanted: Mapping[str, str]) -> Format | None:
    loss = _named(lines, wanted["loss"]) if "loss" in wanted else _loss(lines)
    if loss is None:
        return None
    rows = [at for at, line in enumerate(lines) if loss in line.fields]
    found = _with_step(lines, rows, loss, wanted)
    if found.step is None and not wanted:  # lines are counted if their names leave no doubt
        losses = [key for key in lines[rows[0]].fields if loss_score(key)]
        if len(rows) < COUNTED_MIN or (loss_score(loss) < SURE and len(losses) < SEVERAL):
            return None
    return _with_time(found, lines, rows, wanted)


def _evaluated(lines: Sequence[Line], wanted: Mapping[str, str]) -> Format | None:
    """The format of lines of which only evaluations have a loss, as where the first of these is of the training set."""
    count = Counter(key for line in lines for key, field in line.fields.items() if is_evaluated(key) and not field.unit)
    scores = {key: loss_score(" ".join(word for word in words(key) if word not in _EVALUATED)) for key in count}
    key = max(scores, key=lambda name: (scores[name], count[name]), default="")
    enough = scores.get(key, 0.0) > 0 and count[key] >= EVALUATED_MIN and "loss" not in wanted
    return _format(lines, {**wanted, "loss": key}) if enough else None


def _lossless(lines: Sequence[Line], wanted: Mapping[str, str]) -> Format | None:
    """The format of lines that have no loss."""
    scores = {key: step_score(key, field.unit) for line in lines for key, field in line.fields.items()}
    key = max(scores, key=lambda name: scores[name], default="")
    if scores.get(key, 0.0) < SURE:
        return None
    rows = [at for at, line in enumerate(lines) if key in line.fields]
    return _with_time(_with_epoch(Format(key, rows=len(rows)), lines, rows), lines, rows, wanted)


def _named(lines: Iterable[Line], name: str) -> str | None:
    """The key that a person means by a name."""
    keys = {key: None for line in lines for key in line.fields}
    for same in (str, str.lower, lambda text: " ".join(words(text))):
        for key in keys:
            if same(key) == same(name):
                return key
    return None


def _loss(lines: Sequence[Line]) -> str | None:
    """The key of the loss: by its name, and by how often it is there and not beside one of an evaluation."""
    count: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    placed: Counter[str] = Counter()
    for line in lines:
        evaluated = any(is_evaluated(key) for key in line.fields)
        has_step = any(step_score(key, field.unit) >= 4.0 for key, field in line.fields.items())
        for key, field in line.fields.items():
            if field.total is None and not field.unit and loss_score(key):
                count[key] += 1
                beside[key] += evaluated
                placed[key] += has_step
    most = max(count.values(), default=0)

    def score(key: str) -> float:
        often = min((count[key] + 1) / most, 1.0)  # of a record in parts the last one may not be there yet
        is_placed = often >= 0.1 and placed[key] >= 0.8 * count[key]
        return loss_score(key) + 4.0 * often - 3.0 * beside[key] / count[key] + 5.0 * is_placed

    return max(count, key=score, default=None)


def _with_step(lines: Sequence[Line], rows: Sequence[int], loss: str, wanted: Mapping[str, str]) -> Format:
    """The step: what rises from one line with a loss to the next, in the same line or before it."""
    keys = {key: field.unit for line in lines for key, field in line.fields.items()}
    if "step" in wanted:
        named = _named(lines, wanted["step"])
        keys = {named: ""} if named is not None else {}
    counts = {key for at in rows for key, field in lines[at].fields.items() if field.total is not None}
    best, best_score = Format(None, loss, rows=len(rows)), 3.0
    for key, unit in keys.items():
        base = 10.0 if "step" in wanted else step_score(key, unit if key != "[it]" else "")
        base = base or 3.5 * (key in counts)
        if not base:
            continue
        totals: list[float | None] = [None]
        beside = sum(key in lines[at].fields for at in rows)
        if key == "/" and not beside:
            totals = [*{line.fields[key].total or 0.0: None for line in lines if key in line.fields}]
        for total in totals:
            seen = steps_at(lines, rows, key, total)
            whole = [value for value in seen if 0 <= value < STEP_MAX and value.is_integer()]
            if not whole or len(seen) - len(whole) > max(1, len(seen) // 10):
                continue
            seen = whole
            pairs = list(itertools.pairwise(seen))
            rises = sum(one < other for one, other in pairs) / max(len(pairs), 1)
            still = sum(one == other for one, other in pairs) / max(len(pairs), 1)
            share = len(seen) / len(rows)
            score = base + 4.0 * share * (beside / len(rows) if beside else 0.5) + 4.0 * rises - 8.0 * (still > 0.7)
            score -= 3.0 * (1 - rises - still) * (base > 5.0)
            score += 0.001 * (total or 0.0) ** 0.25
            if (len(rows) == 1 or rises or beside) and score > best_score:
                best_score = score
                best = Format(key, loss, total=total, is_one_line=beside >= 0.5 * len(rows), rows=len(rows))
    return _with_epoch(best, lines, rows)


def steps_at(lines: Sequence[Line], rows: Sequence[int], key: str, total: float | None) -> list[float]:
    """The newest value of a field at each line with a loss."""
    found, newest, wanted = [], None, set(rows)
    for at, line in enumerate(lines):
        field = line.fields.get(key)
        if field is not None and (total is None or field.total == total):
            newest = field.value
        if at in wanted and newest is not None:
            found.append(newest)
    return found


def _with_epoch(found: Format, lines: Sequence[Line], rows: Sequence[int]) -> Format:
    if found.step is None or found.total is not None or (step_score(found.step) > 6.0 and not _has_epochs(lines, rows)):
        return found
    for line in lines:
        for key, field in line.fields.items():
            if is_epoch(key) and key != found.step and not field.unit and field.value.is_integer():
                values = [other.fields[key].value for other in lines if key in other.fields]
                if all(value.is_integer() for value in values):
                    return replace(found, epoch=key)
    return found


def _has_epochs(lines: Sequence[Line], rows: Sequence[int]) -> bool:
    """Whether an epoch stands beside the step, which may then begin anew with each."""
    return any(is_epoch(key) for at in rows for key in lines[at].fields)


def _with_time(found: Format, lines: Sequence[Line], rows: Sequence[int], wanted: Mapping[str, str]) -> Format:
    """The time: the key that says it most plainly; none where the clocks of the lines tell it better."""
    fields: dict[str, list[Field]] = {}
    parts_s = 0.0
    begin = rows[0] if found.is_one_line else 0
    for line in lines[begin:]:
        for key, field in line.fields.items():
            fields.setdefault(key, []).append(field)
    for key, seen in fields.items():
        if not _PARTS.isdisjoint(words(key)) and _TIME & set(words(key)):
            parts_s = max(parts_s, median(field.value for field in seen) * _scale_s(seen[0].name, seen[0].unit))
    named = _named(lines, wanted["time"]) if "time" in wanted else None
    best, best_score = found, 0.0
    for key, seen in fields.items():
        said = time_of(seen[0].name, seen[0].unit)
        if named is not None:
            if key != named:
                continue
            said = said or Time("plain", _scale_s(seen[0].name, seen[0].unit), 1.0)
        if said is None or len(seen) < 0.3 * len(rows) or key in TIMESTAMPS or key in (found.step, found.loss):
            continue
        kind, scale_s, score = said
        if kind in ("step", "rate") and named is None and is_epoch(found.step or ""):
            continue  # of what an epoch consists of
        if kind == "step" and named is None and not median(field.value for field in seen) * scale_s > parts_s:
            continue  # of another part, or too short to be printed
        if kind == "elapsed" and not TIMESTAMPS.isdisjoint(fields):
            continue
        values = [field.value for field in seen]
        if kind == "elapsed" and 2 * sum(a < b for a, b in itertools.pairwise(values)) < len(values) - 1:
            continue  # since the line before
        if kind == "plain" and _is_interval(values, scale_s, found, lines, rows):
            kind = "interval"
        elif kind in ("plain", "step") and len(values) > 2 and all(a < b for a, b in itertools.pairwise(values)):
            if all(map(float.is_integer, values)):
                continue  # it counts
            kind, score = "elapsed", 4.0
        if kind == "amount":
            scale_s = median(values) * (_pace_s(found, lines, rows) or 1.0)
        if score > best_score:
            best_score = score
            best = replace(found, time=key, time_kind=kind, time_scale_s=scale_s)
    return best


def _is_interval(
    values: Sequence[float], scale_s: float, found: Format, lines: Sequence[Line], rows: Sequence[int]
) -> bool:
    """Whether a time is that between two lines, as their clocks show, though steps lie between them."""
    steps = steps_at(lines, rows, found.step, found.total) if found.step is not None else []
    clocks = [lines[at].clock_s for at in rows]
    apart = [b - a for a, b in itertools.pairwise(clocks) if a is not None and b is not None and b > a]
    every = [b - a for a, b in itertools.pairwise(steps) if b > a]
    if len(apart) < 3 or not every or median(every) < 2:
        return False
    took_s, apart_s = median(values) * scale_s, median(apart)
    return abs(took_s - apart_s) < 0.3 * apart_s and took_s * median(every) > 2 * apart_s


def _pace_s(found: Format, lines: Sequence[Line], rows: Sequence[int]) -> float | None:
    """Seconds of a step by the clocks of the first and the last line, if these are far enough apart."""
    clocks = [clock for at in (rows[0], rows[-1]) if (clock := lines[at].clock_s) is not None]
    steps = steps_at(lines, rows, found.step, found.total) if found.step is not None else []
    if len(clocks) < 2 or len(steps) < 2 or clocks[1] - clocks[0] < CLOCK_S_MIN or steps[-1] <= steps[0]:
        return None
    return (clocks[1] - clocks[0]) / (steps[-1] - steps[0])


def clock_of(line: Line) -> float | None:
    """When a line was written: by a field of that name, else by its own clock."""
    for key, field in line.fields.items():
        if key.lower() in TIMESTAMPS and field.value > _UNIX_S_MIN:
            return field.value
    return line.clock_s
