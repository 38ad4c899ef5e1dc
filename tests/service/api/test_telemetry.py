"""Ingest: a batch is durable before it is accepted, and refused with a reason if it never can be."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from rankwatch import wire
from rankwatch_service.access.grants import Scope
from tests.support.service.api import MSGPACK

PLAIN = {
    "schema": 1,
    "job": "j",
    "attempt": "l.0",
    "host": "h",
    "boot": "b",
    "seq": 0,
    "sent_unix_ns": 0,
    "steps": {"rows": 2, "columns": {"step": [7, 7], "rank": [0, 1], "loss": [1.5, "NaN"]}},
}


def batch(seq=0, **changes):
    made = wire.Batch(1, "j", "l.0", "h", "b", seq, 0)
    return wire.encode(msgspec.structs.replace(made, **changes))


def letters(api):
    return api.get("/api/v1/dead-letters").json()["items"]


def test_an_accepted_batch_is_in_the_log_when_the_answer_comes(api):
    body = batch()
    answer = api.send(body)
    assert (answer.status_code, answer.json()) == (202, {"accepted": True})
    [record] = api.log.read(0, 0, 10)
    assert (record.key, record.value) == ("j", body)


def test_plain_json_becomes_the_same_batch_and_nan_survives(api):
    assert api.post("/api/v1/telemetry", PLAIN).status_code == 202
    [record] = api.log.read(0, 0, 10)
    stored = wire.decode_batch(record.value)
    assert stored.job == "j"
    assert b"\x00\x00\xc0\x7f" in stored.steps.columns["loss"].data or b"\xf8\x7f" in stored.steps.columns["loss"].data


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (batch()[:-4], MSGPACK, 400, "malformed"),
        (b"[" * 5_000, {"content-type": "application/json"}, 400, "malformed"),
        (b"a=1", {"content-type": "application/x-www-form-urlencoded"}, 415, "content_type"),
        (batch(), MSGPACK | {"content-encoding": "gzip"}, 415, "content_type"),
        (b"x" * (wire.BATCH_BYTES_MAX + 1), MSGPACK, 413, "too_large"),
        (batch(schema=99), MSGPACK, 422, "version"),
        (batch(steps=wire.Table(5, {"step": wire.Column("i8", b"1234")})), MSGPACK, 422, "columns"),
    ],
)
def test_a_batch_that_can_never_be_accepted_is_refused_with_a_reason_and_a_dead_letter(
    api, body, headers, status, reason
):
    answer = api.send(body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    [letter] = letters(api)
    assert letter["reason"] == reason
    assert api.log.read(0, 0, 10) == []
    assert api.send(batch()).status_code == 202


def test_a_body_that_exceeds_the_limit_without_a_content_length_is_refused(api):
    answer = api.send(b"x" * 1_000_000 for _ in range(10))
    assert answer.status_code == 413
    assert [letter["reason"] for letter in letters(api)] == ["too_large"]


def test_a_token_for_one_job_sends_for_no_other(api):
    token = api.token(Scope.INGEST, job="mine")
    assert api.send(batch(), token=token).status_code == 403
    assert api.send(batch(job="mine"), token=token).status_code == 202
    assert letters(api) == []


def test_batches_of_many_senders_are_all_there_each_once_and_each_senders_in_order(api):
    def sender(host):
        for seq in range(10):
            assert api.send(batch(seq, host=host)).status_code == 202

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sender, [f"h{n}" for n in range(8)]))
    came = [wire.decode_batch(record.value) for record in api.log.read(0, 0, 1_000)]
    for n in range(8):
        assert [one.seq for one in came if one.host == f"h{n}"] == list(range(10))
    assert len(came) == 80


def test_a_log_that_cannot_be_written_is_503_and_the_same_batch_is_taken_later(api, monkeypatch):
    from rankwatch_service.store.errors import StoreBusyError

    def busy(_items):
        raise StoreBusyError

    good = api.app.state.context.intake._flush
    monkeypatch.setattr(api.app.state.context.intake, "_flush", busy)
    answer = api.send(batch())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert letters(api) == []
    monkeypatch.setattr(api.app.state.context.intake, "_flush", good)
    assert api.send(batch()).status_code == 202


def test_more_than_may_wait_is_refused_and_counted(api, monkeypatch):
    monkeypatch.setattr("rankwatch_service.api.ingest.PENDING_BYTES_MAX", 10)
    assert api.send(batch()).status_code == 503
    assert 'rankwatch_ingest_batches_total{result="busy"} 1.0' in api.get("/metrics").text
