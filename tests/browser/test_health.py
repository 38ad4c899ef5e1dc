"""The page about rankwatch itself, and the banner above every page while something there is wrong."""

import pytest
from playwright.sync_api import expect

from rankwatch_service.store.models import AgentView
from tests.browser.conftest import HOSTILE
from tests.browser.dashboard import S
from tests.support.service.api import notifier_reports, stream_reports
from tests.support.store.database import add

pytestmark = [pytest.mark.browser, pytest.mark.ci]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_page_is_in_the_navigation_and_shows_each_part(visit, width, height):
    with visit(width, height, color_scheme="dark") as one:
        page = one.page
        expect(page.locator(".banner")).to_be_hidden()
        page.get_by_role("navigation").get_by_role("link", name="Health").click()
        expect(page.locator(".works")).to_contain_text("All parts work.")
        expect(page.locator(".tile", has_text="Notifier").last).to_contain_text("runs")
        expect(page.locator(".card", has_text="Partitions of the log").locator("tbody tr")).to_have_count(1)
        expect(page.locator("tr", has_text="pager")).to_contain_text("works")
        expect(page.locator(".card", has_text="Agents").last.get_by_role("link", name="gpt-small")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_banner_says_on_every_page_what_is_wrong_and_the_page_of_it_what_to_do(dashboard):
    for path in ("/incidents", "/jobs", "/hosts", "/policy", "/rules", "/access"):
        page = dashboard.goto(path)
        expect(page.locator(".banner")).to_contain_text("No stream process has ever reported")
    page.locator(".banner").get_by_role("link", name="Health: 1 more").click()
    expect(page.locator(".problems li")).to_have_count(2)
    expect(page.locator(".problems li").first).to_contain_text("Start rankwatch stream;")
    expect(page.locator(".banner")).to_have_count(0)


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_alerts_that_wait_come_and_go_with_their_labels_and_the_reason(dashboard, width, height):
    dashboard.page.set_viewport_size({"width": width, "height": height})
    page = dashboard.goto("/health")
    expect(page.locator(".problems li")).to_have_count(2)
    expect(page.get_by_role("heading", name="alert waits")).to_have_count(0)
    reported = {
        "labels": {"alertname": "Full", "job_name": HOSTILE, "mountpoint": "/data"},
        "generatorURL": "http://p/g",
    }
    assert (
        dashboard.api.post("/api/v2/alerts", [reported | {"annotations": {"summary": "Disk is full"}}]).status_code
        == 200
    )
    card = page.locator(".card", has=page.get_by_role("heading", name="1 alert waits"))
    expect(card).to_contain_text("mountpoint = /data")
    expect(card).to_contain_text(f"No running job that its sender may access is named {HOSTILE}.")
    expect(card.get_by_role("link", name="Full")).to_have_attribute("href", "http://p/g")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    over = reported | {"startsAt": "2020-01-01T00:00:00Z", "endsAt": "2020-01-01T00:00:01Z"}
    assert dashboard.api.post("/api/v2/alerts", [over]).status_code == 200
    expect(card).to_have_count(0)


def test_the_page_follows_without_a_reload_and_names_stay_text(dashboard):
    stream_reports(dashboard.api)
    page = dashboard.goto("/health")
    expect(page.locator(".problems li")).to_have_count(1)
    expect(page.locator(".problems li")).to_contain_text("No notifier has ever run")
    notifier_reports(dashboard.api)
    expect(page.locator(".works")).to_be_visible()
    dashboard.job("gpt", attempt="l.0", dropped={HOSTILE: 3})
    seen = {"agent": "", "boot": "b", "ranks": b"\x90", "at_unix_ns": dashboard.now - 600 * S}
    add(dashboard.api.engine, AgentView, job="gpt", attempt="l.0", host=HOSTILE, **seen)
    problem = page.locator(".problems li", has_text="1 of 1 agent of 1 job")
    expect(problem).to_contain_text(HOSTILE)
    expect(page.locator("td.late")).to_contain_text("min ago")
    expect(page.locator(".card", has_text="Dropped telemetry")).to_contain_text("img src=x", ignore_case=True)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hacked") is None
