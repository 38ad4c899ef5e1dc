"""Commands: the list, one command with the answers of its ranks, and the dialog that says what one costs."""

import re

import pytest
from playwright.sync_api import expect

from rankwatch_service.store.models import Checkpoint
from tests.browser.conftest import HOSTILE
from tests.browser.dashboard import S
from tests.support.orders.rows import add_command, add_view, answered
from tests.support.store.database import add, checkpoint_row
from tests.support.values.batches import progress

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), pytest.param(390, 844, marks=pytest.mark.ci)])
def test_the_ranks_of_a_command_answer_one_by_one_without_a_reload(dashboard, width, height):
    dashboard.page.set_viewport_size({"width": width, "height": height})
    engine = dashboard.api.engine
    dashboard.job("gpt", world_size=4)
    add_command(engine, dashboard.now, reason=HOSTILE)
    add_view(engine, dashboard.now, [answered(0, "held"), progress(1, 1_239)])
    page = dashboard.goto("/incidents")
    page.get_by_role("navigation").get_by_role("link", name="Commands").click()
    row = page.locator("tr.link")
    expect(row).to_contain_text(HOSTILE)
    row.get_by_role("link", name="Checkpoint").click()
    expect(page.locator("h1")).to_contain_text("Checkpoint gpt")
    ranks = page.locator(".ranks")
    expect(ranks).to_contain_text("1 of 4 have answered")
    expect(ranks.locator("li", has_text="has not answered")).to_contain_text("rank 1")
    page.evaluate("window.same = true")
    add_view(engine, dashboard.now, [answered(0, "done"), answered(1, "failed", HOSTILE)])
    expect(ranks).to_contain_text("2 of 4 have answered")
    expect(ranks.locator("li").first).to_contain_text(HOSTILE)
    expect(page.locator(".card", has_text="Tries").last).to_contain_text("1,240")
    assert page.evaluate("window.same") is True
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_command_of_somebody_else_appears_and_is_cancelled_with_its_audit_trail(visit, site):
    with visit(color_scheme="dark") as one:
        page = one.goto("/commands?state=open&job=gpt-small")
        expect(page.locator(".live")).to_have_text("Live")
        wanted = {"action": "checkpoint", "reason": "from the shell"}
        site.service.write("POST", "/api/v1/jobs/gpt-small/commands", wanted)
        page.get_by_role("button", name="All", exact=True).click()
        row = page.locator("tr.link", has_text="from the shell").first
        row.get_by_role("link", name="Checkpoint").click()
        expect(page.locator(".card", has_text="What was asked").last).to_contain_text("from the shell")
        audit = page.locator(".card", has_text="Audit trail").last
        expect(audit.locator("tr").first).to_be_visible()
        expect(page.locator(".ranks")).to_contain_text("have answered")


def test_the_dialog_says_what_is_lost_and_a_stop_needs_the_name_of_the_job(dashboard):
    dashboard.job("gpt", step_time_s=2.0, accelerated=False)
    dashboard.attempt(
        "gpt", ranks=[], can=["stop", "rollback", "rollback_memory", "rollback_disk", "pause"], replicated=False
    )
    for step in (1_034, 834):
        saved = {"saved_unix_ns": dashboard.now - (2_000 - step) * 10 * S}
        add(dashboard.api.engine, Checkpoint, checkpoint_row("gpt", step, "remote", **saved))
    page = dashboard.goto("/jobs/gpt")
    page.get_by_role("button", name="Roll back").click()
    price = page.locator("dialog .price")
    expect(price).to_contain_text("200, from 1,034 to 1,234")
    expect(price).to_contain_text("6 min 40 s of training, 28.4 rank-h")
    expect(price).to_contain_text(re.compile("saved 2 h"))
    page.get_by_label("Checkpoint").select_option("remote:l.0:834")
    expect(price).to_contain_text("400, from 834 to 1,234")
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Stop").click()
    dialog = page.locator("dialog")
    expect(dialog).to_contain_text("It cannot be undone")
    dialog.get_by_label("Reason").fill("wrong data")
    dialog.get_by_label("type the name of the job").fill("gp")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog).to_be_visible()
    dialog.get_by_label("type the name of the job").fill("gpt")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog.get_by_role("alert")).to_contain_text("no agent can reach job gpt")
    expect(dialog.get_by_label("Reason")).to_have_value("wrong data")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("dialog .price")).to_contain_text("256 rank-h for each hour")
    expect(page.locator("dialog").get_by_label("type the name of the job")).to_have_count(0)


@pytest.mark.parametrize("status", [403, 409, 422])
def test_a_refused_dialog_keeps_what_was_typed_and_says_why_until_it_is_accepted(dashboard, status):
    dashboard.job("gpt")
    dashboard.incidents(1, job="gpt")
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}")
    problem = {"status": status, "title": "Refused", "detail": f"not allowed: {status}"}
    page.route("**/api/v1/silences", lambda route: route.fulfill(status=status, json=problem), times=1)
    page.get_by_role("button", name="Silence").click()
    dialog = page.locator("dialog")
    dialog.get_by_label("Comment").fill("sam is on it")
    dialog.locator("[name=hours]").select_option("8")
    dialog.get_by_role("button", name="Silence").click()
    expect(dialog.get_by_role("alert")).to_have_text(f"not allowed: {status}")
    expect(dialog.get_by_label("Comment")).to_have_value("sam is on it")
    expect(dialog.locator("[name=hours]")).to_have_value("8")
    dialog.get_by_role("button", name="Silence").click()
    expect(dialog).to_have_count(0)
    expect(page.locator(".toast")).to_contain_text("Silenced until")
    assert [one["comment"] for one in dashboard.api.get("/api/v1/silences").json()["items"]] == ["sam is on it"]
