"""Whoever comes between people and the OIDC provider, or forges its id tokens, gets no session."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from rankwatch_service.access.oidc_provider import CALLBACK_PATH
from tests.support.service.oidc_provider import CLIENT_SECRET, Provider, new_key, oidc_provider
from tests.support.service.process import Http, Up, free_port, running_up

pytestmark = pytest.mark.integration


def environment(provider: Provider, port: int) -> dict[str, str]:
    """The settings of a service whose people log in with this provider."""
    named = {f"RANKWATCH_{name.upper()}": value for name, value in provider.settings().items()}
    groups = json.dumps(named.pop("RANKWATCH_OIDC_GROUPS"))
    return named | {"RANKWATCH_OIDC_GROUPS": groups, "RANKWATCH_PUBLIC_URL": f"http://127.0.0.1:{port}"}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with oidc_provider() as one:
        yield one


@contextmanager
def up_with(folder: Path, provider: Provider) -> Iterator[Up]:
    port = free_port()
    with running_up(folder, port=port, **environment(provider, port)) as up, closing(Http(up.url)) as http:
        http.ask("GET", "/readyz")
        yield up


@pytest.fixture(scope="module")
def up(tmp_path_factory, provider) -> Iterator[Up]:
    with up_with(tmp_path_factory.mktemp("up"), provider) as up:
        yield up


@pytest.fixture(autouse=True)
def honest_again(provider):
    """After each attack an honest person can log in."""
    signs = provider.key
    yield
    provider.key, provider.algorithm, provider.claims, provider.published = signs, "RS256", {}, []


class Browser:
    """A browser that keeps cookies and follows no redirect by itself."""

    def __init__(self, up: Up) -> None:
        self.client = httpx2.Client(base_url=up.url, trust_env=False, timeout=10)

    def sent_back_to(self) -> str:
        """Log in at the provider: where it sends this browser."""
        to_provider = self.client.get("/login/oidc", params={"next": "/jobs"})
        assert to_provider.status_code == 303, to_provider.text
        return httpx2.get(to_provider.headers["location"], trust_env=False).headers["location"]

    def follow(self, address: str) -> int:
        return self.client.get(address).status_code

    def is_logged_in(self) -> bool:
        return self.client.get("/api/v1/jobs").status_code == 200


@pytest.fixture
def browser(up) -> Iterator[Browser]:
    one = Browser(up)
    with one.client:
        yield one


def logs_in(up) -> bool:
    one = Browser(up)
    with one.client:
        return one.follow(one.sent_back_to()) == 303 and one.is_logged_in()


FORGED = {
    "signed by nobody": {"algorithm": "none"},
    "signed with the public key as if it were a secret": {"algorithm": "HS256"},
    "signed by a key of the forger that has the name of the provider's": {"key": new_key("first")},
    "for another client": {"claims": {"aud": "another client"}},
    "of another issuer": {"claims": {"iss": "https://evil.example"}},
    "of an earlier login": {"claims": {"nonce": "which was right then"}},
    "expired": {"claims": {"exp": 1_700_000_000}},
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_id_token_opens_no_session(up, provider, browser, how):
    provider.published = [provider.key]
    for name, value in FORGED[how].items():
        setattr(provider, name, value)
    assert browser.follow(browser.sent_back_to()) == 401
    assert not browser.is_logged_in()
    provider.key = provider.published[0]
    provider.algorithm, provider.claims = "RS256", {}
    assert logs_in(up)


def test_an_address_of_the_callback_is_worth_nothing_in_another_browser(up, browser):
    """A thief may send the victim his own address (to log the victim in as himself), or have seen the victim's."""
    other = Browser(up)
    address = browser.sent_back_to()
    assert other.follow(address) == 401
    other.sent_back_to()  # with a try of its own
    assert other.follow(address) == 401
    assert not other.is_logged_in()
    other.client.close()
    assert browser.follow(address) == 303
    assert browser.follow(address) == 401  # and once


def test_a_session_that_was_planted_before_the_login_is_not_the_one_after_it(up, browser):
    browser.client.cookies.set("rankwatch_session", "rankwatch_session_0123456789ab_planted")
    assert browser.follow(browser.sent_back_to()) == 303
    kept = [one.value for one in browser.client.cookies.jar if one.name == "rankwatch_session"]
    assert "planted" not in kept[-1]


def test_after_the_login_no_address_leads_elsewhere(up, browser):
    for wanted in ("//evil.example", "https://evil.example", "/\\evil.example", "/\t/evil.example"):
        browser.client.get("/login/oidc", params={"next": wanted})
        to_provider = browser.client.get("/login/oidc", params={"next": wanted}).headers["location"]
        back = httpx2.get(to_provider, trust_env=False).headers["location"]
        assert browser.client.get(back).headers["location"] == "/"


def test_neither_secret_nor_code_is_in_the_log_and_guesses_are_slowed_down(tmp_path, provider):
    with up_with(tmp_path, provider) as up:
        browser = Browser(up)
        address = browser.sent_back_to()
        code = dict(part.split("=") for part in urlsplit(address).query.split("&"))["code"]
        assert browser.follow(address) == 303
        provider.algorithm = "none"
        assert browser.follow(browser.sent_back_to()) == 401
        statuses = [browser.follow(f"{CALLBACK_PATH}?code=guess&state={n}") for n in range(40)]
        assert (statuses[0], statuses[-1]) == (401, 429)
        browser.client.close()
        said = up.said()
    assert "oidc_login_refused" in said
    assert CLIENT_SECRET not in said
    assert code not in said
