"""The pages as the tests read them: what stands in code type, and in which line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.service.api import Api

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if page.name != "CHANGELOG.md")
"""The changelog tells of what was: it may name what is gone."""
SOURCES = ("collectors", "detectors", "service", "suite", "benchmarks", "migrations", "examples")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Code:
    """A span of code within a sentence, or a line of a fenced block."""

    page: Path
    line: int
    text: str
    fence: str | None = None
    """The language of the block, "" where it names none; None: a span within a sentence."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


def read(page: Path) -> Iterator[Code]:
    """The code of one page, in its order."""
    fence: str | None = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = line.strip().removeprefix("```") if fence is None else None
        elif fence is not None:
            yield Code(page, number, line, fence)
        else:
            yield from (Code(page, number, span) for span in _SPAN.findall(line))


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines, with their numbers, that are neither of a table nor of a block."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "![")):
            yield number, line


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Fenced blocks of a language, with the number of their first line."""
    lines: list[Code] = []
    for code in [*read(page), Code(page, 0, "", None)]:
        if lines and (code.fence is None or code.line != lines[-1].line + 1):
            yield lines[0].line, "\n".join(line.text for line in lines)
            lines = []
        if code.fence == language:
            lines.append(code)


@cache
def all_code() -> list[Code]:
    """Of all pages."""
    return [code for page in PAGES for code in read(page)]


@cache
def files() -> set[str]:
    """Every file and folder of the project, relative to its root."""
    found = {".ci/run"}
    for folder in (*SOURCES, "deploy", "tests", "docs"):
        found |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts}
        found.add(folder)
    return found | {path.name for path in ROOT.iterdir() if path.is_file()}


@cache
def words() -> set[str]:
    """Every identifier in the sources, tests left out."""
    texts = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".js"}]
    texts += [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    texts += [ROOT / name for name in ("Makefile", "pyproject.toml", "docker-compose.yml")]
    contents = [*(path.read_text() for path in texts), json.dumps(rest_description())]
    return {word for content in contents for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", content)}


@cache
def rest_description() -> dict[str, Any]:
    """The OpenAPI description of the REST interface."""
    with TemporaryDirectory() as folder:
        api = Api(Path(folder))
        described = api.app.openapi()
        api.engine.dispose()
    return described
