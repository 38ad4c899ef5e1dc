"""Tunings by REST: versioned, audited, and sent to stream in the same transaction."""

import pytest
from sqlalchemy import func, select

from rankwatch_detectors.tuning import SETTINGS
from rankwatch_service.access.grants import Scope
from rankwatch_service.api.routes import tuning as routes
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import decode_control
from rankwatch_service.store.models import TuningVersion
from rankwatch_service.tuning import TuningSet, read_tunings

ON_BOTH_DATABASES = True
PATH = "/api/v1/tuning"
EPOCH = "1970-01-01T00:00:00.000000Z"
GPT = {"jobs": "gpt-*", "profile": "quiet", "settings": {"hang.steps": 6.0, "hang.floor_s": 9.0}}


def put(api, *tunings, **more):
    return api.ask("PUT", PATH, json={"tunings": list(tunings), **more})


def reported(api):
    records = [decode_control(one.value) for one in api.controls.read(0, 1_000)]
    return [one for one in records if isinstance(one, TuningSet)]


def test_nobody_has_set_version_0(api):
    assert api.get(PATH).json() == {"version": 0, "tunings": [], "actor": "", "at_unix_ns": 0, "at": EPOCH}
    assert reported(api) == []


def test_they_are_replaced_as_a_whole_under_the_next_version_and_told_to_stream(api):
    answer = put(api, GPT)
    assert (answer.status_code, answer.json()["version"], answer.json()["tunings"]) == (200, 1, [GPT])
    assert answer.json()["actor"]
    assert api.get(PATH).json() == answer.json()
    assert put(api, {"jobs": "a"}, GPT).json()["version"] == 2
    assert reported(api) == [TuningSet(1, read_tunings([GPT])), TuningSet(2, read_tunings([{"jobs": "a"}, GPT]))]


def test_one_step_brings_every_setting_back_to_its_default(api):
    put(api, GPT)
    assert (api.ask("DELETE", PATH).json()["version"], api.get(PATH).json()["tunings"]) == (2, [])
    assert reported(api)[-1] == TuningSet(2)


def test_what_is_in_force_already_is_no_new_version(api):
    first = put(api, GPT).json()
    assert put(api, GPT).json() == first
    assert len(reported(api)) == 1


def test_only_the_version_that_was_read_is_replaced(api):
    put(api, GPT)
    answer = put(api, version=0)
    assert answer.status_code == 409
    assert answer.json()["detail"] == "version 1 is in force, not 0; read it and change that"
    assert put(api, version=1).json()["version"] == 2


def test_old_versions_are_removed(api, monkeypatch):
    monkeypatch.setattr(routes, "VERSIONS_MAX", 2)
    for name in "abcd":
        put(api, {"jobs": name})
    with api.engine.connect() as connection:
        query = select(func.min(TuningVersion.version), func.max(TuningVersion.version))
        assert tuple(connection.execute(query).one()) == (3, 4)


@pytest.mark.parametrize(
    ("tuning", "said"),
    [
        ({"settings": {"hang.step": 1}}, "hang has hang.steps"),
        ({"settings": {"hang.steps": "6"}}, "valid"),
        ({"profile": "loud"}, "'quiet', 'standard' or 'sensitive'"),
        ({"jobs": ""}, "at least 1 character"),
        ({"job": "a"}, "Extra inputs"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed_and_changes_nothing(api, tuning, said):
    answer = put(api, tuning)
    assert answer.status_code == 422
    assert said in answer.text
    assert api.get(PATH).json()["version"] == 0
    assert reported(api) == []


def test_there_are_at_most_100_tunings(api):
    assert put(api, *({"jobs": str(number)} for number in range(101))).status_code == 422


def test_only_admins_of_all_jobs_change_them(api):
    for token in (api.token(Scope.COMMAND), api.token(Scope.ADMIN, job="a")):
        assert api.ask("PUT", PATH, json={"tunings": []}, token=token).status_code == 403
        assert api.ask("DELETE", PATH, token=token).status_code == 403
    assert api.ask("GET", PATH, token=api.token(Scope.READ)).status_code == 200


def test_the_settings_are_listed_with_ranges_and_profiles(api):
    items = api.get(f"{PATH}/settings").json()["items"]
    assert [one["name"] for one in items] == list(SETTINGS)
    ratio = items[0]
    assert (ratio["low"], ratio["high"]) == (1.005, 5)
    assert ratio["profiles"] == {"quiet": 1.05, "standard": 1.022, "sensitive": 1.015}


def test_a_row_exists_if_and_only_if_stream_is_reported(api, monkeypatch):
    """A failure between both leaves neither."""

    def fail(self, connection, entries):
        raise RuntimeError("the process ends here")

    monkeypatch.setattr(ControlLog, "append_in", fail)
    assert put(api, GPT).status_code == 500
    monkeypatch.undo()
    assert api.get(PATH).json()["version"] == 0
    assert api.get("/api/v1/audit?target=tuning").json()["items"] == []
    assert put(api, GPT).json()["version"] == 1
