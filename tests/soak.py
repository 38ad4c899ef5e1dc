"""Longer trials than `make test` has time for: `python -m tests.soak` (or `make soak`).

Ten clean demo jobs in a row, then ten with two CPU burners beside them: none may open an incident. Then fifty random
kills while ranks hold, act and go on. Then twenty minutes of four ranks beside bursts of load, replayed: one incident
for information at most. Prints a line for each and ends with the number that failed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rankwatch_detectors.base import Severity
from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from tests.support.ranks.crowded_rows import record

RUNS = 10
BURNERS = 2
COMMAND_TRIALS = 50
CROWDED_S = 1200.0
LOADS = 25
"""Endless loops at most, in bursts of 2 to 20 s."""
RANKWATCH = str(Path(sys.executable).with_name("rankwatch"))


def clean_demo(burners: int) -> bool:
    """Run one demo without faults beside `burners` endless loops; True if it opened nothing."""
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burners)]
    try:
        done = subprocess.run(
            [RANKWATCH, "demo", "--no-faults"], capture_output=True, text=True, timeout=600, check=False
        )
    finally:
        for process in beside:
            process.kill()
            process.wait()
    if done.returncode != 0:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n")
    return done.returncode == 0


def command_trials() -> bool:
    """Run the random kills of tests/integration/test_commands_real_ranks.py, fifty of them."""
    environment = os.environ | {"RANKWATCH_COMMAND_TRIALS": str(COMMAND_TRIALS)}
    test = "tests/integration/test_commands_real_ranks.py"
    return (
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--timeout=3600", test], env=environment, check=False
        ).returncode
        == 0
    )


def crowded_job(seconds: float = CROWDED_S) -> bool:
    """Run four ranks that share their cores with bursts of load, and replay what they recorded."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "crowded.csv.gz"
        record(recorded, 4, seconds, LOADS)
        outcome = replay(
            [open_source(recorded)],
            {},
            [CatalogueConfig()],
            job="crowded",
            until_step=None,
            progress=lambda _done, _total: None,
        )
    (incidents,) = outcome.incidents
    for incident in incidents:
        print(f"{incident.kind} {incident.severity}: {incident.summary}")
    print(f"{outcome.frames} steps of 4 ranks beside up to {LOADS} loads: {len(incidents)} incidents", flush=True)
    return len(incidents) <= 1 and all(incident.severity is Severity.INFO for incident in incidents)


def main() -> int:
    """Run all trials; the exit status is the number that failed."""
    failed = 0
    for burners in (0, BURNERS):
        for run in range(RUNS):
            passed = clean_demo(burners)
            failed += not passed
            print(
                f"clean demo {run + 1}/{RUNS} beside {burners} burners: {'no incident' if passed else 'FAILED'}",
                flush=True,
            )
    passed = command_trials()
    failed += not passed
    print(f"{COMMAND_TRIALS} command trials: {'passed' if passed else 'FAILED'}")
    failed += not crowded_job()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
