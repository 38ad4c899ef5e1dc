"""A class name means one thing in the whole project: whoever reads it in one file knows it in the next."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("collectors", "detectors", "service", "suite", "benchmarks")
FORMS = (
    "service/rankwatch_service/store/models/",
    "service/rankwatch_service/api/routes/",
    "collectors/rankwatch/client/client.py",
)
"""Rows of tables, bodies of the API and results of its client: forms of the thing whose name they carry."""


def definitions() -> dict[str, list[str]]:
    """Public classes by name, with the files that define them."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not name.startswith(FORMS):
                    found[node.name].append(name)
    return found


def shared() -> dict[str, list[str]]:
    return {name: files for name, files in definitions().items() if len(files) > 1}


def test_a_class_name_means_one_thing():
    assert shared() == {}
