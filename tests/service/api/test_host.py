"""Which requests are answered: those that ask for the service by its own name, and whom they come from."""

import pytest
from starlette.datastructures import Headers

from rankwatch_service.api.http.gate import TrustedProxies, asked_host, own_names
from rankwatch_service.settings import Settings
from tests.support.service.api import running_api


def names(**settings):
    return own_names(Settings(**settings), "box.lab.example")


def test_the_service_has_the_names_of_its_url_of_its_machine_and_of_the_setting():
    here = {"localhost", "127.0.0.1", "box", "box.lab.example"}
    assert names() == here
    assert names(public_url="https://Watch.example/") == here | {"watch.example"}
    assert names(allowed_hosts="api, Watch.internal") == here | {"api", "watch.internal"}
    assert names(host="gpu7") == {"localhost", "gpu7", "box", "box.lab.example"}


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("Watch.Example.", "watch.example"),
        ("watch.example:8770", "watch.example"),
        ("[::1]:8770", "::1"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_host_is_taken_without_its_port(value, host):
    assert asked_host([value]) == host


@pytest.mark.parametrize(
    "values", [[], [""], ["a", "a"], ["a b"], ["a:b"], ["::1"], ["user@127.0.0.1"], ["127.0.0.1/x"], ["a:8770\t"]]
)
def test_a_missing_second_or_malformed_host_is_refused(values):
    with pytest.raises(ValueError, match="exactly one Host header"):
        asked_host(values)


@pytest.mark.parametrize("host", ["testserver", "localhost:8770", "127.0.0.1:8770", "10.7.7.7", "[::1]:8770"])
def test_own_names_and_addresses_are_answered(api, host):
    assert api.get("/api/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/livez", "/api/v1/jobs", "/static/none"])
def test_another_name_is_refused_before_anything_else(api, path):
    answer = api.get(path, headers={"Host": "evil.example:8770"})
    assert answer.status_code == 421
    assert answer.headers["content-type"] == "application/problem+json"
    assert "RANKWATCH_ALLOWED_HOSTS" in answer.json()["detail"]
    assert 'rankwatch_requests_refused_total{status="421"} 1.0' in api.get("/metrics").text


def test_a_name_of_the_setting_is_answered(tmp_path):
    with running_api(tmp_path, public_url="https://watch.example") as api:
        assert api.get("/livez", headers={"Host": "watch.example"}).status_code == 200


PROXIES = TrustedProxies("10.0.0.0/8, 2001:db8::1,127.0.0.1")


def client_of(peer, **headers):
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return PROXIES.client_of(peer, Headers(raw=sent))


def test_nobody_is_trusted_by_default():
    assert "127.0.0.1" not in TrustedProxies()
    assert "" not in TrustedProxies()


def test_the_word_of_others_does_not_count():
    assert client_of("192.0.2.9", x_forwarded_for="10.0.0.1") == "192.0.2.9"
    assert client_of("192.0.2.9", forwarded="for=10.0.0.1") == "192.0.2.9"


@pytest.mark.parametrize(
    ("added", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("203.0.113.5, 192.0.2.1", "192.0.2.1"),  # the left one is what the client itself sent
        ("203.0.113.5, 192.0.2.1, 10.9.9.9,10.1.1.1", "192.0.2.1"),
        ("10.9.9.9, 10.1.1.1", "10.9.9.9"),
        ("192.0.2.1:4711", "192.0.2.1"),
        ("[2001:db8::7]:4711", "2001:db8::7"),
        ("2001:db8::7", "2001:db8::7"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1, nonsense, 10.1.1.1", "10.1.1.1"),
        ("", "10.0.0.1"),
        ("unknown", "10.0.0.1"),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_no_trusted_proxy(added, client):
    assert client_of("10.0.0.1", x_forwarded_for=added) == client


def test_a_header_that_is_sent_twice_is_one_list():
    headers = Headers(raw=[(b"x-forwarded-for", b"203.0.113.5"), (b"x-forwarded-for", b"192.0.2.1, 10.1.1.1")])
    assert PROXIES.client_of("10.0.0.1", headers) == "192.0.2.1"


@pytest.mark.parametrize(
    ("added", "client"),
    [
        ("for=192.0.2.1", "192.0.2.1"),
        ('for="[2001:db8::7]:4711";proto=https;by=10.0.0.1', "2001:db8::7"),
        ("for=203.0.113.5, proto=https; For=192.0.2.1, for=10.1.1.1", "192.0.2.1"),
        ("for=_hidden, for=10.1.1.1", "10.1.1.1"),
        ("proto=https", "10.0.0.1"),
    ],
)
def test_forwarded_says_the_same(added, client):
    assert client_of("10.0.0.1", forwarded=added) == client
    assert client_of("10.0.0.1", forwarded="for=198.51.100.1", x_forwarded_for="192.0.2.1") == "192.0.2.1"
