"""Names: a class name means one thing in the whole project, and words that the field has a term for stay away."""

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

FORBIDDEN = {
    "blind": "outage",
    "calm": "normal",
    "comrades": "same_launch",
    "crowding": "cpu_contention",
    "doubt": "uncertainty, suspect",
    "judge": "evaluate, review",
    "objection": "rejection_reason",
    "parcel": "batch",
    "patience": "timeout",
    "resting": "idle",
    "shortfall": "unmet criterion",
    "spoils": "corrupts",
    "spoilt": "corrupted",
    "trails": "history",
    "witness": "test",
}
"""Words in names of functions, parameters, variables and attributes, with the standard term for each."""


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


def names(tree: ast.Module) -> set[str]:
    """The functions, parameters, variables and attributes that a module defines."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def test_names_use_the_terms_of_the_field():
    used = {
        f"{path.relative_to(ROOT)}: {name}"
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
        for name in names(ast.parse(path.read_text()))
        if not FORBIDDEN.keys().isdisjoint(name.lower().split("_"))
    }
    assert used == set()
