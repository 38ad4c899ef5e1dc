"""Who a request comes from, where reverse proxies stand before the api."""

import pytest
from starlette.datastructures import Headers

from rankwatch_service.api.http.trusted_proxies import TrustedProxies

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
