"""Reads a log of any form: finds out which numbers are step, loss and time, and makes rows of them.

The first lines decide, and are read once that is known. What was understood of few lines is checked when there are
more, and may change once more later, as when a second phase prints lines of another form.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from rankwatch.follow.fields import FIELDS_MAX, Field, Line, line_of
from rankwatch.follow.roles import (
    CLOCK_S_MIN,
    EVALUATION_WORDS,
    SURE,
    TIMESTAMPS,
    Format,
    clock_of,
    is_epoch,
    is_evaluated,
    is_evaluation,
    known_name,
    loss_score,
    step_score,
    steps_at,
    time_of,
    understood,
)
from rankwatch.follow.rows import (
    STEP_MAX,
    End,
    Entry,
    LoggedFailure,
    LoggedStep,
    LoggedValues,
    NotUnderstood,
    Understood,
    Unreadable,
)
from rankwatch.follow.template import LEARNED_EVERY, TEMPLATES_MAX, LineReading, LineTemplate, template_of
from rankwatch.output.errors import LineRole, Weight, pattern_of, shown_line
from rankwatch.output.prefixes import labelled

KEPT_LINES: Final = 64
"""Newest lines with numbers by which a format is found."""
ENOUGH_LINES: Final = 20
"""Lines after which it is told what was understood, and rows after which that is checked."""
ENOUGH_LOSSES: Final = 6
UNREAD_LINES: Final = 50
"""After so many lines without a step it is told; and another format is looked for."""
QUICK_CHARACTERS_MAX: Final = 512
"""Longer lines may be ones that `parse` refuses."""
OTHERS_LINES: Final = 2_000
"""After so many lines of other ranks without a step of the followed one another rank is followed."""
CHECK_LINES: Final = 10
CHECK_ROWS: Final = (4, 6)
BACK_ROWS: Final = 20
"""A step that is so many rows back is that of a restarted job; a nearer one may be late, until the next one comes."""
_SKIPPED: Final = re.compile(r"\bOVERFLOW!|overflow\b.*\bskip|skipping (?:step|update)|gradient overflow", re.I)
_ENDED: Final = re.compile(
    r"\[after training is done\]|\[exiting program|['\"]train_runtime['\"]|"
    r"(?:^|- |\] |: )training (?:has )?(?:completed|finished)[.!]?\s*$",
    re.I,
)
_EXCEPTION: Final = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt)|Exception))\b:?")
"""What a log may end with; an exception that is caught is followed by further steps."""
_ENDING: Final = (
    *("killed", "time_limit", "cancelled", "nccl_watchdog", "diverged", "assertion", "exit_status", "aborted"),
)
"""Patterns that end a job as certain ones do."""
_NOTABLE: Final = (
    *("raining", "exiting", "runtime", "kipping", "verflow", "VERFLOW"),
    *("Killed", "CANCELLED", "LIMIT", "kill", "imeout", "error", "fault", "Error", "Exception", "Interrupt"),
    *("diverged with", "oss is", "exit", "return code", "heck failed", "dumped", "EXHAUSTED", "OOM"),
    *("out of memory", "illegal memory", "device-side", "No space left", "bad_alloc", "DataLoader worker"),
)
"""One of these is in each line that the patterns above find; to look for words takes a tenth of the time."""
FAILURE_CHARACTERS_MAX: Final = 200
LIKELY_LINES: Final = 3
Parse = Callable[[str], Line | None]


def _failure(text: str, label: str) -> LoggedFailure | None:
    """What a line says of the end of its job; None: nothing."""
    exception, pattern = _EXCEPTION.match(text), pattern_of(text)
    if pattern is None:
        return None
    is_certain = pattern.role is LineRole.ROOT and pattern.weight is Weight.CERTAIN
    if exception is None and not is_certain and pattern.name not in _ENDING:
        return None
    kind = exception["kind"] if exception is not None else "Ended"
    message = shown_line(text if exception is None else text[exception.end("kind") + 1 :]).strip()
    rank = f" ({label.strip('[]: ')})" if any(sign.isdigit() for sign in label) else ""
    weight = 3 if is_certain else 1 if pattern.role is LineRole.CASCADE or pattern.weight is Weight.WEAK else 2
    return LoggedFailure(kind.rpartition(".")[2], message[:FAILURE_CHARACTERS_MAX] + rank, weight)


class LogReader:
    """Makes entries of lines, of which it finds out what they say."""

    def __init__(
        self,
        wanted: Mapping[str, str] | None = None,
        before: LogReader | None = None,
        *,
        is_table: bool = False,
        parse: Parse | None = None,
    ) -> None:
        """Begin with a file.

        Args:
            wanted: the names that a person gave for `step`, `loss` and `time`.
            before: read what the file was until it began anew; what it understood is kept.
            is_table: its numbers have columns, tags or keys as names, which leave fewer doubts than words in a line.
            parse: cuts a line of text, and remembers nothing of it. None: no line is read quickly.
        """
        self._parse = parse
        self._templates: list[LineTemplate] = []
        """The one that fitted last comes first."""
        self._words = [""]
        """One of these is in each line that has a step, a loss or a time."""
        self._learned = 0
        self._without = 0
        """Lines of the format that no template fitted."""
        self._wanted = dict(wanted or {})
        self._is_table = is_table
        self._format: Format | None = before._format if before is not None else None
        self._checked: bool = before is not None and before._checked
        self._changed: bool = before is not None and before._changed
        self.label: str = before.label if before is not None else ""
        """Of the rank that is followed."""
        self._kept: deque[Line] = deque(maxlen=KEPT_LINES)
        self._unread: deque[Line | str] = deque(maxlen=KEPT_LINES)
        """Lines since the newest row; those that a template read as they are."""
        self._read_lines = 0
        self._others = 0
        """Lines of other ranks since the newest row."""
        self._lines = 0
        """Since the newest row."""
        self._losses = 0
        self._rows = 0
        self._positions = _Positions()
        self._time: float | None = None
        """The newest one since the newest row."""
        self._epoch: float | None = None
        self._usual: frozenset[str] = frozenset()
        self._skipped = 0
        self._is_clocked: bool = before is not None and before._is_clocked
        self._order = _Order()
        self._norms = _Norms()

    def quick(self, text: str) -> Sequence[Entry] | None:
        """The entries of a line like those before it, or of one that says nothing; None of others, for `take`."""
        is_due = self._lines % UNREAD_LINES == UNREAD_LINES - 1
        for at, template in enumerate(self._templates):
            reading = template.read(text)
            if reading is not None:
                if not reading.is_row:
                    if is_due:
                        return None
                    self._unread.append(text)
                    self._lines += 1
                if at:
                    self._templates.insert(0, self._templates.pop(at))
                return self._follow(reading)
        return None if is_due or not self._checked or self._is_notable(text) else ()

    def _is_notable(self, text: str) -> bool:
        """Whether `take` has to read a line that no template fits; other lines are counted here."""
        if len(text) > QUICK_CHARACTERS_MAX or any(word in text for word in _NOTABLE):
            return True
        if self.label and labelled(text)[0] != self.label:
            self._others += self._others < OTHERS_LINES
            return self._others == OTHERS_LINES
        if any(word in text for word in self._words) or any(word in text.lower() for word in EVALUATION_WORDS):
            return True
        self._unread.append(text)
        self._lines += 1
        return False

    def forget(self) -> None:
        """Lines mean something else from here on, as below another header."""
        self._templates, self._words = [], [""]

    def _learn(self, text: str, *, is_row: bool) -> None:
        """Make a template of a line that none fitted."""
        self._without += 1
        if self._learned < TEMPLATES_MAX or self._without > LEARNED_EVERY * self._learned:
            self._learned += 1
            template = template_of(text, self._reading_of, commas_separate=is_row)
            if template is not None:
                self._templates = [template, *self._templates][:TEMPLATES_MAX]

    def _reading_of(self, text: str) -> tuple[LineReading, str] | None:
        line = self._parse(text) if self._parse is not None else None
        assert self._format is not None
        return (self._reading(line, self._format), line.label) if line is not None else None

    def take(self, line: Line, text: str = "") -> Iterator[Entry]:
        """The entries that a further line completes.

        Args:
            line: the line.
            text: what `parse` made it of, by which lines like it are read from here on; "" if they are not.
        """
        if len(line.fields) > FIELDS_MAX:
            raise ValueError(f"more than {FIELDS_MAX:,} values")
        said = line.text
        notable = any(word in said for word in _NOTABLE)
        if notable and _ENDED.search(said):
            yield from self.flush()
            yield End()
            return
        if notable and (failure := _failure(said, line.label)) is not None:
            text = ""
            yield from self.flush()
            yield failure
        if notable and _SKIPPED.search(said) is not None:
            self._skipped, text = self._skipped + 1, ""
        if self._format is not None and line.label != self.label:
            self._pass_over()
            return
        self._lines += 1
        is_due = self._lines % UNREAD_LINES == 0
        if line.fields:
            self._kept.append(line)
        if self._format is None:
            self._losses += any(map(loss_score, line.fields))
            if (
                (line.fields and (self._losses == ENOUGH_LOSSES or (self._is_table and _is_sure(line))))
                or (self._lines >= ENOUGH_LINES and (not line.fields or self._lines % 4 == 0))
                or is_due
            ):
                yield from self._understand()
            if is_due and self._format is None:
                yield NotUnderstood(self._likely())
            return
        if is_due:
            yield NotUnderstood(self._likely())
        if not line.fields:
            return
        self._unread.append(line)
        found, reading = self._format, self._reading(line, self._format)
        yield from self._follow(reading)
        self._read_lines += 1
        if not self._checked and (self._rows in CHECK_ROWS or self._read_lines % CHECK_LINES == 0):
            self._checked = self._rows >= ENOUGH_LINES or self._read_lines >= KEPT_LINES
            yield from self._check(list(self._kept))
        elif self._lines and self._lines % UNREAD_LINES == 0 and not self._changed:
            before = self._format
            yield from self._check(self._unread_lines())
            self._changed = self._format is not before
        is_of_it = reading.is_row or reading.step is not None or (bool(reading.values) and not found.is_one_line)
        if text and self._checked and self._format is found and is_of_it:
            self._learn(text, is_row=not line.text)

    def _pass_over(self) -> None:
        """A line of another rank; if only others print since long, one of them is followed."""
        self._others += 1
        if self._others > OTHERS_LINES:
            self._format, self._checked, self._lines, self._losses, self._others = None, False, 0, 0, 0
            self._kept.clear()
            self.forget()

    def flush(self) -> Iterator[Entry]:
        """Nothing came for a while: what waits for further lines."""
        if self._format is None and self._kept:
            yield from self._understand(rows_min=1 if self._is_table or any(map(_is_sure, self._kept)) else 3)
        yield from self._order.flush()

    def _understand(self, rows_min: int = 1) -> Iterator[Entry]:
        """Find the format by the lines that were kept, and read these."""
        for label in dict.fromkeys(line.label for line in self._kept):
            lines = [line for line in self._kept if line.label == label]
            found = understood(lines, self._wanted, lossless=self._is_table or self._lines >= UNREAD_LINES)
            if found is not None and found.rows >= rows_min:
                self.label = label
                yield from self._begin(found, lines)
                yield from self._read_kept(lines)
                return

    def _check(self, lines: list[Line]) -> Iterator[Entry]:
        """Look whether lines show another format, and read on by that, from the newest row on."""
        lines = [line for line in lines if line.label == self.label]
        found, unread = understood(lines, self._wanted), self._unread_lines()
        assert self._format is not None
        if found is None or found.rows < CHECK_ROWS[0] or replace(found, rows=0) == replace(self._format, rows=0):
            return
        yield from self._begin(found, lines)
        yield from self._read_kept(unread)

    def _unread_lines(self) -> list[Line]:
        parse = self._parse or line_of
        lines = (parse(line) if isinstance(line, str) else line for line in self._unread)
        return [line for line in lines if line is not None]

    def _read_kept(self, lines: list[Line]) -> Iterator[Entry]:
        for line in lines:
            try:
                assert self._format is not None
                self._unread.append(line)
                yield from self._follow(self._reading(line, self._format))
            except ValueError as error:
                yield Unreadable(str(error))

    def _begin(self, found: Format, lines: list[Line]) -> Iterator[Entry]:
        self._format = found
        self.forget()
        at = [at for at, line in enumerate(lines) if (found.loss or found.step) in line.fields]
        rows = [lines[row] for row in at]
        names = [key.rpartition("/")[2] or "/" for key in (found.step, found.loss, found.time, found.epoch) if key]
        is_named = found.is_one_line and self._parse is not None and all(line.text for line in rows)
        self._words = names if is_named and not any(name.startswith("[") for name in names) else [""]
        clocks = [clock for line in rows if (clock := clock_of(line)) is not None]
        apart = [b - a for a, b in itertools.pairwise(clocks) if b > a]
        stamped = any(key.lower() in TIMESTAMPS for line in rows for key in line.fields)
        self._is_clocked = stamped or any(clock % 1 for clock in clocks) or bool(apart and median(apart) >= CLOCK_S_MIN)
        self._usual = frozenset(rows[0].fields) if rows else frozenset()
        steps = steps_at(lines, at, found.step, found.total) if found.step is not None else []
        yield Understood(self._described(found, [b - a for a, b in itertools.pairwise(steps) if b > a]))

    def _described(self, found: Format, apart: list[float]) -> str:
        step = f"step `{_shown(found.step)}`" if found.step is not None else "no step, so that lines are counted"
        time = f"time `{_shown(found.time)}`" if found.time is not None else ""
        if found.time_kind in ("step", "plain", "interval", "elapsed"):
            time += {1e-3: " in ms", 1e-6: " in us", 60.0: " in min"}.get(found.time_scale_s, " in s")
        if found.time_kind == "amount" and not self._is_clocked:
            time += ", of which the ratio counts"
        elif not time or found.time_kind == "amount":
            time = "time by the clock of its lines" if self._is_clocked else "time as its lines arrive"
        every = median(apart) if apart else 1
        pace = f", every {every:g} steps" if every > 1 else ""
        loss = f"loss `{_shown(found.loss)}`" if found.loss is not None else "no loss"
        return f"{step}, {loss}, {time}{pace}"

    def _reading(self, line: Line, found: Format) -> LineReading:
        """What a line says by a format."""
        fields = line.fields
        if not found.evaluates and is_evaluation(line):
            return LineReading(values={f"validation {key}": field.value for key, field in fields.items() if field.name})
        placed, loss, timed = fields.get(found.step or ""), fields.get(found.loss or ""), fields.get(found.time or "")
        if placed is not None and found.total is not None and placed.total != found.total:
            placed = None
        is_row = loss is not None or (found.is_one_line and placed is not None and self._is_usual(fields, found))
        is_row = is_row and (placed is not None or found.step is None or not found.is_one_line)
        values: dict[str, float] = {}
        if is_row or not found.is_one_line or placed is not None or any(map(is_evaluated, fields)):
            values = _values_of(fields, found, evaluated=found.is_one_line and placed is None and not is_row)
        if loss is not None and is_row:
            values["loss"] = loss.value
        if not is_row and found.is_one_line:
            placed = None
        epoch = fields.get(found.epoch or "")
        return LineReading(
            placed.value if placed is not None else None,
            placed.total if placed is not None else None,
            epoch.value if epoch is not None else None,
            timed.value if timed is not None else None,
            clock_of(line) if self._is_clocked and (timed is None or found.time_kind == "amount") else None,
            values,
            is_row,
        )

    def _follow(self, reading: LineReading) -> Sequence[Entry]:
        """The entries of what a line says."""
        found = self._format
        assert found is not None
        if reading.epoch is not None and reading.epoch < STEP_MAX and reading.epoch.is_integer():
            self._epoch = reading.epoch
        if reading.step is not None:
            if not 0 <= reading.step < STEP_MAX:
                raise ValueError(f"no number of a step: {reading.step:g}")
            total = reading.total if reading.total is not None and 0 < reading.total < STEP_MAX else None
            self._positions.move(reading.step, total, self._epoch, found)
        if reading.time is not None:
            self._time = reading.time
        if not reading.is_row:
            return [LoggedValues(reading.values)] if reading.values else ()
        return self._row(reading, found) if found.step is None or self._positions.is_known else ()

    def _is_usual(self, fields: Mapping[str, Field], found: Format) -> bool:
        """Whether a line without a loss is one of those that have one otherwise."""
        if found.loss is None:
            return True
        shared = len(self._usual & fields.keys())
        return shared > max(2, 0.6 * len(self._usual)) and not any(map(is_evaluated, fields))

    def _row(self, reading: LineReading, found: Format) -> Sequence[Entry]:
        self._rows, self._lines, self._others = self._rows + 1, 0, 0
        self._unread.clear()
        step = self._positions.step(found)
        if not 0 <= step < STEP_MAX:
            raise ValueError(f"no number of a step: {step:g}")
        values = reading.values
        every = self._order.every(int(step))
        if "loss" not in values and values.get("number of nan iterations", 0.0) > 0:
            values["loss"] = math.nan  # Megatron-LM leaves out a loss that is not finite
        skipped = max(self._skipped, values.get("number of skipped iterations", 0.0))
        if self._norms.has_overflown(values):
            skipped = every
        if skipped or self._order.has_skipped:
            self._order.has_skipped = True
            values["optimizer_skipped"] = float(skipped >= every)
        step_time_s = time_s = None
        if self._time is not None and not (found.time_kind == "amount" and self._is_clocked):
            step_time_s, time_s = _times(found, self._time, every)
        if step_time_s is None and time_s is None:
            time_s = reading.clock_s
        self._time, self._skipped = None, 0
        return self._order.put(LoggedStep(int(step), values, step_time_s, time_s))

    def _likely(self) -> tuple[str, ...]:
        """The lines that look most like steps."""

        def score(line: Line) -> float:
            scores = (max(step_score(key, field.unit), loss_score(key)) for key, field in line.fields.items())
            return sum(scores) + 0.1 * len(line.fields)

        return tuple(
            line.text.strip()[:160]
            for line in sorted(self._unread_lines() or self._kept, key=score, reverse=True)[:LIKELY_LINES]
        )


class _Positions:
    """Steps of the whole job, from what is counted anew in each epoch."""

    def __init__(self) -> None:
        self._base = 0.0
        self._value = -1.0
        self._epoch: float | None = None
        self._newest = 0.0
        """The step of the newest row."""
        self.is_known = False

    def move(self, value: float, total: float | None, epoch: float | None, found: Format) -> None:
        """The position is another."""
        begins = self._value < 0 or (epoch is not None and self._epoch is not None and epoch < self._epoch)
        if begins:
            self._base = self._begin(total, epoch, found)
        elif value < self._value or (epoch is not None and epoch != self._epoch):
            is_next = epoch is not None and self._epoch is not None and epoch > self._epoch
            if is_next and value <= self._value:
                assert epoch is not None
                assert self._epoch is not None
                self._base += (epoch - self._epoch) * total if total else self._value + (value == 0)
            elif value < self._value and not is_next:
                is_full = epoch is None and total is not None and found.total is None and self._value >= 0.95 * total
                self._base = self._base + (total or 0.0) if is_full else self._begin(total, epoch, found)
        if value < self._value:
            self._newest = min(self._newest, self._base + value - 1)
        self._value, self._epoch, self.is_known = value, epoch, True

    def step(self, found: Format) -> float:
        """The step of a row here."""
        if found.step is None:
            self._newest += 1
        elif found.is_one_line or found.total is None:
            self._newest = self._base + self._value
        else:  # a bar lags: lines come faster than it is drawn
            self._newest = max(self._base + self._value, self._newest + 1)
        return self._newest

    def _begin(self, total: float | None, epoch: float | None, found: Format) -> float:
        """What was before an epoch that is the first one seen."""
        if epoch is None or not total or step_score(found.step or "") > 6.0:
            return 0.0
        return (epoch - 1.0 if epoch else 0.0) * total


class _Norms:
    """Tells overflows, which loss scalers skip without a word, from gradients that are not finite.

    Beside a loss that is finite the first norms of a log may not be, until the scale is found, and one may be infinite
    later, where the scale has become too large.
    """

    def __init__(self) -> None:
        self._is_usual = False
        self._may_overflow = True

    def has_overflown(self, values: Mapping[str, float]) -> bool:
        """Whether the norm of a row says so."""
        norm, loss = values.get("grad_norm"), values.get("loss", 0.0)
        if norm is None:
            return False
        if math.isfinite(norm):
            self._is_usual = self._may_overflow = True
            return False
        overflows = self._may_overflow and bool(loss) and math.isfinite(loss)
        self._may_overflow = not self._is_usual
        return overflows and (not self._is_usual or math.isinf(norm))


class _Order:
    """Steps that go back: those of a restarted job are given, and late ones of another rank are not."""

    def __init__(self) -> None:
        self._newest: int | None = None
        self._every = 1
        self._held: LoggedStep | None = None
        self.has_skipped = False

    def every(self, step: int) -> int:
        """Steps from row to row."""
        if self._newest is not None and step > self._newest:
            self._every = step - self._newest
        return self._every

    def put(self, row: LoggedStep) -> Sequence[Entry]:
        """A further row."""
        newest, held = self._newest, self._held
        if newest is None or row.step >= newest or newest - row.step > BACK_ROWS * self._every:
            self._newest, self._held = row.step, None
            return (row,)
        if held is None or row.step < held.step:
            self._held = row
        elif row.step > held.step:
            self._newest, self._held = row.step, None
            return (held, row)
        return ()

    def flush(self) -> Sequence[Entry]:
        """No further row has come that tells."""
        held, self._held = self._held, None
        if held is None:
            return ()
        self._newest = held.step
        return (held,)


def _is_sure(line: Line) -> bool:
    """Whether the names in a line leave no doubt, so that it need not be compared with others."""
    sure = max(map(loss_score, line.fields), default=0.0) >= SURE and not any(map(is_evaluated, line.fields))
    return sure and any(step_score(key, field.unit) >= SURE for key, field in line.fields.items())


def _shown(key: str | None) -> str:
    return {"/": "N/M", "[it]": "Nit"}.get(key or "", (key or "").strip("[]"))


def _values_of(fields: Mapping[str, Field], found: Format, *, evaluated: bool = False) -> dict[str, float]:
    """The values of a line by the names that detectors know; without step, time and the like."""
    values: dict[str, float] = {}
    for key, field in fields.items():
        if (
            not field.name.isprintable()
            or not field.name
            or field.total is not None
            or key in (found.step, found.loss, found.time)
        ):
            continue
        said = time_of(field.name, field.unit)
        if said is not None and said.kind == "elapsed":
            continue
        if key.lower() in TIMESTAMPS or step_score(key) > 1.0 or (is_epoch(key) and key == found.epoch):
            continue
        if not evaluated or is_evaluated(key):
            name = known_name(key)
            values.setdefault(name if name != "loss" else f"other {name}", field.value)
    return values


def _times(found: Format, value: float, every: int) -> tuple[float | None, float | None]:
    """Seconds of a step, or the time of the row."""
    if found.time_kind == "elapsed":
        return None, value * found.time_scale_s
    if not math.isfinite(value) or value < 0:
        return None, None
    if found.time_kind in ("rate", "amount"):
        return (found.time_scale_s / value if value else None), None
    return value * found.time_scale_s / (every if found.time_kind == "interval" else 1), None
