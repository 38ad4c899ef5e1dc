"""Why a rank is called slow: from telemetry through a broker to a drawing on the incident's page."""

import os

import pytest

from rankwatch_service.demo.service import ServiceProcess
from tests.browser.conftest import Visit, until
from tests.support.agent.service import until as wait_until
from tests.support.kafka.broker import new_prefix
from tests.support.service.telemetry_feed import Feed

pytestmark = [pytest.mark.browser, pytest.mark.ci]
SLOW_STEP = 200
CARD = (
    "[...document.querySelectorAll('section.card')]"
    ".find((one) => one.querySelector('h2').textContent === 'Why, and why not earlier')"
)


def slow_down(step, values, _exact):
    if step >= SLOW_STEP:
        values["busy_s"][1] *= 1.12


def test_the_evidence_of_a_slow_rank_is_drawn_against_its_threshold(any_broker, tmp_path, chromium):
    kafka = {"RANKWATCH_KAFKA": any_broker.bootstrap, "RANKWATCH_KAFKA_PREFIX": new_prefix()}
    environment = {**os.environ, **kafka, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    service = ServiceProcess(tmp_path / "data", 0, environment)
    service.start()
    feed = Feed(service.url, (tmp_path / "data/ingest-token").read_text().strip(), "gpt", slow_down)
    try:
        feed.send(SLOW_STEP + 60)
        wait_until(lambda: service.items("/api/v1/incidents", kind="straggler"))
        (incident,) = service.items("/api/v1/incidents", kind="straggler")
        visit = Visit(chromium.new_page(), service.url)
        visit.page.goto(service.login_url)
        visit.page.wait_for_url("**/incidents")
        page = visit.goto(f"/incidents/{incident['id']}")
        until(page, f"({CARD})?.textContent.includes('log-likelihood ratio of a lasting change reached')")
        until(page, f"({CARD}).textContent.includes('first rows of an attempt 2')")
        label = page.evaluate(f"({CARD}).querySelector('canvas.line').ariaLabel")
        assert "and its threshold. From step" in label
        assert "log-likelihood ratio" in label
        assert "threshold: " in label
        assert page.evaluate(f"({CARD}).querySelectorAll('table.earlier tbody tr').length") >= 1
        assert visit.complaints == []
        page.close()
    finally:
        feed.stop()
        service.stop()
