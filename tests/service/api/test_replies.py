"""What replies have in common: times in text, numbers that are never null, ETags; and the heat map as bytes."""

from datetime import datetime

import numpy as np
import pytest

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.api.reply import ApiReply, text_name, time_text
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.models import Incident, Job
from tests.support.service.stored_series import read
from tests.support.store.database import add, change, job_row
from tests.support.store.database import numbered_incident as incident

FINITE = {"confidence", "ratio", "false_ratio", "low", "high", "profiles", "counters", "seconds"}
"""Fields that are finite whatever a job sends: ratios, ranges of settings, durations, counters of devices, and the
charts' `low` and `high`, whose `mark` says what is not finite."""
NO_BOUND = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def reply_classes(base=ApiReply):
    for one in base.__subclasses__():
        yield one
        yield from reply_classes(one)


def parts(schema):
    yield schema
    for inner in (*schema.get("anyOf", ()), *[schema[name] for name in ("items", "additionalProperties")
                                              if isinstance(schema.get(name), dict)]):  # fmt: skip
        yield from parts(inner)


@pytest.mark.parametrize(
    ("unix_ns", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (1_764_003_168_123_456_789, "2025-11-24T16:52:48.123456Z"),
        (2**63 - 1, "2262-04-11T23:47:16.854775Z"),
    ],
)
def test_a_time_in_text_has_its_zone_and_is_that_of_the_nanoseconds(unix_ns, text):
    assert time_text(unix_ns) == text
    assert int(datetime.fromisoformat(text).timestamp()) == unix_ns // 10**9


def test_each_time_has_its_text_beside_it_and_the_description_says_so(api):
    add(api.engine, Job, job_row())
    add(api.engine, Incident, incident(1, onset_unix_ns=10**9))
    (shown,) = api.get("/api/v1/incidents").json()["items"]
    assert (shown["onset_at"], shown["resolved_at"]) == ("1970-01-01T00:00:01.000000Z", None)
    assert list(shown).index("onset_at") == list(shown).index("onset_unix_ns") + 1
    assert api.get("/api/v1/jobs/j").json()["first_seen_at"] == "1970-01-01T00:00:00.000000Z"
    described = api.app.openapi()["components"]["schemas"]
    for one in reply_classes():
        for name, field in one.model_fields.items():
            if text_name(name) and field.annotation != list[int] and one.__name__ in described:
                assert text_name(name) in described[one.__name__]["properties"], one
                assert text_name(name) not in one.model_fields, one


def test_what_an_edited_policy_says_in_text_is_not_read(api):
    policy = api.get("/api/v1/policy").json()
    assert policy["unsigned_until_at"] is None
    answer = api.ask("PUT", "/api/v1/policy", json=policy | {"unsigned_until_unix_ns": 10**18})
    assert (answer.status_code, answer.json()["unsigned_until_at"]) == (200, "2001-09-09T01:46:40.000000Z")


def test_no_field_of_a_reply_can_turn_a_number_into_null(api):
    for one in {*reply_classes()} - {one for one in reply_classes() if "[" in one.__name__}:
        properties = one.model_json_schema(mode="serialization").get("properties", {})
        for name, field in properties.items():
            bare = [part for part in parts(field) if part.get("type") == "number"]
            if bare and name not in FINITE:
                named = any(part.get("enum") == ["NaN", "Inf", "-Inf"] for part in parts(field))
                bounded = all(any(bound in part for bound in NO_BOUND) for part in bare)
                assert named or bounded or one.__name__ == "ShownRule", f"{one.__name__}.{name}"


RECEIVER = {"url": "https://receiver.example/hook", "kinds": [], "severities": ["critical"]}


def edits(api):
    """By what is edited: the address it is read at, and two changes of it."""
    api.post("/api/v1/receivers", RECEIVER | {"name": "r"})
    add(api.engine, Job, job_row())
    rule = {"name": "high", "metric": "memory", "when": "above", "value": 10.0}
    return {
        "/api/v1/receivers/r": ("PUT", RECEIVER, RECEIVER | {"severities": ["info"]}),
        "/api/v1/tuning": ("PUT", {"tunings": [{"profile": "sensitive"}]}, {"tunings": []}),
        "/api/v1/jobs/j": ("PATCH", {"owner": "ann"}, {"owner": "bob"}),
        "/api/v1/policy": ("PUT", {"limits": {"cool_down_s": 1}}, {"limits": {"cool_down_s": 2}}),
        "/api/v1/rules": ("PUT", {"rules": [rule]}, {"rules": [rule | {"value": 9.0}]}),
    }


def test_what_somebody_else_has_changed_is_not_overwritten_unseen(api):
    for path, (method, first, second) in edits(api).items():
        api.ask(method, path, json=second)
        read = api.get(path).headers["ETag"]
        changed = api.ask(method, path, json=first, headers={"If-Match": f'"other", {read}'})
        assert changed.status_code == 200, changed.text
        assert changed.headers["ETag"] == api.get(path).headers["ETag"] != read, path
        refused = api.ask(method, path, json=second, headers={"If-Match": read})
        assert (refused.status_code, "read it again" in refused.json()["detail"]) == (412, True), path
        assert api.get(path).headers["ETag"] == changed.headers["ETag"], path
        for newest in ({}, {"If-Match": "*"}):
            assert api.ask(method, path, json=second, headers=newest).status_code == 200, path


def test_the_etag_of_a_job_is_about_what_people_edit(api):
    add(api.engine, Job, job_row())
    before = api.get("/api/v1/jobs/j").headers["ETag"]
    change(api.engine, Job.__table__.update().values(step=99))
    assert api.get("/api/v1/jobs/j").headers["ETag"] == before


def test_a_silence_receiver_or_rule_that_has_changed_is_not_removed_unseen(api):
    for path, (method, first, _) in edits(api).items():
        api.ask(method, path, json=first)
    body = {"job": "j", "ends_unix_ns": api.clock.unix_ns() + 10**12, "comment": "noisy"}
    silence = api.post("/api/v1/silences", body).json()
    for path in (f"/api/v1/silences/{silence['id']}", "/api/v1/receivers/r", "/api/v1/rules/high"):
        assert api.ask("DELETE", path, headers={"If-Match": '"other"'}).status_code == 412
        read = api.get("/api/v1/rules" if "rules" in path else path)
        assert api.ask("DELETE", path, headers={"If-Match": read.headers["ETag"]}).status_code == 204
    assert api.get("/api/v1/receivers/r").status_code == 404


def stored(api, ranks: int, steps: int) -> None:
    add(api.engine, Job, job_row("j", world_size=ranks, step=steps))
    writer = SeriesWriter(api.engine, SystemClock())
    for step in range(steps):
        values = {"loss": np.arange(ranks) + step / 4}
        writer.add("j", Frame("l.0", "steps", step, StepKind.TRAIN, 0.0, values, {"loss": np.ones(ranks, bool)}))
    writer.flush("j")


def test_a_heat_map_has_the_highest_or_lowest_value_of_each_cell(api):
    stored(api, 4, 20)
    answer = api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=5")
    assert answer.headers["content-encoding"] == "gzip"
    step, rank, values, _ = read(answer.content)
    assert step.tolist() == [0, 4, 8, 12, 16]
    assert rank.tolist() == [0, 1, 2, 3]
    assert np.abs(values - (rank[:, None] + (step + 3) / 4)).max() < 0.01
    plain = api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=5", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == answer.content
    low = read(api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=5&side=low").content)[2]
    assert low[0].tolist() == pytest.approx([0, 1, 2, 3, 4], abs=0.01)


def test_answers_have_a_bound_whatever_the_job(api):
    stored(api, 3_000, 100)
    _, rank, values, _ = read(api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=1000").content)
    assert len(rank) == 1_000
    assert len(rank) * values.shape[1] <= 320_000
    assert values[-1, -1] == pytest.approx(2_999 + 99 / 4, rel=0.01)
    for query in ("metric=loss&rows=0", "metric=loss&rows=2000", "metric=loss&side=middle", "columns=3"):
        assert api.get(f"/api/v1/jobs/j/heatmap.bin?{query}").status_code == 422
    assert api.get("/api/v1/jobs/none/heatmap.bin?metric=loss").status_code == 404
