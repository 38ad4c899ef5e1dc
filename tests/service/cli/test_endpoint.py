"""Which service and which token a command uses."""

import json
import ssl
import stat

import pytest

from rankwatch.client.connection import URL_DEFAULT, Places, ServiceEndpoint
from rankwatch.trust import Trust, pin_of
from rankwatch_service.cli.client import CliClient, find_endpoint, store_endpoint
from rankwatch_service.cli.errors import CliError
from tests.support.agent.service import AgentService
from tests.support.service.machine import make_certificate


@pytest.fixture
def config(tmp_path):
    return tmp_path / "rankwatch" / "client.json"


def found(config, url=None, token=None, **environment):
    return find_endpoint(url, token, environment, Places(config, config.with_name("local.json")))


def test_without_a_login_the_service_that_up_started_is_used(config):
    store_endpoint(ServiceEndpoint("http://127.0.0.1:9999", "l"), config.with_name("local.json"))
    assert found(config) == ServiceEndpoint("http://127.0.0.1:9999", "l")
    assert found(config, "http://127.0.0.1:9999/") == ServiceEndpoint("http://127.0.0.1:9999", "l")
    assert found(config, "http://elsewhere") == ServiceEndpoint("http://elsewhere", "")
    store_endpoint(ServiceEndpoint("http://file", "f"), config)
    assert found(config) == ServiceEndpoint("http://file", "f")


def test_a_malformed_file_of_up_is_reported_with_a_remedy(config):
    config.parent.mkdir()
    config.with_name("local.json").write_text("{")
    with pytest.raises(CliError, match=r"local.json .*rankwatch up"):
        found(config)


def test_without_configuration_the_service_on_this_machine_is_used(config):
    assert found(config) == ServiceEndpoint(URL_DEFAULT, "")


def test_option_beats_environment_beats_file(config):
    store_endpoint(ServiceEndpoint("http://file", "f"), config)
    environment = {"RANKWATCH_URL": "http://env", "RANKWATCH_TOKEN": "e"}
    assert found(config) == ServiceEndpoint("http://file", "f")
    assert found(config, **environment) == ServiceEndpoint("http://env", "e")
    assert found(config, "http://option/", "o", **environment) == ServiceEndpoint("http://option", "o")


def test_a_token_is_never_sent_to_another_service_than_its_own(config):
    store_endpoint(ServiceEndpoint("http://file", "f"), config)
    assert found(config, "http://elsewhere") == ServiceEndpoint("http://elsewhere", "")
    assert found(config, RANKWATCH_URL="http://elsewhere") == ServiceEndpoint("http://elsewhere", "")
    assert found(config, "http://file/") == ServiceEndpoint("http://file", "f")


def test_what_the_service_has_to_prove_comes_with_its_token(config, tmp_path):
    pin = "ab" * 32
    store_endpoint(ServiceEndpoint("http://file", "f", Trust(insecure=True)), config)
    assert found(config) == ServiceEndpoint("http://file", "f", Trust(insecure=True))
    assert found(config, "http://elsewhere", "o") == ServiceEndpoint("http://elsewhere", "o")
    assert found(config, "https://x", f"o.{pin}") == ServiceEndpoint("https://x", f"o.{pin}", Trust(pin))
    environment = {"RANKWATCH_CA_FILE": "ca.pem", "RANKWATCH_INSECURE": "1"}
    assert found(config, "https://x", "o", **environment).trust == Trust(ca_file="ca.pem", insecure=True)
    with pytest.raises(CliError, match="not copied as a whole"):
        found(config, "https://x", "o.abc")


@pytest.mark.parametrize(
    ("endpoint", "reported"),
    [
        (ServiceEndpoint("http://10.0.0.1:8770", "t"), "RANKWATCH_INSECURE=1"),
        (ServiceEndpoint("ftp://h", "t"), "is not the URL of a service"),
        (ServiceEndpoint("https://h", "t", Trust(ca_file="/nonexistent")), "/nonexistent cannot be used: No such file"),
    ],
)
def test_a_client_refuses_before_anything_is_sent(endpoint, reported):
    with pytest.raises(CliError, match=reported):
        CliClient(endpoint)


def test_a_client_sends_no_token_to_who_does_not_prove_itself(tmp_path):
    make_certificate(tmp_path / "c.pem", tmp_path / "k.pem")
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    with AgentService(served) as service:
        for trust, reported in (
            (Trust("ab" * 32), r"^https://127.0.0.1:\d+: the service has another certificate"),
            (Trust(), "not trusted .self-signed"),
        ):
            client = CliClient(ServiceEndpoint(service.url, "t", trust))
            with pytest.raises(CliError, match=reported):
                client.post("/api/v1/agents/view", {})
        assert service.tokens == []
        pin = pin_of(tmp_path / "c.pem")
        client = CliClient(ServiceEndpoint(service.url, f"t.{pin}", Trust(pin)))
        with pytest.raises(CliError, match="enrol again"):  # what the fake service says
            client.post("/api/v1/agents/view", {})
        assert service.tokens == ["Bearer t"]


def test_a_token_without_a_url_is_used_with_the_default_service(config):
    store_endpoint(ServiceEndpoint("http://file", "f"), config)
    assert found(config, token="o") == ServiceEndpoint("http://file", "o")
    assert found(config, RANKWATCH_TOKEN="e") == ServiceEndpoint("http://file", "e")


def test_only_its_owner_can_read_the_file_and_it_is_replaced_atomically(config):
    store_endpoint(ServiceEndpoint("http://a", "1"), config)
    store_endpoint(ServiceEndpoint("http://b", "2"), config)
    assert json.loads(config.read_text()) == {"url": "http://b", "token": "2"}
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert [entry.name for entry in config.parent.iterdir()] == ["client.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"url": "x"}'])
def test_a_malformed_file_is_reported_with_a_remedy(config, content):
    config.parent.mkdir()
    config.write_text(content)
    with pytest.raises(CliError, match=r"client.json .*rankwatch login"):
        found(config)
