"""Deleting a job on its page."""

import pytest
from playwright.sync_api import expect
from sqlalchemy import update

from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.models import AgentView, Job

pytestmark = [pytest.mark.browser, pytest.mark.ci]
JOB = "of-old"
HOUR_NS = 3_600 * 10**9


@pytest.fixture
def lost_job(site):
    """A job that stops to send; gives the database, in which time can be let pass."""
    feed = site.feed(JOB)
    feed.send(30)
    feed.stop()
    engine = open_engine(site.database_url)
    yield engine
    engine.dispose()


def test_a_job_is_deleted_by_its_name(visit, lost_job):
    with visit() as one:
        page = one.goto(f"/jobs/{JOB}")
        expect(
            page.get_by_role("button", name="Delete")
        ).to_be_visible()  # the job is lost, and written for the last time
        with write(lost_job) as connection:
            for model, column in ((Job, Job.last_seen_unix_ns), (AgentView, AgentView.at_unix_ns)):
                connection.execute(update(model).values({column: column - HOUR_NS}))
        page.get_by_role("button", name="Delete").click()
        dialog = page.locator("dialog")
        dialog.locator("input").fill("gpt-small")
        dialog.get_by_role("button", name="Delete").click()
        expect(dialog.get_by_role("alert")).to_contain_text("nothing was deleted")
        expect(dialog.locator("input")).to_have_value("gpt-small")
        problem = {"status": 409, "title": "Conflict", "detail": "job 'of-old' reports again"}
        refusals = iter([problem])

        def refuse_once(route):
            # The page reads its job from the same address, whenever it likes.
            refused = next(refusals, None) if route.request.method == "DELETE" else None
            route.fulfill(status=409, json=refused) if refused else route.continue_()

        page.route("**/api/v1/jobs/of-old", refuse_once)
        dialog.locator("input").fill(JOB)
        dialog.get_by_role("button", name="Delete").click()
        expect(dialog.get_by_role("alert")).to_have_text("job 'of-old' reports again")
        expect(dialog.locator("input")).to_have_value(JOB)
        dialog.get_by_role("button", name="Delete").click()
        page.wait_for_url("**/jobs")
        expect(page.locator("tr.link", has_text="gpt-small")).to_be_visible()
        expect(page.locator("tr.link", has_text=JOB)).to_have_count(0)
        # The event of the deletion may reach the job's page before it has left for the list of jobs.
        one.complaints = [
            complaint for complaint in one.complaints if "404" not in complaint and "409" not in complaint
        ]
