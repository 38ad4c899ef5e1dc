"""The page of rules on metrics: a rule is tried on a job's past, saved, finds something, and is deleted."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PATIENCE_MS

pytestmark = [pytest.mark.browser, pytest.mark.ci]
expect.set_options(timeout=PATIENCE_MS)


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_a_rule_is_previewed_saved_edited_and_deleted(site, visit, size):
    name = f"busy-{size[0]}"
    with visit(*size) as one:
        page = one.goto("/policy")
        page.get_by_role("link", name="Rules").click()
        page.get_by_label("Name").fill(name)
        page.get_by_label("Metric").fill("loss")
        page.get_by_label("When").select_option("below")
        page.get_by_label("Value").fill("1000")
        page.get_by_label("Job to preview on").select_option("gpt-small")
        page.get_by_role("button", name="Preview").click()
        found = page.locator("p", has_text="would have opened")
        expect(found).to_contain_text(re.compile(r"^1 incident .* steps of gpt-small were judged"))
        expect(page.locator("tr", has_text="loss is below 1000").first).to_contain_text("open still")
        page.get_by_label("When").select_option("change")
        expect(page.get_by_label("Value")).to_be_hidden()
        expect(page.get_by_label("Direction")).to_be_visible()
        page.get_by_label("When").select_option("below")
        page.get_by_role("button", name="Save").click()
        row = page.locator("tr", has_text=name).filter(has=page.get_by_role("button", name="Delete"))
        expect(row).to_contain_text("below 1,000")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        row.get_by_role("button", name="Edit").click()
        page.get_by_label("Hold (seconds)").fill("90")
        page.get_by_role("button", name="Save").click()
        expect(row).to_contain_text("1 min 30 s")
        row.get_by_role("button", name="Delete").click()
        page.locator("dialog").get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)


def test_what_a_rule_finds_is_an_incident_with_its_evidence_until_the_rule_is_deleted(site, visit):
    rule = {"name": "low-loss", "metric": "loss", "when": "below", "value": 1000.0, "jobs": ["gpt-*"]}
    site.service.write("PUT", "/api/v1/rules/low-loss", rule)
    with visit() as one:
        page = one.goto("/incidents")
        page.locator("tr", has_text="Rule low-loss").first.click()
        expect(page.locator("main")).to_contain_text("Rule low-loss: loss is below 1000")
        expect(page.locator("main")).to_contain_text("threshold")
        expect(page.locator("main")).to_contain_text("Loss around the onset")
        site.service.write("DELETE", "/api/v1/rules/low-loss", None)
        expect(page.locator("main")).to_contain_text("resolved")
