"""What an open page reads: nothing while nothing changes, then what has changed, and all of it after a restart."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.office import TIMEOUT_MS

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.ci]

POLLED_MS = 15_500
"""Longer than the time between two slow polls of a page."""
ALWAYS = ("/api/v1/incidents/totals", "/api/v1/health", "/api/v1/events")


def asked_from_now_on(page):
    """What the page asks the service for; the counts above each page and the events left out."""
    asked = []

    def note(request):
        url = urlsplit(request.url)
        if url.path.startswith("/api/") and url.path not in ALWAYS:
            asked.append((url.path, parse_qs(url.query)))

    page.on("request", note)
    return asked


def test_no_list_is_read_while_nothing_changes(office):
    office.job("gpt")
    office.incidents(3, job="gpt")
    pages, asked = [office.page, office.page.context.new_page()], []
    for page, path in zip(pages, ("/incidents", "/jobs"), strict=True):
        page.goto(office.url + path)
        expect(page.locator("tr.link").first).to_be_visible()
        expect(page.locator(".live")).to_have_text("Live")
        page.wait_for_load_state("networkidle")
        asked.append(asked_from_now_on(page))
    with pages[0].expect_response(re.compile("/incidents/totals"), timeout=TIMEOUT_MS):
        pages[1].wait_for_timeout(POLLED_MS)
    pages[1].wait_for_timeout(500)
    assert asked == [[], []]


def test_an_event_brings_a_row_of_a_job_up_to_date_without_a_request(office):
    office.job("gpt")
    office.job("other")
    page = office.goto("/jobs")
    row = page.locator("tr.link", has=page.get_by_role("link", name="gpt", exact=True))
    expect(row).to_contain_text("1,234")
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.textContent")
    asked = asked_from_now_on(page)
    office.tell("job", "gpt", state="stalled", step=1_300, loss="NaN", last_seen_unix_ns=office.now)
    office.tell("job", "other", state="running", step=1_301, last_seen_unix_ns=office.now)
    expect(row).to_contain_text("1,300")
    expect(row).to_contain_text("stalled")
    expect(row).to_contain_text("NaN")
    expect(page.locator("tr.link", has_text="1,301")).to_have_count(1)
    assert page.evaluate("document.activeElement.textContent") == focused
    assert asked == []


def test_a_job_is_read_alone_after_a_change_of_its_incidents_and_a_new_one_enters_the_list(office):
    office.job("gpt")
    page = office.goto("/jobs")
    row = page.locator("tr.link", has=page.get_by_role("link", name="gpt", exact=True))
    expect(row).to_contain_text("none")
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    asked = asked_from_now_on(page)
    office.incidents(2, job="gpt")
    office.tell("incident", "gpt", id=office.incident_id("critical"))
    expect(row).to_contain_text("2 unresolved")
    assert asked == [("/api/v1/jobs", {"name": ["gpt"], "limit": ["1"]})]
    office.job("fresh")
    office.tell("job", "fresh", state="running", step=3, last_seen_unix_ns=office.now)
    expect(page.locator("tr.link", has_text="fresh")).to_have_count(1)


def test_a_job_that_the_filter_leaves_out_is_asked_for_once_alone(office):
    office.job("gpt")
    office.job("other")
    office.api.ask("PATCH", "/api/v1/jobs/gpt", json={"project": "vision", "owner": ""})
    page = office.goto("/jobs?project=vision")
    expect(page.locator("tr.link")).to_have_count(1)
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    asked = asked_from_now_on(page)
    office.tell("job", "other", state="running", step=5, last_seen_unix_ns=office.now)
    page.wait_for_timeout(1_000)
    for step in range(6, 9):
        office.tell("job", "other", state="running", step=step, last_seen_unix_ns=office.now)
    office.tell("job", "gpt", state="running", step=9_876, last_seen_unix_ns=office.now)
    expect(page.locator("tr.link")).to_contain_text("9,876")
    assert [query.get("name") for _, query in asked] == [["other"]]


def test_a_change_among_more_incidents_than_are_shown_reads_one_and_keeps_their_order(office):
    office.job("gpt")
    office.incidents(120, job="gpt", severity="warning")
    page = office.goto("/incidents")
    rows = page.locator("tr.link")
    expect(rows).to_have_count(100)
    expect(page.locator(".rest")).to_contain_text("100 of 120 shown")
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    asked = asked_from_now_on(page)
    office.incidents(1, job="gpt", severity="critical")
    office.tell("incident", "gpt", id=office.incident_id("critical"))
    expect(page.locator(".rest")).to_contain_text("100 of 121 shown")
    expect(rows.first).to_contain_text("critical")
    office.change("warning", state="resolved", resolved_unix_ns=office.now)
    office.tell("incident", "gpt", id=office.incident_id("warning"))
    expect(page.locator(".rest")).to_contain_text("99 of 120 shown")
    office.tell("incident", "gpt", id=office.incident_id("warning", 119))  # it stands below the last row
    expect(rows).to_have_count(99)
    page.wait_for_timeout(500)
    assert {query["limit"][0] for _, query in asked} == {"1"}
    ids = page.evaluate("[...document.querySelectorAll('tr.link')].map((row) => row.dataset.id)")
    listed = office.api.get("/api/v1/incidents?state=unresolved&order=urgency&limit=99").json()["items"]
    assert ids == [one["id"] for one in listed]


def test_pages_go_on_after_a_restart_of_the_api_and_no_row_comes_twice(visit, site):
    with visit() as one:
        page = one.goto("/incidents?state=all")
        expect(page.locator("tr.link").first).to_be_visible()
        expect(page.locator(".live")).to_have_text("Live")
        page.evaluate("window.same = true")
        site.kill("api")
        expect(page.locator(".live")).to_have_text("Not connected")
        expect(page.locator(".live")).to_have_text("Live")
        feed = site.feed("after-restart", spoil_late)
        feed.send(170)
        feed.stop()
        expect(page.locator("tr.link", has_text="after-restart")).to_have_count(1)
        ids = page.evaluate("[...document.querySelectorAll('tr.link')].map((row) => row.dataset.id)")
        assert len(ids) == len(set(ids))
        assert page.evaluate("window.same") is True
        one.complaints.clear()  # the browser rightly complained about the network


def spoil_late(step, values, _exact):
    if step == 150:
        values["loss"] = [float("inf")] * 4
