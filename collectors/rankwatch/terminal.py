"""Text on its way to a terminal. Standard library only.

Names, lines of logs and messages of others may hold escape sequences, with which a terminal is told to do things.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

KEPT: Final = "\n\t"
_CONTROL: Final = re.compile(r"[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Signs that JSON leaves as they are, and that a terminal obeys or does not show."""


def printable(text: object) -> str:
    """The text with a replacement for each sign that is not shown, besides line breaks and tabs."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(sign if sign.isprintable() or sign in KEPT else "\N{REPLACEMENT CHARACTER}" for sign in shown)


def json_line(thing: Any) -> str:
    """A value as one line of JSON with its line break, in which signs that are not shown are escaped."""
    text = json.dumps(thing, ensure_ascii=False)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"
