"""Lists of hosts in settings."""

from ipaddress import ip_address

import pytest
from pydantic import ValidationError

from rankwatch_service.allow_list import allow_list
from rankwatch_service.settings import Settings


def test_a_host_is_allowed_by_its_name_or_its_address():
    listed = allow_list(" Alert.internal, 10.1.0.0/16 ,::1,, 192.168.7.9")
    assert listed.allows("alert.INTERNAL", ip_address("10.9.9.9"))
    assert listed.allows("other", ip_address("10.1.2.3"))
    assert listed.allows("other", ip_address("::1"))
    assert listed.allows("other", ip_address("192.168.7.9"))
    assert not listed.allows("other", ip_address("10.9.9.9"))
    assert not listed.allows("sub.alert.internal", ip_address("10.9.9.9"))


@pytest.mark.parametrize("wrong", ["10.0.0.0/33", "10.1.2.3/8", "http://a", "a b", "*", "1.2.3", "a:80", "-"])
def test_an_entry_that_is_no_host_is_refused(wrong):
    with pytest.raises(ValueError, match="neither a host name, an address nor a network"):
        allow_list(f"good, {wrong}")
    with pytest.raises(ValidationError, match="neither a host name"):
        Settings(notify_allow=wrong)


def test_private_targets_are_none_all_or_those_of_the_list():
    address = ip_address("10.1.2.3")
    assert not Settings().private_targets().allows("host", address)
    assert Settings(notify_allow="10.0.0.0/8").private_targets().allows("host", address)
    assert Settings(notify_allow_private=True).private_targets().allows("host", address)


def test_names_that_requests_ask_for_are_names():
    with pytest.raises(ValidationError, match="allowed_hosts are names"):
        Settings(allowed_hosts="watch.example, 10.0.0.1")
