"""The files in deploy/ as a scheduler would run them, with real launchers and ranks, until a real service shows the
job: under which launch, how far it came, and that its ends were reported before the scheduler killed the agents."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.service.process import Up, free_port, until
from tests.support.trials.schedulers import BatchJob, Pod, environment_of

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.torch, pytest.mark.timeout(900)]

DEPLOY = Path(__file__).parents[2] / "deploy"
HOSTS = 2
STEPS = 40
RUN_S = 400.0

SCRIPT = """
import os, sys, time
import rankwatch

together = "--together" in sys.argv
if together:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
watch = rankwatch.start(relaunches=True, agent="--no-agent" not in sys.argv)
for step in watch.steps(10**6 if together else STEPS):
    if together:
        dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    if together and step == 10 and watch.identity.rank == 0 and not os.path.exists("failed"):
        open("failed", "w").close()
        os._exit(3)
""".replace("STEPS", str(STEPS))
"""With `--together` ranks wait for each other without end, as those of a training job, and rank 0 fails once."""


class Service(Up):
    """What a service shows of a job."""

    def job_token(self, job: str) -> str:
        asked = {"name": job, "scopes": ["ingest"], "job": job, "hosts_max": HOSTS}
        token: str = self.http.ask("POST", "/api/v1/tokens", json=asked).json()["token"]
        return token

    def job(self, name: str) -> dict[str, Any]:
        answer = self.http.ask("GET", f"/api/v1/jobs/{name}")
        return answer.json() if answer.status_code == 200 else {"state": "", "step": -1, "attempt": ""}

    def until(self, name: str, state: str, step: int) -> dict[str, Any]:
        """The job, once it is in this state and so far."""

        def there() -> dict[str, Any]:
            found = self.job(name)
            return found if found["state"] == state and found["step"] >= step else {}

        found: dict[str, Any] = until(f"{name} {state} at step {step}: {self.job(name)}", there, 60.0)
        return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of its own for each job, with the training script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def allocation(service: Service, folder: Path, job: str, number: int) -> dict[str, str]:
    """What Slurm passes to a batch script, and where this service and the job's folders are."""
    (folder / "token").write_text(service.job_token(job) + "\n")
    return {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NAME": job,
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURM_NNODES": str(HOSTS),
        "RANKS_PER_HOST": "1",
        "RANKWATCH_URL": service.url,
        "RANKWATCH_TOKEN_FILE": str(folder / "token"),
        "RANKWATCH_DIR": str(folder / "rings"),
    }


def test_a_batch_script_starts_again_after_a_failed_rank_and_is_queued_again_at_its_time_limit(service, folder):
    number = free_port()
    second = f"slurm-{number}-0-1.0"
    script, arguments = DEPLOY / "slurm" / "train.sbatch", [str(folder / "train.py"), "--together"]
    run = BatchJob(folder / "slurm", script, arguments, allocation(service, folder, "slurm", number))
    try:

        def trains_again() -> bool:
            job = service.job("slurm")
            return job["attempt"] == second and job["step"] > 5

        until("steps of the second start", trains_again, RUN_S)
        run.process.send_signal(signal.SIGUSR1)
        assert run.process.wait(RUN_S) != 0
        job = service.until("slurm", "ended", 5)
    finally:
        run.kill()
        print(run.said())
    assert (job["attempt"], job["world_size"]) == (second, HOSTS), "after the limit there is no third start"
    assert run.requeued == f"requeue {number}\n"


LABELS = {
    "jobset.sigs.k8s.io/jobset-name": "gpt-7b",
    "jobset.sigs.k8s.io/jobset-uid": "5f0c",
    "jobset.sigs.k8s.io/restart-attempt": "1",
    "training.kubeflow.org/job-name": "gpt-7b-x7k2p",
}
OPERATOR = {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:2", "PET_MAX_RESTARTS": "0", "PET_NPROC_PER_NODE": "1"}
"""What the training operator makes of `elasticPolicy` and `nprocPerNode`, with the address of the first worker."""


@pytest.mark.parametrize(
    ("file", "spec", "launch"),
    [
        ("jobset.yaml", ("replicatedJobs", 0, "template", "spec", "template", "spec"), "5f0c-1"),
        ("pytorchjob.yaml", ("pytorchReplicaSpecs", "Worker", "template", "spec"), "gpt-7b-x7k2p"),
    ],
)
def test_the_pods_of_a_manifest_train_and_report_how_they_end(service, folder, file, spec, launch):
    part = yaml.safe_load((DEPLOY / "kubernetes" / file).read_text())["spec"]
    for name in spec:
        part = part[name]
    (container,) = part["containers"]
    name, address = f"pods-{Path(file).stem}", f"localhost:{free_port()}"
    environment = environment_of(container, LABELS, service.job_token(name))
    assert environment["RANKWATCH_JOB"] == "gpt-7b"
    environment |= {"RANKWATCH_JOB": name, "RANKWATCH_URL": service.url}
    environment |= {"RANKWATCH_DIR": str(folder / "rings"), "RANKWATCH_SPOOL": str(folder / "spool" / "agent")}
    if file == "pytorchjob.yaml":
        environment |= OPERATOR | {"PET_RDZV_ENDPOINT": address}
    (folder / "spool").mkdir()
    (text,) = container["args"]
    text = text.replace("gpt-7b-hosts-0-0.gpt-7b:29400", address).replace("--nproc-per-node=8", "--nproc-per-node=1")
    pods = [Pod(folder, container | {"args": [text]}, environment) for _ in range(HOSTS)]
    try:
        assert [pod.wait(RUN_S) for pod in pods] == [0, 0], (folder / "out.txt").read_text()
    finally:
        for pod in pods:
            pod.kill()
    job = service.until(name, "ended", STEPS - 1)
    assert (job["attempt"], job["world_size"]) == (f"{launch}.0", HOSTS)


def test_the_agents_of_a_host_serve_jobs_that_start_none(service: Service, folder: Path) -> None:
    unit = (DEPLOY / "systemd" / "rankwatch-agent@.service").read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    (folder / "token").write_text(service.job_token("unit"))
    rings = folder / "rings"
    here = {
        "/opt/rankwatch/bin/python": sys.executable,
        "/run/rankwatch-%i": str(rings),
        "/etc/rankwatch/%i.token": str(folder / "token"),
    }
    command = [here.get(word, word) for word in shlex.split(line.removeprefix("ExecStart="))]
    environment = {"PATH": "/usr/bin:/bin", "RANKWATCH_URL": service.url, "RANKWATCH_SPOOL": str(folder / "spool")}
    (folder / "spool").mkdir(mode=0o700)
    daemon = subprocess.Popen(command, env=environment)
    try:
        until("the agents' folder", rings.exists)
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        subprocess.run(
            [torchrun, "--standalone", f"--nproc-per-node={HOSTS}", str(folder / "train.py"), "--no-agent"],
            env=os.environ | {"RANKWATCH_DIR": str(rings), "RANKWATCH_JOB": "unit", "RANKWATCH_LAUNCH": "first"},
            check=True,
            timeout=RUN_S,
        )
        assert service.until("unit", "ended", STEPS - 1)["attempt"] == "first.0"
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0
