"""A real service with live data, and a real Chromium."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from rankwatch_service.demo.service import ServiceProcess
from tests.browser.dashboard import TIMEOUT_MS, Dashboard, opened
from tests.support.service.api import served_api
from tests.support.service.process import children
from tests.support.service.telemetry_feed import Feed
from tests.support.service.webhook_receiver import webhook_receiver

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HOSTILE = "<img src=x onerror='window.hacked=1'>"
BAD_STEP = 120
expect.set_options(timeout=TIMEOUT_MS)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="no chromium on this machine")
    for item in items:
        if "tests/browser/" in item.nodeid and CHROMIUM is None:
            item.add_marker(skip)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Site:
    """A running service, its feeds, and sessions in it."""

    def __init__(self, service: ServiceProcess, data: Path):
        self.service = service
        self.database_url = f"sqlite:///{data}/rankwatch.db"
        self._ingest = (data / "ingest-token").read_text().strip()

    def feed(self, job, change=None) -> Feed:
        return Feed(self.service.url, self._ingest, job, change)

    def kill(self, role: str) -> None:
        """Kill a role; the service starts it again."""
        os.kill(children(self.service._process.pid)[role], signal.SIGKILL)

    def incident_id(self) -> str:
        return self.service.items("/api/v1/incidents", job="gpt-small", kind="nonfinite")[0]["id"]


def spoil(step, values, exact):
    """Rank 1 has gradients that are not finite; the loss of all ranks follows."""
    if step == BAD_STEP:
        exact["nonfinite"][1] = 3
        values["loss"] = [float("nan")] * 4
    if step == BAD_STEP + 1:
        values["grad_norm"] = [float("inf")] * 4


def measure_hostile(_step, values, _exact):
    values[HOSTILE] = [1.0] * 4


@pytest.fixture(scope="module")
def site(tmp_path_factory, chromium) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
    service = ServiceProcess(folder / "data", 0, environment)
    with webhook_receiver() as receiver:
        service.start()
        site = Site(service, folder / "data")
        feeds = [site.feed("gpt-small", spoil), site.feed(HOSTILE, measure_hostile)]
        service.write("POST", "/api/v1/receivers", {"name": "pager", "url": receiver.url})
        try:
            for feed in feeds:
                feed.send(200)
            feeds[0].start()
            receiver.wait_for(lambda calls: len(calls) >= 1, 60)
            yield site
        finally:
            for feed in feeds:
                feed.stop()
            service.stop()


class Visit:
    """A logged-in page that remembers everything the browser complained about."""

    def __init__(self, page: Page, url: str):
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))

    def _heard(self, kind: str, text: str) -> None:
        # A policy violation is reported as a console error too.
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def goto(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page


def logged_in(page: Page, service: ServiceProcess) -> Visit:
    visit = Visit(page, service.url)
    page.goto(service.login_url)
    page.wait_for_url("**/incidents")
    return visit


def until(page: Page, expression: str) -> None:
    """Wait until an expression holds. Playwright's own waiting needs eval, which our pages forbid."""
    deadline_s = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, expression
        page.wait_for_timeout(50)


@pytest.fixture
def visit(site, chromium):
    """Opens visits; at the end none may have had a complaint."""

    @contextmanager
    def visited(width=1280, height=800, **context):
        with_context = chromium.new_context(viewport={"width": width, "height": height}, **context)
        try:
            one = logged_in(with_context.new_page(), site.service)
            yield one
            assert one.complaints == []
        finally:
            with_context.close()

    return visited


@pytest.fixture
def dashboard(tmp_path, chromium) -> Iterator[Dashboard]:
    with served_api(tmp_path) as (api, url), opened(chromium) as page:
        page.goto(f"{url}/login#{api.admin}")
        page.wait_for_url("**/incidents")
        yield Dashboard(api, url, page)
