"""Small files of /proc and /sys as numbers. What is missing, unreadable or of another form is None."""

from __future__ import annotations

from pathlib import Path


def missing_under(root: Path) -> list[str]:
    """Of /proc and /sys, those that are not under this folder: nothing can be told of what is in them."""
    return [name for name, some in (("proc", "proc/stat"), ("sys", "sys/class/net")) if not (root / some).exists()]


def text_of(path: Path) -> str | None:
    """The content without the white space around it; None if it cannot be read, as some cannot while a link is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path) -> float | None:
    """The content as a number."""
    return as_number(text_of(path))


def as_number(text: str | None) -> float | None:
    """The number that a text is."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def table_of(path: Path) -> dict[str, float]:
    """Lines of "name value" or "name: value unit", such as /proc/meminfo has them, by name."""
    found = {}
    for line in (text_of(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and (value := as_number(words[1])) is not None:
            found[words[0]] = value
    return found


def rate(now: float | None, before: float | None, seconds: float) -> float | None:
    """What a count has grown by in a second; None if it is not known, or began anew."""
    if now is None or before is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds


def known(counters: dict[str, float | None]) -> dict[str, float]:
    """The counters that could be read."""
    return {name: value for name, value in counters.items() if value is not None}
