"""Nobody between agents and the service, nor in the place of either, learns a token or is believed."""

import os
import ssl
import subprocess
import sys
from contextlib import closing
from hashlib import sha256
from urllib.parse import urlsplit

import httpx2
import pytest

from rankwatch.notices import notice_path, read_notice
from rankwatch.trust import Trust, pin_of
from rankwatch_service.access.refusals import TRIES_MAX
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import TOKEN, AgentService
from tests.support.ranks.recording_rank import RecordingRank
from tests.support.service.machine import make_certificate
from tests.support.service.process import Http, Role, children, running_up, until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.ci]

HALF_OPEN = 300


class Files:
    """A certificate that signs itself, and its key."""

    def __init__(self, folder, name):
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.renew()

    def renew(self):
        make_certificate(self.certificate, self.key)

    @property
    def served(self):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context

    @property
    def options(self):
        return "--tls-cert", str(self.certificate), "--tls-key", str(self.key)


def command(role, *arguments, **environment):
    """A command of the user who started the service."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RANKWATCH_")}
    return subprocess.run(
        [sys.executable, "-m", "rankwatch_service", *arguments],
        env=clean | {"XDG_CONFIG_HOME": str(role.folder / "config")} | environment,
        cwd=role.folder,
        capture_output=True,
        text=True,
        check=False,
    )


def shown(url):
    """The certificate that the service shows, in PEM form."""
    parts = urlsplit(url)
    return ssl.get_server_certificate((parts.hostname, parts.port))


def client_of(up):
    """A client that accepts the certificate that is shown, and no other."""
    pin = sha256(ssl.PEM_cert_to_DER_cert(shown(up.url))).hexdigest()
    return httpx2.Client(base_url=up.url, verify=Trust(pin).context(), trust_env=False, timeout=30)


def test_a_fake_server_gets_neither_token_nor_telemetry_and_the_training_output_says_so(tmp_path):
    ours, theirs = Files(tmp_path, "ours"), Files(tmp_path, "theirs")
    recorders = tmp_path / "recorders"
    recorders.mkdir(mode=0o700)
    with AgentService(theirs.served) as fake:
        environment = {"RANKWATCH_URL": fake.url, "RANKWATCH_TOKEN": f"{TOKEN}.{pin_of(ours.certificate)}"}
        with RecordingRank(recorders) as rank, AgentProcess(recorders, environment):
            rank.do("steps", 10)
            notice = until("notice", lambda: read_notice(notice_path(str(recorders), "gpt")))
            assert "another certificate than the token names, so nothing was sent" in notice.text
            assert (fake.tokens, fake.batches, fake.views) == ([], [], [])
            fake.stop()
            fake._tls = ours.served
            fake.start()
            until("telemetry at the real service", lambda: len(fake.rows()) == 10)
            assert set(fake.tokens) == {f"Bearer {TOKEN}"}, "the pin is no part of what is sent"


# To other machines an address is theirs; this one reaches the fake service here, and is no loopback address.
OTHER_MACHINE = "0.0.0.0"


def test_an_agent_sends_nothing_over_plain_http_to_another_machine_unless_somebody_wants_it(tmp_path):
    with AgentService() as fake, RecordingRank(tmp_path) as rank:
        environment = fake.environment | {"RANKWATCH_URL": fake.url.replace("127.0.0.1", OTHER_MACHINE)}
        rank.do("steps", 10)
        with AgentProcess(tmp_path, environment) as agent:
            notice = until("notice", lambda: read_notice(notice_path(str(tmp_path), "gpt")))
            assert f"http://{OTHER_MACHINE}" in notice.text
            assert "use https, or RANKWATCH_INSECURE=1" in notice.text
            assert (fake.tokens, fake.batches) == ([], [])
        until("the agent is gone", lambda: not agent.running())
        with AgentProcess(tmp_path, environment, arguments=["--insecure"]):
            until("telemetry", lambda: len(fake.rows()) == 10)


def test_a_command_sends_nothing_over_plain_http_to_another_machine_unless_somebody_wants_it(tmp_path):
    with running_up(tmp_path, "--host", OTHER_MACHINE, RANKWATCH_INSECURE="true") as up:
        assert up.url.startswith("http://127.0.0.1:")
        assert command(up, "jobs").returncode == 0
        elsewhere = ("--url", up.url.replace("127.0.0.1", OTHER_MACHINE), "--token", up.token())
        refused = command(up, "jobs", *elsewhere)
        assert refused.returncode == 2
        assert "use https, or RANKWATCH_INSECURE=1" in refused.stderr
        assert command(up, "jobs", *elsewhere, RANKWATCH_INSECURE="1").returncode == 0
        assert command(up, "login", *elsewhere[1:]).returncode == 2
        assert command(up, "login", *elsewhere[1:], "--insecure").returncode == 0
        assert command(up, "jobs").returncode == 0, "what the login said holds for later commands"


@pytest.mark.parametrize("role", ["up", "api"])
def test_nothing_listens_without_tls_where_others_reach_it_unless_somebody_wants_it(tmp_path, role):
    data = ("--data", str(tmp_path / "data"), "--port", "0")
    refused = Role(tmp_path, role, *data, "--host", "0.0.0.0")
    refused.start()
    assert refused.process.wait(60) == 2
    [line] = refused.said().splitlines()
    assert all(remedy in line for remedy in ("--tls-cert", "reverse proxy", "--insecure"))
    assert not (tmp_path / "data").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("files"), "served")


@pytest.fixture(scope="module")
def up(tmp_path_factory, files):
    with running_up(tmp_path_factory.mktemp("up"), "--host", "0.0.0.0", *files.options) as up:
        yield up


def test_on_its_machine_nothing_more_is_to_be_typed_and_other_hosts_get_a_pinned_token(up, files, tmp_path):
    assert up.url.startswith("https://127.0.0.1:")
    assert command(up, "jobs").returncode == 0
    recorders = tmp_path / "recorders"
    recorders.mkdir(mode=0o700)
    create = ("create", "hosts", "--scope", "ingest")
    made = [command(up, "token", *how).stdout.strip() for how in (create, ("job", "there"))]
    assert all(token.endswith(f".{pin_of(files.certificate)}") for token in made)
    elsewhere = {"RANKWATCH_URL": up.url, "RANKWATCH_TOKEN": made[-1]}
    for job, environment in (("here", {"XDG_CONFIG_HOME": str(up.folder / "config")}), ("there", elsewhere)):
        with RecordingRank(recorders, job=job, world_size=1) as rank, AgentProcess(recorders, environment, job=job):
            rank.do("steps", 10)
            until(f"job {job}", lambda job=job: job in command(up, "jobs", "--json").stdout)
    assert "." not in command(up, "token", "create", "me", "--scope", "read").stdout


def test_browsers_are_held_to_https(up):
    with client_of(up) as client:
        answer = client.get("/livez")
        assert answer.headers["strict-transport-security"].startswith("max-age=")
        login = up.login
        same = {"Sec-Fetch-Site": "same-origin"}
        cookie = client.post("/api/v1/session", json={"token": login}, headers=same).headers["set-cookie"]
        assert cookie.startswith("__Host-")
        assert "Secure" in cookie


def test_a_renewed_certificate_is_shown_without_a_restart_and_a_broken_one_is_not(up, files):
    api, before = children(up.process.pid)["api"], files.certificate.read_text()
    assert shown(up.url) == before
    files.certificate.write_text("half a certif")
    until("the log says so", lambda: "certificate_not_renewed" in up.said())
    assert shown(up.url) == before
    files.renew()
    until("the renewed certificate", lambda: shown(up.url) == files.certificate.read_text())
    assert children(up.process.pid)["api"] == api
    assert up.said().count("certificate_not_renewed") == 1
    assert command(up, "jobs").returncode == 0, "commands here expect the renewed one too"


def test_connections_that_never_shake_hands_keep_nobody_out(up):
    waiting = [up.socket() for _ in range(HALF_OPEN)]
    with client_of(up) as client:
        assert client.get("/livez").status_code == 200
    assert waiting[0].recv(1) == b"", "the oldest made room for the newest"
    for one in waiting:
        one.close()


def test_plain_http_gets_no_answer(up):
    with up.socket() as one:
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not one.recv(100).startswith(b"HTTP")


def guess(http, added):
    """The status of a request with a guessed token, to which proxies seem to have added this address."""
    headers = {"Authorization": "Bearer rankwatch_api_000000000000_guess", "X-Forwarded-For": added}
    return http.ask("GET", "/api/v1/jobs", headers=headers).status_code


def test_behind_a_trusted_proxy_each_client_has_its_own_brake_and_name(tmp_path):
    with running_up(tmp_path, RANKWATCH_TRUSTED_PROXIES="127.0.0.0/8") as up, closing(Http(up.url)) as http:
        answers = [guess(http, f"198.51.100.{number}, 192.0.2.1") for number in range(TRIES_MAX + 1)]
        assert answers == [401] * TRIES_MAX + [429]
        assert guess(http, "192.0.2.2") == 401
    # What was refused is written to the audit trail at the latest when the api ends.
    with running_up(tmp_path) as up, closing(Http(up.url, up.token())) as http:
        lines = http.ask("GET", "/api/v1/audit").json()["items"]
        assert {line["source"] for line in lines if line["action"] == "request.refuse"} == {"192.0.2.1", "192.0.2.2"}
