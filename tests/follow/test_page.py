"""The table of `docs/logs.md` says what the reader says of the samples."""

from __future__ import annotations

import re
from pathlib import Path

from rankwatch.follow.fields import line_of
from tests.follow.samples import SAMPLES
from tests.follow.test_reader import LOSSES, understood, written

PAGE = Path(__file__).parents[2] / "docs" / "logs.md"
VARIANT = re.compile(r"\b(?:with|without|after|over|by|older|workers|slow|1|own|each|first|since|in)\b")
"""Samples whose project has another one, or that are of none."""


def table() -> str:
    """A row for each project: how a line ends with its loss, and which names are step, loss and time."""
    found = ["|project|a line, to its loss|step|loss|time|", "|-|-|-|-|-|"]
    for name, sample in SAMPLES.items():
        if VARIANT.search(name):
            continue
        step, loss, time = re.match(
            r"(.*?), (loss `.*?`), (.*?)(?:, every .*)?\Z", understood(written(sample))
        ).groups()
        cells = [name, f"`{excerpt(sample.text(1, LOSSES[1]))}`"]
        cells += [quoted[0] if (quoted := re.findall("`.*?`", cell)) else "" for cell in (step, loss)]
        cells.append(
            re.sub(r"^time (?:by the )?|(?<=`) in \w+$|, of which.*", "", time).replace("as its lines arrive", "")
        )
        found.append("|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|")
    return "\n".join(found)


def excerpt(text: str) -> str:
    """The end of a line up to its loss, 40 characters at most."""
    text = re.sub(r"\x1b\[\d+m", "", text)
    before, loss, _ = re.split(r"(4\.90*(?:E\+00)?)", text, maxsplit=1)
    line = " ".join((re.split("[\r\n]", before)[-1] + loss).split())
    return line if len(line) <= 40 else f"…{line[-39:]}"


def test_the_page_shows_what_is_understood_of_each_project():
    assert table() in PAGE.read_text(), f"paste this into {PAGE}:\n{table()}"


def test_excerpts_are_of_lines():
    assert line_of(excerpt("step 3 loss 4.9\n")).fields["loss"].value == 4.9
