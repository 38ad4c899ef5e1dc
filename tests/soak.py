"""Longer trials than `make test` has time for: `python -m tests.soak` (or `make soak`).

Ten clean demo jobs in a row, then ten with two CPU burners beside them: none may open an incident. Then fifty random
kills while ranks hold, act and go on. Then twenty minutes of four ranks beside bursts of load, replayed: one incident
for information at most. Then twenty jobs of four ranks on a host whose cores eight loops keep full: each ends as ended,
with all its steps and no incident that wakes anybody. Prints a line for each and ends with the number that failed.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankwatch_detectors.base import Severity
from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from tests.support.ranks.crowded_rows import record
from tests.support.service.process import free_port, until

RUNS = 10
BURNERS = 2
COMMAND_TRIALS = 50
CROWDED_S = 1200.0
LOADS = 25
"""Endless loops at most, in bursts of 2 to 20 s."""
FULL_RUNS = 20
FULL_BURNERS = 8
FULL_STEPS = 300
SETTLED_S = 45.0
"""After its end: silence of an agent is an incident after 30 s."""
TRAINING = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range({FULL_STEPS}):
    model(torch.randn(16, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.03)
dist.destroy_process_group()
"""
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
            progress=lambda _done, _steps: None,
        )
    (incidents,) = outcome.incidents
    for incident in incidents:
        print(f"{incident.kind} {incident.severity}: {incident.summary}")
    print(f"{outcome.frames} steps of 4 ranks beside up to {LOADS} loads: {len(incidents)} incidents", flush=True)
    return len(incidents) <= 1 and all(incident.severity is Severity.INFO for incident in incidents)


def full_cores() -> int:
    """Train beside a service on cores that are kept full, again and again; how many runs lost or accused something."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        script, log, port = Path(folder, "train.py"), Path(folder, "up.log"), free_port()
        script.write_text(TRAINING)
        environment = {name: text for name, text in os.environ.items() if not name.startswith("RANKWATCH_")}
        environment |= {"HOME": folder, "RANKWATCH_URL": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
        environment |= {"RANKWATCH_SPOOL": f"{folder}/spool", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        up = [RANKWATCH, "up", "--data", f"{folder}/data", "--port", str(port)]
        with log.open("w") as output:
            service = subprocess.Popen(up, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            until("the service", lambda: "rankwatch is up" in log.read_text())
            for run in range(FULL_RUNS):
                said = _beside_full_cores(f"full-{run}", script, environment)
                failed += bool(said)
                print(f"full cores {run + 1}/{FULL_RUNS}: {said or 'nothing lost, no incident'}", flush=True)
        finally:
            os.killpg(service.pid, signal.SIGTERM)
            service.wait(60)
    return failed


def _beside_full_cores(job: str, script: Path, environment: dict[str, str]) -> str:
    """What was lost or said of one job; "" if nothing was."""

    def listed(*command: str) -> list[dict[str, object]]:
        lines = subprocess.check_output([RANKWATCH, *command, "--json"], env=environment, text=True).splitlines()
        return [json.loads(line) for line in lines]

    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(FULL_BURNERS)]
    try:
        torchrun = [str(Path(RANKWATCH).with_name("torchrun")), "--standalone", "--nproc-per-node=4", str(script)]
        command = [RANKWATCH, "run", "--job", job, "--", *torchrun]
        code = subprocess.run(command, env=environment, cwd=script.parent, capture_output=True, check=False).returncode
        time.sleep(SETTLED_S)
    finally:
        for process in beside:
            process.kill()
            process.wait()
    (found,) = [one for one in listed("jobs") if one["name"] == job]
    grave = [str(one["summary"]) for one in listed("incidents", "--job", job) if one["severity"] != "info"]
    lost = (code, found["state"], found["step"]) != (0, "ended", FULL_STEPS - 1)
    return "; ".join([f"exit {code}, {found['state']} at step {found['step']}"] * lost + grave)


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
    return failed + full_cores()


if __name__ == "__main__":
    raise SystemExit(main())
