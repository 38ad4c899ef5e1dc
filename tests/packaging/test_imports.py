"""What importing each part costs and pulls in, seen from a fresh interpreter."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest


@cache
def modules_after(statement: str) -> set[str]:
    code = f"import sys, json; old = set(sys.modules); {statement}; print(json.dumps([*set(sys.modules) - old]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stdout))


def third_party(module: str) -> set[str]:
    return {name.split(".")[0] for name in modules_after(f"import {module}")} - sys.stdlib_module_names


def test_the_training_process_imports_the_standard_library_only():
    assert third_party("rankwatch") == {"rankwatch"}
    assert not {"rankwatch.agent", "rankwatch.wire"} & modules_after("import rankwatch")


def test_the_detectors_import_without_river_torch_or_the_service():
    assert not third_party("rankwatch_detectors.base") & {"torch", "river", "rankwatch", "rankwatch_service"}


def test_the_agent_needs_nothing_but_the_standard_library_and_msgspec():
    # msgspec takes typing_extensions where it finds it, and does without where it does not.
    assert third_party("rankwatch.agent.worker") <= {"rankwatch", "msgspec", "typing_extensions"}


@cache
def imported() -> dict[str, set[str]]:
    """The packages that each file imports."""
    root = Path(__file__).parents[2]
    found: dict[str, set[str]] = {}
    for folder in ("collectors", "detectors", "service"):
        for path in (root / folder).rglob("*.py"):
            packages = found.setdefault(str(path.relative_to(root)), set())
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                packages |= {name.split(".")[0] for name in names}
    return found


def files_that_import(module: str) -> set[str]:
    return {file for file, packages in imported().items() if module in packages}


@pytest.mark.parametrize(
    ("module", "only"),
    [("pynvml", "collectors/rankwatch/agent/nvml.py"), ("river", "detectors/rankwatch_detectors/statistics/series.py")],
)
def test_one_file_alone_imports(module, only):
    assert files_that_import(module) == {only}


def test_the_kafka_client_is_imported_only_where_kafka_is_spoken_to():
    assert files_that_import("kafka") == {
        "collectors/rankwatch/kafka/client.py",
        "collectors/rankwatch/kafka/producer.py",
        "service/rankwatch_service/log/kafka_topics.py",
        "service/rankwatch_service/stream/kafka_source.py",
    }


@pytest.mark.parametrize(
    "module", ["rankwatch.agent.worker", "rankwatch_service.settings", "rankwatch_service.api.serve"]
)
def test_who_does_not_use_kafka_does_not_need_its_client(module):
    assert "kafka" not in third_party(module)


@pytest.mark.parametrize("role", ["api", "stream", "notify"])
def test_no_role_waits_for_what_few_jobs_need(role):
    """SciPy, which takes as long to import as all else, comes with River's tests for changes."""
    assert "scipy.stats" not in modules_after(f"import rankwatch_service.{role}.serve")


def test_torch_is_imported_only_where_tensors_are():
    training = ("integrations/", "run/training.py", "run/site/", "torch_probe/")
    allowed = (*(f"collectors/rankwatch/{place}" for place in training), "service/rankwatch_service/demo/")
    assert not {path for path in files_that_import("torch") if not path.startswith(allowed)}


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
