"""Which service and which token a command uses."""

import json
import stat

import pytest

from rankwatch_service.cli.endpoint import URL_DEFAULT, Places, ServiceEndpoint, find_endpoint, store_endpoint
from rankwatch_service.cli.errors import CliError


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
