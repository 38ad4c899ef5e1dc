"""A backup of a service that runs and gets telemetry, restored elsewhere: all is there, and telemetry goes on."""

import json
import os
import shutil
import subprocess

import pytest

from tests.support.service.machine import machines
from tests.support.service.process import Http, until
from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.integration, pytest.mark.ci]


@pytest.fixture(params=[pytest.param("sqlite", marks=long_trial), "postgresql"])
def services(request, tmp_path):
    """A machine for the service that is backed up, and one to restore it on."""
    with machines(request, tmp_path, request.param, 2) as made:
        yield made


def back_up(machine, file):
    if not machine.database_url.startswith("postgresql"):
        status, said = machine.command("backup", str(file))
        assert status == 0, said
        return
    program(machine, "pg_dump", f"--dbname={machine.database_url}", "--format=custom", "--no-owner", f"--file={file}")


def restore(old, new, file):
    """As docs/operations.md says for each of the databases."""
    if not new.database_url.startswith("postgresql"):
        status, said = new.command("restore", str(file), *new.where)
        assert status == 0, said
        return
    how = ("--exit-on-error", "--single-transaction", "--no-owner")
    program(new, "pg_restore", *how, f"--dbname={new.database_url}", str(file))
    new.data.mkdir(mode=0o700, parents=True)
    for name in ("secret.key", "ingest-token", "local-token"):
        shutil.copy2(old.data / name, new.data / name)


def program(machine, *command):
    command = [part.replace("postgresql+psycopg:", "postgresql:") for part in command]
    done = subprocess.run(command, env=os.environ | machine.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_was_backed_up_while_the_service_ran_is_there_after_a_restore(services, tmp_path):
    old, new = services
    file = tmp_path / "backup"
    old.start()
    key = old.data / "secret.key"
    if not key.exists():
        key.write_text("a key of the service")
    made = old.command("token", "create", "ci", "--scope", "read")[1].strip()
    job = old.simulated("--steps", "2000", "--speed", "10", "--fault", "nonfinite:rank=3,at=40")
    job.start()
    (incident, *_) = until("incident", lambda: old.items("incidents"))
    path = f"/api/v1/incidents/{incident['id']}/acknowledge"
    assert old.http.ask("POST", path, json={"text": "mine"}).status_code == 200

    before = old.steps()
    back_up(old, file)
    assert job.process.poll() is None, "the job ended before the backup was made"
    until("telemetry after the backup", lambda: old.steps() > before)
    job.kill()
    audit = old.audit()
    token = (old.data / "ingest-token").read_text()
    old.stop()

    restore(old, new, file)
    new.start()
    (restored, *_) = [one for one in new.items("incidents") if one["id"] == incident["id"]]
    assert (restored["state"], restored["acknowledged_by"]) == ("acknowledged", "commands on this machine")
    found = new.audit()
    assert found[: len(audit)] == audit
    assert "incident.acknowledged" in {action for action, _ in audit}
    assert (new.data / "ingest-token").read_text() == token
    assert (new.data / "secret.key").read_bytes() == key.read_bytes()
    client = Http(new.http.url, made)
    (listed,) = client.ask("GET", "/api/v1/jobs").json()["items"]
    client.close()
    assert listed["step"] >= before
    assert json.loads((new.folder / "config" / "rankwatch" / "ingest.json").read_text())["token"] == token.strip()

    again = new.simulated("--steps", "60", "--speed", "10", "--seed", "1")
    again.start()
    assert again.process.wait(120) == 0, again.said()
    until("telemetry after the restore", lambda: [one for one in new.items("jobs") if one["step"] == 59])
    assert len(new.items("jobs/gpt/attempts")) == 2
