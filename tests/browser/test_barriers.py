"""axe-core finds nothing serious on any page, and the keyboard alone acknowledges, silences and rolls back."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from rankwatch_service.dashboard import PAGES
from tests.browser.conftest import BAD_STEP, spoil
from tests.browser.dashboard import S
from tests.browser.test_incident import rank

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.ci]

SERIOUS = ("serious", "critical")


def addresses(dashboard):
    """Of every page, with something on it."""
    names = {"incident": dashboard.incident_id("critical"), "job:path": "gpt", "host": "host-1"}
    paths = [re.sub(r"\{([^}]+)\}", lambda found: names.get(found[1], "0"), path) for path in PAGES]
    return [*paths, "/incidents?state=resolved", "/nothing", "/login"]


@pytest.mark.parametrize(
    ("scheme", "width", "height"), [("light", 1280, 800), ("dark", 1280, 800), ("light", 390, 844)]
)
def test_axe_finds_nothing_serious_on_any_page(dashboard, scheme, width, height):
    dashboard.job("gpt", state="stalled", world_size=16)
    dashboard.attempt(
        "gpt", ranks=[rank(n) for n in range(16)], can=["pause", "rollback", "rollback_memory", "rollback_disk"]
    )
    dashboard.job("quiet", last_seen_unix_ns=dashboard.now - 900 * S)
    for severity in ("critical", "warning", "info"):
        dashboard.incidents(3, job="gpt", severity=severity, hosts=["host-1"], attempt="l.0")
    dashboard.page.emulate_media(color_scheme=scheme)
    dashboard.page.set_viewport_size({"width": width, "height": height})
    faults = {}
    for path in addresses(dashboard):
        page = dashboard.goto(path)
        expect(page.locator("h1")).to_be_visible()
        page.wait_for_load_state("networkidle")
        found = Axe().run(page).response["violations"]
        faults |= {
            (path, one["id"]): [node["html"] for node in one["nodes"]] for one in found if one["impact"] in SERIOUS
        }
    assert faults == {}


def test_an_incident_is_acknowledged_with_the_keyboard_alone(visit, site):
    feed = site.feed("acknowledged-by-key", spoil)
    feed.send(BAD_STEP + 40)
    feed.stop()
    with visit() as one:
        page = one.goto("/incidents?job=acknowledged-by-key&state=all")
        row = page.locator("tr.link").first
        expect(row).to_contain_text("open")
        page.keyboard.press("j")
        incident = page.evaluate("document.activeElement.closest('tr.link').dataset.id")
        page.keyboard.press("a")
        expect(page.locator(".toast")).to_contain_text("Acknowledged")
        expect(page.locator(f"tr.link[data-id='{incident}']")).to_contain_text("acknowledged")
        assert page.evaluate("document.activeElement.closest('tr.link')?.dataset.id") == incident
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(f"/incidents/{incident}$"))
        expect(page.locator(".timeline")).to_contain_text("Acknowledged")


def tab_to(page, name):
    """Press Tab until a button has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == name:
            return
    raise AssertionError(f"Tab does not reach {name}")


def test_a_job_is_rolled_back_with_the_keyboard_alone(visit, site):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        expect(page.get_by_role("button", name="Roll back")).to_be_visible()
        tab_to(page, "Roll back")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert page.evaluate("document.activeElement.textContent.trim()") == "Roll back"
        page.keyboard.press("Enter")
        options = dialog.get_by_label("What to restore").locator("option")
        expect(options).to_have_text([re.compile("Full, within the processes")])
        for _ in range(20):
            if page.evaluate("document.activeElement.name") == "reason":
                break
            page.keyboard.press("Tab")
        page.keyboard.type("the loss climbs")
        page.keyboard.press("Tab")
        page.keyboard.type("gpt-small")
        tab_to(page, "Roll back")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("there is no checkpoint to go back to")
        expect(dialog.get_by_label("Reason")).to_have_value("the loss climbs")
        assert "409 (Conflict)" in one.complaints.pop()  # the browser's own about the answer
