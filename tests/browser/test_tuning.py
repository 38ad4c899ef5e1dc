"""The tunings of detectors on the page of the policy: shown, added, previewed, removed, reset."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PATIENCE_MS

pytestmark = [pytest.mark.browser, pytest.mark.ci]
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def untuned(site):
    """A service in which every setting has its default, before and after."""
    site.service.write("PUT", "/api/v1/tuning", {"tunings": []})
    yield site
    site.service.write("PUT", "/api/v1/tuning", {"tunings": []})


def card(page):
    return page.locator(".card", has=page.get_by_role("heading", name="Tuning", exact=True))


def dialog(page):
    return page.locator("dialog")


def filled(page, settings, jobs="gpt-*", profile="quiet"):
    dialog(page).get_by_label("Jobs: a pattern").fill(jobs)
    dialog(page).get_by_label("Profile").select_option(profile)
    dialog(page).get_by_label("Settings of their own").fill(settings)
    return dialog(page)


def test_a_tuning_is_added_shown_removed_and_reset(visit, untuned):
    with visit(390, 844) as one:
        page = one.goto("/policy")
        expect(card(page)).to_contain_text("None: every setting of every detector has its default.")
        card(page).get_by_role("button", name="Add tuning").click()
        filled(page, "slowdown.ratio_min = 1.5\nhang.steps=6").get_by_role("button", name="Add").click()
        expect(card(page)).to_contain_text("slowdown.ratio_min = 1.5")
        stored = untuned.service.get("/api/v1/tuning")
        settings = {"slowdown.ratio_min": 1.5, "hang.steps": 6.0}
        assert stored["tunings"] == [{"jobs": "gpt-*", "profile": "quiet", "settings": settings}]
        expect(card(page)).to_contain_text(f"Version {stored['version']}, set by")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        card(page).get_by_role("button", name="Add tuning").click()
        filled(page, "", jobs="<b>x", profile="sensitive").get_by_role("button", name="Add").click()
        expect(card(page)).to_contain_text("<b>x")
        card(page).get_by_role("button", name="Remove the tuning of gpt-*").click()
        expect(card(page)).not_to_contain_text("gpt-*")
        card(page).get_by_role("button", name="Reset").click()
        dialog(page).get_by_role("button", name="Reset").click()
        expect(card(page)).to_contain_text("None: every setting of every detector has its default.")
        assert untuned.service.get("/api/v1/tuning")["tunings"] == []


def test_a_line_that_is_no_setting_is_said_and_nothing_is_sent(visit, untuned):
    with visit() as one:
        page = one.goto("/policy")
        before = untuned.service.get("/api/v1/tuning")
        card(page).get_by_role("button", name="Add tuning").click()
        filled(page, "hang.steps: 6").get_by_role("button", name="Add").click()
        expect(dialog(page).get_by_role("alert")).to_have_text('"hang.steps: 6" is not NAME = NUMBER')
        expect(dialog(page).get_by_label("Settings of their own")).to_have_value("hang.steps: 6")
        filled(page, "hang.steps = 0.001").get_by_role("button", name="Add").click()
        expect(dialog(page).get_by_role("alert")).not_to_contain_text("NAME = NUMBER")
        expect(dialog(page).get_by_label("Jobs: a pattern")).to_have_value("gpt-*")
        assert "422" in one.complaints.pop()  # the browser's own about the answer
        assert untuned.service.get("/api/v1/tuning") == before


def test_a_preview_shows_what_would_not_open(visit, untuned):
    job = untuned.service.get("/api/v1/incidents?kind=nonfinite")["items"][0]["job"]
    with visit() as one:
        page = one.goto("/policy")
        card(page).get_by_role("button", name="Preview").click()
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
