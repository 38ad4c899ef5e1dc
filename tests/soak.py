"""Longer trials than `make test` has time for: `python -m tests.soak` (or `make soak`).

Ten clean demo jobs in a row, then ten with two CPU burners beside them: none may open an incident. Then fifty random
kills while ranks hold, act and go on. Prints a line for each and ends with the number that failed.
"""

import os
import subprocess
import sys
from pathlib import Path

RUNS = 10
BURNERS = 2
COMMAND_TRIALS = 50
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
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
