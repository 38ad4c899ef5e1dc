"""A person clicks the button of the OIDC provider in a real browser."""

import json
import os
import re

import pytest
from playwright.sync_api import expect

from rankwatch_service.demo.service import ServiceProcess
from tests.browser.conftest import Visit
from tests.support.service.oidc_provider import oidc_provider
from tests.support.service.process import free_port

pytestmark = [pytest.mark.browser, pytest.mark.ci]


@pytest.fixture(scope="module")
def provider():
    with oidc_provider() as one:
        yield one


@pytest.fixture(scope="module")
def service(tmp_path_factory, provider):
    folder, port = tmp_path_factory.mktemp("people"), free_port()
    named = {f"RANKWATCH_{name.upper()}": value for name, value in provider.settings().items()}
    named["RANKWATCH_OIDC_GROUPS"] = json.dumps(named["RANKWATCH_OIDC_GROUPS"])
    environment = {**os.environ, **named, "XDG_CONFIG_HOME": str(folder / "config")}
    one = ServiceProcess(folder / "data", port, environment)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def visit(chromium, service):
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    yield Visit(context.new_page(), service.url)
    context.close()


def test_a_click_logs_in_and_another_one_out(visit, provider):
    page = visit.goto("/jobs?state=lost")
    page.wait_for_url("**/login?next=*")
    visit.complaints.clear()  # the browser reports the 401 by which the page knew
    button = page.get_by_role("link", name=re.compile("Log in with 127.0.0.1"))
    expect(button).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    button.click()
    page.wait_for_url("**/jobs?state=lost")
    expect(page.get_by_role("button", name="Log out")).to_be_visible()
    assert page.evaluate("document.cookie") == ""
    page.goto(f"{visit.url}/access")
    here = page.locator(".card", has=page.get_by_role("heading", name="People")).locator("tbody tr")
    expect(here).to_contain_text(re.compile(r"ada@example.com.*admin in every job.*1 open"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    assert visit.complaints == []


def test_a_person_without_a_group_reads_why(visit, provider):
    provider.claims["groups"] = ["<b>interns</b>"]
    page = visit.goto("/login")
    page.get_by_role("link", name=re.compile("Log in with")).click()
    problem = page.get_by_role("alert")
    expect(problem).to_have_text("ada@example.com is in no group that may use this service.")
    page.wait_for_url("**/login")
    expect(page.get_by_label("Access token").last).to_be_visible()
    provider.claims.clear()
