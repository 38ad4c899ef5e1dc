"""Labels of incidents, by which they are routed and silenced, and the matchers on them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

ALERT_NAME: Final = "alertname"

LABEL_NAMES: Final = (ALERT_NAME, "kind", "severity", "job", "project", "owner", "attempt", "scope", "host", "rank")
"""Labels that incidents have. One that would be empty is missing."""


def incident_labels(data: Mapping[str, Any]) -> dict[str, str]:
    """The labels of an incident.

    `host` and `rank` are there if it is about exactly one. `alertname` is the kind, see `alert_name`.

    Args:
        data: the field `data` of its message (`policy.notification.incident_message`), or the same fields of what is
            known of it: kind, severity, job, project, owner, attempt, scope, hosts, ranks.
    """
    hosts, ranks = data["hosts"], data["ranks"]
    labels = {
        ALERT_NAME: alert_name(data["kind"]),
        **{name: str(data[name]) for name in ("kind", "severity", "job", "project", "owner", "attempt", "scope")},
        "host": hosts[0] if len(hosts) == 1 else "",
        "rank": str(ranks[0]) if len(ranks) == 1 else "",
    }
    return {name: value for name, value in labels.items() if value}


def alert_name(kind: str) -> str:
    """A kind in the usual form of alerts: `rank_lost` is `RankLost`."""
    return kind.title().replace("_", "")


def check_label_name(name: str) -> None:
    """Refuse a label that incidents never have.

    Raises:
        ValueError: it is none of `LABEL_NAMES`.
    """
    if name not in LABEL_NAMES:
        raise ValueError(f"incidents have no label {name!r}; they have {', '.join(LABEL_NAMES)}")


Labels = Mapping[str, str]
"""Names and values of an incident's labels. A label that is missing counts as empty."""

PATTERN_CHARS_MAX: Final = 500

PATTERNS_KEPT: Final = 1_024
"""Compiled regular expressions; beyond, the one used longest ago is compiled again: some 50 microseconds."""

_SYNTAX: Final = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(=~|=|!=|!~)\s*(.*?)\s*", re.DOTALL)
_PARTS: Final = re.compile(r'(?:[^,"\\]|\\.|"(?:\\.|[^"\\])*"|"|\\)+', re.DOTALL)
_ESCAPES: Final = {"n": "\n", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on one label. `=~` and `!~` compare the whole value with a regular expression.

    Expressions are those of Rust's `regex`, of the family of RE2 as Alertmanager's: without backreferences and
    look-around, and linear in the value, so that none of them can hold up whoever matches it.
    """

    name: str
    operator: str
    """=, !=, =~ or !~."""
    value: str

    def __post_init__(self) -> None:
        """Check the regular expression, if it is one.

        Raises:
            ValueError: it is malformed or too long.
        """
        if "~" not in self.operator:
            return
        if len(self.value) > PATTERN_CHARS_MAX:
            raise ValueError(f"the regular expression of {self.name} is longer than {PATTERN_CHARS_MAX} characters")
        try:
            _compiled(self.value)
        except (SchemaError, UnicodeError) as error:
            reason = str(error).strip().rpartition("\n")[2].strip().removeprefix("error: ")
            raise ValueError(f"{self.value!r} is not a regular expression: {reason}") from error

    def matches(self, labels: Labels) -> bool:
        """Whether the labels meet the condition."""
        value = labels.get(self.name, "")
        same = _fits(self.value, value) if "~" in self.operator else value == self.value
        return same is not self.operator.startswith("!")

    def __str__(self) -> str:
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.name}{self.operator}"{value}"'


def parse_matcher(text: str) -> Matcher:
    r"""Read one matcher. Quotes around the value are optional; within it `\"`, `\\` and `\n` are escapes.

    Raises:
        ValueError: it is malformed.
    """
    found = _SYNTAX.fullmatch(text)
    if found is None:
        raise ValueError(f'{text!r} is not a matcher such as job="gpt", kind!="hang" or host=~"node-.*"')
    name, operator, raw = found.groups()
    quoted = re.fullmatch(r'"((?:\\.|[^"\\])*)\\?"', raw, re.DOTALL)
    if quoted is None and re.search(r'(?<!\\)(?:\\\\)*"', raw):
        raise ValueError(f'the value in {text!r} has a quote that does not belong to a pair: write \\" for it')
    inner = raw if quoted is None else raw[1:-1]
    return Matcher(name, operator, re.sub(r"\\(.)", _unescaped, inner, flags=re.DOTALL))


@lru_cache(PATTERNS_KEPT)
def parse_matchers(text: str) -> tuple[Matcher, ...]:
    """Read matchers separated by commas, with or without braces around them: `{job="gpt", kind="hang"}`.

    Raises:
        ValueError: one of them is malformed.
    """
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    return tuple(parse_matcher(part) for part in _PARTS.findall(inner) if part.strip())


def match_all(matchers: Iterable[Matcher], labels: Labels) -> bool:
    """Whether the labels meet all conditions."""
    return all(matcher.matches(labels) for matcher in matchers)


@lru_cache(PATTERNS_KEPT)
def _compiled(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=f"^(?:{pattern})$", regex_engine="rust-regex"))


def _fits(pattern: str, value: str) -> bool:
    # Names may hold lone surrogates, which are no text for the engine.
    return _compiled(pattern).isinstance_python(value.encode(errors="replace").decode())


def _unescaped(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[1], found[0])
