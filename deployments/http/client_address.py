"""Where a request comes from: the client's address, as far as limits and access depend on it."""

import ipaddress

from starlette.types import Scope

_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


def client_host(scope: Scope) -> str | None:
    """The address of the peer, or the one that a gateway on this machine has forwarded; None if it is unknown."""
    client = scope.get("client")
    return client[0] if client else None


def address_group(host: str | None) -> str | None:
    """What counts as one client in limits per address: an IPv4 address, or an IPv6 network of 64 bits.

    None means that no such limit holds: the address is unknown or loopback. All local programs, and a gateway that does
    not forward the addresses of its clients, share the loopback address, and a server that only its own machine
    reaches must be able to use all of its room.
    """
    address = _parsed(host)
    if address is None or address.is_loopback:
        return None
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


def is_local(scope: Scope) -> bool:
    """Whether the request was sent by a program on this machine, and not through a gateway on it."""
    address = _parsed(client_host(scope))
    is_forwarded = any(name in _FORWARDED for name, _ in scope["headers"])
    return address is not None and address.is_loopback and not is_forwarded


def is_loopback_name(host: str) -> bool:
    """Whether a host name or IP address (without port, IPv6 without brackets) means this machine and no other."""
    name = host.lower().removesuffix(".")
    address = _parsed(host)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def is_ip_address(host: str) -> bool:
    return _parsed(host) is not None


def _parsed(host: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address
