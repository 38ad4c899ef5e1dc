"""What an open page reads: nothing while nothing changes, then what has changed, and all of it after a restart."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.dashboard import TIMEOUT_MS

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


def test_no_list_is_read_while_nothing_changes(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(3, job="gpt")
    pages, asked = [dashboard.page, dashboard.page.context.new_page()], []
    for page, path in zip(pages, ("/incidents", "/jobs"), strict=True):
        page.goto(dashboard.url + path)
        expect(page.locator("tr.link").first).to_be_visible()
        expect(page.locator(".live")).to_have_text("Live")
        page.wait_for_load_state("networkidle")
        asked.append(asked_from_now_on(page))
    with pages[0].expect_response(re.compile("/incidents/totals"), timeout=TIMEOUT_MS):
        pages[1].wait_for_timeout(POLLED_MS)
    pages[1].wait_for_timeout(500)
    assert asked == [[], []]


def test_an_event_brings_a_row_of_a_job_up_to_date_without_a_request(dashboard):
    dashboard.job("gpt")
    dashboard.job("other")
    page = dashboard.goto("/jobs")
    row = page.locator("tr.link", has=page.get_by_role("link", name="gpt", exact=True))
    expect(row).to_contain_text("1,234")
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.textContent")
    asked = asked_from_now_on(page)
    dashboard.publish("job", "gpt", state="stalled", step=1_300, loss="NaN", last_seen_unix_ns=dashboard.now)
    dashboard.publish("job", "other", state="running", step=1_301, last_seen_unix_ns=dashboard.now)
    expect(row).to_contain_text("1,300")
    expect(row).to_contain_text("stalled")
    expect(row).to_contain_text("NaN")
    expect(page.locator("tr.link", has_text="1,301")).to_have_count(1)
    assert page.evaluate("document.activeElement.textContent") == focused
    assert asked == []


def test_a_job_is_read_alone_after_a_change_of_its_incidents_and_a_new_one_enters_the_list(dashboard):
    dashboard.job("gpt")
    page = dashboard.goto("/jobs")
    row = page.locator("tr.link", has=page.get_by_role("link", name="gpt", exact=True))
    expect(row).to_contain_text("none")
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    asked = asked_from_now_on(page)
    dashboard.incidents(2, job="gpt")
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("critical"))
    expect(row).to_contain_text("2 unresolved")
    assert asked == [("/api/v1/jobs", {"name": ["gpt"], "limit": ["1"]})]
    dashboard.job("fresh")
    dashboard.publish("job", "fresh", state="running", step=3, last_seen_unix_ns=dashboard.now)
    expect(page.locator("tr.link", has_text="fresh")).to_have_count(1)


def test_a_job_that_the_filter_leaves_out_is_asked_for_once_alone(dashboard):
    dashboard.job("gpt")
    dashboard.job("other")
    dashboard.api.ask("PATCH", "/api/v1/jobs/gpt", json={"project": "vision", "owner": ""})
    page = dashboard.goto("/jobs?project=vision")
    expect(page.locator("tr.link")).to_have_count(1)
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    asked = asked_from_now_on(page)
    dashboard.publish("job", "other", state="running", step=5, last_seen_unix_ns=dashboard.now)
    page.wait_for_timeout(1_000)
    for step in range(6, 9):
        dashboard.publish("job", "other", state="running", step=step, last_seen_unix_ns=dashboard.now)
    dashboard.publish("job", "gpt", state="running", step=9_876, last_seen_unix_ns=dashboard.now)
    expect(page.locator("tr.link")).to_contain_text("9,876")
    assert [query.get("name") for _, query in asked] == [["other"]]


def test_a_change_among_more_incidents_than_are_shown_reads_one_and_keeps_their_order(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(120, job="gpt", severity="warning")
    page = dashboard.goto("/incidents")
    rows = page.locator("tr.link")
    expect(rows).to_have_count(100)
    expect(page.locator(".rest")).to_contain_text("100 of 120 shown")
    expect(page.locator(".live")).to_have_text("Live")
    page.wait_for_load_state("networkidle")
    asked = asked_from_now_on(page)
    dashboard.incidents(1, job="gpt", severity="critical")
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("critical"))
    expect(page.locator(".rest")).to_contain_text("100 of 121 shown")
    expect(rows.first).to_contain_text("critical")
    dashboard.change("warning", state="resolved", resolved_unix_ns=dashboard.now)
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("warning"))
    expect(page.locator(".rest")).to_contain_text("99 of 120 shown")
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("warning", 119))  # it stands below the last row
    expect(rows).to_have_count(99)
    page.wait_for_timeout(500)
    assert {query["limit"][0] for _, query in asked} == {"1"}
    ids = page.evaluate("[...document.querySelectorAll('tr.link')].map((row) => row.dataset.id)")
    listed = dashboard.api.get("/api/v1/incidents?state=unresolved&order=urgency&limit=99").json()["items"]
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
