"""What a page says when all is well, somebody is on it, there is more than it shows, or no data. Rows are made up."""

import re

import pytest
from playwright.sync_api import expect

from rankwatch_service.access.scopes import Scope
from tests.browser.conftest import PATIENCE_MS
from tests.browser.office import S

pytestmark = [pytest.mark.browser, pytest.mark.ci]
expect.set_options(timeout=PATIENCE_MS)

PROBLEM = '{"title": "Internal Server Error", "status": 500, "detail": "internal error", "request_id": "req_7"}'
PROXY = "<h1>Bad Gateway</h1>"


def test_a_long_list_says_how_long_it_is_and_shows_the_worst_first(office):
    office.job("gpt-small")
    office.incidents(219, job="gpt-small", severity="warning")
    office.incidents(181, job="gpt-small", severity="critical")
    page = office.goto("/incidents")
    expect(page.locator(".rest")).to_contain_text("100 of 400 shown")
    expect(page.locator("tr.link .pill.warning")).to_have_count(0)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".rest")).to_contain_text("200 of 400 shown")
    expect(page.locator("tr.link .pill.critical")).not_to_have_count(100)
    assert page.locator("tr.link .c-severity", has_text="critical").count() == 181
    page.goto(f"{office.url}/jobs")
    expect(page.locator("tr.link")).to_contain_text("400 unresolved")


def test_an_incident_tells_first_steps_times_with_their_zone_and_an_id_to_type(office):
    office.job("gpt-hung", state="stalled")
    suggestion = {"action": "investigate", "reason": "", "cost_gpu_hours": 4.0, "alternatives": []}
    office.incidents(1, job="gpt-hung", severity="critical", kind="hang", suggestion=suggestion)
    page = office.goto("/incidents")
    short = page.locator("tr.link .mono").text_content()
    page.goto(f"{office.url}/incidents/{short}")
    todo = page.locator(".card", has_text="What to do")
    expect(todo).to_contain_text("py-spy dump --pid PID")
    expect(todo).to_contain_text("This job supports no commands")
    expect(todo).not_to_contain_text("Wait")
    expect(page.locator(".strip")).to_contain_text("UTC+5:30")
    expect(page).to_have_title(re.compile(short))


def test_a_hang_shows_where_its_ranks_stand_and_a_stack_of_each_group(office):
    office.job("gpt-hung", state="stalled")
    sentence = (
        "511 of 512 ranks stand in all_reduce (distributed_c10d.py:2810), from train (train.py:41); rank 3 in load."
    )
    stacks = [{"ranks": "3", "count": 1, "rank": 3, "stack": "File data.py\nload", "where": "load", "os_state": "R"}]
    stacks += [{"ranks": "0-2,4-511", "count": 511, "rank": 0, "stack": "File c10d.py", "where": "x", "os_state": "S"}]
    evidence = {"age_s": 8.0, "deadline_s": 5.0, "ranks_stand": sentence, "stacks": stacks}
    office.incidents(1, job="gpt-hung", severity="critical", kind="hang", evidence=evidence)
    page = office.goto("/incidents")
    short = page.locator("tr.link .mono").text_content()
    page.goto(f"{office.url}/incidents/{short}")
    expect(page.locator(".card", has_text="Where the ranks stand")).to_contain_text(sentence)
    dumps = page.locator(".card", has=page.locator("pre.dump"))
    expect(dumps).to_have_count(2)
    expect(dumps.nth(0)).to_contain_text("Stack of rank 3")
    expect(dumps.nth(1)).to_contain_text("Stack of 511 ranks: 0-2,4-511")
    expect(dumps.nth(1)).to_contain_text("rank 0: process state S")


def test_a_stalled_job_shows_since_when_and_greys_its_rates(office):
    office.job("gpt-hung", state="stalled", loss=float("nan"), last_progress_unix_ns=office.now - 600 * S)
    page = office.goto("/jobs")
    row = page.locator("tr.link")
    expect(row).to_contain_text("stalled")
    expect(row).to_contain_text("NaN")
    expect(row).to_contain_text(re.compile("10 min ago"))
    expect(row.locator("td.then", has_text="870 ms")).to_be_visible()
    page.goto(f"{office.url}/jobs/gpt-hung")
    strip = page.locator(".strip")
    expect(strip).to_contain_text(re.compile("last step 10 min ago"))
    expect(strip).to_contain_text("before the job was stalled")
    expect(strip).not_to_contain_text("steps / s")


def test_a_job_says_what_is_watched_in_it_and_what_is_not(office):
    line = "watching GPT (8 parameters), AdamW: gradient norm; not watched: fingerprints (switched off)"
    for name, watched in (("gpt-small", line), ("gpt-bare", "")):
        office.job(name)
        office.attempt(name, ranks=[], can=[], replicated=False, watched=watched)
    page = office.goto("/jobs/gpt-small")
    expect(page.locator(".job-head")).to_contain_text(line)
    page.goto(f"{office.url}/jobs/gpt-bare")
    expect(page.locator(".job-head .pill")).to_have_text("running")
    expect(page.locator(".job-head .under")).to_have_count(0)


def test_ranks_that_ended_on_request_are_no_fault(office):
    office.job("gpt")
    ended = {"kind": "rank_lost", "ranks": [1], "hosts": ["node-1"], "evidence": {"requested": True}, "confidence": 0.5}
    office.incidents(1, job="gpt", severity="info", **ended)
    page = office.goto(f"/incidents/{office.incident_id('info')}")
    expect(page.locator("h1")).to_have_text("Ended on request: rank 1 on node-1")
    expect(page.locator(".tile", has_text="Is it real?")).to_contain_text("not a fault")


def test_who_may_not_see_a_page_reads_why_and_can_log_in_as_someone_else(office):
    office.page.goto(f"{office.url}/login")
    office.page.goto(f"{office.url}/login#{office.api.token(Scope.READ)}")
    office.page.wait_for_url("**/incidents")
    page = office.goto("/access")
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
def test_a_page_that_opens_while_the_service_fails_says_so_and_goes_on_by_itself(office, status, body, heading, why):
    office.job("gpt")
    page = office.page
    page.route("**/api/v1/jobs?*", lambda route: route.fulfill(status=status, body=body))
    office.goto("/jobs")
    expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.locator(".error-page")).to_contain_text(why)
    page.evaluate("window.same = true")
    page.unroute("**/api/v1/jobs?*")
    expect(page.locator("tr.link", has_text="gpt")).to_be_visible()
    expect(page.locator(".error-page")).to_have_count(0)
    assert page.evaluate("window.same") is True


def test_a_page_that_is_open_keeps_what_it_shows_when_a_refresh_fails(office):
    office.job("gpt")
    page = office.goto("/jobs/gpt")
    expect(page.locator("h1", has_text="gpt")).to_be_visible()
    page.route("**/api/v1/jobs/gpt", lambda route: route.fulfill(status=503, body=PROBLEM))
    office.tell("job", "gpt")
    expect(page.locator(".problem")).to_contain_text("Internal error. This page goes on by itself.")
    expect(page.locator("h1", has_text="gpt")).to_be_visible()
    expect(page.locator(".error-page")).to_have_count(0)
