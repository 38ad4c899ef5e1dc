"""People say what an incident was worth, by a button or its key."""

import httpx2
import pytest
from playwright.sync_api import expect
from sqlalchemy import delete

from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.models import IncidentFeedback
from tests.browser.conftest import PATIENCE_MS

pytestmark = [pytest.mark.browser, pytest.mark.ci]
expect.set_options(timeout=PATIENCE_MS)
HOSTILE = "<img src=x onerror=hacked> bob"


@pytest.fixture
def incident(site):
    """An incident about which nobody has said anything."""
    yield site.incident_id()
    engine = open_engine(site.database_url)
    with write(engine) as connection:
        connection.execute(delete(IncidentFeedback))
    engine.dispose()


def feedback(page):
    return page.locator(".card", has=page.get_by_role("heading", name="Feedback"))


def pressed(page):
    return page.get_by_role("group", name="Feedback").locator('[aria-pressed="true"]')


def token(site, name, scope):
    return site.service.write("POST", "/api/v1/tokens", {"name": name, "scopes": [scope]})["token"]


def test_a_key_answers_another_changes_the_answer_and_the_same_again_withdraws_it(visit, incident):
    with visit() as one:
        page = one.goto(f"/incidents/{incident}")
        expect(feedback(page)).to_contain_text("Nobody has answered yet.")
        for key, answer in (("u", "Useful"), ("n", "Noise"), ("d", "Duplicate")):
            page.keyboard.press(key)
            expect(pressed(page)).to_contain_text(answer)
            expect(feedback(page).locator("li")).to_have_count(1)
            expect(feedback(page).locator("li")).to_contain_text(answer)
        page.keyboard.press("d")
        expect(feedback(page)).to_contain_text("Nobody has answered yet.")
        page.get_by_role("button", name="Useful").click()
        expect(pressed(page)).to_contain_text("Useful")
        page.reload()
        expect(pressed(page)).to_contain_text("Useful")


def test_the_page_of_the_policy_shows_the_precision_of_each_kind(visit, site, incident):
    site.service.write("PUT", f"/api/v1/incidents/{incident}/feedback", {"answer": "noise"})
    with visit() as one:
        page = one.goto("/policy")
        card = page.locator(".card", has=page.get_by_role("heading", name="Precision"))
        expect(card).to_contain_text("The policy has not acted in these days.")
        rows = card.locator("tbody tr")
        expect(rows.filter(has_text="NaN / Inf")).to_contain_text("0%0% to 79%")
        expect(rows.filter(has_text="of gpt-small")).to_contain_text("0%0% to 79%")
        expect(rows.filter(has_text="actions wait")).to_have_count(0)
        site.service.write("PUT", "/api/v1/policy", {"limits": {"precision_min": 0.5}})
        page.reload()
        expect(rows.filter(has_text="NaN / Inf")).to_contain_text("actions wait")


def test_whoever_may_only_read_sees_the_answers_at_once_and_has_no_buttons(visit, site, incident):
    with visit(390, 844) as one:
        page = one.page
        page.context.clear_cookies()
        page.goto(f"{one.url}/login#{token(site, 'reader', 'read')}")
        page.wait_for_url("**/incidents")
        page.goto(f"{one.url}/incidents/{incident}")
        expect(feedback(page)).to_contain_text("Nobody has answered yet.")
        headers = {"Authorization": f"Bearer {token(site, HOSTILE, 'operate')}"}
        url = f"{one.url}/api/v1/incidents/{incident}/feedback"
        assert httpx2.put(url, json={"answer": "noise"}, headers=headers, timeout=30).status_code == 200
        expect(feedback(page).locator("li")).to_have_text(f"Noise {HOSTILE}")
        expect(page.get_by_role("group", name="Feedback")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
