"""The page of tokens and of the audit trail: what an admin sees there, and what others do not."""

import json
import re

import httpx2
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PATIENCE_MS

pytestmark = [pytest.mark.browser, pytest.mark.ci]
expect.set_options(timeout=PATIENCE_MS)


def asks(site, token: str) -> int:
    return httpx2.get(
        f"{site.service.url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=30
    ).status_code


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_a_token_is_created_used_and_revoked_and_the_trail_tells_it(site, visit, size):
    name = f"<i>ann</i> {size[0]}"
    with visit(*size) as one:
        page = one.goto("/incidents")
        page.get_by_role("link", name="Access").click()
        page.get_by_role("button", name="New token").click()
        dialog = page.locator("dialog")
        dialog.get_by_label("Name").fill(name)
        dialog.get_by_role("button", name="Create").click()
        token = page.locator("dialog textarea").input_value()
        assert asks(site, token) == 200
        page.locator("dialog").get_by_role("button", name="Done").click()
        row = page.locator("tr", has_text=name).filter(has=page.get_by_role("button", name="Revoke"))
        expect(row).to_contain_text("read")
        expect(row).to_contain_text(re.compile(r"in (89|90) d"))
        expect(row).to_contain_text("valid")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        row.get_by_role("button", name="Revoke").click()
        page.locator("dialog").get_by_role("button", name="Revoke").click()
        expect(page.locator("tr", has_text=name).filter(has_text="revoked").first).to_be_visible()
        assert asks(site, token) == 401
        expect(page.locator("tr", has_text="token.revoke").first).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("link", name="Export").click()
        rows = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert {"token.make", "token.revoke"} <= {row["action"] for row in rows}


def test_who_is_no_admin_sees_neither_the_entry_nor_the_tokens(site, visit):
    wanted = {"name": "reader", "scopes": ["read"]}
    token = site.service.write("POST", "/api/v1/tokens", wanted)["token"]
    with visit() as one:
        one.page.context.clear_cookies()
        page = one.goto("/login")
        page.get_by_label("Access token").last.fill(token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/incidents")
        expect(page.locator(".live")).to_have_text("Live")
        expect(page.get_by_role("link", name="Access")).to_have_count(0)
        page.goto(f"{one.url}/access")
        expect(page.get_by_role("alert")).to_contain_text("scope admin is required")
        one.complaints.clear()  # the browser reports the 403
