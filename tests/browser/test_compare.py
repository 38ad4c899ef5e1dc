"""Any metric of attempts and jobs in one chart, what is wrong at the top of a job's page, and the list of jobs."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import until
from tests.browser.dashboard import card, fits


def rates(base: float):
    def change(step, values, _exact):
        values["lr"] = [base * (1 - step / 1_000)] * 4

    return change


@pytest.fixture(scope="module")
def two(site):
    """Two jobs with a learning rate each."""
    feeds = [site.feed(name, rates(base)) for name, base in (("warm", 3e-4), ("cold", 1e-4))]
    for feed in feeds:
        feed.send(200)
    yield site
    for feed in feeds:
        feed.stop()


def test_the_learning_rates_of_two_jobs_are_in_one_chart_whose_address_shows_them_again(two, visit):
    with visit() as one:
        page = one.goto("/jobs/warm")
        picker = page.get_by_label("Add a metric")
        picker.focus()
        until(
            page, "[...document.querySelectorAll('[aria-label=\"Add a metric\"] option')].some((o) => o.value === 'lr')"
        )
        picker.select_option("lr")
        page.get_by_label("Compare with a job").select_option("cold")
        chart = page.locator(".charts.free canvas")
        expect(chart).to_have_attribute("aria-label", re.compile("Lr of warm, cold over steps"))
        expect(page.locator(".charts.free .card")).to_contain_text(
            re.compile(r"At step \d+: warm, attempt 1 0\.0002.*; cold, newest attempt .* \(67 % lower\)")
        )
        assert "metric=lr&with=cold" in page.url
        page.get_by_label("Smoothing").select_option("20")
        page.get_by_label("log scale").check()
        again = one.goto(page.url.removeprefix(one.url))
        expect(again.locator(".charts.free canvas")).to_have_attribute("aria-label", re.compile("warm, cold"))
        expect(again.get_by_label("log scale")).to_be_checked()
        assert fits(again)
        one.goto("/jobs/cold")  # the metrics of a project are kept
        expect(page.locator(".charts.free .card")).to_be_visible()
        page.locator(".charts.free .card").get_by_label("Remove Lr").click()
        expect(page.locator(".charts.free canvas")).to_have_count(0)


def test_what_is_wrong_stands_at_the_top_of_the_page_of_its_job(dashboard):
    dashboard.job("gpt")
    dashboard.attempt("gpt", ranks=[], can=[])
    dashboard.incidents(1, job="gpt", kind="loss_divergence", impact_gpu_hours_per_hour=16.0)
    dashboard.incidents(4, job="gpt", severity="warning")
    page = dashboard.goto("/jobs/gpt")
    troubles = page.get_by_label("Unresolved incidents")
    expect(troubles.locator(".trouble")).to_have_count(3)
    expect(troubles).to_contain_text("2 more")
    worst = troubles.locator(".trouble").first
    expect(worst).to_contain_text(re.compile("critical trouble 0.*costs 16 GPU-hours every hour"))
    assert worst.bounding_box()["y"] < page.locator(".strip").bounding_box()["y"]
    for name in ("Acknowledge", "This was intended", "Silence"):
        expect(worst.get_by_role("button", name=name)).to_be_visible()
    assert fits(page)


def test_pages_of_jobs_ranks_and_hosts_lead_into_own_tools(dashboard):
    urls = {
        "W&B": "https://wandb.example/{job}",
        "Logs": "https://logs.example/{job}/{rank}",
        "IPMI": "https://{host}.bmc/",
    }
    dashboard.api.settings.links.update(urls)
    dashboard.job("gpt 1")
    dashboard.attempt("gpt 1", ranks=[{"rank": 3, "host": "node-a"}], can=[])
    for path, links in {
        "/jobs/gpt%201": {"W&B ↗": "https://wandb.example/gpt%201"},
        "/ranks/gpt%201/3": {"Logs ↗": "https://logs.example/gpt%201/3", "IPMI ↗": "https://node-a.bmc/"},
        "/hosts/node-a": {"IPMI ↗": "https://node-a.bmc/"},
    }.items():
        page = dashboard.goto(path)
        for name, href in links.items():
            expect(page.get_by_role("link", name=name)).to_have_attribute("href", href)


def test_nobody_is_notified_until_a_receiver_is_added_on_the_page_that_says_so(dashboard):
    dashboard.job("gpt")
    dashboard.incidents(1, job="gpt")
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}")
    expect(card(page, "Notifications")).to_contain_text("Nobody was notified: there is no receiver.")
    page = dashboard.goto("/incidents")
    page.get_by_role("button", name="Nobody is notified: add a receiver").click()
    page.get_by_label("Name", exact=True).fill("pager")
    page.get_by_label("URL or address").fill("https://hooks.example/x")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("button", name="Nobody is notified: add a receiver")).to_be_hidden()


def test_jobs_are_searched_filtered_and_ordered(two, visit):
    with visit() as one:
        page = one.goto("/jobs")
        rows = page.locator("tr.link")
        expect(rows.first).to_be_visible()
        page.get_by_label("Search").fill("warm")
        expect(rows).to_have_count(1)
        assert page.url.endswith("search=warm")
        page.get_by_label("Search").fill("")
        page.get_by_label("Any state").select_option("paused")
        expect(page.get_by_text("No job matches.")).to_be_visible()
        page.get_by_label("Any state").select_option("")
        page.get_by_label("Last seen").select_option("size")
        expect(rows.first).to_be_visible()
        assert fits(page)
