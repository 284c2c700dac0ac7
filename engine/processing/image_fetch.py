"""ImageFetcher: downloads images by URL, under limits and from public addresses only."""

import asyncio
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import httpx

from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing.byte_budget import BudgetLease
from engine.processing.public_addresses import Resolver, is_public

MAX_URL_CHARS = 8192
REDIRECTS = (301, 302, 303, 307, 308)
PORTS, FIRST_FREE_PORT = (80, 443), 1024
"""Permitted ports: 80, 443 and from 1024 on. Other services, such as mail or shells, use the other ports."""


class ImageFetcher:
    """Downloads images; every refusal is an InvalidRequest that names the value and the limit."""

    def __init__(self, config: MediaConfig, resolver: Resolver):
        self._config = config
        self._resolver = resolver
        self._allowed = frozenset(_host_key(host) for host in config.allowed_private_hosts)
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._headers = {"User-Agent": user_agent(), "Accept": "image/*", "Accept-Encoding": "identity"}

    async def fetch(self, url: str, hold: BudgetLease) -> bytearray:
        """Download an http: or https: URL.

        Args:
            url: The URL.
            hold: max_bytes of a budget; shrinks to the size of the image.

        Raises:
            InvalidRequest: The URL is not permitted, or the download failed.
        """
        limit_s = self._config.fetch_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                content = await self._follow(url, hold)
        except TimeoutError:
            raise InvalidRequest(f"the image could not be fetched within {limit_s:g} s") from None
        except (httpx.HTTPError, OSError, UnicodeError):
            raise InvalidRequest("the image could not be fetched: its server is not reachable") from None
        hold.shrink(len(content))
        return content

    async def _follow(self, url: str, hold: BudgetLease) -> bytearray:
        target = self._permitted(parse_url(url))
        for _ in range(self._config.max_redirects + 1):
            content = await self._get(target, hold)
            if isinstance(content, bytearray):
                return content
            target = self._permitted(parse_url(content.url, target))
        raise InvalidRequest(f"the image's URL has more than {self._config.max_redirects} redirects, the limit")

    def _permitted(self, url: httpx.URL) -> httpx.URL:
        if url.scheme == "http" and not self._config.allow_http:
            raise InvalidRequest("http: URLs are not fetched (media.allow_http is false); use an https: URL")
        if url.port is not None and url.port not in PORTS and url.port < FIRST_FREE_PORT:
            raise InvalidRequest(
                f"the image's URL has port {url.port}; images are fetched from ports 80, 443 and {FIRST_FREE_PORT} "
                "or higher"
            )
        return url

    async def _get(self, url: httpx.URL, hold: BudgetLease) -> "bytearray | _Redirect":
        """Follow one hop: resolve the name once, check every address, and connect to a checked address."""
        addresses = await self._checked_addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._get_from(url, address, hold)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._get_from(url, addresses[-1], hold)

    async def _checked_addresses(self, url: httpx.URL) -> list[str]:
        host = url.raw_host.decode("ascii")
        addresses = await self._resolver.resolve(host, url.port or (443 if url.scheme == "https" else 80))
        if not addresses:
            raise InvalidRequest(f"the host {host!r} has no address")
        if _host_key(host) not in self._allowed:
            for address in addresses:
                if not is_public(address) and _host_key(address) not in self._allowed:
                    raise InvalidRequest(f"the host {host!r} is not public; images are fetched from public hosts only")
        return addresses

    async def _get_from(self, url: httpx.URL, address: str, hold: BudgetLease) -> "bytearray | _Redirect":
        # Host header, SNI and the certificate's name are those of the URL. A bare transport has no cookies, proxies and
        # redirects. Each hop has its own, so that a connection is never reused for another name at the same address.
        timeout = httpx.Timeout(self._config.fetch_timeout_s, connect=self._config.fetch_timeout_s / 2)
        request = httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii"), **self._headers},
            extensions={"sni_hostname": url.raw_host.decode("ascii"), "timeout": timeout.as_dict()},
        )
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            try:
                if response.status_code in REDIRECTS and "location" in response.headers:
                    return _Redirect(response.headers["location"])
                if response.status_code != 200:
                    raise InvalidRequest(f"the image's server returned status {response.status_code}; expected 200")
                return await self._read(response, hold)
            finally:
                await response.aclose()

    async def _read(self, response: httpx.Response, hold: BudgetLease) -> bytearray:
        limit = self._config.max_bytes
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise InvalidRequest(f"the image's server sent the content-encoding {encoding[:64]!r}; expected identity")
        declared = response.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit():
            if int(declared[:20]) > limit:
                raise InvalidRequest(f"the image has {declared[:20]} bytes; the limit is {limit}")
            hold.shrink(int(declared))
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > limit:
                raise InvalidRequest(f"the image has more than {limit} bytes, which is the limit")
        return content


@dataclass(frozen=True)
class _Redirect:
    url: str


def parse_url(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """Parse an http(s) URL without credentials, relative to `base` if given.

    Characters that parsers treat differently (backslashes, control characters, blanks) are refused before parsing.

    Raises:
        InvalidRequest: The URL is not permitted.
    """
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"the image's URL has {len(url)} characters; the limit is {MAX_URL_CHARS}")
    if re.search(r"[\x00-\x20\x7f-\xa0\\]", url):
        raise InvalidRequest("the image's URL contains spaces, control characters or backslashes")
    try:
        parsed = base.join(url) if base else httpx.URL(url)
    except httpx.InvalidURL:
        raise InvalidRequest("the image's URL is not valid") from None
    if parsed.scheme not in ("http", "https"):
        raise InvalidRequest(f"the image redirects to a {parsed.scheme}: URL; only http: and https: are fetched")
    if parsed.userinfo:
        raise InvalidRequest("the image's URL contains credentials, which are not supported")
    if not parsed.host or "%" in parsed.host:
        raise InvalidRequest("the image's URL has no valid host")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise InvalidRequest(f"the image's URL has port {parsed.port}; ports are 1 to 65535")
    return parsed


def _host_key(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def user_agent() -> str:
    """Return the User-Agent, which some servers such as Wikimedia require of programs."""
    try:
        return f"Orchard/{version('orchard-mlx')} (image fetcher of a model server)"
    except PackageNotFoundError:  # not installed as a package
        return "Orchard (image fetcher of a model server)"
