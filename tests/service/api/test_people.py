"""People log in with a real OIDC provider; their groups say what they may do. Nobody else gets a session."""

import time
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from sqlalchemy import select, update
from structlog.testing import capture_logs

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.oidc_provider import AWAY_S, CALLBACK_PATH, UNKNOWN_KEY_S
from rankwatch_service.access.sessions import LOGIN_S, SESSION_S
from rankwatch_service.api.http import gate
from rankwatch_service.api.routes.sessions import own_page
from rankwatch_service.clock import SystemClock
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Audit, Job, JobOwnership, Silence
from tests.support.service.api import OURS, running_api
from tests.support.service.oidc_provider import CLIENT_SECRET, new_key, oidc_provider
from tests.support.store.database import add, change, job_row


class AheadClock(SystemClock):
    """The machine's clock, which a test sets forward."""

    ahead_s = 0.0

    def unix_ns(self):
        return super().unix_ns() + int(self.ahead_s * 1e9)

    def monotonic_s(self):
        return super().monotonic_s() + self.ahead_s


@pytest.fixture
def provider():
    with oidc_provider() as one:
        yield one


CLOCK = AheadClock
ON_BOTH = pytest.mark.parametrize("api", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def api_settings(provider):
    return {"public_url": "http://testserver", **provider.settings()}


def begin(api, wanted="/jobs?state=lost"):
    """To the provider and back: the address that it sends the browser to."""
    sent = api.client.get("/login/oidc", params={"next": wanted}, follow_redirects=False)
    assert sent.status_code == 303, sent.text
    back = httpx2.get(sent.headers["location"])
    assert back.status_code == 302
    return back.headers["location"]


def come_back(api, address):
    return api.client.get(address, follow_redirects=False)


def log_in(api):
    return come_back(api, begin(api))


def audited(api, action):
    with read(api.engine) as connection:
        return connection.execute(select(Audit).where(Audit.action == action)).mappings().all()


def add_jobs(api, *names):
    seen = dict.fromkeys(("first_seen_unix_ns", "last_seen_unix_ns"), api.clock.unix_ns())
    add(api.engine, Job, *[job_row(name, **seen) for name in names])


def jobs_of(api):
    return sorted(job["name"] for job in api.client.get("/api/v1/jobs").json()["items"])


@ON_BOTH
def test_an_admin_sees_who_was_here_and_what_they_may_do(api):
    log_in(api)
    log_in(api)
    owned = [
        {"job": job, "project": project, "owner": "ada@example.com"}
        for job, project in (("a", "nlp"), ("b", "nlp"), ("c", ""))
    ]
    add(api.engine, JobOwnership, *owned)
    (one,) = api.client.get("/api/v1/people").json()["items"]
    assert (one["name"], one["person"].endswith("#248289761001")) == ("ada@example.com", True)
    assert one["permissions"] == [{"scopes": ["admin"], "jobs": []}]
    assert (one["projects"], one["sessions"]) == (["nlp"], 2)
    assert one["last_used_unix_ns"] >= one["logged_in_unix_ns"]
    api.client.delete("/api/v1/session", headers=OURS)
    reader = api.token(Scope.READ)
    assert api.get("/api/v1/people", token=reader).status_code == 403
    assert api.get("/api/v1/people").json()["items"][0]["sessions"] == 1


@ON_BOTH
def test_a_person_logs_in_and_comes_to_the_page_that_they_wanted(api):
    answer = log_in(api)
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs?state=lost")
    cookie = next(one for one in answer.headers.get_list("set-cookie") if one.startswith("rankwatch_session="))
    assert {"httponly", "samesite=lax", f"max-age={SESSION_S}"} <= set(cookie.lower().split("; "))
    session = api.client.get("/api/v1/session").json()
    assert (session["name"], session["scopes"], session["jobs"]) == ("ada@example.com", ["admin"], [])
    assert session["person"].endswith("#248289761001")
    [row] = audited(api, "session.open")
    assert row["actor"].startswith("ada@example.com (")
    assert row["fields"]["groups"] == ["platform"]
    assert api.client.put("/api/v1/policy/hands-off", json={"hands_off": True}, headers=OURS).status_code == 200
    api.clock.ahead_s += SESSION_S + 2
    assert api.client.get("/api/v1/session").status_code == 401


def test_the_cookie_of_a_try_is_short_lived_hidden_from_scripts_and_gone_afterwards(api):
    sent = api.client.get("/login/oidc", follow_redirects=False)
    cookie = sent.headers["set-cookie"].lower()
    assert {"httponly", "samesite=lax", f"max-age={LOGIN_S}"} <= set(cookie.split("; "))
    query = parse_qs(urlsplit(sent.headers["location"]).query)
    for secret in (query["state"][0], query["nonce"][0]):
        assert secret.lower() not in cookie
    log_in(api)
    assert list(api.client.cookies.keys()) == ["rankwatch_session"]


def test_over_https_the_cookies_belong_to_this_host_alone(tmp_path, provider):
    with running_api(tmp_path, public_url="https://testserver", **provider.settings()) as api:
        api.client.base_url = "https://testserver"
        sent = api.client.get("/login/oidc", follow_redirects=False)
        answer = log_in(api)
    assert sent.headers["set-cookie"].startswith("__Host-rankwatch_login=")
    assert "; Secure" in sent.headers["set-cookie"]
    assert any(one.startswith("__Host-rankwatch_session=") for one in answer.headers.get_list("set-cookie"))


@ON_BOTH
def test_a_person_of_no_mapped_group_is_told_so_and_recorded(api, provider):
    provider.claims["groups"] = ["interns"]
    answer = log_in(api)
    assert answer.status_code == 403
    assert "ada@example.com is in no group" in answer.text
    assert api.client.get("/api/v1/jobs").status_code == 401
    [row] = audited(api, "session.refuse")
    assert (row["actor"], row["outcome"], row["fields"]["groups"]) == ("ada@example.com", "no group", ["interns"])


@ON_BOTH
def test_a_group_sees_its_jobs_alone(api, provider):
    add_jobs(api, "vision-1", "vision-2", "llm-1")
    provider.claims["groups"] = ["vision"]
    log_in(api)
    assert jobs_of(api) == ["vision-1", "vision-2"]
    assert api.client.get("/api/v1/jobs/vision-1").status_code == 200
    assert api.client.get("/api/v1/jobs/llm-1").status_code == 404
    assert api.client.get("/api/v1/tokens").status_code == 403
    silence = {"ends_unix_ns": api.clock.unix_ns() + 10**12, "comment": "known"}
    for job, status in (("vision-1", 201), ("llm-1", 403), ("", 403)):
        answer = api.client.post("/api/v1/silences", json={"job": job, **silence}, headers=OURS)
        assert answer.status_code == status
    change(api.engine, update(Silence).values(job="llm-1"))
    assert api.client.get("/api/v1/silences").json()["items"] == []


@ON_BOTH
def test_what_one_group_allows_does_not_spread_to_the_jobs_of_another(api, provider):
    add_jobs(api, "vision-1", "llm-1", "other")
    provider.claims["groups"] = ["vision", "watchers", "unknown"]
    log_in(api)
    assert jobs_of(api) == ["llm-1", "vision-1"]
    command = {"action": "pause"}
    answers = {
        job: api.client.post(f"/api/v1/jobs/{job}/commands", json=command, headers=OURS).status_code
        for job in ("vision-1", "llm-1", "other")
    }
    assert answers == {"vision-1": 409, "llm-1": 403, "other": 404}  # 409: no agent reports


@pytest.mark.parametrize(
    ("groups", "status"),
    [("platform", 303), (["x", 7, None, "platform"], 303), (None, 403), (7, 403), ({"platform": True}, 403)],
)
def test_groups_may_be_one_text_and_what_is_no_text_is_no_group(api, provider, groups, status):
    provider.claims["groups"] = groups
    assert log_in(api).status_code == status


def forged(**claims):
    return lambda provider: provider.claims.update(claims)


WRONG = {
    "nonce": forged(nonce="of another try"),
    "no nonce": forged(nonce=None),
    "audience": forged(aud="another client"),
    "one of several audiences, and not the authorized party": forged(aud=["rankwatch", "x"], azp="x"),
    "no audience": forged(aud=None),
    "expired": forged(exp=int(time.time()) - 120),
    "no expiry": forged(exp=None),
    "expiry that is no number": forged(exp="never"),
    "from the future": forged(iat=int(time.time()) + 3600, nbf=int(time.time()) + 3600),
    "issuer": forged(iss="https://evil.example"),
    "no subject": forged(sub=None),
    "subject that is no text": forged(sub=7),
    "empty subject": forged(sub=""),
    "signature by none": lambda provider: setattr(provider, "algorithm", "none"),
    "signature by the public key as a secret": lambda provider: setattr(provider, "algorithm", "HS256"),
    "signature by another key of the same name": lambda provider: setattr(provider, "published", [new_key("first")]),
    "signature by a key that is not published": lambda provider: setattr(provider, "published", [new_key("other")]),
}


@pytest.mark.parametrize("lie", WRONG)
def test_an_id_token_that_is_not_right_opens_no_session(api, provider, lie):
    WRONG[lie](provider)
    answer = log_in(api)
    assert answer.status_code == 401, answer.text
    assert "was refused" in answer.text
    assert api.client.get("/api/v1/session").status_code == 401
    assert "rankwatch_session" not in api.client.cookies


def test_the_keys_are_fetched_again_once_for_a_key_that_is_not_known(api, provider):
    assert log_in(api).status_code == 303
    assert log_in(api).status_code == 303
    assert provider.fetched.count("/keys") == 1
    provider.key = new_key("second")
    api.clock.ahead_s += UNKNOWN_KEY_S
    assert log_in(api).status_code == 303
    assert provider.fetched.count("/keys") == 2
    provider.published = [provider.key]
    provider.key = new_key("third")
    for _ in range(3):
        assert log_in(api).status_code == 401
    assert provider.fetched.count("/keys") == 2
    assert provider.fetched.count("/.well-known/openid-configuration") == 1


def test_only_the_browser_that_began_a_login_can_end_it_and_only_once_and_soon(api, provider):
    address = begin(api)
    cookies = dict(api.client.cookies.items())
    wrong_state = f"{CALLBACK_PATH}?{urlsplit(address).query}x"
    assert come_back(api, wrong_state).status_code == 401
    assert come_back(api, address).status_code == 401  # the try is over
    address = begin(api)
    api.client.cookies.clear()
    assert come_back(api, address).status_code == 401  # another browser: the address was sent to somebody else
    address = begin(api)
    cookies = dict(api.client.cookies.items())
    assert come_back(api, address).status_code == 303
    api.client.cookies.clear()
    api.client.cookies.update(cookies)
    assert come_back(api, address).status_code == 401  # the provider takes a code once
    address = begin(api)
    api.clock.ahead_s += LOGIN_S
    assert come_back(api, address).status_code == 401
    assert api.client.get("/api/v1/session").status_code == 401


def test_a_cookie_that_this_service_did_not_make_begins_no_session(api):
    for text in ("x", "gAAAAAB", "%00", '"'):
        api.client.cookies.set("rankwatch_login", text)
        assert come_back(api, f"{CALLBACK_PATH}?code=c&state=s").status_code == 401


def test_a_person_who_gives_up_at_the_provider_comes_back_to_the_login_page(api):
    state = parse_qs(urlsplit(begin(api)).query)["state"][0]
    answer = come_back(api, f"{CALLBACK_PATH}?error=access_denied&error_description=<b>no</b>&state={state}")
    assert answer.status_code == 401
    assert "did not log you in" in answer.text
    assert "<b>" not in answer.text


def test_without_the_provider_people_are_reported_and_tokens_go_on(api, provider):
    address = begin(api)
    provider.away = True
    assert come_back(api, address).status_code == 502
    api.clock.ahead_s += 3600
    answer = api.client.get("/login/oidc", follow_redirects=False)
    assert answer.status_code == 502
    assert "does not answer" in answer.text
    asked = len(provider.fetched)
    assert api.client.get("/login/oidc", follow_redirects=False).status_code == 502
    assert len(provider.fetched) == asked
    token = api.token(Scope.READ)
    assert api.log_in(token).status_code == 201
    provider.away = False
    api.clock.ahead_s += AWAY_S
    provider.claims["exp"] = api.clock.unix_ns() // 10**9 + 300
    assert log_in(api).status_code == 303


def test_a_provider_that_names_itself_otherwise_is_not_believed(api, provider):
    provider.issuer += "/"
    assert api.client.get("/login/oidc", follow_redirects=False).status_code == 502


def test_a_session_that_was_planted_before_the_login_is_not_the_one_after_it(api):
    api.client.cookies.set("rankwatch_session", "rankwatch_session_0123456789ab_planted")
    assert log_in(api).status_code == 303
    assert "planted" not in [one.value for one in api.client.cookies.jar if one.name == "rankwatch_session"][-1]


def test_neither_the_secret_of_the_client_nor_a_code_is_in_the_log(api, provider):
    with capture_logs() as said:
        address = begin(api)
        assert come_back(api, address).status_code == 303
        provider.algorithm = "none"
        assert log_in(api).status_code == 401
    assert "oidc_login_refused" in [one["event"] for one in said]
    assert CLIENT_SECRET not in repr(said)
    assert parse_qs(urlsplit(address).query)["code"][0] not in repr(said)


def test_who_guesses_at_the_callback_is_slowed_down(api, monkeypatch):
    monkeypatch.setattr(gate, "REFUSED_S", 0.0)
    statuses = [come_back(api, f"{CALLBACK_PATH}?code={n}&state=s").status_code for n in range(200)]
    assert statuses[0] == 401
    assert statuses[-1] == 429


def test_the_same_person_with_a_token_of_their_name_does_not_approve_for_themselves(api):
    from rankwatch_service.access.identities import Authenticator

    log_in(api)
    person = Authenticator(api.engine, api.clock).authenticate(api.client.cookies["rankwatch_session"])
    assert person is not None
    requested = (person.person, person.actor)
    with_token = api.post("/api/v1/tokens", {"name": "Ada@example.com", "scopes": ["command"]}).json()["token"]
    token = Authenticator(api.engine, api.clock).authenticate(with_token)
    other = Authenticator(api.engine, api.clock).authenticate(api.admin)
    assert token is not None
    assert other is not None
    assert person.has_requested(*requested)
    assert token.has_requested(*requested)
    assert person.has_requested(token.person, token.actor)
    assert not other.has_requested(*requested)
    assert not person.has_requested("", "policy")


def test_the_login_page_offers_the_provider_where_there_is_one(api, provider, tmp_path):
    page = api.client.get("/login").text
    assert f'content="{urlsplit(provider.issuer).netloc}"' in page
    assert 'content="http://testserver/login/oidc"' in page
    (tmp_path / "without").mkdir()
    with running_api(tmp_path / "without") as without:
        assert 'name="provider"' not in without.client.get("/login").text
        assert without.client.get("/login/oidc").status_code == 404


@pytest.mark.parametrize(
    ("wanted", "page"),
    [
        ("/", "/"),
        ("/jobs/a%2Fb?state=lost&x=1", "/jobs/a%2Fb?state=lost&x=1"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/\t/evil.example", "/"),
        ("/x\\..\\..//evil", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("/a\r\nSet-Cookie: x", "/"),
        ("", "/"),
    ],
)
def test_after_the_login_a_browser_goes_to_pages_of_this_service_alone(wanted, page):
    assert own_page(wanted) == page
