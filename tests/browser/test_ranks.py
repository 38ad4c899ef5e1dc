"""The topology of a job, and the page of one rank."""

import re

import pytest
from playwright.sync_api import expect
from sqlalchemy import insert

from rankwatch_service.simulate.job import Job
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import HostRecord
from tests.browser.conftest import HOSTILE, PATIENCE_MS
from tests.support.service.stored_series import store

pytestmark = [pytest.mark.browser, pytest.mark.ci]
JOB = "gpt small"
expect.set_options(timeout=PATIENCE_MS)


def ranks() -> list[dict]:
    """16 ranks: two pipeline stages of two data groups of four tensor ranks."""
    return [
        {
            "rank": n, "host": HOSTILE if n >= 8 else "node-0", "device_uuid": f"GPU-{n}", "local_rank": n % 8,
            "pid": 1, "dp": n // 4 % 2, "tp": n % 4, "pp": n // 8, "cp": 0, "ep": 0,
        }
        for n in range(16)
    ]  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_topology_shows_the_rank_in_trouble_without_a_reload_and_leads_to_its_page(office, width, height):
    office.page.set_viewport_size({"width": width, "height": height})
    complaints = []
    office.page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    office.job(JOB, world_size=16)
    office.attempt(JOB, ranks=ranks(), can=[], replicated=False)
    page = office.goto(f"/jobs/{JOB}")
    page.get_by_role("link", name="Topology").click()
    stage = page.locator(".card", has=page.get_by_role("heading", name="Pipeline stage 1"))
    expect(stage.locator(".place")).to_have_count(8)
    expect(page.locator(".place.critical")).to_have_count(0)
    office.incidents(1, job=JOB, severity="critical", kind="straggler", ranks=[13], attempt="l.0")
    office.tell("incident", JOB)
    culprit = stage.locator(".place.critical")
    expect(culprit).to_have_text("13")
    expect(culprit).to_have_attribute("title", re.compile("dp 1 tp 1 pp 1 · Straggler, critical"))
    office.incidents(2, job=JOB, severity="warning", kind="hang", ranks=[13, 2], hosts=["node-0"], attempt="l.0")
    office.incidents(1, job=JOB, severity="info", kind="rank_lost", ranks=[3], hosts=["node-0"], attempt="l.0")
    office.tell("incident", JOB)
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
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    culprit.click()
    expect(page.locator("h1")).to_have_text(f"Rank 13 of {JOB}")
    expect(page.locator(".job-head")).to_contain_text(HOSTILE)
    expect(page.locator(".card", has_text="Where it runs").last).to_contain_text("GPU-13")
    page.get_by_role("link", name="Straggler").click()
    page.get_by_role("link", name="rank 13", exact=True).click()
    expect(page).to_have_url(re.compile(r"/ranks/gpt%20small/13$"))
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert complaints == []


def test_a_rank_that_the_job_does_not_have_has_a_page_that_says_so(office):
    office.job(JOB)
    office.attempt(JOB, ranks=ranks(), can=[], replicated=False)
    page = office.goto("/ranks/gpt%20small/99")
    expect(page.locator("h1")).to_have_text(f"There is no rank 99 of {JOB}")


def test_a_rank_is_charted_beside_all_with_its_incidents_and_the_verdict_on_its_host(office):
    store(office.api.engine, Job(world_size=4, steps=80))
    office.incidents(1, job="gpt", severity="warning", kind="straggler", ranks=[2], attempt="launch0.0", onset_step=5)
    record = {"id": "r", "incident_id": "inc_1", "severity": "critical", "host": "host-0", "device_uuid": "GPU-2",
              "job": "gpt", "kind": "device_fault", "at_unix_ns": office.now}  # fmt: skip
    with write(office.api.engine) as connection:
        worse = [record | {"id": f"r{n}", "incident_id": f"inc_{n}", "host": "another"} for n in (2, 3, 4)]
        connection.execute(insert(HostRecord), [record, *worse])
    asked = []
    office.page.on("request", lambda request: asked.append(request.url) if "/hosts" in request.url else None)
    page = office.goto("/ranks/gpt/2")
    expect(page.locator(".job-head .line")).to_have_text("Rank 2 of gptwarninghost probation")
    assert {url.partition("/api/v1")[2] for url in asked} == {"/hosts?host=host-0"}
    chart = page.locator("canvas.line")
    told = (
        r"^Busy of rank 2 beside .* median of all ranks: [\d.]+ ms .* rank 2: [\d.]+ ms .* warning incident from step 5"
    )
    expect(chart).to_have_attribute("aria-label", re.compile(told))
    page.get_by_label("Metric").select_option("loss")
    expect(page.locator("canvas.line")).to_have_attribute("aria-label", re.compile("^Loss of rank 2 beside"))
    expect(page.get_by_role("heading", name="Its GPU beside all")).to_be_hidden()
