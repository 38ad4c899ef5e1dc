"""A job gets project and owner on its page, and the lists are filtered by the project."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PATIENCE_MS

pytestmark = [pytest.mark.browser, pytest.mark.ci]
expect.set_options(timeout=PATIENCE_MS)
HOSTILE = "<img src=x onerror=hacked> nlp"


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
        dialog.get_by_label("Project").fill(HOSTILE)
        dialog.get_by_label("Owner").fill("ann")
        dialog.get_by_role("button", name="Save").click()
        expect(page.locator(".job-head")).to_contain_text(f"project {HOSTILE} · owner ann")

        page.goto(f"{one.url}/jobs")
        projects.select_option(HOSTILE)
        expect(page.locator("tr.link", has_text="of-nobody")).to_have_count(0)
        expect(page.locator("tr.link", has_text="gpt-small")).to_contain_text("owner ann")
        page.reload()
        expect(page.locator("tr.link")).to_have_count(1)

        page.goto(f"{one.url}/incidents?state=all")
        expect(page.locator("tr.link").first).to_be_visible()
        projects.select_option(HOSTILE)
        expect(page.locator("tr.link").first).to_contain_text("gpt-small")
        page.goto(f"{one.url}/incidents?state=all&project=other")
        expect(page.locator(".list")).to_contain_text("No incident matches")
