"""The page of notifications: messages with what failed first, silences, and receivers."""

import re

import pytest
from playwright.sync_api import expect
from sqlalchemy import insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Delivery, Outbox
from tests.browser.conftest import HOSTILE
from tests.browser.dashboard import S, card

pytestmark = [pytest.mark.browser, pytest.mark.ci]
SIZES = [(1280, 800), (390, 844)]


def message(dashboard, n: int, state: str, **changes) -> None:
    at = dashboard.now - n * 60 * S
    row = {"id": f"msg_{n}", "receiver": "pager", "incident_id": dashboard.incident_id("critical"), "transition": n}
    times = {"created_unix_ns": at, "next_try_unix_ns": at, "delivered_unix_ns": at if state == "delivered" else None}
    with write(dashboard.api.engine) as connection:
        connection.execute(insert(Outbox).values(**row | times | {"body": b"{}", "state": state, "tries": 1} | changes))
        error = HOSTILE if state == "failed" else ""
        tried = {"outbox_id": row["id"], "at_unix_ns": at, "status": None, "error": error, "seconds": 0.1}
        connection.execute(insert(Delivery).values(**tried))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_receiver_is_tested_and_its_messages_are_listed(visit, width, height):
    with visit(width, height, color_scheme="dark") as one:
        page = one.page
        page.get_by_role("navigation").get_by_role("link", name="Notifications").click()
        row = card(page, "Receivers").locator("tbody tr", has_text="pager")
        expect(row).to_contain_text("critical, warning")
        row.get_by_role("button", name="Test").click()
        expect(page.locator(".toast")).to_have_text("pager has received the test message.")
        row.get_by_role("button", name="pager").click()
        messages = card(page, "Messages")
        expect(messages.locator("tbody tr", has_text="test").first).to_contain_text("delivered")
        expect(page).to_have_url(re.compile(r"receiver=pager"))
        opened = messages.locator("tbody tr", has=page.get_by_role("link", name="incident")).first
        opened.get_by_role("button", name="Why").click()
        expect(page.locator("dialog")).to_contain_text("pager")
        page.locator("dialog").get_by_role("button", name="Close").click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_receiver_is_added_switched_off_and_removed(visit, site):
    with visit() as one:
        page = one.goto("/notifications")
        page.get_by_role("button", name="New receiver").click()
        dialog = page.locator("dialog")
        dialog.get_by_label("Name", exact=True).fill("room")
        dialog.get_by_label("URL or address").fill("https://127.0.0.1:8443/hook")
        dialog.get_by_label("info", exact=True).check()
        dialog.get_by_role("button", name="Add").click()
        expect(page.locator("dialog textarea")).to_have_value(re.compile("^whsec_"))
        page.locator("dialog").get_by_role("button", name="Done").click()
        row = card(page, "Receivers").locator("tbody tr", has_text="room")
        expect(row).to_contain_text("critical, warning, info")
        row.get_by_role("button", name="Switch off").click()
        expect(row).to_contain_text("switched off")
        row.get_by_role("button", name="Remove").click()
        page.locator("dialog").get_by_role("button", name="Remove").click()
        expect(row).to_have_count(0)
        assert [receiver["name"] for receiver in site.service.items("/api/v1/receivers")] == ["pager"]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_silence_is_added_with_its_reason_shown_to_all_and_expired(visit, site, width, height):
    why = f"<b>maintenance</b> {width}"
    with visit(width, height) as one:
        page = one.goto("/notifications")
        page.get_by_role("button", name="New silence").click()
        dialog = page.locator("dialog")
        dialog.get_by_role("button", name="Silence").click()
        expect(dialog).to_be_visible()  # a silence without a comment is not sent
        dialog.get_by_label("Job").fill("gpt-small")
        dialog.get_by_label("Kind").select_option("hang")
        dialog.get_by_label("Comment").fill(why)
        dialog.get_by_role("button", name="Silence").click()
        row = card(page, "Silences").locator("tbody tr", has_text=why)
        expect(row).to_contain_text("Hang")
        expect(row.get_by_role("link", name="gpt-small")).to_be_visible()
        row.get_by_role("button", name="Expire").click()
        page.locator("dialog").get_by_role("button", name="Expire").click()
        expect(row).to_have_count(0)
        page.get_by_label("ended too").check()
        expect(row).to_contain_text("ended")
        assert page.locator("main td b").count() == 0


def test_a_silence_of_somebody_else_appears_without_a_reload(visit, site):
    with visit() as one:
        page = one.goto("/notifications")
        expect(page.locator(".live")).to_have_text("Live")
        page.evaluate("window.same = true")
        ends = site.service.get("/api/v1/health")["at_unix_ns"] + 600 * S
        site.service.write("POST", "/api/v1/silences", {"ends_unix_ns": ends, "comment": "from the shell"})
        expect(card(page, "Silences")).to_contain_text("from the shell")
        assert page.evaluate("window.same") is True


def test_what_failed_comes_first_says_why_as_text_and_cannot_be_sent_to_nobody(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(1, job="gpt", severity="critical")
    message(dashboard, 1, "failed")
    message(dashboard, 2, "delivered")
    page = dashboard.goto("/notifications")
    messages = card(page, "Messages")
    expect(messages.locator("tbody tr")).to_have_count(1)
    expect(messages.locator("tbody tr")).to_contain_text(HOSTILE)
    assert page.locator("main img").count() == 0
    messages.get_by_role("button", name="Send again").click()
    expect(page.locator(".toast")).to_contain_text("there is no receiver")
    messages.get_by_role("button", name="All").click()
    expect(messages.locator("tbody tr")).to_have_count(2)
    messages.locator("tbody tr").first.get_by_role("link", name="incident").click()
    expect(page.locator("h1")).to_be_visible()
    expect(page).to_have_url(re.compile(dashboard.incident_id("critical")))


def test_a_silence_has_matchers(dashboard):
    page = dashboard.goto("/notifications")
    page.get_by_role("button", name="New silence").click()
    page.get_by_label("Matchers").fill('host="node-a", severity!=critical')
    page.get_by_label("Comment").fill("the fan is replaced")
    page.locator("dialog").get_by_role("button", name="Silence").click()
    expect(card(page, "Silences")).to_contain_text('every kind · host="node-a" · severity!="critical"')
