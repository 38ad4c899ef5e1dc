"""What a page says when all is well, somebody is on it, there is more than it shows, or no data; and pages of ranks."""

import re

import pytest
from playwright.sync_api import expect

from rankwatch_service.access.grants import Scope
from rankwatch_service.simulate.job import Job
from rankwatch_service.store.models import HostRecord
from tests.browser.conftest import HOSTILE
from tests.browser.dashboard import S, fits
from tests.support.service.stored_series import store
from tests.support.store.database import add

pytestmark = [pytest.mark.browser, pytest.mark.ci]

PROBLEM = '{"title": "Internal Server Error", "status": 500, "detail": "internal error", "request_id": "req_7"}'
PROXY = "<h1>Bad Gateway</h1>"


def test_a_long_list_says_how_long_it_is_and_shows_the_worst_first(dashboard):
    dashboard.job("gpt-small")
    dashboard.incidents(219, job="gpt-small", severity="warning")
    dashboard.incidents(181, job="gpt-small", severity="critical")
    page = dashboard.goto("/incidents")
    expect(page.locator(".rest")).to_contain_text("100 of 400 shown")
    expect(page.locator("tr.link .pill.warning")).to_have_count(0)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".rest")).to_contain_text("200 of 400 shown")
    expect(page.locator("tr.link .pill.critical")).not_to_have_count(100)
    assert page.locator("tr.link .c-severity", has_text="critical").count() == 181
    page.goto(f"{dashboard.url}/jobs")
    expect(page.locator("tr.link")).to_contain_text("400 unresolved")


def test_an_incident_tells_first_steps_times_with_their_zone_and_an_id_to_type(dashboard):
    dashboard.job("gpt-hung", state="stalled")
    suggestion = {"action": "investigate", "reason": "", "cost_gpu_hours": 4.0, "alternatives": []}
    dashboard.incidents(1, job="gpt-hung", severity="critical", kind="hang", suggestion=suggestion)
    page = dashboard.goto("/incidents")
    short = page.locator("tr.link .mono").text_content()
    page.goto(f"{dashboard.url}/incidents/{short}")
    todo = page.locator(".card", has_text="What to do")
    expect(todo).to_contain_text("py-spy dump --pid")
    expect(todo).to_contain_text("rankwatch can only watch this job")
    expect(todo).not_to_contain_text("Wait")
    expect(page.locator(".strip")).to_contain_text("UTC+5:30")
    expect(page).to_have_title(re.compile(short))


def test_a_stalled_job_shows_since_when_and_greys_its_rates(dashboard):
    dashboard.job("gpt-hung", state="stalled", loss=float("nan"), last_progress_unix_ns=dashboard.now - 600 * S)
    page = dashboard.goto("/jobs")
    row = page.locator("tr.link")
    expect(row).to_contain_text("stalled")
    expect(row).to_contain_text("NaN")
    expect(row).to_contain_text(re.compile("10 min ago"))
    expect(row.locator("td.then", has_text="870 ms")).to_be_visible()
    page.goto(f"{dashboard.url}/jobs/gpt-hung")
    strip = page.locator(".strip")
    expect(strip).to_contain_text(re.compile("last step 10 min ago"))
    expect(strip).to_contain_text("before the job was stalled")
    expect(strip).not_to_contain_text("steps / s")


def test_a_job_says_what_is_watched_in_it_and_what_is_not(dashboard):
    line = "watching GPT (8 parameters), AdamW: gradient norm; not watched: fingerprints (switched off)"
    for name, watched in (("gpt-small", line), ("gpt-bare", "")):
        dashboard.job(name)
        dashboard.attempt(name, ranks=[], can=[], replicated=False, watched=watched)
    page = dashboard.goto("/jobs/gpt-small")
    expect(page.locator(".job-head")).to_contain_text(line)
    page.goto(f"{dashboard.url}/jobs/gpt-bare")
    expect(page.locator(".job-head .pill")).to_have_text("running")


def test_a_job_whose_log_is_not_understood_says_so(dashboard):
    dashboard.job("from-a-log", state="log_not_understood", step=-1)
    page = dashboard.goto("/jobs")
    expect(page.locator("tr.link .pill.critical")).to_have_text("log not understood")
    page.goto(f"{dashboard.url}/jobs/from-a-log")
    expect(page.locator(".job-head .pill")).to_have_text("log not understood")
    expect(page.locator(".job-head .under")).to_have_count(0)


def test_ranks_that_ended_on_request_are_no_fault(dashboard):
    dashboard.job("gpt")
    ended = {"kind": "rank_lost", "ranks": [1], "hosts": ["node-1"], "evidence": {"requested": True}, "confidence": 0.5}
    dashboard.incidents(1, job="gpt", severity="info", **ended)
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('info')}")
    expect(page.locator("h1")).to_have_text("Ended on request: rank 1 on node-1")
    expect(page.locator(".tile", has_text="Is it real?")).to_contain_text("not a fault")


def test_who_may_not_see_a_page_reads_why_and_can_log_in_as_someone_else(dashboard):
    dashboard.page.goto(f"{dashboard.url}/login")
    dashboard.page.goto(f"{dashboard.url}/login#{dashboard.api.token(Scope.READ)}")
    dashboard.page.wait_for_url("**/incidents")
    page = dashboard.goto("/access")
    expect(page.get_by_role("heading", name="You may not see this page")).to_be_visible()
    expect(page.get_by_role("heading", name="Tokens")).to_be_hidden()
    page.get_by_role("button", name="Log in as someone else").click()
    page.wait_for_url("**/login")


@pytest.mark.parametrize(
    ("status", "body", "heading", "why"),
    [
        (500, PROBLEM, "The service failed to read this page's data", "under the request req_7"),
        (502, PROXY, "The service is not available", "It may be restarting"),
    ],
)
def test_a_page_that_opens_while_the_service_fails_says_so_and_goes_on_by_itself(dashboard, status, body, heading, why):
    dashboard.job("gpt")
    page = dashboard.page
    page.route("**/api/v1/jobs?*", lambda route: route.fulfill(status=status, body=body))
    dashboard.goto("/jobs")
    expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.locator(".error-page")).to_contain_text(why)
    page.evaluate("window.same = true")
    page.unroute("**/api/v1/jobs?*")
    expect(page.locator("tr.link", has_text="gpt")).to_be_visible()
    expect(page.locator(".error-page")).to_have_count(0)
    assert page.evaluate("window.same") is True


def test_a_page_that_is_open_keeps_what_it_shows_when_a_refresh_fails(dashboard):
    dashboard.job("gpt")
    page = dashboard.goto("/jobs/gpt")
    expect(page.locator("h1", has_text="gpt")).to_be_visible()
    page.route("**/api/v1/jobs/gpt", lambda route: route.fulfill(status=503, body=PROBLEM))
    dashboard.publish("job", "gpt")
    expect(page.locator(".problem")).to_contain_text("Internal error. This page goes on by itself.")
    expect(page.locator("h1", has_text="gpt")).to_be_visible()
    expect(page.locator(".error-page")).to_have_count(0)


JOB = "gpt small"


def places() -> list[dict]:
    """16 ranks: two pipeline stages of two data groups of four tensor ranks."""
    return [
        {
            "rank": n, "host": HOSTILE if n >= 8 else "node-0", "device_uuid": f"GPU-{n}", "local_rank": n % 8,
            "pid": 1, "dp": n // 4 % 2, "tp": n % 4, "pp": n // 8, "cp": 0, "ep": 0,
        }
        for n in range(16)
    ]  # fmt: skip


def test_the_topology_shows_the_rank_in_trouble_without_a_reload_and_leads_to_its_page(dashboard):
    complaints = []
    dashboard.page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    dashboard.job(JOB, world_size=16)
    dashboard.attempt(JOB, ranks=places(), can=[], replicated=False)
    page = dashboard.goto(f"/jobs/{JOB}")
    page.get_by_role("link", name="Topology").click()
    stage = page.locator(".card", has=page.get_by_role("heading", name="Pipeline stage 1"))
    expect(stage.locator(".place")).to_have_count(8)
    expect(page.locator(".place.critical")).to_have_count(0)
    dashboard.incidents(1, job=JOB, severity="critical", kind="straggler", ranks=[13], attempt="l.0")
    dashboard.publish("incident", JOB)
    culprit = stage.locator(".place.critical")
    expect(culprit).to_have_text("13")
    expect(culprit).to_have_attribute("title", re.compile("dp 1 tp 1 pp 1 · Straggler, critical"))
    dashboard.incidents(2, job=JOB, severity="warning", kind="hang", ranks=[13, 2], hosts=["node-0"], attempt="l.0")
    dashboard.incidents(1, job=JOB, severity="info", kind="rank_lost", ranks=[3], hosts=["node-0"], attempt="l.0")
    dashboard.publish("incident", JOB)
    expect(page.get_by_role("list", name="States of ranks").locator("li")).to_have_text(
        ["2 hanging", "1 ended on request or finished"]
    )
    expect(page.locator(".card", has_text="Pipeline stage 0").locator(".place.hanging.warning")).to_have_text("2")
    expect(culprit).to_have_attribute("title", re.compile("pp 1 · hanging · Straggler, critical"))
    host = page.locator(".card", has=page.get_by_role("heading", name="Hosts")).locator("tr", has_text="node-0")
    expect(host.get_by_role("link", name="Hang", exact=True)).to_have_count(2)
    listed = page.locator(".card", has=page.get_by_role("heading", name="Unresolved incidents"))
    expect(listed.locator("tbody tr").first).to_contain_text("Straggler")
    expect(listed.get_by_role("link", name="node-0")).to_have_count(3)
    assert fits(page)
    culprit.click()
    expect(page.locator("h1")).to_have_text(f"Rank 13 of {JOB}")
    expect(page.locator(".job-head")).to_contain_text(HOSTILE)
    expect(page.locator(".card", has_text="Where it runs").last).to_contain_text("GPU-13")
    page.get_by_role("link", name="Straggler").click()
    page.get_by_role("link", name="rank 13", exact=True).click()
    expect(page).to_have_url(re.compile(r"/ranks/gpt%20small/13$"))
    assert page.locator("main img").count() == 0
    assert fits(page)
    assert complaints == []


def test_a_rank_that_the_job_does_not_have_has_a_page_that_says_so(dashboard):
    dashboard.job(JOB)
    dashboard.attempt(JOB, ranks=places(), can=[], replicated=False)
    page = dashboard.goto("/ranks/gpt%20small/99")
    expect(page.locator("h1")).to_have_text(f"There is no rank 99 of {JOB}")


def test_a_rank_is_charted_beside_all_with_its_incidents_and_the_verdict_on_its_host(dashboard):
    store(dashboard.api.engine, Job(world_size=4, steps=80))
    dashboard.incidents(
        1, job="gpt", severity="warning", kind="straggler", ranks=[2], attempt="launch0.0", onset_step=5
    )
    record = {"id": "r", "incident_id": "inc_1", "severity": "critical", "host": "host-0", "device_uuid": "GPU-2",
              "job": "gpt", "kind": "device_fault", "at_unix_ns": dashboard.now}  # fmt: skip
    worse = [record | {"id": f"r{n}", "incident_id": f"inc_{n}", "host": "another"} for n in (2, 3, 4)]
    add(dashboard.api.engine, HostRecord, record, *worse)
    asked = []
    dashboard.page.on("request", lambda request: asked.append(request.url) if "/hosts" in request.url else None)
    page = dashboard.goto("/ranks/gpt/2")
    expect(page.locator(".job-head .line")).to_have_text("Rank 2 of gptwarninghost probation")
    assert {url.partition("/api/v1")[2] for url in asked} == {"/hosts?host=host-0"}
    chart = page.locator("canvas.line")
    reported = (
        r"^Busy of rank 2 beside .* median of all ranks: [\d.]+ ms .* rank 2: [\d.]+ ms .* warning incident from step 5"
    )
    expect(chart).to_have_attribute("aria-label", re.compile(reported))
    page.get_by_label("Metric", exact=True).select_option("loss")
    expect(page.locator("canvas.line")).to_have_attribute("aria-label", re.compile("^Loss of rank 2 beside"))
    expect(page.get_by_role("heading", name="Its GPU and all others")).to_be_hidden()
