"""Why an incident was opened, and what is judged of a job, on the command line against a real api."""

import json

import pytest

from rankwatch.client.connection import ServiceEndpoint
from rankwatch_detectors.base import Kind
from rankwatch_detectors.explanation import Statistic, Suspect, UnmetCriterion, explanation
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.cli.client import CliClient
from rankwatch_service.cli.errors import CliError
from rankwatch_service.store.models import Incident, IncidentTransition, Job
from tests.support.service.stream import Service
from tests.support.store.database import add, job_row
from tests.support.values.incidents import finding, incident_row

SLOW = Suspect(IncidentScope.of_rank(1), Statistic.EVIDENCE, 21.0, 20.0, 9, 1.08, source="wall")
POINTS = [[120, 1.0, 12.0, 20.0, 7, 1.07, ""], [121, 2.0, 20.5, 20.0, 8, 1.07, str(UnmetCriterion.CERTAINTY)]]


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    """An incident that is explained, one that is not, and a job."""
    reported = explanation(
        finding(Kind.STRAGGLER, scope="rank:1", onset_step=114, detected_step=122),
        SLOW,
        [*POINTS, [122, 3.0, 21.0, 20.0, 9, 1.08, ""]],
        {"judged": 110, "evaluation or checkpoint": 3},
        lambda _, rows: 1.2 if rows >= 6 else None,
    )
    opened = {"incident_id": "inc_1", "number": 1, "what": "opened", "actor": "stream", "text": "", "at_unix_ns": 1}
    add(api.engine, Job, job_row(incident_row()["job"]))
    add(api.engine, Incident, incident_row())
    died = {"kind": "rank_lost", "scope": "rank:1", "ranks": [1], "summary": "Rank 1 ended with 3.", "step": 130}
    add(api.engine, Incident, incident_row(id="inc_2", consequences=[died]))
    over = {"state": "resolved", "resolved_unix_ns": 1}
    add(api.engine, Incident, incident_row(id="inc_3", **over))
    add(api.engine, Incident, incident_row(id="inc_4", **over, evidence={"ended_with_job": True}))
    add(api.engine, IncidentTransition, **opened, fields={"why": [reported]})
    service = Service(api.engine)
    stream = service.started()
    service.train(*range(50))
    service.clock.advance(1.0)
    stream.step()
    stream.close()


def test_an_incident_is_explained_with_what_it_needed_to_be_reported_earlier(rankwatch):
    status, out, _ = rankwatch("incidents", "show", "inc_1", "--why")
    assert status == 0
    assert "reached 21 after 9 rows; its threshold is 20." in out
    assert "In step 121 it could still be chance" in out
    assert "it had to reach 1.2 times the usual value; it reached 1.08 times" in out
    assert "evaluation or checkpoint 3" in out
    assert "more steps" in out
    assert "certainty" in out


def test_the_explanation_is_part_of_the_json_if_asked_for(rankwatch):
    (reported,) = json.loads(rankwatch("incidents", "show", "inc_1", "--why", "--json")[1])["why"]
    assert reported["points"]["value"] == [12.0, 20.5, 21.0]
    assert "why" not in json.loads(rankwatch("incidents", "show", "inc_1", "--json")[1])


def test_an_incident_without_a_threshold_says_so(rankwatch):
    status, out, err = rankwatch("incidents", "show", "inc_2", "--why")
    assert (status, "no threshold decided" in out, err) == (0, True, "")


def test_first_steps_are_listed_only_while_an_incident_is_unresolved(rankwatch):
    lines = rankwatch("incidents", "show", "inc_2")[1].splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["incident", "do this first", "next"]
    for name, left in (("inc_3", "Nothing: it is over."), ("inc_4", "The job has ended.")):
        out = rankwatch("incidents", "show", name)[1]
        assert ("next" in out, left in out) == (False, True)


def test_a_silent_job_says_what_is_judged_and_the_smallest_fault(rankwatch):
    status, out, _ = rankwatch("jobs", "why", "gpt")
    assert status == 0
    assert "none: what it judges is not measured" in out
    assert "a slower job" in out
    assert "a jump of the loss" in out
    assert "the first that is not finite is reported" in out
    assert json.loads(rankwatch("jobs", "why", "gpt", "--json")[1])["job"] == "gpt"


def test_a_saved_file_is_whole_or_not_there(api, tmp_path):
    client = CliClient(ServiceEndpoint(api.url, api.admin))
    file, sizes = tmp_path / "audit.jsonl", []
    assert client.save("/api/v1/audit/export", file, sizes.append) == file.stat().st_size
    with pytest.raises(CliError, match="overwrites nothing"):
        client.save("/api/v1/audit/export", file, sizes.append)
    with pytest.raises(CliError, match="none"):
        client.save("/api/v1/jobs/none/telemetry", tmp_path / "other", sizes.append)
    assert list(tmp_path.glob("*other*")) == []


def test_consequences_of_an_incident_are_reported_with_it(rankwatch):
    out = rankwatch("incidents", "show", "inc_2")[1]
    assert "consequence" in out
    assert "Rank 1 ended with 3." in out
    assert "consequence" not in rankwatch("incidents", "show", "inc_1")[1]
