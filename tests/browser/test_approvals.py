"""Approvals in a real browser: asked for at once, decided by buttons, and the switch that asks for two people."""

import re
import subprocess

import httpx2
import pytest
from playwright.sync_api import expect

from rankwatch.children import python_module
from tests.browser.conftest import spoil

pytestmark = [pytest.mark.browser, pytest.mark.ci]

RANKS_WITHOUT_APPROVAL = 3
"""One less than the ranks of the job."""
RULE = {"id": "nan", "kind": "nonfinite", "mode": "act", "action": "checkpoint"}
JOB = "guarded"


@pytest.fixture(scope="module")
def guarded(site):
    """A job with more ranks than may be commanded without an approval, and an incident on which a rule acts."""
    policy = {"two_people": True, "limits": {"approval_ranks": RANKS_WITHOUT_APPROVAL}, "rules": [RULE]}
    site.service.write("PUT", "/api/v1/policy", policy)
    feed = site.feed(JOB, spoil)
    feed.send(200)
    feed.start()
    yield site
    feed.stop()


def post_as(site, name, path, body):
    """Post as another person than the one at the browser, who has not made their token."""
    made = python_module("rankwatch_service", "token", "create", name, "--scope", "command")
    reported = subprocess.run([*made, "--database-url", site.database_url], capture_output=True, text=True, check=True)
    headers = {"Authorization": f"Bearer {reported.stdout.strip()}"}
    answer = httpx2.post(f"{site.service.url}/api/v1/{path}", json=body, headers=headers, timeout=30)
    assert answer.is_success, answer.text
    return answer.json()


def request_as(site, name, **body):
    return post_as(site, name, f"jobs/{JOB}/commands", body)


def approve_as(site, name, action):
    [asked] = [one for one in site.service.items("/api/v1/commands", waiting=True) if one["action"] == action]
    return post_as(site, name, f"commands/{asked['id']}/approve", {})


def waiting(page):
    return page.locator(".approval")


def test_what_the_policy_wants_is_approved_on_the_page_of_its_incident(guarded, visit):
    with visit(390, 844) as one:
        page = one.goto(f"/incidents?state=all&job={JOB}")
        page.locator("tr.link").first.click()
        asked = waiting(page)
        expect(asked).to_contain_text("Checkpoint on 4 ranks, requested by policy")
        expect(asked).to_contain_text(re.compile(r"Expires in \d+ (min|s)"))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        asked.get_by_role("button", name="Approve").click()
        page.locator("dialog").get_by_role("button", name="Approve").click()
        expect(page.locator(".toast")).to_contain_text("Checkpoint: approved")
        expect(asked).to_have_count(0)
        expect(page.locator(".card", has_text="Commands").last).to_contain_text("policy, approved by demo")
    commands = guarded.service.items("/api/v1/commands", job=JOB)
    [command] = [one for one in commands if one["requested_by"] == "policy"]
    assert command["approved_by"].startswith("demo (")


def test_what_another_person_requests_is_asked_for_at_once_and_refused_with_a_reason(guarded, visit):
    with visit() as one:
        page = one.goto(f"/jobs/{JOB}")
        expect(page.locator(".live")).to_have_text("Live")
        expect(page.locator(".job-head h1")).to_have_text(JOB)
        page.evaluate("window.same = true")
        made = request_as(guarded, "ann", action="stop", reason="wrong data")
        asked = waiting(page).filter(has_text="ann")
        expect(asked).to_contain_text("wrong data")
        asked.get_by_role("button", name="Refuse").click()
        dialog = page.locator("dialog")
        problem = {"status": 409, "title": "Conflict", "detail": "the command is applied: it cannot be refused"}
        page.route("**/api/v1/commands/*/refuse", lambda route: route.fulfill(status=409, json=problem), times=1)
        dialog.get_by_label("Reason").fill("it is nearly done")
        dialog.get_by_role("button", name="Refuse").click()
        expect(dialog.get_by_role("alert")).to_have_text("the command is applied: it cannot be refused")
        expect(dialog.get_by_label("Reason")).to_have_value("it is nearly done")
        assert "409" in one.complaints.pop()  # the browser's own about the answer
        dialog.get_by_role("button", name="Refuse").click()
        expect(page.locator(".toast")).to_contain_text("Stop: refused")
        expect(asked).to_have_count(0)
        assert page.evaluate("window.same") is True
    found = guarded.service.get(f"/api/v1/commands/{made['id']}")
    assert (found["state"], found["result"]) == ("refused", "by demo: it is nearly done")


def test_who_requests_it_waits_for_another_person(guarded, visit):
    with visit() as one:
        page = one.goto(f"/jobs/{JOB}")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("dialog")).to_contain_text("until another person approves it")
        page.get_by_label("Reason").fill("my own wish")
        page.get_by_label("type the name of the job").fill(JOB)
        page.locator("dialog").get_by_role("button", name="Stop").click()
        expect(page.locator(".toast")).to_contain_text("waits for the approval of another person")
        asked = waiting(page).filter(has_text="my own wish")
        expect(asked).to_contain_text("somebody else must approve it")
        expect(asked.get_by_role("button")).to_have_text(["Cancel"])
        asked.get_by_role("button", name="Cancel").click()
        expect(asked).to_have_count(0)


def test_the_policy_page_shows_the_rules_and_turns_the_switches(guarded, visit):
    with visit(390, 844) as one:
        page = one.goto("/policy")
        expect(page.locator("tr", has_text="nan").first).to_contain_text(re.compile("Checkpoint\\s*acts"))
        switch = page.get_by_label("Two people")
        expect(switch).to_be_checked()
        expect(page.locator(".switch").last).to_contain_text(f"more than {RANKS_WITHOUT_APPROVAL} ranks")
        switch.click()
        expect(page.locator(".toast")).to_contain_text(
            "The approval by two people stays on until another person approves the change"
        )
        expect(switch).to_be_checked()
        approve_as(guarded, "carol", action="set_approvals")
        page.reload()
        expect(switch).not_to_be_checked()
        switch.check()
        expect(page.locator(".toast")).to_contain_text("Two people: on")
        assert guarded.service.get("/api/v1/policy")["rules"][0]["id"] == "nan"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_rule_acts_by_itself_only_after_its_dry_run_was_seen(dashboard, width, height):
    dashboard.job("gpt")
    dashboard.attempt("gpt", ranks=[], can=["pause"])
    dashboard.incidents(2, job="gpt", kind="hang", severity="critical", confidence=1.0, attempt="l.0")
    dashboard.incidents(3, job="gpt", kind="hang", severity="warning", attempt="l.0")
    dashboard.page.set_viewport_size({"width": width, "height": height})
    page = dashboard.goto("/policy")
    page.get_by_role("button", name="New rule").click()
    page.get_by_label("Name").fill("hangs")
    page.get_by_label("Kind").select_option("hang")
    page.get_by_label("Action").select_option("pause")
    dialog = page.locator("dialog")
    dialog.get_by_role("button", name="Dry run").click()
    dialog.get_by_role("button", name="Add as a proposal").click()
    expect(page.locator(".toast")).to_have_text("hangs is added")
    acts = page.get_by_label("hangs acts by itself")
    acts.click()
    expect(dialog).to_contain_text("Of 5 incidents of the last 7 days, 2 would have been acted on and 3")
    expect(dialog).to_contain_text("3 the hang is not critical yet")
    expect(dialog.get_by_role("link", name="Hang")).to_have_count(2)
    dialog.get_by_role("button", name="Cancel").click()
    expect(acts).not_to_be_checked()
    assert [one["mode"] for one in dashboard.api.get("/api/v1/policy").json()["rules"]] == ["suggest"]
    acts.click()
    dialog.get_by_role("button", name="Switch on").click()
    expect(page.locator(".toast")).to_have_text("hangs acts by itself")
    assert [one["mode"] for one in dashboard.api.get("/api/v1/policy").json()["rules"]] == ["act"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Remove hangs").click()
    dialog.get_by_role("button", name="Remove").click()
    expect(page.locator(".card", has_text="None: people are notified")).to_be_visible()
