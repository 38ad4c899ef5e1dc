"""Makes the README's picture: the incident of the demo's throttled GPU, as the dashboard shows it.

`python -m tests.browser.picture docs/dashboard.png`: takes three minutes, and needs Chromium.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from rankwatch_service.demo.display import DemoView
from rankwatch_service.demo.processes import own_environment
from rankwatch_service.demo.service import ServiceProcess
from rankwatch_service.demo.throttled import JOB, REPORTED_LIMIT_S, ThrottledJob
from tests.browser.conftest import CHROMIUM, FLAGS, TIMEOUT_MS

SIZE = {"width": 1280, "height": 900}
LIMIT_S = 120.0 + REPORTED_LIMIT_S
AFTER_S = 5.0
"""Steps after the cause is known, so that charts have some."""


def main(path: Path) -> int:
    """Write the picture; returns the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = {"XDG_CONFIG_HOME": str(folder / "config"), "TMPDIR": name}
        environment = own_environment() | ours
        service = ServiceProcess(folder / "service", 0, environment)
        service.start()
        job = ThrottledJob(service, DemoView(Console(), []))
        try:
            job.start()
            until_s = time.monotonic() + LIMIT_S
            while not job.done and time.monotonic() < until_s:
                job.poll()
                time.sleep(0.1)
            time.sleep(AFTER_S)
            (incident,) = [one for one in service.items("/api/v1/incidents", job=JOB) if one["state"] != "resolved"]
            shoot(service, f"/incidents/{incident['id']}", path)
        finally:
            job.stop()
            service.stop()
    return 0


def shoot(service: ServiceProcess, page_path: str, path: Path) -> None:
    """Open a page of the dashboard and save what is seen of it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(service.login_url)
        page.wait_for_url("**/incidents")
        page.goto(service.url + page_path)
        page.wait_for_selector("canvas")
        time.sleep(2.0)  # charts are drawn
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(Path(sys.argv[1])))
