"""What importing each part costs and pulls in, seen from a fresh interpreter."""

import json
import subprocess
import sys

import pytest

FORBIDDEN_IN_TRAINING = (
    "torch",
    "numpy",
    "msgspec",
    "kafka",
    "pynvml",
    "fastapi",
    "sqlalchemy",
    "river",
    "rankwatch.agent",
    "rankwatch.wire",
)


def modules_after(statement: str) -> set[str]:
    code = f"import sys, json; before = set(sys.modules); {statement}; print(json.dumps([*set(sys.modules) - old]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stdout))


def test_the_training_process_imports_the_standard_library_only():
    third_party = {
        name
        for name in modules_after("import rankwatch")
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("rankwatch")
    }
    assert third_party == set()


@pytest.mark.parametrize("name", FORBIDDEN_IN_TRAINING)
def test_importing_rankwatch_does_not_import(name):
    assert name not in modules_after("import rankwatch")


def test_the_detectors_import_without_river_torch_or_the_service():
    loaded = modules_after("import rankwatch_detectors.base")
    assert not {name for name in loaded if name.split(".")[0] in {"torch", "river", "rankwatch", "rankwatch_service"}}


def test_the_agent_needs_nothing_but_the_standard_library_and_msgspec():
    third_party = {
        name.split(".")[0]
        for name in modules_after("import rankwatch.agent.worker")
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert third_party <= {"rankwatch", "msgspec"}
