"""What a stolen or guessed token, a used login link and a hostile name reach in `rankwatch up`: nothing more."""

import subprocess
import sys

import pytest

from rankwatch import wire
from rankwatch_service.access.refusals import TRIES_MAX
from tests.support.service.process import Up, free_port, running_up, until
from tests.support.values.batches import batch, ranks, table

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MSGPACK = {"Content-Type": "application/msgpack"}
ELSEWHERE = {"X-Forwarded-For": "203.0.113.5"}
OWN_PAGE = {"Sec-Fetch-Site": "same-origin"}
SECRET_PATH = "T00SECRET/B00SECRET"


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    # Behind a proxy on this machine, so that a test can come from another one.
    with running_up(tmp_path_factory.mktemp("up"), RANKWATCH_TRUSTED_PROXIES="127.0.0.1") as up:
        yield up


@pytest.fixture
def mine(up, asking):
    return asking(up.kept("ingest-token"))


def command(up: Up, *words: str) -> str:
    """What a command prints to stdout, on the machine of the service."""
    reported = subprocess.run(
        [sys.executable, "-m", "rankwatch_service", *words, "--data", str(up.data)],
        env=up._environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return reported.stdout.strip()


def telemetry(job: str) -> dict:
    steps = table([1], [0], step_time_s=[0.5], loss=[1.0])
    return {"content": wire.encode(batch(job=job, ranks=ranks(1), steps=steps)), "headers": MSGPACK}


def test_the_tokens_that_up_keeps_are_good_on_its_machine_only(up, asking):
    for file in ("ingest-token", "local-token"):
        stolen = asking(up.kept(file))
        path = "/api/v1/telemetry" if file == "ingest-token" else "/api/v1/jobs"
        how = telemetry("mine") if file == "ingest-token" else {}
        method = "POST" if how else "GET"
        assert stolen.request(method, path, **how).is_success
        refused = stolen.request(method, path, **how | {"headers": how.get("headers", {}) | ELSEWHERE})
        assert refused.status_code in {401, 403}, file


def test_the_token_of_a_job_is_good_for_this_job_its_hosts_and_its_lifetime(up, asking):
    stolen = asking(command(up, "token", "job", "gpt", "--hosts", "1", "--for", "1d").partition(".")[0])
    assert stolen.post("/api/v1/telemetry", **telemetry("another")).status_code == 403
    assert stolen.post("/api/v1/agents/enrol", json={"job": "another", "host": "h"}).status_code == 403
    assert stolen.get("/api/v1/jobs").status_code == 403
    assert stolen.post("/api/v1/agents/enrol", json={"job": "gpt", "host": "node-1"}).status_code == 201
    full = stolen.post("/api/v1/agents/enrol", json={"job": "gpt", "host": "thief"})
    assert (full.status_code, "Retry-After" in full.headers) == (429, True)
    brief = asking(command(up, "token", "job", "brief", "--hosts", "9", "--for", "8s").partition(".")[0])
    assert brief.post("/api/v1/telemetry", **telemetry("brief")).status_code == 202
    until("expiry", lambda: brief.post("/api/v1/telemetry", **telemetry("brief")).status_code == 401)


def test_a_login_link_opens_one_session_and_nothing_else(up, asking):
    link = asking(up.login)
    assert link.get("/api/v1/jobs").status_code == 401, "before it was used"
    browser = asking()
    login = {"json": {"token": up.login}, "headers": OWN_PAGE}
    assert browser.post("/api/v1/session", **login).is_success
    assert browser.get("/api/v1/jobs").is_success
    assert asking().post("/api/v1/session", **login).status_code == 401, "a second time"
    assert link.get("/api/v1/jobs").status_code == 401, "after it was used"


@pytest.mark.ci
def test_whoever_guesses_tokens_is_slowed_counted_and_audited_and_holders_go_on(admin, asking):
    assert admin.get("/api/v1/jobs").is_success
    thief = asking("rankwatch_api_000000000000_guess")
    statuses = [thief.get("/api/v1/jobs", headers=ELSEWHERE).status_code for _ in range(TRIES_MAX + 5)]
    assert statuses.count(401) <= TRIES_MAX
    assert set(statuses[TRIES_MAX:]) == {429}
    assert admin.get("/api/v1/jobs").is_success

    def audited() -> int:
        rows = admin.get("/api/v1/audit").json()["items"]
        return sum(one["fields"]["times"] for one in rows if one["source"] == ELSEWHERE["X-Forwarded-For"])

    until("audit", lambda: audited() >= TRIES_MAX + 5)
    assert 'rankwatch_requests_refused_total{status="429"}' in admin.get("/metrics").text


def test_an_ingest_token_opens_no_session(up, asking):
    login = {"json": {"token": up.kept("ingest-token")}, "headers": OWN_PAGE}
    assert asking().post("/api/v1/session", **login).status_code == 403


def test_the_url_of_a_receiver_is_told_to_admins_alone_and_stands_in_no_log(up, admin, mine, asking):
    url = f"http://127.0.0.1:{free_port()}/services/{SECRET_PATH}"
    added = admin.post("/api/v1/receivers", json={"name": "pager", "url": url})
    assert added.status_code == 201, added.text
    steps = table([1], [0], step_time_s=[0.5], loss=[float("nan")])
    ill = wire.encode(batch(job="ill", ranks=ranks(1), steps=steps))
    assert mine.post("/api/v1/telemetry", content=ill, headers=MSGPACK).is_success
    until("a try", lambda: admin.get("/api/v1/deliveries").json()["items"])
    reader = asking(command(up, "token", "create", "reader", "--scope", "read"))
    for path in ("/api/v1/receivers", "/api/v1/deliveries", "/api/v1/audit"):
        assert SECRET_PATH not in reader.get(path).text
    assert SECRET_PATH in admin.get("/api/v1/receivers").text
    assert SECRET_PATH not in up.said()


@pytest.mark.parametrize(
    "name",
    ["..", ".", "gpt\u200b", "\u202etpg", "a\x00b", "a\nb", ""],
    ids=lambda name: name.encode("unicode_escape").decode(),
)
def test_a_name_that_deceives_people_or_paths_is_no_name_of_a_job(mine, name):
    assert mine.post("/api/v1/telemetry", **telemetry(name)).status_code in {400, 422}


@pytest.mark.parametrize(
    "url", ["http://h/a b", "http://h/\r\nX: 1", "ftp://h/", "http://169.254.169.254/", "javascript:alert(1)"]
)
def test_a_receiver_has_a_plain_url(admin, url):
    answer = admin.post("/api/v1/receivers", json={"name": "evil", "url": url})
    assert answer.status_code == 422
    assert answer.json()["detail"]


def test_another_origin_or_scheme_writes_nothing_with_the_cookie_of_a_browser(up, admin, asking):
    browser = asking()
    link = command(up, "token", "login").partition("#")[2]
    assert browser.post("/api/v1/session", json={"token": link}, headers=OWN_PAGE).is_success
    host = up.url.removeprefix("http://")
    for origin in ("http://evil.example", f"https://{host}", "null"):
        answer = browser.put("/api/v1/policy/hands-off", json={"hands_off": True}, headers={"Origin": origin})
        assert answer.status_code == 403, origin
    assert browser.put("/api/v1/policy/hands-off", json={"hands_off": False}, headers={"Origin": up.url}).is_success
