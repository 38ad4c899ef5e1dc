"""Home: what burns, in one line and one list, with filters in the address; and nothing is read again without need."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.dashboard import S

pytestmark = pytest.mark.browser


def test_home_tells_first_steps_then_quiet_then_what_does_not_move(dashboard):
    page = dashboard.goto("/incidents")
    expect(page.locator(".list")).to_contain_text("No job has reported yet")
    expect(page.locator(".list")).to_contain_text("rankwatch.start(job=")
    expect(page.locator(".list")).not_to_contain_text("No open incidents")
    dashboard.job("gpt-small")
    page.reload()
    expect(page.locator("h2")).to_have_text("No open incidents")
    dashboard.job("gpt-hung", state="stalled", last_progress_unix_ns=dashboard.now - 600 * S)
    page.reload()
    expect(page.locator("h2")).to_have_text("No open incidents, but not every job makes progress")


def test_one_line_says_what_burns_and_acknowledged_ones_stand_below_with_their_owner(dashboard):
    for n in range(7):
        dashboard.job(f"still-{n}", state="stalled" if n else "lost")
    dashboard.job("gpt", world_size=300)
    dashboard.incidents(3, job="gpt", severity="critical", impact_gpu_hours_per_hour=72.25)
    dashboard.incidents(1, job="gpt", severity="info", state="acknowledged", acknowledged_by="ada@example.com",
                     impact_gpu_hours_per_hour=72.25)  # fmt: skip
    dashboard.incidents(10, job="gpt", severity="warning", impact_gpu_hours_per_hour=0.0)
    page = dashboard.goto("/incidents")
    words = re.compile(
        r"3 critical.*10 warning.*1 info.*the work of 289 GPUs is lost.*7 jobs not progressing.*1 acknowledged"
    )
    expect(page.locator(".totals")).to_have_text(words)
    rows = page.locator(".incidents tbody tr")
    expect(rows).to_have_count(15)
    expect(rows.nth(13)).to_have_text("Acknowledged · 1")
    expect(rows.nth(14).locator(".c-state")).to_have_text("ada@example.com")


def test_twenty_rows_stand_on_one_screen_and_none_is_cut_off_on_a_phone(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(25, job="gpt", summary="a sentence " * 30, hosts=[f"host-{n}" for n in range(9)])
    page = dashboard.goto("/incidents")
    expect(page.locator("tr.link")).to_have_count(25)
    banner = page.locator(".banner").bounding_box()  # no stream runs here, which every page says above its own
    box = page.locator("tr.link").nth(19).bounding_box()
    assert box["y"] + box["height"] - banner["height"] <= 800
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.get_by_role("button", name="Filters")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_filters_are_in_the_address_and_what_they_hide_is_said(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(1, job="gpt", severity="critical", kind="hang", hosts=["host-1"], ranks=[1])
    dashboard.incidents(1, job="gpt", severity="warning", kind="straggler", hosts=["host-2"], ranks=[9])
    page = dashboard.goto("/incidents")
    expect(page.locator("tr.link")).to_have_count(2)
    page.get_by_label("Any kind").select_option("hang")
    expect(page.locator("tr.link")).to_have_count(1)
    page.get_by_label("Any time").select_option("1h")
    page.get_by_label("Any host").select_option("host-1")
    page.get_by_label("Search").fill("critical trouble")
    expect(page).to_have_url(re.compile(r"search=critical\+trouble"))
    wanted = {"kind": ["hang"], "period": ["1h"], "host": ["host-1"], "search": ["critical trouble"]}
    assert parse_qs(urlsplit(page.url).query) == wanted
    page.reload()
    expect(page.locator("tr.link")).to_have_count(1)
    expect(page.get_by_label("Search")).to_have_value("critical trouble")
    expect(page.get_by_label("Any host")).to_have_value("host-1")
    page.get_by_label("Search").fill("nothing")
    expect(page.locator(".list")).to_contain_text("2 unresolved incidents do not match")
    expect(page.locator(".totals")).to_contain_text("1 critical")
    page.get_by_role("button", name="Show all unresolved incidents").click()
    expect(page.locator("tr.link")).to_have_count(2)
    assert urlsplit(page.url).query == ""


def test_a_change_is_read_alone_and_steps_of_a_job_are_not_read_at_all(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(3, job="gpt", severity="warning")
    page = dashboard.goto("/incidents")
    expect(page.locator("tr.link")).to_have_count(3)
    expect(page.locator(".live")).to_have_text("Live")
    dashboard.publish("job", "gpt", state="running", step=1)
    dashboard.incidents(1, job="gpt", severity="critical")
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("critical"))
    expect(page.locator("tr.link")).to_have_count(4)  # what the page knows of the job is current
    asked = []
    page.on("request", lambda request: asked.append(urlsplit(request.url)))
    for step in range(9):
        dashboard.publish("job", "gpt", state="running", step=step)
    dashboard.change("critical", state="resolved")
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("critical"))
    expect(page.locator("tr.link")).to_have_count(3)
    polled = ("/api/v1/incidents/totals", "/api/v1/events")
    lists = [parse_qs(one.query) for one in asked if one.path not in polled]
    assert [one.get("id") for one in lists] == [[dashboard.incident_id("critical")]]


def test_keys_move_the_focus_search_and_list_themselves_and_the_focus_survives_a_change(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(2, job="gpt", severity="warning")
    page = dashboard.goto("/incidents")
    expect(page.locator("tr.link")).to_have_count(2)
    focused = "document.activeElement.closest('tr.link')?.dataset.id"
    ids = page.evaluate("[...document.querySelectorAll('tr.link')].map((row) => row.dataset.id)")
    page.keyboard.press("j")
    assert page.evaluate(focused) == ids[0]
    page.keyboard.press("j")
    assert page.evaluate(focused) == ids[1]
    page.keyboard.press("k")
    assert page.evaluate(focused) == ids[0]
    dashboard.incidents(1, job="gpt", severity="critical")
    dashboard.publish("incident", "gpt", id=dashboard.incident_id("critical"))
    expect(page.locator("tr.link")).to_have_count(3)
    assert page.evaluate(focused) == ids[0]
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("acknowledge")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_label("Search")).to_be_focused()
    page.keyboard.type("jk")
    expect(page.get_by_label("Search")).to_have_value("jk")


def test_a_silence_is_made_with_the_keyboard_alone_and_says_what_it_mutes(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(1, job="gpt", severity="warning", kind="straggler", scope="rank:9")
    page = dashboard.goto("/incidents")
    expect(page.locator("tr.link")).to_have_count(1)
    page.keyboard.press("j")
    focused = "document.activeElement.closest('tr.link')?.dataset.id"
    assert page.evaluate(focused) == dashboard.incident_id("warning")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("s")
    dialog = page.get_by_role("dialog", name="Silence")
    expect(dialog).to_contain_text("straggler at rank:9 of gpt")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert page.evaluate(focused) == dashboard.incident_id("warning")
    page.keyboard.press("s")
    dialog.get_by_role("button", name="Silence").click()
    expect(dialog).to_be_visible()  # a silence without a comment is not sent
    dialog.get_by_label("Comment").focus()
    page.keyboard.type("a new card comes tomorrow")
    page.keyboard.press("Tab")  # Cancel
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("Silenced until")
    assert page.evaluate(focused) == dashboard.incident_id("warning")
    (made,) = dashboard.api.get("/api/v1/silences").json()["items"]
    assert (made["job"], made["kind"], made["scope"]) == ("gpt", "straggler", "rank:9")
    assert made["comment"] == "a new card comes tomorrow"
    assert 0 < made["ends_unix_ns"] - dashboard.api.clock.unix_ns() <= 4 * 3_600 * S
