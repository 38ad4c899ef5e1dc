"""The numbers in a line of a log, with the names and units that stand beside them; whatever the line's form.

Pure: nothing of earlier lines is known here. A name is what stands before a number, up to the number or the sign
before it that separates; so `key=value`, `key: value`, `| key value |`, bars, JSON and Python's dicts are one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from rankwatch.output.prefixes import labelled

NAME_CHARACTERS_MAX: Final = 64
GAP_CHARACTERS_MAX: Final = 256
"""Before a number, in which its name is looked for."""
NESTING_MAX: Final = 4
"""Depth to which JSON is read."""
SIDE_BY_SIDE_MIN: Final = 3
"""So many numbers with names behind them make a line of such."""
FIELDS_MAX: Final = 4_096
"""Numbers in one line; a recorder has room for 64 names."""


class Field(NamedTuple):
    """A number of a line."""

    name: str
    """As written; "" if nothing names it."""
    value: float
    unit: str = ""
    """As written behind the value, in lower case."""
    total: float | None = None
    """Of `3250/5808` the second number."""

    @property
    def key(self) -> str:
        """What it is known by from line to line: its name, else its unit; "/" of a bare fraction."""
        if self.name:
            return self.name
        return "/" if self.total is not None else f"[{self.unit}]"


class Line(NamedTuple):
    """A line that was cut into its parts."""

    fields: dict[str, Field]
    """By key; of several with one key the first."""
    text: str
    """Without colours, prefix and clock; "" of a row of a table."""
    label: str = ""
    """Names the rank that wrote it; "" if nothing does."""
    clock_s: float | None = None
    """When it was written, by its own clock, whose zone and day may be unknown: only differences count."""


_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)|\x08+|\ufeff")
_TIME: Final = r"(\d\d):(\d\d):(\d\d)([.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?(?![\d:])"
_CLOCK: Final = re.compile(rf"(?<![\d-])(\d{{4}})[-/](\d\d)[-/](\d\d)(?:[T_ ]|,\s?|\s-\s){_TIME}")
_TIME_OF_DAY: Final = re.compile(
    rf"\W{{0,3}}(?:[IWEF]\d{{4}}\s|\d\d/\d\d(?:/\d\d(?:\d\d)?)?\s|[A-Z][a-z]{{2}}\s+\d{{1,2}}\s)?{_TIME}"
    r"(?:\s+\d+(?=\s[\w./-]+\.(?:py|cc):))?"
)
"""At the begin of a line, where no duration stands; the last part is the thread that a Google logger names."""
_SOURCES: Final = (".py:", ".cc:", ".cpp:", ".cu:", ".h:", ".rs:")
_SOURCE: Final = re.compile(r"[\w./-]*\w\.(?:py|cc|cpp|cu|h|rs):\d+(?::\w+)?")
"""A place in the code, as loggers print it."""
_SPAN: Final = re.compile(
    r"(?<![\w.])\d+(?: days?, \d+)?:\d\d(?::\d\d)?(?:\.\d+)?(?![\w:])|(?<![\w.])(?:\d+[dhms]\s?){2,4}(?!\w)"
)
"""A duration, such as the time that is left."""
_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NOT_FINITE: Final = r"(?:nan(?:xxx|\(ind\))?|inf(?:inity)?|1\.#(?:qnan|ind|inf)\d*)"
"""As C, Python, Paddle and Windows print it."""
_VALUE_FOLLOWS: Final = re.compile(r"(?:[:=,|(\[\t'\"]|loss|norm|ppl)\s*\Z", re.I)
_UNIT: Final = (
    r"\s?(?:(?:[mµun]?s|secs?|seconds?|mins?)(?:/\w{2,9})?|[A-Za-z]{2,9}/s(?:ec(?:ond)?)?|/s(?:ec)?|"
    r"%|it|[KMGT]i?B|[kKMGTB])(?![\w/]|[:=]|\s+=)"
)
_NUMBER: Final = re.compile(
    rf"(?<![\w.@%-])([-+]?(?:{_NOT_FINITE}|{_DIGITS}))(?:\s*/\s*({_DIGITS}|infinity)(?![\w.]))?({_UNIT})?(?!\.?\w)",
    re.I,
)
_BARE: Final = re.compile(r"(?<=[\s:])(?:(nan)|\+?inf(?:inity)?)(?=\s*[,}])", re.I)
"""Numbers that JSON writes otherwise."""
_CALL: Final = re.compile(r"(?:tensor|array|(?:np\.|numpy\.|jnp\.)?float\d*)\(\[?$", re.I)
_BREAK: Final = re.compile(r"[\]}{|,;<>\t:=\u2500-\u259f]|\s{2,}|\s-\s|\.\s|\"\s|(?<=\w)\s?\[")
_NAME: Final = re.compile(r"(?:[^\W\d]|#)(?:[\w ./()\[\]@%+&#*-]|'(?=s ))*\Z")
_BEFORE_NAME: Final = re.compile(r"[^\w#]+")
_COUNT: Final = re.compile(r"[\s\]]*(?:\[(\d{1,12})\]|(\d{1,12}):?)(?=[\s,])")
"""A number that a line begins with, as of gradient boosting; it is known by `COUNT`."""
COUNT: Final = "#"
_EDGE: Final = " \t'\"`*"
_WIDE: Final = str.maketrans("：，；（）［］＝｜│┃║", ":,;()[]=||||")
_IS_WIDE: Final = re.compile("[：，；（）［］＝｜│┃║]")
_TURNED: Final = (
    (re.compile(r"(?<![\w.])(?:\d+-)?(\d+)(epoch|batch|iters?|steps?)(?![A-Za-z])"), r" \2 \1 "),
    (re.compile("第? ?([0-9]+) ?(步|轮|輪)"), r" \2 \1 "),
    (re.compile(r"(\bloss:?) (\d+) (?=[-+]?\d+\.\d|nan|inf)", re.I), r"step \2 \1 "),
    (re.compile(r"^(\W*)\[(\d+)/(\d+)\]\s*(?=\[\d+/\d)"), r"\1epoch \2/\3 "),
    (re.compile("(?<=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af])(?=[0-9.-]|nan|inf)"), " "),
)
"""Places of steps whose names stand behind them, or nowhere; each as a name with its number."""
_BEHIND: Final = re.compile(
    rf"\s*([-+]?{_NOT_FINITE}|{_DIGITS})()\s?([mµun]?s(?![\w/])|[KMGT]i?B(?!\w))?\s?([A-Za-z][\w ]{{0,30}})?\s*", re.I
)
"""A number before its unit and name, of lines in which all are such: `3.43 s run, 11.9 loss, 1e-4 LR`."""
_DECIMAL_COMMA: Final = re.compile(r"(?<![\d.,])(?:\d+,(?:\d\d|\d{4,})|0,\d{3})(?![\d,])")


def plain(text: str) -> str:
    """A line with signs of ASCII for those of full width and of frames, and for what SageMaker writes for tabs."""
    if not text.isascii() and _IS_WIDE.search(text):
        text = text.translate(_WIDE)
    return text.replace("#011", "\t").replace("#015", "\r") if "#01" in text else text


def line_of(text: str) -> Line:
    """A line without its end, cut into its parts."""
    text = _ESCAPE.sub("", text) if "\x1b" in text or "\x08" in text or "\ufeff" in text else text
    label, length = labelled(text)
    text = text[length:].lstrip() if length else text
    clock_s, text = _clock(text)
    turned = text
    for form, by in _TURNED:
        turned = form.sub(by, turned)
    if "," in turned and _DECIMAL_COMMA.search(turned) and not re.search(r"\d\.\d", turned):
        turned = re.sub(r"(?<=\d),(?=\d)", ".", turned)
    return Line(named(_fields(turned, 0)), text, label, clock_s)


def named(fields: Iterator[Field]) -> dict[str, Field]:
    """Fields by their key, of each the first."""
    found: dict[str, Field] = {}
    for field in fields:
        found.setdefault(field.key, field)
        if len(found) > FIELDS_MAX:
            raise ValueError(f"more than {FIELDS_MAX:,} values")
    return found


def value_of(text: str) -> Field | None:
    """The number that a text is as a whole, such as a cell of a table; without a name."""
    found = _NUMBER.fullmatch(text.strip(_EDGE))
    return _field("", found) if found is not None else None


def clock_s(text: str) -> float | None:
    """The clock that a text begins with, as in `Line`."""
    return _clock(text)[0]


_MESSAGES: Final = frozenset(("log", "message", "msg", "text", "textpayload", "line", "event", "body", "content"))
_WRAPPERS: Final = frozenset(("data", "fields", "payload", "jsonPayload", "attributes", "extra", "record", "metrics"))
"""Names of objects in which a logger puts what it was given."""


def from_mapping(mapping: Mapping[str, Any], depth: int = 0, before: str = "") -> Iterator[Field]:
    """The numbers of a JSON object, those within it with a path as a name; and of a line that it wraps."""
    if isinstance(name := mapping.get("key"), str) and isinstance(value := mapping.get("value"), int | float):
        yield Field(name, float(value))
    for name, value in mapping.items():
        path = f"{before}{name}"
        if name == "step" and isinstance(value, list) and value and isinstance(value[-1], int):
            yield Field(path, float(value[-1]))  # behind the epoch
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int | float):
            yield Field(path, float(value) if abs(value) < 1e300 or value != value else float("inf"))
        elif isinstance(value, str):
            field = value_of(value)
            if field is not None:
                yield field._replace(name=path)
            elif name.lower().lstrip("@_") in _MESSAGES:
                yield from line_of(value.rstrip()).fields.values()
        elif isinstance(value, Mapping) and depth < NESTING_MAX:
            yield from from_mapping(value, depth + 1, before if name in _WRAPPERS else f"{path}/")


@lru_cache(1024)
def words(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case: of `reduced_train_loss`, `LanguageCrossEntropy` or `lr/group0`."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    if not name.isascii():
        for word, english in _FOREIGN.items():
            name = name.replace(word, f" {english} ")
    return tuple(re.findall(r"[a-z]+", name))


_FOREIGN: Final = {
    word: english
    for english, listed in (
        ("loss", "损失 損失 손실 потери"),
        ("step", "训练次数 步数 步骤 步 迭代 ステップ 스텝 шаг"),
        ("epoch", "轮次 轮数 轮 輪 エポック 에폭 эпоха"),
        ("lr", "学习率 学習率 학습률"),
        ("val", "测试 验证 検証 검증"),
        ("time", "耗时 用时"),
        ("train", "训练 학습"),
        ("avg", "平均"),
    )
    for word in listed.split()
}


def _fields(text: str, at: int) -> Iterator[Field]:
    begins, ends = text.find('{"'), text.rfind("}")
    if 0 <= begins < ends:
        content = _json(text[begins : ends + 1])
        if content is not None:
            yield from _fields(text[:begins], at)
            yield from from_mapping(content)
            return
    if at == 0 and (count := _COUNT.match(text)) is not None:
        yield Field(COUNT, float(count[1] or count[2]))
        at = count.end()
    if (behind := _behind(text[at:])) is not None:
        yield from behind
        return
    at = 0
    spans = [span.span() for span in _SPAN.finditer(text)]
    before: Field | None = None
    for found in _NUMBER.finditer(text):
        start = found.start()
        if spans and any(begin <= start < end for begin, end in spans):
            at = found.end()
            continue
        gap = text[at:start]
        if found[1][-1].isalpha() and not (
            _VALUE_FOLLOWS.search(gap) or not text[found.end() :].lstrip()[:1].isalpha()
        ):
            continue  # prose: `number of nan iterations`
        at = found.end()
        field = _field(_name(gap[-GAP_CHARACTERS_MAX:]), found)
        is_mean = before is not None and gap.strip() == "(" and field.total is None and field.unit in ("", before.unit)
        before = field
        if field.name or (not is_mean and field.unit != "%" and (field.unit or field.total is not None)):
            yield field


_SECONDS: Final = ("s", "sec", "secs", "second", "seconds")


def _behind(text: str) -> list[Field] | None:
    """The numbers of a line in which names stand behind them; None of other lines."""
    parts = [_BEHIND.fullmatch(part) for part in text.rstrip(" ,").split(",")]
    if len(parts) < SIDE_BY_SIDE_MIN or not all(parts):
        return None
    found = []
    for part in parts:
        assert part is not None
        name = (part[4] or "").strip()
        field = _field("avg loss" if name == "avg" else name, part)  # of darknet
        found.append(field._replace(name="", unit=name) if name in _SECONDS else field)
    found = [field for field in found if field.name or field.unit]
    return found if len(found) >= SIDE_BY_SIDE_MIN else None


def _json(text: str) -> dict[str, Any] | None:
    for written in (text, _BARE.sub(lambda found: "NaN" if found[1] else "Infinity", text)):
        try:
            content = json.loads(written)
        except (ValueError, RecursionError):
            continue
        return content if isinstance(content, dict) else None
    return None


def _field(name: str, found: re.Match[str]) -> Field:
    total = found[2]
    return Field(
        name, _value(found[1]), (found[3] or "").strip().lower(), float(total.replace(",", "")) if total else None
    )


def _value(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan if "inf" not in text.lower() else -math.inf if text[0] == "-" else math.inf


@lru_cache(1024)
def _name(gap: str) -> str:
    gap = _CALL.sub("", gap).rstrip(" \t'\"`:=([#~>|")
    part = _BREAK.split(gap)[-1].strip(_EDGE)
    part = part[before.end() :] if (before := _BEFORE_NAME.match(part)) is not None else part
    if part.count(" ") > 5:
        part = " ".join(part.split(" ")[-3:])
    return part if len(part) <= NAME_CHARACTERS_MAX and _NAME.match(part) else ""


def _clock(text: str) -> tuple[float | None, str]:
    """The first clock of a line, and the line without clocks and places in code."""
    clock_s = None
    if text.count(":") >= 2:
        found = _CLOCK.search(text)
        if found is not None:
            year, month, day, *time = found.groups()
            clock_s = _day_s(int(year), int(month), int(day)) + _seconds(*time)
            text = _CLOCK.sub("  ", text)
        elif (found := _TIME_OF_DAY.match(text)) is not None:
            clock_s = _seconds(*found.groups())
            text = text[found.end() :]
    return clock_s, _SOURCE.sub("  ", text) if any(ending in text for ending in _SOURCES) else text


def _seconds(hours: str, minutes: str, seconds: str, fraction: str | None) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction[1:]}" if fraction else 0)


@lru_cache(64)
def _day_s(year: int, month: int, day: int) -> float:
    try:
        return datetime(year, month, day, tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
