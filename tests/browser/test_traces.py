"""What ranks recorded for a trace, in a real browser: on the pages of the job and of the incident."""

import pytest
from playwright.sync_api import expect
from sqlalchemy import insert, select

from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.models import Command, Job, RankTrace
from rankwatch_service.store.rows import command_row
from tests.browser.conftest import PATIENCE_MS, Site
from tests.support.values.traces import SUMMARY

pytestmark = [pytest.mark.browser, pytest.mark.ci]

expect.set_options(timeout=PATIENCE_MS)


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
