"""Notices of cloud providers, asked of a server that answers as their metadata services do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rankwatch.agent.cloud import TELL_AGAIN_S, CloudNotices, Notice, on_aws, on_azure, on_gcp
from tests.support.clock import FakeClock

AWS, GCP = "/latest/meta-data", "/computeMetadata/v1/instance"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"


class Metadata:
    """A metadata service; `answers` has its bodies by path, all else is 404."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.headers[self.path] = {name.lower(): value for name, value in self.headers.items()}
                body = told.answers.get(self.path)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    service = Metadata()
    yield service
    service.close()


def test_an_interrupted_spot_instance_and_scheduled_events_of_aws(metadata: Metadata) -> None:
    metadata.answers["/latest/api/token"] = "secret"
    assert on_aws(metadata.base) is None
    events = [
        {"Code": "system-reboot", "State": "completed"},
        {"Code": "instance-stop", "State": "active", "NotBefore": "21 Jan 2027 09:00:43 GMT", "Description": "retired"},
    ]
    metadata.answers[f"{AWS}/events/maintenance/scheduled"] = json.dumps(events)
    assert on_aws(metadata.base) == {
        "what": "maintenance", "action": "instance-stop", "at": "21 Jan 2027 09:00:43 GMT", "detail": "retired"
    }  # fmt: skip
    spot = {"action": "terminate", "time": "2027-01-21T09:00:00Z"}
    metadata.answers[f"{AWS}/spot/instance-action"] = json.dumps(spot)
    assert on_aws(metadata.base) == {"what": "preemption", "action": "terminate", "at": "2027-01-21T09:00:00Z"}
    assert metadata.headers[f"{AWS}/spot/instance-action"]["x-aws-ec2-metadata-token"] == "secret"


def test_preemption_and_maintenance_of_google(metadata: Metadata) -> None:
    metadata.answers |= {f"{GCP}/preempted": "FALSE", f"{GCP}/maintenance-event": "NONE"}
    assert on_gcp(metadata.base) is None
    metadata.answers[f"{GCP}/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert on_gcp(metadata.base) == {"what": "maintenance", "action": "TERMINATE_ON_HOST_MAINTENANCE"}
    metadata.answers[f"{GCP}/preempted"] = "TRUE"
    assert on_gcp(metadata.base) == {"what": "preemption", "action": "terminate"}
    assert metadata.headers[f"{GCP}/preempted"]["metadata-flavor"] == "Google"


def test_events_of_this_machine_of_azure_and_what_ends_it_first(metadata: Metadata) -> None:
    metadata.answers["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = "vm-3"
    metadata.answers[AZURE] = json.dumps({"DocumentIncarnation": 1, "Events": []})
    assert on_azure(metadata.base) is None
    when = "Mon, 19 Sep 2027 18:29:47 GMT"
    other = {"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": when}
    freeze = {"EventType": "Freeze", "Resources": ["vm-1", "vm-3"], "NotBefore": when}
    metadata.answers[AZURE] = json.dumps({"Events": [other]})
    assert on_azure(metadata.base) is None
    preempt = {"EventType": "Preempt", "Resources": ["vm-3"], "NotBefore": when, "Description": "evicted"}
    metadata.answers[AZURE] = json.dumps({"Events": [other, freeze, preempt]})
    assert on_azure(metadata.base) == {"what": "preemption", "action": "Preempt", "at": when, "detail": "evicted"}
    metadata.answers[AZURE] = json.dumps({"Events": [freeze]})
    assert on_azure(metadata.base) == {"what": "maintenance", "action": "Freeze", "at": when, "detail": ""}


def test_a_notice_is_told_each_minute_and_its_withdrawal_once_and_silence_changes_nothing(caplog):
    said: list[Notice | Exception | None] = []

    def look() -> Notice | None:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    caplog.set_level("INFO")
    clock = FakeClock()
    notices = CloudNotices("fake", clock, {"fake": look})
    preempted: Notice = {"what": "preemption"}
    for answer in (None, preempted, preempted, OSError("no route"), ValueError("not JSON"), preempted):
        said.append(answer)
        notices.look()
    assert [event.fields for event in notices.take_events()] == [{"what": "preemption"}]
    assert caplog.text.count("does not answer") == 1
    clock.advance(TELL_AGAIN_S)
    for answer in (preempted, None, None):
        said.append(answer)
        notices.look()
    assert [event.fields for event in notices.take_events()] == [{"what": "preemption"}, {"what": ""}]
    assert notices.take_events() == []


@pytest.mark.parametrize("provider", ["", "elsewhere"])
def test_without_a_known_provider_nobody_is_asked(provider: str, caplog: pytest.LogCaptureFixture) -> None:
    notices = CloudNotices(provider, FakeClock())
    notices.start()
    notices.join(30)
    assert not notices.is_alive()
    assert ("elsewhere" in caplog.text) is bool(provider)
