"""own_address: finds the address of this machine by which the other machines of a cluster reach it."""

import socket
from ipaddress import ip_address

import psutil

SOME_ADDRESS = ("192.0.2.1", 9)
"""An address of documentation (RFC 5737): the way there is that of the default route. Nothing is sent."""


class NoAddress(Exception):
    """No address can be used; the message is for the operator."""


def own_address(interface: str | None = None) -> str:
    """Return an IPv4 address of this machine.

    Args:
        interface: Name of an interface, such as en0, or an address; None: that of the default route.

    Raises:
        NoAddress: There is none, or more than one and no default route.
    """
    found = _addresses()
    if interface is not None:
        if interface in found.values():
            return interface
        if interface in found:
            return found[interface]
        raise NoAddress(f"--interface is {interface!r}; this machine has {_listed(found)}")
    outside = {name: address for name, address in found.items() if not ip_address(address).is_loopback}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(SOME_ADDRESS)
            if (address := probe.getsockname()[0]) in outside.values():
                return address
        except OSError:
            pass  # there is no default route
    if len(outside) != 1:
        raise NoAddress(f"the other machines must reach this one: give --interface, one of {_listed(outside)}")
    return next(iter(outside.values()))


def addresses_here() -> list[str]:
    """Return the IPv4 addresses of this machine besides loopback."""
    return [address for address in _addresses().values() if not ip_address(address).is_loopback]


def _addresses() -> dict[str, str]:
    """Return interface to its first IPv4 address."""
    return {
        name: next(entry.address for entry in entries if entry.family == socket.AF_INET)
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.family == socket.AF_INET for entry in entries)
    }


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in sorted(found.items())) or "no address"
