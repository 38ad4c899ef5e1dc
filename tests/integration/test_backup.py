"""A backup of a service that runs and gets telemetry, restored elsewhere: all is there, and telemetry goes on."""

import json
import stat

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


def test_what_was_backed_up_while_the_service_ran_is_there_after_a_restore(services, tmp_path):
    old, new = services
    file = tmp_path / "backup.tar"
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
    status, said = old.command("backup", str(file))
    assert status == 0, said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert job.process.poll() is None, "the job ended before the backup was made"
    until("telemetry after the backup", lambda: old.steps() > before)
    status, said = new.command("restore", str(file), *old.where)
    assert (status, "already running" in said) == (1, True), said
    job.kill()
    audit = old.audit()
    token = (old.data / "ingest-token").read_text()
    old.stop()

    status, said = new.command("restore", str(file), *new.where)
    assert status == 0, said
    new.start()
    (restored, *_) = [one for one in new.items("incidents") if one["id"] == incident["id"]]
    assert (restored["state"], restored["acknowledged_by"]) == ("acknowledged", "commands on this machine")
    found = new.audit()
    assert found[: len(audit)] == audit
    assert {action for action, _ in audit} >= {"incident.acknowledged", "backup.create"}
    assert ("backup.restore", str(file)) in found
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
