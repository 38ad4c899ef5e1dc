import gc
import platform
import subprocess
import sys

import pytest

from rankwatch_service.stream.memory import YOUNG_MAX

BATCH_AFTER_BATCH = """
import resource, sys
import numpy as np
from rankwatch_service.stream.memory import tune
assert not sys.argv[1:] or tune()
def batch():
    return [np.ones(40_000) for _ in range(64)]
for _ in range(3):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def in_a_process(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_young_objects_are_looked_at_seldom_and_older_ones_as_before():
    code = (
        "import gc\nfrom rankwatch_service.stream.memory import tune\ntune()\nprint(gc.isenabled(), gc.get_threshold())"
    )
    assert in_a_process(code) == f"True {(YOUNG_MAX, *gc.get_threshold()[1:])}"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep what is freed")
def test_the_pages_of_one_batch_serve_the_next():
    assert int(in_a_process(BATCH_AFTER_BATCH, "tuned")) < int(in_a_process(BATCH_AFTER_BATCH)) / 10
