"""The job page says how much of the usual work is done, and which kinds of incidents have cost most."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.office import PATIENCE_MS, S

pytestmark = pytest.mark.browser
expect.set_options(timeout=PATIENCE_MS)


def lost_time(page):
    return page.locator(".card", has=page.get_by_role("heading", name="Goodput and lost time"))


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_lost_time_is_listed_by_kind_and_leads_to_the_incidents(office, size):
    office.job("gpt", world_size=16)
    hours = {"onset_unix_ns": office.now - 9_000 * S, "resolved_unix_ns": office.now - 7_200 * S, "state": "resolved"}
    office.incidents(2, job="gpt", kind="hang", impact_gpu_hours_per_hour=8.0, **hours)
    office.incidents(1, job="gpt", kind="straggler", severity="warning", impact_gpu_hours_per_hour=4.0)
    office.page.set_viewport_size({"width": size[0], "height": size[1]})
    page = office.goto("/jobs/gpt")
    card = lost_time(page)
    expect(card).to_contain_text("75 % of usual now")
    rows = card.locator("tbody tr")
    expect(rows.nth(0)).to_have_text(re.compile(r"^Hang28$"))
    expect(rows.nth(1)).to_have_text(re.compile(r"^Straggler10\.0\d+$"))
    expect(card).to_contain_text("GPU-h lost")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    card.get_by_label("Period").select_option("1h")
    expect(rows).to_have_count(2)  # the straggler and the sum
    card.get_by_label("Period").select_option("")
    rows.get_by_role("link", name="Hang").click()
    expect(page).to_have_url(re.compile(r"/incidents\?state=all&job=gpt&kind=hang$"))
    expect(page.locator("tr.link")).to_have_count(2)


def test_a_job_that_lost_nothing_says_so_and_a_job_without_gpus_counts_ranks(office):
    office.job("cpu", world_size=2, state="paused")
    cpu = {"local_rank": 0, "host": "laptop", "device_uuid": "", "device_type": "cpu"}
    office.attempt("cpu", ranks=[cpu | {"rank": n} for n in range(2)])
    card = lost_time(office.goto("/jobs/cpu"))
    expect(card).to_contain_text("No incident has cost this job time")
    expect(card).to_contain_text("– (paused) now · 100 % of the rank-h, last 24 hours")
