"""Which addresses webhooks may go to."""

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from rankwatch_service.allow_list import EVERY_ADDRESS, allow_list
from rankwatch_service.notify.address import (
    ADDRESSES_MAX,
    METADATA,
    AddressError,
    check_address,
    checked_url,
    masked_url,
    resolved,
)

NOTHING = allow_list("")
NAT64, SIX_TO_FOUR = ip_address("64:ff9b::"), ip_address("2002::")
NEVER = [
    *("169.254.169.254", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "100.100.100.200", "::", "fe80::1"),
    *("ff02::1", "fd00:ec2::254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::"),
]
PRIVATE = [
    *("127.0.0.1", "127.9.9.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd12::1"),
    "::ffff:10.0.0.1",
]


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("private", [EVERY_ADDRESS, NOTHING, allow_list("host.example")])
def test_webhooks_never_go_to_link_local_reserved_or_metadata_addresses(address, private):
    with pytest.raises(AddressError, match="never"):
        check_address("host.example", ip_address(address), private)


def forms(address: IPv4Address | IPv6Address) -> list[str]:
    """An address in every form in which it can be written."""
    if isinstance(address, IPv6Address):
        return [str(address), address.exploded]
    number = int(address)
    return [str(address), f"::ffff:{address}", str(NAT64 + number), str(SIX_TO_FOUR + (number << 80))]


@pytest.mark.parametrize("address", METADATA, ids=str)
def test_metadata_services_are_refused_in_every_form_whatever_is_allowed(address):
    for form in forms(address):
        for private in (EVERY_ADDRESS, allow_list("host.example"), allow_list(str(address))):
            with pytest.raises(AddressError, match="never"):
                check_address("host.example", ip_address(form), private)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_need_a_setting_that_allows_them(address):
    check_address("host.example", ip_address(address), EVERY_ADDRESS)
    check_address("Host.example", ip_address(address), allow_list("other.example, host.example"))
    for private in (NOTHING, allow_list("other.example, 10.200.0.0/16")):
        with pytest.raises(AddressError, match=r"private.*RANKWATCH_NOTIFY_ALLOW"):
            check_address("host.example", ip_address(address), private)


def test_a_network_in_the_list_allows_its_addresses_in_every_form():
    private = allow_list("10.0.0.0/9, ::1")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "::1"):
        check_address("host.example", ip_address(address), private)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:4700::1111", "::ffff:93.184.215.14"])
def test_public_addresses_are_allowed(address):
    check_address("host.example", ip_address(address), NOTHING)


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("https://pager.example/hook?x=1", ("pager.example", 443)),
        ("http://pager.example/", ("pager.example", 80)),
        ("http://127.0.0.1:9999/hook", ("127.0.0.1", 9999)),
        ("https://[2606:4700::1111]/", ("2606:4700::1111", 443)),
    ],
)
def test_web_addresses_are_split(url, where):
    assert checked_url(url) == where


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://a/", "file:///etc/passwd", "gopher://a:70/", "unix:///run/x.sock", "http:///path"),
        *("http://user@evil.example/", "http://good.example:80@evil.example/"),
        *("http://a:22/", "http://a:25/", "http://a:99999/", "http://a:b/", "http://[::1/", "http://a/b c"),
        *("http://a/\r\nX-Injected: 1", "http://a\t.example/", "http://a/\u202e", "https://a/" + "x" * 3_000),
    ],
)
def test_other_urls_are_refused(url):
    with pytest.raises(AddressError):
        checked_url(url)


@pytest.mark.parametrize("host", ["2130706433", "0177.0.0.1", "127.1", "0x7f.1", "localhost"])
def test_other_spellings_of_loopback_are_seen_through(host):
    with pytest.raises(AddressError, match="private"):
        asyncio.run(resolved(host, 80, NOTHING))


def answers(*addresses):
    async def getaddrinfo(self, host, port, **_kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return getaddrinfo


def test_one_bad_answer_among_good_ones_refuses_the_name(monkeypatch):
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", answers("93.184.215.14", "169.254.169.254"))
    with pytest.raises(AddressError, match="never"):
        asyncio.run(resolved("rebinding.example", 80, EVERY_ADDRESS))


def test_addresses_are_tried_in_the_name_servers_order_up_to_the_bound(monkeypatch):
    given = [f"93.184.215.{n}" for n in (9, 1, 5, 1, 2, 3, 4)]
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", answers(*given))
    known = [f"93.184.215.{n}" for n in (9, 1, 5, 2)][:ADDRESSES_MAX]
    assert asyncio.run(resolved("many.example", 80, NOTHING)) == known


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example/T00/B00/secret", "https://hooks.example/…"),
        ("http://10.0.0.1:9093/?key=secret", "http://10.0.0.1:9093/…"),
        ("https://hooks.example?key=secret", "https://hooks.example/…"),
        ("https://hooks.example/", "https://hooks.example/"),
    ],
)
def test_a_masked_url_says_where_and_not_with_which_secret(url, shown):
    assert masked_url(url) == shown
