"""The client's address, for limits per address and for access rules."""

import ipaddress

from starlette.types import Scope

_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


def client_host(scope: Scope) -> str | None:
    """Return the address of the peer, or the one that a gateway on this machine forwarded; None if unknown."""
    client = scope.get("client")
    return client[0] if client else None


def address_group(host: str | None) -> str | None:
    """Return the unit of limits per address: an IPv4 address or an IPv6 /64 network.

    Returns None, which exempts the request, for an unknown or loopback address: all local programs share loopback, as
    do the clients of a gateway that does not forward addresses, and a local server must be able to use its capacity.
    """
    address = _parsed(host)
    if address is None or address.is_loopback:
        return None
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


def is_local(scope: Scope) -> bool:
    """Tell whether a program on this machine sent the request, as opposed to a gateway on it."""
    address = _parsed(client_host(scope))
    is_forwarded = any(name in _FORWARDED for name, _ in scope["headers"])
    return address is not None and address.is_loopback and not is_forwarded


def is_loopback_name(host: str) -> bool:
    """Tell whether a host name or IP address (without port, IPv6 without brackets) is a loopback one."""
    name = host.lower().removesuffix(".")
    address = _parsed(host)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def is_ip_address(host: str) -> bool:
    """Tell whether a host is an IPv4 or IPv6 address, IPv6 without brackets."""
    return _parsed(host) is not None


def _parsed(host: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address
