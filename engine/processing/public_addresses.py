"""Resolver: resolves host names off the event loop; is_public: tells which addresses belong to the public internet."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

IPV6_UNICAST = ipaddress.ip_network("2000::/3")
IPV4_IN_LAST_BITS = (ipaddress.ip_network("::/96"), ipaddress.ip_network("64:ff9b::/96"))
"""IPv4-compatible and NAT64 networks: IPv6 addresses that reach the IPv4 address in their last 32 bits."""
CLOUD_PLATFORMS = (ipaddress.ip_network("168.63.129.16/32"), ipaddress.ip_network("192.0.0.0/24"))
"""Platform services of clouds at addresses that Python considers public: Azure's, and Oracle's (192.0.0.192, in a range
that RFC 6890 reserves for protocol assignments)."""

NUM_LOOKUPS = 32


class Resolver:
    """Resolves names in its own threads, as a lookup cannot be cancelled and may take many seconds."""

    def __init__(self, look_up: Callable[..., list[Any]] = socket.getaddrinfo, num_lookups: int = NUM_LOOKUPS):
        self._look_up = look_up
        self._threads = ThreadPoolExecutor(num_lookups, "name-lookup")

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, in the order in which to try them. Raises OSError, UnicodeError."""
        loop = asyncio.get_running_loop()
        infos = await loop.run_in_executor(self._threads, lambda: self._look_up(host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(info[4][0]) for info in infos))


def is_public(address: str) -> bool:
    """Tell whether an address, in any notation, belongs to the public internet."""
    return all(_is_public(ip) for ip in _unwrap(ipaddress.ip_address(address)))


def _unwrap(ip: IPAddress) -> list[IPAddress]:
    """Return the IPv4 addresses that an IPv6 address embeds, else the address itself."""
    if not isinstance(ip, ipaddress.IPv6Address):
        return [ip]
    if ip.ipv4_mapped:
        return [ip.ipv4_mapped]
    if ip.sixtofour:
        return [ip.sixtofour]
    if ip.teredo:
        return list(ip.teredo)
    if any(ip in network for network in IPV4_IN_LAST_BITS):
        return [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)]
    return [ip]


def _is_public(ip: IPAddress) -> bool:
    if isinstance(ip, ipaddress.IPv6Address) and ip not in IPV6_UNICAST:
        return False
    if any(ip in network for network in CLOUD_PLATFORMS):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)
