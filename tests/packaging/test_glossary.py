"""Every noun of a file or class stands in the glossary or is plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.pages import ROOT, SOURCES

GLOSSARY = ROOT / "docs" / "glossary.md"
PLAIN = Path(__file__).with_name("plain_words.txt")
"""Words that any engineer of the field knows, one a line, sorted. What needs an explanation is the glossary's."""


def parts(name: str) -> list[str]:
    """`KafkaLog` and `kafka_log` as their words, in small letters."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)


def names() -> Iterator[tuple[Path, str]]:
    """Files, folders and classes of the project, with the file that each stands in."""
    for folder in (folder for folder in SOURCES if folder != "migrations"):  # whose names are in databases
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT)
            yield from ((place, part) for part in (*place.parts[1:-1], path.stem))
            classes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
            yield from ((place, node.name) for node in classes)


def terms() -> set[str]:
    """The words of the glossary's first column."""
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)
    return {word.lower() for row in rows for word in re.findall(r"[A-Za-z]+", row)}


def test_a_term_has_one_row() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)
    assert [row for row in set(rows) if rows.count(row) > 1 and row not in {"term", "---"}] == []


def forms(word: str) -> set[str]:
    """A word as it stands in a name, and as it stands in a list."""
    singular = re.sub(r"ies$", "y", word) if word.endswith("ies") else re.sub(r"(?<=[^s])s$", "", word)
    return {word, singular, re.sub(r"es$", "", word)}


def test_every_word_of_a_name_is_a_term_or_plain_english() -> None:
    known = {form for word in (terms() | set(PLAIN.read_text().split())) for form in forms(word)}
    unknown = sorted(
        f"{place}: {word!r} in {name} is neither in {GLOSSARY.name} nor in {PLAIN.name}: is there a usual word?"
        for place, name in names()
        for word in map(str.lower, parts(name))
        if not word.isdigit() and not forms(word) & known
    )
    assert not unknown, "\n".join(unknown)


def test_the_plain_words_are_sorted_and_none_is_a_term() -> None:
    words = PLAIN.read_text().split()
    assert words == sorted(set(words))
    assert set(words) & terms() == set()
