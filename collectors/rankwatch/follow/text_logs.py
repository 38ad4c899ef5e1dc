"""The lines that trainers print: Megatron-LM, nanoGPT, torchtitan, Hugging Face Trainer; bars of tqdm, and plain lines.

Written after the sources of Megatron-LM core 0.20 (`training_log`), nanoGPT at 3adf61e (`train.py`), torchtitan 0.2.2
(`components/metrics.py`), transformers 5.23 (`trainer_callback.py`) and llm.c at f1e2ace (`train_gpt2.cu`, also in
Python and C). Lines of other forms are passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from rankwatch.follow.rows import End, Entry, LineCutter, LoggedStep, LoggedValues, known_name, number, step_number

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
LINE_BYTES_MAX: Final = 8 << 10
"""Longest line: one of 100 values has half of that."""
RUN_CHARACTERS_MAX: Final = 512
"""Most blanks, or letters, digits and points, in a row: what the patterns take would grow with its square."""
_RUN: Final = re.compile(rf"\s{{{RUN_CHARACTERS_MAX + 1}}}|[\w.,/-]{{{RUN_CHARACTERS_MAX + 1}}}")
_NUMBER: Final = r"([-+]?(?:\d[\d.,]*(?:e[-+]?\d+)?|nan|inf(?:inity)?))"
_LABEL: Final = re.compile(r"\[[\w.-]*\d+\]:|\[\d+,\d+\]<std(?:out|err)>:|\d+: ")
"""Names the rank that wrote a line: `[rank0]:` of torchrun, `[1,0]<stdout>:` of mpirun, `0: ` of `srun --label`."""
_CLOCK: Final = re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d{3,6}")
"""The time of a line. Whole seconds would say too little of steps."""

LineParser = Callable[[str], Entry | None]


class MegatronLines:
    """` iteration 10/ 100 | consumed samples: 80 | elapsed time per iteration (ms): 512.1 | lm loss: 8.1E+00 | ...`."""

    _ITERATION: Final = re.compile(r"\biteration\s+(\d+)/\s*(?:\d+|infinity)\s*\|(.*)")
    _VALIDATION: Final = re.compile(r"validation\S* loss at iteration \d+[^|]*\|(.*)")
    _DONE: Final = re.compile(r"\[after training is done\]|\[exiting program")
    _VALIDATED: Final = "validation "

    def __call__(self, line: str) -> Entry | None:
        """The entry of a line; None for any other line."""
        if (found := self._ITERATION.search(line)) is not None:
            return self._row(step_number(found[1]), _pairs(found[2]))
        if (found := self._VALIDATION.search(line)) is not None:
            return LoggedValues({self._VALIDATED + name: value for name, value in _pairs(found[1]).items()})
        return End() if self._DONE.search(line) else None

    def _row(self, step: int, pairs: Mapping[str, float]) -> LoggedStep:
        values: dict[str, float] = {}
        for name, value in pairs.items():
            values.setdefault(known_name(name), value)
        took_ms = values.pop("elapsed time per iteration (ms)", None)
        if "loss" not in values:
            # It leaves the loss out where no iteration had a finite one. Otherwise the first loss is that of the model.
            losses = [value for name, value in values.items() if "loss" in name and "scale" not in name]
            if losses:
                values["loss"] = losses[0]
            elif values.get("number of nan iterations", 0) > 0:
                values["loss"] = math.nan
        return LoggedStep(step, values, took_ms / 1e3 if took_ms is not None else None)


class NanoGptLines:
    """`iter 100: loss 2.5000, time 35.20ms, mfu 12.00%`."""

    _ITERATION: Final = re.compile(rf"\biter (\d+): loss {_NUMBER}, time {_NUMBER}ms(?:.*?mfu {_NUMBER}%)?", re.I)
    _EVALUATION: Final = re.compile(rf"\bstep \d+: train loss {_NUMBER}, val loss {_NUMBER}", re.I)

    def __call__(self, line: str) -> Entry | None:
        """The entry of a line; None for any other line."""
        if (found := self._ITERATION.search(line)) is not None:
            took_ms, mfu = number(found[3]), number(found[4] or "")
            values = {"loss": number(found[2]), "mfu": mfu if mfu is None or mfu >= 0 else None}  # -100: not known yet
            return LoggedStep(step_number(found[1]), _known(values), took_ms / 1e3 if took_ms is not None else None)
        if (found := self._EVALUATION.search(line)) is not None:
            values = {"evaluated train loss": number(found[1]), "validation loss": number(found[2])}
            return LoggedValues(_known(values))
        return None


class TorchtitanLines:
    """`[titan] ... - step: 10  loss: 8.1000  grad_norm: 1.2000  memory: 1.00GiB(2.00%)  tps: 1,000  mfu: 5.00%`."""

    _STEP: Final = re.compile(r"(validate )?\bstep:\s*(\d+)\s+(loss:.*)")
    _PAIR: Final = re.compile(rf"(\w+):\s*{_NUMBER}", re.I)
    _DONE: Final = re.compile(r"Training completed")

    def __call__(self, line: str) -> Entry | None:
        """The entry of a line; None for any other line."""
        found = self._STEP.search(line)
        if found is None:
            return End() if self._DONE.search(line) else None
        values = {
            known_name(name): value
            for name, text in self._PAIR.findall(found[3])
            if (value := number(text)) is not None
        }
        if found[1]:
            return LoggedValues({f"validation {name}": value for name, value in values.items()})
        return LoggedStep(step_number(found[2]), values)


class HuggingFaceLines:
    """`{'loss': '2.345', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.1'}`, of each logging interval.

    These lines have no number of their step. It is that of the newest progress bar, else the number of the line.
    """

    _LOGGED: Final = re.compile(r"\{('\w+': .*)\}")
    _PAIR: Final = re.compile(rf"'([^']+)': '?{_NUMBER}'?(?=[,}}]|$)", re.I)
    _BAR: Final = re.compile(r"\|\s*(\d+)/(\d+) \[")

    def __init__(self) -> None:
        self._step = 0
        self._shown = 0
        self._total = ""

    def __call__(self, line: str) -> Entry | None:
        """The entry of a line; None for any other line."""
        for done, total in self._BAR.findall(line):
            shown = step_number(done)
            self._total = self._total or total  # the first bar is that of training; evaluations have others
            if total == self._total:
                if shown < self._shown:  # training was resumed from a checkpoint
                    self._step = shown - 1
                self._shown = shown
        found = self._LOGGED.search(line)
        if found is None:
            return None
        logged = {name: value for name, text in self._PAIR.findall(found[1]) if (value := number(text)) is not None}
        if "train_runtime" in logged:
            return End()
        values = {known_name(name): value for name, value in logged.items()}
        if not {"loss", "grad_norm"} & values.keys():
            return LoggedValues(values) if values else None
        self._step = max(self._shown, self._step + 1)
        return LoggedStep(self._step, values)


class TqdmLines:
    """`Epoch 1:  45%|████▌     | 450/1000 [00:45<00:55, 9.9it/s, loss=2.31]`, of Lightning too.

    Each epoch may have a bar of its own; their steps are numbered on.
    """

    _BAR: Final = re.compile(r"(?:\|\s*(\d+)/(\d+)|(\d+)it) \[([^\]]*)\]")
    _PAIR: Final = re.compile(rf"([\w/.]+)={_NUMBER}", re.I)

    def __init__(self) -> None:
        self._before = 0
        """Steps of the epochs before."""
        self._done = 0
        self._total: str | None = None

    def __call__(self, line: str) -> Entry | None:
        """The entry of a line, of which the newest bar counts; None for any other line."""
        entry = None
        for done, total, alone, postfix in self._BAR.findall(line):
            values = {known_name(name): number(text) for name, text in self._PAIR.findall(postfix)}
            if "loss" not in values or self._total not in (None, total):
                continue  # an evaluation has a bar of another length
            step = step_number(done or alone)
            self._total = total
            if step < self._done:
                self._before += self._done
            self._done = step
            entry = LoggedStep(self._before + step, _known(values))
        return entry


class PlainLines:
    """`step 10/1000 | loss 2.31 (+0.10z)| norm 1.2 | lr 3.0e-04 | 52.00 ms`: a line with a step and a loss.

    llm.c prints these, and many loops of one's own, also with `:` or `=` between name and number.
    """

    _STEP: Final = re.compile(r"\b(?:global[_ ])?(?:step|iter|iteration)s?\s*[:=#]?\s*\[?(\d+)\b", re.I)
    _LOSS: Final = re.compile(rf"(?<![\w/])((?:[a-z]+[ _/])?loss)\s*[:=]?\s*{_NUMBER}", re.I)
    _NORM: Final = re.compile(rf"\b(?:grad(?:ient)?[ _-]?)?norm\s*[:=]?\s*{_NUMBER}", re.I)
    _RATE: Final = re.compile(rf"\b(?:lr|learning[ _]rate)\s*[:=]?\s*{_NUMBER}", re.I)
    _TOOK: Final = re.compile(rf"(?:\b(?:dt|took|time|step_time|step_avg)\s*[:=]?|[|(])\s*{_NUMBER}\s*ms\b", re.I)
    _OF_TRAINING: Final = ("loss", "train loss", "training loss", "mean loss", "avg loss", "total loss")
    _OF_EVALUATION: Final = re.compile("(val|valid|validation|eval|test) loss")

    def __call__(self, line: str) -> Entry | None:
        """The entry of a line; None for any other line."""
        found = self._STEP.search(line)
        if found is None:
            return None
        losses = {re.sub("[_/]", " ", name.lower()): number(text) for name, text in self._LOSS.findall(line)}
        loss = next((losses[name] for name in self._OF_TRAINING if name in losses), None)
        if loss is None:
            return LoggedValues(_known({name: one for name, one in losses.items() if self._OF_EVALUATION.match(name)}))
        values = {"loss": loss, "grad_norm": _first(self._NORM, line), "lr": _first(self._RATE, line)}
        took_ms = _first(self._TOOK, line)
        return LoggedStep(step_number(found[1]), _known(values), took_ms / 1e3 if took_ms is not None else None)


FORMATS: Final[Mapping[str, Callable[[], LineParser]]] = {
    "megatron": MegatronLines,
    "nanogpt": NanoGptLines,
    "torchtitan": TorchtitanLines,
    "huggingface": HuggingFaceLines,
    "tqdm": TqdmLines,
    "plain": PlainLines,
}
"""The more particular before the others."""


class TextLog:
    """Lines of one of these formats, and of one rank: the first that has reported a step.

    Unless the format is named, the first one whose lines are found is read, until a more particular one is found.
    """

    def __init__(self, name: str | None = None) -> None:
        self._parsers = [form() for known, form in FORMATS.items() if name in (None, known)]
        self._lines = LineCutter(LINE_BYTES_MAX)
        self._label = ""
        """Of what was read since the last line feed."""
        self._followed: str | None = None
        """The label of the lines that are read; None before a step."""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """See `Parser.cut`; a line is complete with its end."""
        return self._lines.cut(data)

    def parse(self, piece: bytes) -> Iterator[Entry]:
        """See `Parser.parse`."""
        label, self._label = self._label, ""
        text = _COLOUR.sub("", self._lines.text(piece))
        if len(text) > RUN_CHARACTERS_MAX and _RUN.search(text):
            raise ValueError(f"more than {RUN_CHARACTERS_MAX} blanks, or signs without one, in a row")
        named = _LABEL.match(text.lstrip())
        label = named[0] if named is not None else label
        if not piece.endswith(b"\n"):
            self._label = label
        entry = self._parsed(text, label)
        if entry is not None:
            yield entry

    def flush(self) -> Iterator[Entry]:
        """See `Parser.flush`; an incomplete line may yet go on."""
        return iter(())

    def _parsed(self, line: str, label: str) -> Entry | None:
        if self._followed not in (None, label):
            return self._parsed_of_others(line)
        for at, parser in enumerate(self._parsers):
            entry = parser(line)
            if isinstance(entry, LoggedStep):
                self._followed, self._parsers = label, self._parsers[: at + 1]
                return _timed(entry, line)
            if isinstance(entry, End):
                return entry if at == len(self._parsers) - 1 else None
            if entry is not None and entry.values:
                return entry
        return None

    def _parsed_of_others(self, line: str) -> Entry | None:
        """Megatron-LM's last rank prints its steps, and its first one the end."""
        parser = self._parsers[-1]
        entry = parser(line) if isinstance(parser, MegatronLines) else None
        return entry if isinstance(entry, End) else None


def _timed(row: LoggedStep, line: str) -> LoggedStep:
    """A step with the time of its line, where that has one and the step none."""
    found = _CLOCK.search(line) if row.step_time_s is None else None
    if found is None:
        return row
    try:
        time_s = datetime.fromisoformat(found[0]).replace(tzinfo=UTC).timestamp()  # only differences count
    except ValueError:
        return row
    return replace(row, time_s=time_s)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _first(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return number(found[1]) if found is not None else None


def _pairs(text: str) -> dict[str, float]:
    """`name: value | name: value |`; of `value/mean` the value."""
    parts = (part.rpartition(":") for part in text.split("|"))
    numbers = ((name.strip(), number(value.split("/")[0])) for name, _, value in parts)
    return {name: value for name, value in numbers if name and value is not None}
