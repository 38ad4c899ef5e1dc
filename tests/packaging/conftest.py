"""What is built once for all packaging tests."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_S = 300


@dataclass(frozen=True)
class Built:
    """What `make release` makes: the source distribution, and the wheel that was built from it alone."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    # The environment is there: it runs this test.
    command = ["make", "--assume-old=.venv/.installed", "release", f"DIST={out}", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (sdist,), (wheel,) = out.glob("rankwatch-*.tar.gz"), out.glob("rankwatch-*.whl")
    return Built(sdist, wheel)
