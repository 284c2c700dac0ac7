import psutil
import pytest

from deployments.cluster.own_address import NoAddress, own_address


def test_an_interface_or_its_address_is_taken():
    names = [name for name, entries in psutil.net_if_addrs().items() if any(e.address == "127.0.0.1" for e in entries)]
    assert own_address(names[0]) == "127.0.0.1" == own_address("127.0.0.1")


def test_another_interface_is_refused_with_those_that_exist():
    with pytest.raises(NoAddress, match=r"--interface is 'none0'; this machine has .*127.0.0.1"):
        own_address("none0")


def test_the_default_is_no_loopback_address():
    try:
        assert not own_address().startswith("127.")
    except NoAddress as refused:
        assert "give --interface" in str(refused)
