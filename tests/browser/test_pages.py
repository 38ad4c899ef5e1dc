"""Every page in a real browser, wide and on a phone, with live data and not one complaint of the browser."""

import re

import pytest
from playwright.sync_api import expect

from rankwatch_service.store.models import HostRecord
from tests.browser.conftest import BAD_STEP, HOSTILE, TIMEOUT_MS, until
from tests.browser.dashboard import S, card
from tests.support.store.database import add

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LAST_STEP_DRAWN = (
    "Number(/to step ([\\d,]+)/.exec(document.querySelector('canvas.line').ariaLabel)?.[1].replaceAll(',', '') ?? -1)"
)
SIZES = [(1280, 800), (390, 844)]


def no_sideways_scrolling(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def in_first_screen(page, locator):
    box = locator.bounding_box()
    return box is not None and box["y"] + box["height"] <= page.viewport_size["height"]


def in_both_sizes(page):
    """Make the page small and then wide."""
    for width, height in reversed(SIZES):
        page.set_viewport_size({"width": width, "height": height})
        yield


def test_incidents_lists_what_is_open(visit):
    with visit() as one:
        page = one.goto("/incidents?state=all&job=gpt-small")
        row = page.locator("tr.link").first
        expect(page.locator(".live")).to_have_text("Live")
        for _ in in_both_sizes(page):
            expect(row).to_contain_text("NaN")
            expect(row).to_contain_text("rank 1")
            assert in_first_screen(page, row)
            assert no_sideways_scrolling(page)


def test_an_incident_answers_the_first_questions_on_one_screen(visit, site):
    with visit() as one:
        page = one.goto(f"/incidents/{site.incident_id()}")
        strip, todo = page.locator(".strip"), page.get_by_role("heading", name="What to do")
        for _ in in_both_sizes(page):
            expect(page.locator("h1")).to_contain_text("rank 1")
            for text in ("rank 1", "node-1", f"step {BAD_STEP}"):
                expect(strip).to_contain_text(text)
            expect(todo).to_be_visible()
            expect(page.locator(".timeline")).to_contain_text("Opened")
            expect(page.locator(".lines", has_text="pager")).to_contain_text("delivered")
            assert in_first_screen(page, strip)
            assert in_first_screen(page, todo)
            assert no_sideways_scrolling(page)


def test_jobs_lists_all_jobs_with_their_state(visit):
    with visit() as one:
        page = one.goto("/jobs")
        row = page.locator("tr.link", has_text="gpt-small")
        for _ in in_both_sizes(page):
            expect(row).to_contain_text("running")
            expect(row).to_contain_text("4 / 4")
            assert no_sideways_scrolling(page)


def test_a_job_shows_its_charts_and_goes_on_by_itself(visit):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        for _ in in_both_sizes(page):
            expect(page.get_by_role("img", name=re.compile("^Loss over steps. From step"))).to_be_visible()
            expect(page.locator("canvas.heat")).to_be_visible()
            expect(page.locator(".scale")).to_contain_text("×")
            assert no_sideways_scrolling(page)
        assert in_first_screen(page, page.locator("canvas.heat"))
        step = page.locator(".tile", has_text="Step").first.locator(".value")
        expect(step).to_have_text(re.compile(r"^[\d,]+$"))
        before = step.text_content()
        expect(step).not_to_have_text(before)
        until(page, f"{LAST_STEP_DRAWN} >= {before.replace(',', '')}")


def test_the_heat_map_draws_cells_and_names_them_under_the_pointer(visit):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        expect(page.locator(".scale")).to_contain_text("×")
        page.get_by_label("Shade by").select_option("absolute")
        expect(page.locator(".scale")).not_to_contain_text("×\n")
        colours = page.evaluate(
            "(() => { const canvas = document.querySelector('canvas.heat'); const context = canvas.getContext('2d');"
            "const data = context.getImageData(70, 0, canvas.width - 80, 90).data; const seen = new Set();"
            "for (let n = 0; n < data.length; n += 4) seen.add(data.slice(n, n + 4).join()); return seen.size; })()"
        )
        assert colours > 20
        box = page.locator("canvas.heat").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 14)
        expect(page.locator(".heatbox .tip")).to_contain_text(re.compile(r"rank 0 on node-1 · step [\d,]+\s+\d"))


def test_names_that_are_markup_stay_text_everywhere(visit, site):
    with visit() as one:
        page = one.goto("/jobs")
        expect(page.locator("tr.link", has_text=HOSTILE)).to_be_visible()
        page.locator("a.title", has_text=HOSTILE).click()
        expect(page.locator("h1")).to_have_text(HOSTILE)
        picker = page.get_by_label("Metric", exact=True)
        expect(picker.locator("option", has_text="<img")).to_have_count(1)
        picker.select_option(HOSTILE)
        page.goto(f"{site.service.url}/incidents/{site.incident_id()}")
        page.get_by_label("Comment").fill("</script><script>window.hacked=1</script><b>bold</b>")
        page.get_by_role("button", name="Comment").click()
        expect(page.locator(".timeline")).to_contain_text("<b>bold</b>")
        assert page.locator("main img, main script, main b:has-text('bold')").count() == 0
        assert page.evaluate("window.hacked") is None


def test_a_command_is_asked_for_with_a_reason(visit, site):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        expect(page.locator(".job-head h1")).to_have_text("gpt-small")
        commands = len(site.service.items("/api/v1/commands", job="gpt-small"))
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Cancel").click()
        assert len(site.service.items("/api/v1/commands", job="gpt-small")) == commands
        page.get_by_role("button", name="Pause").click()
        page.get_by_label("Reason").fill("looking at rank 1")
        page.locator("dialog").get_by_role("button", name="Pause").click()
        expect(page.locator(".toast")).to_contain_text("Pause")
        expect(page.locator(".card", has_text="Commands").last).to_contain_text("looking at rank 1")


def test_a_page_says_when_it_is_cut_off_and_recovers_by_itself(visit):
    with visit() as one:
        page = one.goto("/jobs")
        expect(page.locator(".live")).to_have_text("Live")
        page.context.set_offline(True)
        expect(page.locator(".live")).to_have_text("Not connected")
        expect(page.get_by_role("alert")).to_contain_text("may be restarting. This page goes on by itself.")
        page.context.set_offline(False)
        expect(page.locator(".live")).to_have_text("Live")
        expect(page.get_by_role("alert")).to_be_hidden()
        one.complaints.clear()  # the browser rightly complained about the network


def test_a_job_without_telemetry_is_greyed_with_its_age(visit):
    with visit() as one:
        page = one.goto("/jobs")
        row = page.locator("tr.link", has_text=HOSTILE)
        expect(row).to_have_class(re.compile("stale"))
        expect(row).to_contain_text("ago")
        expect(page.locator("tr.link", has_text="gpt-small")).not_to_have_class(re.compile("stale"))


def test_light_and_dark_are_kept(visit):
    with visit(color_scheme="dark") as one:
        page = one.goto("/jobs")
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "dark"
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(theme) == "light"
        one.goto("/incidents")
        until(page, f"{theme} === 'light'")


def test_without_a_session_every_page_leads_to_the_login_and_back(chromium, site):
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"{site.service.url}/jobs/gpt-small")
    expect(page).to_have_url(re.compile(r"/login\?next="))
    page.get_by_label("Access token").fill("rankwatch_api_nonsense")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    page.get_by_label("Access token").fill(site.service.token)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(re.compile(r"/jobs/gpt-small$"))
    expect(page.locator("h1")).to_have_text("gpt-small")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(re.compile(r"/login"))
    context.close()


def test_the_login_link_leaves_no_token_in_the_address_or_the_history(chromium, site):
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(site.service.login_url)
    expect(page).to_have_url(re.compile(r"/incidents$"))
    assert site.service.token not in page.url
    page.go_back()
    assert site.service.token not in page.url
    context.close()


def test_lost_time_is_listed_by_kind_and_leads_to_the_incidents(dashboard):
    dashboard.job("gpt", world_size=16)
    hours = {
        "onset_unix_ns": dashboard.now - 9_000 * S,
        "resolved_unix_ns": dashboard.now - 7_200 * S,
        "state": "resolved",
    }
    dashboard.incidents(2, job="gpt", kind="hang", impact_gpu_hours_per_hour=8.0, **hours)
    dashboard.incidents(1, job="gpt", kind="straggler", severity="warning", impact_gpu_hours_per_hour=4.0)
    page = dashboard.goto("/jobs/gpt")
    lost = card(page, "Goodput and lost time")
    expect(lost).to_contain_text("75 % of usual now")
    rows = lost.locator("tbody tr")
    expect(rows.nth(0)).to_have_text(re.compile(r"^Hang28$"))
    expect(rows.nth(1)).to_have_text(re.compile(r"^Straggler10\.0\d+$"))
    expect(lost).to_contain_text("GPU-h lost")
    for _ in in_both_sizes(page):
        assert no_sideways_scrolling(page)
    lost.get_by_label("Period").select_option("1h")
    expect(rows).to_have_count(2)  # the straggler and the sum
    lost.get_by_label("Period").select_option("")
    rows.get_by_role("link", name="Hang").click()
    expect(page).to_have_url(re.compile(r"/incidents\?state=all&job=gpt&kind=hang$"))
    expect(page.locator("tr.link")).to_have_count(2)


def test_a_job_that_lost_nothing_says_so_and_a_job_without_gpus_counts_ranks(dashboard):
    dashboard.job("cpu", world_size=2, state="paused", accelerated=False)
    cpu = {"local_rank": 0, "host": "laptop", "device_uuid": "", "device_type": "cpu"}
    dashboard.attempt("cpu", ranks=[cpu | {"rank": n} for n in range(2)])
    lost = card(dashboard.goto("/jobs/cpu"), "Goodput and lost time")
    expect(lost).to_contain_text("No incident has cost this job time")
    expect(lost).to_contain_text("– (paused) now · 100 % of the rank-h, last 24 hours")


def test_the_page_of_a_host_shows_the_verdict_that_the_list_of_hosts_shows(dashboard):
    record = {"device_uuid": "GPU-9", "job": "gpt", "kind": "device_fault", "at_unix_ns": dashboard.now}
    rows = [{"id": f"r{n}", "incident_id": f"inc_{n}", "severity": "critical"} | record for n in range(2)]
    add(dashboard.api.engine, HostRecord, *[row | {"host": "host-1"} for row in rows])
    page = dashboard.goto("/hosts")
    expect(page.locator("tr.link .pill")).to_have_text("refused")
    page.get_by_role("link", name="host-1").click()
    expect(page.locator(".job-head .pill")).to_have_text("refused")
    expect(page.locator(".job-head .pill")).to_have_attribute("title", re.compile("until it is repaired$"))
    dashboard.goto("/hosts/host-2")
    expect(page.locator(".job-head .pill")).to_have_text("ok")
