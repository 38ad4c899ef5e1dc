"""`rankwatch trace` of a real DDP job over gloo: rank, agent, stream, api and command line are real processes."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwatch_service.demo.processes import end_all
from tests.support.service.process import LOGIN, Http, Role, free_port, until

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.torch]

SCRIPT = Path(__file__).parents[1] / "support" / "ranks" / "traced_rank.py"
TRAINING_S = 120.0


class TracedJob:
    """Two ranks that train, and the service that watches them."""

    def __init__(self, folder: Path, url: str, http: Http, token: str) -> None:
        self.folder = folder
        self.http = http
        self._to = ("--url", url, "--token", token)

    def trace(self, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        """Exit status, what the ranks recorded, and what else was said."""
        command = [sys.executable, "-m", "rankwatch_service", "trace", "traced", "--json", *arguments, *self._to]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRAINING_S + 60, check=False)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    def get(self, path: str) -> Any:
        return self.http.ask("GET", f"/api/v1/{path}").json()

    def step(self) -> int:
        answer = self.http.ask("GET", "/api/v1/jobs/traced")
        return answer.json()["step"] if answer.status_code == 200 else -1

    def may_be_traced(self) -> bool:
        """Whether its ranks have introduced themselves, both of them."""
        answer = self.http.ask("GET", "/api/v1/jobs/traced")
        return answer.status_code == 200 and "trace" in answer.json()["can"] and answer.json()["ranks_reporting"] == 2


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TracedJob]:
    port = free_port()
    role = Role(tmp_path / "service", "up", "--data", str(tmp_path / "data"), "--port", str(port))
    with contextlib.ExitStack() as ends:
        role.start()
        ends.callback(role.stop)
        until("login link", lambda: LOGIN.search(role.said()))
        url, mark = f"http://127.0.0.1:{port}", f"traced-{uuid.uuid4().hex}"
        folder = tmp_path / "ranks"
        folder.mkdir(mode=0o700)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_")}
        environment |= {"RANKWATCH_DIR": str(folder), "RANKWATCH_LAUNCH": mark, "HOME": str(folder)}
        environment |= {"RANKWATCH_URL": url, "RANKWATCH_TOKEN": role.token(), "WORLD_SIZE": "2"}
        ends.callback(end_all, mark, 0.2)
        for rank in range(2):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen([sys.executable, str(SCRIPT), str(folder)], env=own)
            ends.callback(process.wait)
            ends.callback(process.kill)
        http = Http(url, role.token())
        ends.callback(http.close)
        job = TracedJob(folder, url, http, role.token())
        until("both ranks", job.may_be_traced, TRAINING_S)
        yield job


@pytest.mark.timeout(600)
def test_ranks_tell_where_their_steps_go_while_training_goes_on(job):
    status, traces, said = job.trace("--ranks", "0,1", "--steps", "2")
    assert (status, [trace["rank"] for trace in traces]) == (0, [0, 1]), said
    for trace in traces:
        summary = trace["summary"]
        assert (trace["error"], len(summary["step_times_s"]), summary["on_device"]) == ("", 2, False)
        calls = {(row["group"], row["name"]): (row["count"], row["bytes"]) for row in summary["collectives"]}
        assert calls["pair", "all_reduce"] == (2, 80)
        assert calls["default_pg", "all_reduce"][1] == 2 * 4 * (32 * 64 + 64 + 64 + 1)
        assert {"matmul", "optimizer", "collective"} <= set(summary["kinds"])
        assert len(summary["top"]) == 10
    (command,) = [one for one in job.get("commands?job=traced")["items"] if one["action"] == "trace"]
    assert (command["state"], command["result"]) == ("applied", "")
    assert job.get(f"commands/{command['id']}")["traces"] == traces
    assert not list(job.folder.glob("*.new"))

    before = job.step()
    until("steps after the trace", lambda: job.step() > before + 5, TRAINING_S)

    # The script's own profiler runs: ours is refused, and training goes on.
    (job.folder / "profile").touch()
    until("its profiler", (job.folder / "profiling-0").exists, TRAINING_S)
    status, traces, said = job.trace("--ranks", "0")
    assert (status, traces[0]["error"], traces[0]["summary"]) == (1, "a profiler of the script's own runs", {})
    (job.folder / "profile").unlink()
    before = job.step()
    until("steps after the refusal", lambda: job.step() > before + 5, TRAINING_S)

    # Without ranks, the first one.
    status, traces, said = job.trace("--steps", "1")
    assert (status, [trace["rank"] for trace in traces]) == (0, [0]), said
