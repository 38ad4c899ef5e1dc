"""A message as every type of receiver reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from rankwatch_service.names import one_line

SEVERITIES: Final = ("critical", "warning", "info")

LINK_TITLES: Final[Mapping[str, str]] = {
    "incident": "Open incident",
    "job": "Open job",
    "service": "Open rankwatch",
    "runbook": "Runbook",
    "acknowledge": "Acknowledge",
    "silence": "Silence for 1 h",
}
"""Links of a message that people get as buttons, in this order."""


@dataclass(frozen=True)
class OutgoingMessage:
    """One message of the outbox: its id, the exact bytes of {type, timestamp, data}, and what they say."""

    id: str
    """The same in all tries."""
    body: bytes

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The body, parsed."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def type(self) -> str:
        """Such as incident.opened."""
        return str(self.content["type"])

    @property
    def timestamp(self) -> str:
        """When it happened: ISO 8601, UTC."""
        return str(self.content["timestamp"])

    @property
    def data(self) -> Mapping[str, Any]:
        """What it is about."""
        data: Mapping[str, Any] = self.content["data"]
        return data

    @property
    def group_key(self) -> str:
        """The same in all messages about one subject: a receiver puts them into one incident or thread."""
        return str(self.data.get("id") or self.id)

    @property
    def is_about_incident(self) -> bool:
        """Whether it is about an incident, which will be resolved some day."""
        return self.type.startswith("incident.")

    @property
    def is_resolved(self) -> bool:
        """Whether it reports that its incident is resolved."""
        return self.type == "incident.resolved"

    @property
    def severity(self) -> str:
        """One of `SEVERITIES`; a message that is about no incident is a warning."""
        severity = str(self.data.get("severity", "warning"))
        return severity if severity in SEVERITIES else "warning"

    @property
    def job(self) -> str:
        """Name of the job; empty: none."""
        return str(self.data.get("job") or "")

    @property
    def lines(self) -> tuple[str, str, str]:
        """The three lines of the text: what, where and how bad; what is normal; what to do first."""
        text = str(self.data.get("text") or self.data.get("summary") or self.type)
        what, normal, first, *_ = [*map(one_line, text.split("\n")), "", ""]
        return what, normal, first

    @property
    def links(self) -> Mapping[str, str]:
        """URLs by name."""
        links: Mapping[str, str] = self.data.get("links") or {}
        return links

    def buttons(self) -> list[tuple[str, str]]:
        """The links that people get, as title and URL, in the order of `LINK_TITLES`."""
        return [(title, self.links[name]) for name, title in LINK_TITLES.items() if name in self.links]


def cut(text: str, chars_max: int) -> str:
    """The text, or its beginning and an ellipsis: at most `chars_max` characters.

    >>> cut("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def escaped(text: str, escape: Callable[[str], str], chars_max: int) -> str:
    """The text with each character escaped: at most `chars_max` characters. An escape is not cut in two."""
    parts = [escape(char) for char in text]
    if sum(map(len, parts)) <= chars_max:
        return "".join(parts)
    length, kept = 0, []
    for part in parts:
        if (length := length + len(part)) > chars_max - 1:
            break
        kept.append(part)
    return "".join(kept) + "…"


def encoded(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")
