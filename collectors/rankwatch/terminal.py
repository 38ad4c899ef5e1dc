"""Text on its way to a terminal. Standard library only.

Names, lines of logs and messages of others may hold escape sequences, which control a terminal.
"""

from __future__ import annotations

import json
from typing import Any, Final

KEPT: Final = "\n\t"


def printable(text: object) -> str:
    """The text with a replacement for each sign that is not shown, besides line breaks and tabs."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(sign if sign.isprintable() or sign in KEPT else "\N{REPLACEMENT CHARACTER}" for sign in shown)


def json_line(thing: Any) -> str:
    """A value as one line of JSON with its line break, in which signs that are not shown are escaped."""
    text = json.dumps(thing, ensure_ascii=False)
    if not text.isprintable():
        text = "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in text)
    return text + "\n"
