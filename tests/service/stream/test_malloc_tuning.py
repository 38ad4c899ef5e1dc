import gc
import platform
import subprocess
import sys

from rankwatch_service.stream.serve import YOUNG_MAX

BATCH_AFTER_BATCH = """
import resource, sys
import numpy as np
from rankwatch_service.stream.serve import tune
told = sys.argv[1:] == ["tuned"] and tune()
def batch():
    return [np.ones(40_000) for _ in range(64)]
for _ in range(3):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def in_a_process(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_young_objects_are_looked_at_seldom_and_older_ones_as_before():
    code = (
        "import gc\nfrom rankwatch_service.stream.serve import tune\ntune()\nprint(gc.isenabled(), gc.get_threshold())"
    )
    assert in_a_process(code) == f"True {(YOUNG_MAX, *gc.get_threshold()[1:])}"


def test_where_glibc_can_be_told_the_pages_of_one_batch_serve_the_next():
    told, pages = in_a_process(BATCH_AFTER_BATCH, "tuned").split()
    assert (told == "True") == (platform.libc_ver()[0] == "glibc")
    _, usual_pages = in_a_process(BATCH_AFTER_BATCH).split()
    assert told == "False" or int(pages) < int(usual_pages) / 10
