"""A folder that one can take in at a glance, and files that one can read in one go."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_MAX = 400
SMALL = ("service", "benchmarks")
"""Here a folder has at most 15 files, elsewhere at most 25."""
DATA = ("docs", "migrations/versions", "tests/golden", "tests/adoption/scripts")
"""Pages, migrations, recorded files and scripts are looked up by name."""


ROOMS = ("benchmarks", "collectors", "detectors", "examples", "migrations", "service", "suite", "tests")


def files() -> list[Path]:
    found = (path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file())
    return [path for path in found if "__pycache__" not in path.parts]


def test_no_folder_has_more_files_than_one_takes_in():
    count = Counter(str(path.parent) for path in files() if not str(path).startswith(DATA))
    most = {folder: 15 if folder.startswith(SMALL) else 25 for folder in count}
    assert {folder: number for folder, number in count.items() if number > most[folder]} == {}


def test_no_file_is_longer_than_400_lines():
    python = [path for path in files() if path.suffix == ".py" and path.parts[0] != "migrations"]
    long = {str(path): len((ROOT / path).read_text().splitlines()) for path in python}
    assert {path: lines for path, lines in long.items() if lines > LINES_MAX} == {}
