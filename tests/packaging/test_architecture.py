"""docs/architecture.md names what there is."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
FUNCTIONS = re.findall(r"`((?:rankwatch|rankwatch_service|rankwatch_detectors)(?:\.\w+)+)`", TEXT)
PATHS = re.findall(r"`((?:collectors|detectors|service|docs|tests)/[\w./]+)`", TEXT)
HOPS_MAX = 18
FILES_MAX = 6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_on_the_way_of_a_batch_exists(name):
    parts = name.split(".")
    module = next(length for length in range(len(parts), 0, -1) if exists(parts[:length]))
    found = importlib.import_module(".".join(parts[:module]))
    for part in parts[module:]:
        found = getattr(found, part)
    assert callable(found)


def exists(parts: list[str]) -> bool:
    path = ROOT / {"rankwatch": "collectors"}.get(parts[0], "service") / Path(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", sorted({path for path in PATHS if "NAME" not in path and "KIND" not in path}))
def test_a_path_exists(path):
    assert (ROOT / path.partition("…")[0]).exists()


@pytest.mark.parametrize(
    "folder", ["collectors/rankwatch", "detectors/rankwatch_detectors", "service/rankwatch_service"]
)
def test_each_package_is_named(folder):
    packages = [entry.name for entry in (ROOT / folder).iterdir() if (entry / "__init__.py").exists()]
    assert [name for name in packages if f"{name}/" not in TEXT] == []


def test_a_step_passes_no_more_functions_than_a_newcomer_can_follow():
    assert 0 < len(re.findall(r"^\| \d+ \| `", TEXT, re.MULTILINE)) <= HOPS_MAX


@pytest.mark.parametrize("recipe", re.split(r"^\*\*(?=A )", TEXT.partition("## How to add")[2], flags=re.MULTILINE)[1:])
def test_a_recipe_is_short(recipe):
    assert 0 < len(re.findall(r"^\d+\. ", recipe, re.MULTILINE)) <= FILES_MAX
