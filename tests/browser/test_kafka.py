"""Through a real broker to a page: counters of devices, and why a rank is called slow."""

import json
import os

import pytest

from rankwatch_service.demo.service import ServiceProcess
from tests.browser.conftest import logged_in, until
from tests.support.accelerator import DRIVER
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import until as wait_until
from tests.support.host_tree import HostTree
from tests.support.kafka.broker import new_prefix
from tests.support.ranks.recording_rank import RecordingRank
from tests.support.service.telemetry_feed import Feed

pytestmark = [pytest.mark.browser, pytest.mark.ci]


def shown(title: str) -> str:
    """The card of this title, as an expression."""
    cards = "[...document.querySelectorAll('section.card')]"
    return f"{cards}.find((one) => one.querySelector('h2').textContent === '{title}')"


CARD = shown("Devices")
WHY = shown("How it was found")


@pytest.fixture
def kafka(any_broker):
    return {"RANKWATCH_KAFKA": any_broker.bootstrap, "RANKWATCH_KAFKA_PREFIX": new_prefix()}


@pytest.fixture
def service(kafka, tmp_path):
    environment = {**os.environ, **kafka, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    service = ServiceProcess(tmp_path / "data", 0, environment)
    service.start()
    yield service
    service.stop()


def test_a_counter_of_a_device_reaches_the_page_of_its_job_through_kafka(kafka, service, tmp_path, chromium):
    driver, rings = tmp_path / "nvml.json", tmp_path / "rings"
    driver.write_text(json.dumps({"celsius": {"3": 87}}))
    rings.mkdir(mode=0o700)
    tree = HostTree(tmp_path / "host")
    tree.rdma("mlx5_0")
    agent_environment = kafka | {
        "RANKWATCH_URL": service.url,
        "RANKWATCH_TOKEN": (tmp_path / "data/ingest-token").read_text().strip(),
        "PYTHONPATH": str(DRIVER),
        "SIMULATED_NVML": str(driver),
        "RANKWATCH_HOST_ROOT": str(tree.root),
    }
    with RecordingRank(rings, 0, world_size=1) as rank, AgentProcess(rings, agent_environment):
        rank.do("steps", 5)
        wait_until(lambda: service.find("/api/v1/jobs/gpt"))
        visit = logged_in(chromium.new_page(timezone_id="Asia/Kolkata"), service)
        page = visit.goto("/jobs/gpt")
        until(page, f"({CARD})?.textContent.includes('87 °C')")
        first = page.evaluate(f"({CARD}).querySelector('tbody tr').textContent")
        assert first.startswith("node-1 GPU 3")
        assert page.evaluate(f"({CARD}).querySelectorAll('tbody tr').length") == 8
        until(page, f"/highest: 87 °C/.test(({CARD}).querySelector('canvas.line').ariaLabel)")
        clock = f"/to (\\d\\d):(\\d\\d)/.exec(({CARD}).querySelector('canvas.line').ariaLabel).slice(1).map(Number)"
        hours, minutes = page.evaluate(clock)
        behind_min = (
            page.evaluate("new Date().getHours() * 60 + new Date().getMinutes()") - hours * 60 - minutes
        ) % 1440
        assert behind_min < 60, "its axis shows local time"
        page.locator("section.devices select[aria-label=Counter]").first.select_option("power_now_w")
        until(page, f"({CARD}).querySelector('canvas.line').ariaLabel.startsWith('Power now')")
        until(page, f"/highest: \\d+ W/.test(({CARD}).querySelector('canvas.line').ariaLabel)")
        until(page, f"({shown('Network ports')})?.querySelector('tbody tr').textContent.startsWith('node-1 mlx5_0/1')")
        until(page, f"({shown('Hosts')})?.textContent.includes('Memory available')")
        page.locator("section.devices tbody a").first.click()
        page.wait_for_url("**/hosts/node-1")
        until(page, f"({shown('Network ports')})?.textContent.includes('400 Gbit/s')")
        until(page, f"/highest: /.test(({CARD})?.querySelector('canvas.line')?.ariaLabel)")
        page.set_viewport_size({"width": 390, "height": 844})
        until(page, "document.documentElement.scrollWidth <= innerWidth")
        visit.goto("/hosts")
        until(page, "document.body.textContent.includes('No host has an incident on its record.')")
        assert visit.complaints == []
        page.close()
    assert [one["at_unix_ns"] is not None for one in service.items("/api/v1/jobs/gpt/devices")] == [True] * 8


SLOW_STEP = 200


def slow_down(step, values, _exact):
    if step >= SLOW_STEP:
        values["busy_s"][1] *= 1.12


def test_the_evidence_of_a_slow_rank_is_drawn_against_its_threshold(kafka, service, tmp_path, chromium):
    feed = Feed(service.url, (tmp_path / "data/ingest-token").read_text().strip(), "gpt", slow_down)
    try:
        feed.send(SLOW_STEP + 60)
        wait_until(lambda: service.items("/api/v1/incidents", kind="straggler"))
        (incident,) = service.items("/api/v1/incidents", kind="straggler")
        visit = logged_in(chromium.new_page(), service)
        page = visit.goto(f"/incidents/{incident['id']}")
        until(page, f"({WHY})?.textContent.includes('log-likelihood ratio of a lasting change reached')")
        until(page, f"({WHY}).textContent.includes('first rows of an attempt 2')")
        label = page.evaluate(f"({WHY}).querySelector('canvas.line').ariaLabel")
        assert "and its threshold. From step" in label
        assert "log-likelihood ratio" in label
        assert "threshold: " in label
        assert page.evaluate(f"({WHY}).querySelectorAll('table.earlier tbody tr').length") >= 1
        assert visit.complaints == []
        page.close()
    finally:
        feed.stop()
