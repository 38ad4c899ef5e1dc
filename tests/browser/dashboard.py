"""An api over rows that a test writes, and a browser that is logged in to it."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page
from sqlalchemy import update

from rankwatch_service.incidents.model import derived
from rankwatch_service.orders import commands
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Incident, Job
from tests.support.store.database import add, attempt_row, job_row
from tests.support.values.incidents import incident_row

S = 10**9
TIMEOUT_MS = 60_000


class Dashboard:
    """An api over rows that tests write, and a browser that is logged in to it."""

    def __init__(self, api, url: str, page: Page) -> None:
        self.api = api
        self.url = url
        self.page = page
        self.now = api.clock.unix_ns()

    def goto(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page

    def job(self, name: str, **changes) -> None:
        seen = {"first_seen_unix_ns": self.now - 9_000 * S, "last_seen_unix_ns": self.now}
        usual = {"world_size": 256, "ranks_reporting": 256, "step": 1_234, "step_time_s": 0.87, "loss": 2.31}
        add(self.api.engine, Job, job_row(name, **usual | seen | {"last_progress_unix_ns": self.now} | changes))

    def attempt(self, job: str, **topology) -> None:
        ran = {"started_unix_ns": self.now, "world_size": 256, "last_step": 1_234, "topology": topology}
        add(self.api.engine, Attempt, attempt_row(job, **ran))

    def incidents(self, count: int, **changes) -> None:
        rows = [self._incident(n, changes) for n in range(count)]
        add(self.api.engine, Incident, *rows)

    @staticmethod
    def incident_id(severity: str, n: int = 0) -> str:
        """Of one that `incidents` has written."""
        return f"inc_{derived(severity, n)}"

    def change(self, severity: str, **changes) -> None:
        """Change the first incident of a severity."""
        with write(self.api.engine) as connection:
            connection.execute(update(Incident).where(Incident.id == self.incident_id(severity)).values(**changes))

    def publish(self, topic: str, job: str, **data) -> None:
        """Publish a change to open pages, as stream does."""
        with write(self.api.engine) as connection:
            commands.publish(connection, topic, job, data, self.now)

    def _incident(self, n: int, changes: dict) -> dict:
        kind, onset = changes.get("severity", "critical"), self.now - (n + 1) * 60 * S
        named = {"id": self.incident_id(kind, n), "summary": f"{kind} trouble {n}"}
        times = {"onset_unix_ns": onset, "detected_unix_ns": onset}
        return incident_row(**named | times | changes)


def fits(page: Page) -> bool:
    """Nothing of the page needs scrolling sideways, on a phone and wide."""
    for width, height in ((390, 844), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        if not page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            return False
    return True


def card(page: Page, title: str) -> Locator:
    """The card with this heading."""
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


@contextmanager
def opened(chromium: Browser, width: int = 1280, height: int = 800) -> Iterator[Page]:
    context = chromium.new_context(
        viewport={"width": width, "height": height}, timezone_id="Asia/Kolkata", locale="en-GB"
    )
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    try:
        yield page
    finally:
        context.close()
