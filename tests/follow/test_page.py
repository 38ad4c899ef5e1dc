"""The table of `docs/logs.md` says what the reader says of the samples."""

from __future__ import annotations

import re
from pathlib import Path

from tests.follow.further_samples import SAMPLES
from tests.follow.test_reader import understood, written

PAGE = Path(__file__).parents[2] / "docs" / "logs.md"
VARIANT = re.compile(r"\b(?:with|without|after|over|by|older|workers|slow|1|own|each|first|since|in|of)\b")
"""Samples whose project has another one, or that are of none."""


def table() -> str:
    """A row for each project: which names are step, loss and time."""
    found = ["|project|step|loss|time|", "|-|-|-|-|"]
    for name, sample in SAMPLES.items():
        if VARIANT.search(name):
            continue
        step, loss, time = re.match(
            r"(.*?), (loss `.*?`), (.*?)(?:, every .*)?\Z", understood(written(sample))
        ).groups()
        cells = [name, *(quoted[0] if (quoted := re.findall("`.*?`", cell)) else "" for cell in (step, loss))]
        cells.append(
            re.sub(r"^time (?:by the )?|(?<=`) in \w+$|, of which.*", "", time).replace("as its lines arrive", "")
        )
        found.append("|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|")
    return "\n".join(found)


def test_the_page_shows_what_is_understood_of_each_project():
    assert table() in PAGE.read_text(), f"paste this into {PAGE}:\n{table()}"
