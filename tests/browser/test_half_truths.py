"""What a page says when all is well, when somebody is on it, and when there is more than it shows. Rows are made up."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import insert

from rankwatch_service.incidents.model import derived
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Incident, Job
from tests.browser.conftest import PATIENCE_MS
from tests.support.service.served_api import served_api
from tests.support.values.incidents import incident_row

pytestmark = pytest.mark.browser
expect.set_options(timeout=PATIENCE_MS)
S = 10**9


class Office:
    """An api over rows that tests write, and a browser that is logged in to it."""

    def __init__(self, api, url: str, page: Page) -> None:
        self.api = api
        self.url = url
        self.page = page
        self.now = api.clock.unix_ns()

    def goto(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page

    def job(self, name: str, **changes) -> None:
        row = {
            "name": name, "state": "running", "attempt": "l.0", "world_size": 256, "ranks_reporting": 256,
            "step": 1_234, "step_time_s": 0.87, "loss": 2.31, "first_seen_unix_ns": self.now - 9_000 * S,
            "last_seen_unix_ns": self.now, "last_progress_unix_ns": self.now,
        }  # fmt: skip
        with write(self.api.engine) as connection:
            connection.execute(insert(Job).values(**row | changes))

    def attempt(self, job: str, **topology) -> None:
        row = {"job": job, "attempt": "l.0", "started_unix_ns": self.now, "ended_unix_ns": None, "world_size": 256,
               "first_step": 0, "last_step": 1_234, "topology": topology, "number": 1}  # fmt: skip
        with write(self.api.engine) as connection:
            connection.execute(insert(Attempt).values(**row))

    def incidents(self, count: int, **changes) -> None:
        with write(self.api.engine) as connection:
            rows = [self._incident(n, changes) for n in range(count)]
            connection.execute(insert(Incident), rows)

    def _incident(self, n: int, changes: dict) -> dict:
        kind, onset = changes.get("severity", "critical"), self.now - (n + 1) * 60 * S
        named = {
            "id": f"inc_{derived(kind, n)}",
            "number": n + 1,
            "summary": f"{kind} trouble {n}",
        }
        return incident_row(**named, onset_unix_ns=onset, detected_unix_ns=onset, **changes)


@pytest.fixture
def office(tmp_path, chromium) -> Iterator[Office]:
    with served_api(tmp_path) as (api, url), opened(chromium) as page:
        page.goto(f"{url}/login#{api.admin}")
        page.wait_for_url("**/incidents")
        yield Office(api, url, page)


@contextmanager
def opened(chromium) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, timezone_id="Asia/Kolkata", locale="en-GB")
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        yield page
    finally:
        context.close()


def test_home_tells_first_steps_then_quiet_then_what_does_not_move(office):
    page = office.goto("/incidents")
    expect(page.locator(".list")).to_contain_text("No job has reported yet")
    expect(page.locator(".list")).to_contain_text("rankwatch.start(job=")
    expect(page.locator(".list")).not_to_contain_text("No open incidents")
    office.job("gpt-small")
    page.reload()
    expect(page.locator("h2")).to_have_text("No open incidents")
    office.job("gpt-hung", state="stalled", last_progress_unix_ns=office.now - 600 * S)
    page.reload()
    expect(page.locator("h2")).to_have_text("No open incidents, but not every job makes progress")


def test_what_is_acknowledged_is_not_quiet(office):
    office.job("gpt-hung", state="stalled", world_size=300)
    office.incidents(4, job="gpt-hung", state="acknowledged", severity="critical", impact_gpu_hours_per_hour=72.25)
    page = office.goto("/incidents")
    expect(page.locator("tr.link")).to_have_count(4)
    totals = page.locator(".totals")
    expect(totals).to_contain_text("4 unresolved, all acknowledged")
    expect(totals).to_contain_text("4 critical")
    expect(totals).to_contain_text("289 GPU-hours per hour")
    page.get_by_role("button", name="Open").click()
    expect(page.locator(".list")).to_contain_text("4 acknowledged incidents are unresolved")


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
    expect(todo).to_contain_text("Read the stack of the named rank")
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
