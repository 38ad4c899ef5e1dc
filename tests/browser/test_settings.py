"""What people set on pages: tokens, rules, tunings, projects, feedback; and what a trace showed."""

import json
import re

import httpx2
import pytest
from playwright.sync_api import expect
from sqlalchemy import delete, insert, select

from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.models import Command, IncidentFeedback, Job, RankTrace
from rankwatch_service.store.rows import command_row
from tests.browser.conftest import Site
from tests.browser.dashboard import card, fits
from tests.support.values.presences import SUMMARY

pytestmark = [pytest.mark.browser, pytest.mark.ci]


def asks(site, token: str) -> int:
    return httpx2.get(
        f"{site.service.url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=30
    ).status_code


def test_a_token_is_created_used_and_revoked_and_the_trail_tells_it(site, visit):
    name = "<i>ann</i>"
    with visit() as one:
        page = one.goto("/incidents")
        page.get_by_role("link", name="Access").click()
        page.get_by_role("button", name="New token").click()
        dialog = page.locator("dialog")
        dialog.get_by_label("Name").fill(name)
        dialog.get_by_role("button", name="Create").click()
        token = page.locator("dialog textarea").input_value()
        assert asks(site, token) == 200
        page.locator("dialog").get_by_role("button", name="Done").click()
        row = page.locator("tr", has_text=name).filter(has=page.get_by_role("button", name="Revoke"))
        expect(row).to_contain_text("read")
        expect(row).to_contain_text(re.compile(r"in (89|90) d"))
        expect(row).to_contain_text("valid")
        assert fits(page)
        row.get_by_role("button", name="Revoke").click()
        page.locator("dialog").get_by_role("button", name="Revoke").click()
        expect(page.locator("tr", has_text=name).filter(has_text="revoked").first).to_be_visible()
        assert asks(site, token) == 401
        expect(page.locator("tr", has_text="token.revoke").first).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("link", name="Export").click()
        rows = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert {"token.make", "token.revoke"} <= {row["action"] for row in rows}


def test_who_is_no_admin_sees_neither_the_entry_nor_the_tokens(site, visit):
    wanted = {"name": "reader", "scopes": ["read"]}
    token = site.service.write("POST", "/api/v1/tokens", wanted)["token"]
    with visit() as one:
        one.page.context.clear_cookies()
        page = one.goto("/login")
        page.get_by_label("Access token").last.fill(token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/incidents")
        expect(page.locator(".live")).to_have_text("Live")
        expect(page.get_by_role("link", name="Access")).to_have_count(0)
        page.goto(f"{one.url}/access")
        expect(page.get_by_role("alert")).to_contain_text("scope admin is required")
        one.complaints.clear()  # the browser reports the 403


def test_a_rule_is_previewed_saved_edited_and_deleted(site, visit):
    name = "busy"
    with visit() as one:
        page = one.goto("/policy")
        page.get_by_role("link", name="Rules").click()
        page.get_by_label("Name").fill(name)
        page.get_by_label("Metric").fill("loss")
        page.get_by_label("When").select_option("below")
        page.get_by_label("Value").fill("1000")
        page.get_by_label("Job to preview on").select_option("gpt-small")
        page.get_by_role("button", name="Preview").click()
        found = page.locator("p", has_text="would have opened")
        expect(found).to_contain_text(re.compile(r"^1 incident .* steps of gpt-small were judged"))
        expect(page.locator("tr", has_text=", below 1000").first).to_contain_text("open still")
        page.get_by_label("When").select_option("change")
        expect(page.get_by_label("Value")).to_be_hidden()
        expect(page.get_by_label("Direction")).to_be_visible()
        page.get_by_label("When").select_option("below")
        page.get_by_role("button", name="Save").click()
        row = page.locator("tr", has_text=name).filter(has=page.get_by_role("button", name="Delete"))
        expect(row).to_contain_text("below 1,000")
        assert fits(page)
        row.get_by_role("button", name="Edit").click()
        page.get_by_label("Hold (seconds)").fill("90")
        page.get_by_role("button", name="Save").click()
        expect(row).to_contain_text("1 min 30 s")
        row.get_by_role("button", name="Delete").click()
        page.locator("dialog").get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)


def test_what_a_rule_finds_is_an_incident_with_its_evidence_until_the_rule_is_deleted(site, visit):
    rule = {"name": "low-loss", "metric": "loss", "when": "below", "value": 1000.0, "jobs": ["gpt-*"]}
    site.service.write("PUT", "/api/v1/rules/low-loss", rule)
    with visit() as one:
        page = one.goto("/incidents")
        page.locator("tr", has_text="Rule low-loss").first.click()
        expect(page.locator("main")).to_contain_text(re.compile(r"Rule low-loss: loss is [0-9.]+, below 1000"))
        expect(page.locator("main")).to_contain_text("threshold")
        expect(page.locator("main")).to_contain_text("Loss around the onset")
        site.service.write("DELETE", "/api/v1/rules/low-loss", None)
        expect(page.locator("main")).to_contain_text("resolved")


@pytest.fixture
def untuned(site):
    """A service in which every setting has its default, before and after."""
    site.service.write("PUT", "/api/v1/tuning", {"tunings": []})
    yield site
    site.service.write("PUT", "/api/v1/tuning", {"tunings": []})


def dialog(page):
    return page.locator("dialog")


def filled(page, settings, jobs="gpt-*", profile="quiet"):
    dialog(page).get_by_label("Jobs: a pattern").fill(jobs)
    dialog(page).get_by_label("Profile").select_option(profile)
    dialog(page).get_by_label("Settings, one per line").fill(settings)
    return dialog(page)


def test_a_tuning_is_added_shown_removed_and_reset(visit, untuned):
    with visit() as one:
        page = one.goto("/policy")
        expect(card(page, "Tuning")).to_contain_text("None: every setting of every detector has its default.")
        card(page, "Tuning").get_by_role("button", name="Add tuning").click()
        filled(page, "slowdown.ratio_min = 1.5\nhang.steps=6").get_by_role("button", name="Add").click()
        expect(card(page, "Tuning")).to_contain_text("slowdown.ratio_min = 1.5")
        stored = untuned.service.get("/api/v1/tuning")
        settings = {"slowdown.ratio_min": 1.5, "hang.steps": 6.0}
        assert stored["tunings"] == [{"jobs": "gpt-*", "profile": "quiet", "settings": settings}]
        expect(card(page, "Tuning")).to_contain_text(f"Version {stored['version']}, set by")
        assert fits(page)
        card(page, "Tuning").get_by_role("button", name="Add tuning").click()
        filled(page, "", jobs="<b>x", profile="sensitive").get_by_role("button", name="Add").click()
        expect(card(page, "Tuning")).to_contain_text("<b>x")
        card(page, "Tuning").get_by_role("button", name="Remove the tuning of gpt-*").click()
        expect(card(page, "Tuning")).not_to_contain_text("gpt-*")
        card(page, "Tuning").get_by_role("button", name="Reset").click()
        dialog(page).get_by_role("button", name="Reset").click()
        expect(card(page, "Tuning")).to_contain_text("None: every setting of every detector has its default.")
        assert untuned.service.get("/api/v1/tuning")["tunings"] == []


def test_a_line_that_is_no_setting_is_said_and_nothing_is_sent(visit, untuned):
    with visit() as one:
        page = one.goto("/policy")
        before = untuned.service.get("/api/v1/tuning")
        card(page, "Tuning").get_by_role("button", name="Add tuning").click()
        filled(page, "hang.steps: 6").get_by_role("button", name="Add").click()
        expect(dialog(page).get_by_role("alert")).to_have_text('"hang.steps: 6" is not NAME = NUMBER')
        expect(dialog(page).get_by_label("Settings, one per line")).to_have_value("hang.steps: 6")
        filled(page, "hang.steps = 0.001").get_by_role("button", name="Add").click()
        expect(dialog(page).get_by_role("alert")).not_to_contain_text("NAME = NUMBER")
        expect(dialog(page).get_by_label("Jobs: a pattern")).to_have_value("gpt-*")
        assert "422" in one.complaints.pop()  # the browser's own about the answer
        assert untuned.service.get("/api/v1/tuning") == before


def test_a_preview_shows_what_would_not_open(visit, untuned):
    job = untuned.service.get("/api/v1/incidents?kind=nonfinite")["items"][0]["job"]
    with visit() as one:
        page = one.goto("/policy")
        card(page, "Tuning").get_by_role("button", name="Preview").click()
        dialog(page).get_by_label("Job whose stored telemetry").fill("nobody")
        filled(page, "hang.steps = 6", jobs="*").get_by_role("button", name="Preview").click()
        expect(dialog(page).get_by_role("alert")).to_contain_text("nobody")
        assert "404" in one.complaints.pop()  # the browser's own about the answer
        dialog(page).get_by_label("Job whose stored telemetry").fill(job)
        dialog(page).get_by_role("button", name="Preview").click()
        shown = dialog(page)
        expect(shown).to_contain_text(f"Preview on {job}")
        expect(shown).to_contain_text("incidents open with both")
        expect(shown).to_contain_text("hang.steps, ")
        expect(shown).to_contain_text("cannot be previewed")
        shown.get_by_role("button", name="Close").click()


PROJECT = "<img src=x onerror=hacked> nlp"


def test_a_job_is_given_to_a_project_and_found_by_it(visit, site):
    other = site.feed("of-nobody")
    other.send(5)
    other.stop()
    with visit() as one:
        page = one.goto("/jobs")
        projects = page.get_by_label("Any project")
        expect(page.locator("tr.link", has_text="of-nobody")).to_be_visible()
        expect(projects).to_be_hidden()  # there is none to choose

        page.goto(f"{one.url}/jobs/gpt-small")
        page.get_by_role("button", name="Edit").click()
        dialog = page.locator("dialog")
        dialog.get_by_label("Project").fill(PROJECT)
        dialog.get_by_label("Owner").fill("ann")
        dialog.get_by_role("button", name="Save").click()
        expect(page.locator(".job-head")).to_contain_text(f"project {PROJECT} · owner ann")

        page.goto(f"{one.url}/jobs")
        projects.select_option(PROJECT)
        expect(page.locator("tr.link", has_text="of-nobody")).to_have_count(0)
        expect(page.locator("tr.link", has_text="gpt-small")).to_contain_text("owner ann")
        page.reload()
        expect(page.locator("tr.link")).to_have_count(1)

        page.goto(f"{one.url}/incidents?state=all")
        expect(page.locator("tr.link").first).to_be_visible()
        projects.select_option(PROJECT)
        expect(page.locator("tr.link").first).to_contain_text("gpt-small")
        page.goto(f"{one.url}/incidents?state=all&project=other")
        expect(page.locator(".list")).to_contain_text("No incident matches")


BOB = "<img src=x onerror=hacked> bob"


@pytest.fixture
def incident(site):
    """An incident about which nobody has said anything."""
    yield site.incident_id()
    engine = open_engine(site.database_url)
    with write(engine) as connection:
        connection.execute(delete(IncidentFeedback))
    engine.dispose()


def pressed(page):
    return page.get_by_role("group", name="Feedback").locator('[aria-pressed="true"]')


def token_of(site, name, scope):
    return site.service.write("POST", "/api/v1/tokens", {"name": name, "scopes": [scope]})["token"]


def test_a_key_answers_another_changes_the_answer_and_the_same_again_withdraws_it(visit, incident):
    with visit() as one:
        page = one.goto(f"/incidents/{incident}")
        expect(card(page, "Feedback")).to_contain_text("Nobody has answered yet.")
        for key, answer in (("u", "Useful"), ("n", "Noise"), ("d", "Duplicate")):
            page.keyboard.press(key)
            if answer == "Noise":  # which asks what shall change
                page.get_by_role("button", name="Cancel").click()
            expect(pressed(page)).to_contain_text(answer)
            expect(card(page, "Feedback").locator("li")).to_have_count(1)
            expect(card(page, "Feedback").locator("li")).to_contain_text(answer)
        page.keyboard.press("d")
        expect(card(page, "Feedback")).to_contain_text("Nobody has answered yet.")
        page.get_by_role("button", name="Useful").click()
        expect(pressed(page)).to_contain_text("Useful")
        page.reload()
        expect(pressed(page)).to_contain_text("Useful")


def test_noise_offers_what_to_change_with_what_it_would_have_changed(visit, site, incident):
    with visit() as one:
        page = one.goto(f"/incidents/{incident}")
        page.get_by_role("button", name="Noise").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("From now on").select_option("quiet")
        expect(dialog.get_by_role("status")).to_contain_text(
            re.compile(r"In steps \d+ to \d+, \d incidents? would not")
        )
        dialog.get_by_label("From now on").select_option("silence")
        expect(dialog.get_by_role("status")).to_have_text(re.compile("Over the last week this concerns 1 incident\\."))
        dialog.get_by_role("button", name="Apply").click()
        expect(dialog).to_have_count(0)
    (silence,) = site.service.items("/api/v1/silences")
    assert (silence["job"], silence["kind"], silence["scope"]) == ("gpt-small", "nonfinite", "")
    site.service.write("DELETE", f"/api/v1/silences/{silence['id']}", None)


def test_the_page_of_the_policy_shows_the_precision_of_each_kind(visit, site, incident):
    site.service.write("PUT", f"/api/v1/incidents/{incident}/feedback", {"answer": "noise"})
    with visit() as one:
        page = one.goto("/policy")
        precision = card(page, "Precision")
        expect(precision).to_contain_text("The policy has not acted in these days.")
        rows = precision.locator("tbody tr")
        expect(rows.filter(has_text="NaN / Inf")).to_contain_text("0%0% to 79%")
        expect(rows.filter(has_text="of gpt-small")).to_contain_text("0%0% to 79%")
        expect(rows.filter(has_text="actions wait")).to_have_count(0)
        site.service.write("PUT", "/api/v1/policy", {"limits": {"precision_min": 0.5}})
        page.reload()
        expect(rows.filter(has_text="NaN / Inf")).to_contain_text("actions wait")


def test_whoever_may_only_read_sees_the_answers_at_once_and_has_no_buttons(visit, site, incident):
    with visit() as one:
        page = one.page
        page.context.clear_cookies()
        page.goto(f"{one.url}/login#{token_of(site, 'reader', 'read')}")
        page.wait_for_url("**/incidents")
        page.goto(f"{one.url}/incidents/{incident}")
        expect(card(page, "Feedback")).to_contain_text("Nobody has answered yet.")
        headers = {"Authorization": f"Bearer {token_of(site, BOB, 'operate')}"}
        url = f"{one.url}/api/v1/incidents/{incident}/feedback"
        assert httpx2.put(url, json={"answer": "noise"}, headers=headers, timeout=30).status_code == 200
        expect(card(page, "Feedback").locator("li")).to_have_text(f"Noise {BOB}")
        expect(page.get_by_role("group", name="Feedback")).to_have_count(0)
        assert fits(page)


@pytest.fixture(scope="module")
def traced(site) -> Site:
    """The job's incident has a trace of two ranks, one of which recorded nothing."""
    engine = open_engine(site.database_url)
    with write(engine) as connection:
        request = CommandRequest(
            id="cmd_trace",
            job="gpt-small",
            attempt=connection.scalar(select(Job.attempt).where(Job.name == "gpt-small")),
            action="trace",
            params={"ranks": [0, 1], "steps": 3},
            reason="",
            requested_by="test",
            requested_unix_ns=2**62,
            incident_id=site.incident_id(),
        )
        ended = {"state": "applied", "finished_unix_ns": 2**62, "applied_step": 41}
        connection.execute(insert(Command).values(**command_row(request) | ended))
        answers = [(0, "", SUMMARY), (1, "<b>CUPTI</b>", {})]
        for rank, error, summary in answers:
            row = {"command_id": "cmd_trace", "rank": rank, "error": error, "summary": summary, "at_unix_ns": 1}
            connection.execute(insert(RankTrace).values(**row))
    engine.dispose()
    return site


@pytest.mark.parametrize("page", ["job", "incident"])
def test_where_the_steps_went_is_shown_when_it_is_opened(traced, visit, page):
    with visit() as one:
        shown = one.goto("/jobs/gpt-small" if page == "job" else f"/incidents/{traced.incident_id()}")
        shown.get_by_text("Where the steps went").click()
        fold = shown.locator("details", has_text="Where the steps went")
        for text in (
            "Rank 0",
            "device idle 12.5 %",
            "matmul",
            "60 %",
            "mesh_dp",
            "12.6 MB",
            "sm80_gemm",
            "Rank 1",
            "<b>CUPTI</b>",
        ):
            expect(fold).to_contain_text(text)
