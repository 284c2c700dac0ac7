"""MediaLoader: pictures that a client names or sends, fetched and decoded under limits, from public addresses only."""

import asyncio
import base64
import binascii
import hashlib
import io
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
from PIL import Image, ImageOps

from engine.config import MediaConfig
from engine.protocol import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_URL_CHARS = 8192
MAX_SIDE_RATIO = 200

REDIRECTS = (301, 302, 303, 307, 308)
NUM_DECODERS = 2

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

IPV6_UNICAST = ipaddress.ip_network("2000::/3")
IPV4_IN_LAST_BITS = (ipaddress.ip_network("::/96"), ipaddress.ip_network("64:ff9b::/96"))
"""IPv4-compatible and NAT64 addresses: IPv6 that ends up at the IPv4 address in its last 32 bits."""


@dataclass(frozen=True)
class DecodedImage:
    """image: RGB, upright, on white. content_hash: sha256 hex digest over mode, size and pixels."""

    image: Image.Image
    content_hash: str


class MediaLoader:
    """Loads the pictures of requests. A refusal is an InvalidRequest that names the field, the value and the limit."""

    def __init__(self, config: MediaConfig):
        self._config = config
        self._allowed = frozenset(_host_key(host) for host in config.allowed_private_hosts)
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._decoders = asyncio.Semaphore(NUM_DECODERS)

    async def load_images(self, sources: Sequence[tuple[str, str]]) -> list[DecodedImage]:
        """The pictures of one request in order. A source is the path of its field and a data:, http: or https: URL.

        Raises InvalidRequest for the first that fails, and then gives up on the others.
        """
        if len(sources) > self._config.max_images:
            raise InvalidRequest(
                f"the request has {len(sources)} images; the limit is {self._config.max_images}",
                sources[self._config.max_images][0],
            )
        tasks = [asyncio.ensure_future(self._load(url, field)) for field, url in sources]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, url: str, field: str) -> DecodedImage:
        try:
            match = re.match(r"([a-z][a-z0-9+.-]{0,31}):", url, re.IGNORECASE)
            scheme = match[1].lower() if match else ""
            if scheme == "data":
                content = decode_data_url(url, self._config.max_bytes)
            elif scheme in ("http", "https"):
                content = await self._fetch(url)
            else:
                kind = f"{scheme}: URLs are" if scheme else "paths and bare data are"
                raise InvalidRequest(f"{kind} not supported for images; use a data:, http: or https: URL")
            async with self._decoders:
                return await asyncio.to_thread(decode_image, content, self._config.max_pixels)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, field) from None

    async def _fetch(self, url: str) -> bytes:
        limit_s = self._config.fetch_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._follow(url)
        except TimeoutError:
            raise InvalidRequest(f"the image could not be fetched within {limit_s:g} s") from None
        except (httpx.HTTPError, OSError, UnicodeError):
            raise InvalidRequest("the image could not be fetched: its server is not reachable") from None

    async def _follow(self, url: str) -> bytes:
        target = parse_url(url)
        for _ in range(self._config.max_redirects + 1):
            content = await self._get(target)
            if isinstance(content, bytes):
                return content
            target = parse_url(content.url, target)
        raise InvalidRequest(f"the image is behind more than {self._config.max_redirects} redirects")

    async def _get(self, url: httpx.URL) -> "bytes | _Redirect":
        """One hop: the name is resolved once, every address checked, and the connection made to a checked address."""
        addresses = await self._checked_addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._get_from(url, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._get_from(url, addresses[-1])

    async def _checked_addresses(self, url: httpx.URL) -> list[str]:
        host = url.raw_host.decode("ascii")
        addresses = await resolve(host, url.port or (443 if url.scheme == "https" else 80))
        if not addresses:
            raise InvalidRequest(f"the host {host!r} has no address")
        if _host_key(host) not in self._allowed:
            for address in addresses:
                if not is_public(address) and _host_key(address) not in self._allowed:
                    raise InvalidRequest(f"the host {host!r} is not public; images are fetched from public hosts only")
        return addresses

    async def _get_from(self, url: httpx.URL, address: str) -> "bytes | _Redirect":
        # Host header, SNI and the certificate's name stay those of the URL. A bare transport has no cookies, proxies or
        # redirects; one per hop, so that no connection made for one name serves another on the same address.
        timeout = httpx.Timeout(self._config.fetch_timeout_s, connect=self._config.fetch_timeout_s / 2)
        request = httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.raw_host.decode("ascii"), "timeout": timeout.as_dict()},
        )
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            try:
                if response.status_code in REDIRECTS and "location" in response.headers:
                    return _Redirect(response.headers["location"])
                if response.status_code != 200:
                    raise InvalidRequest(f"the image's server answered {response.status_code}; expected 200")
                return await self._read(response)
            finally:
                await response.aclose()

    async def _read(self, response: httpx.Response) -> bytes:
        limit = self._config.max_bytes
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest("the image's server compressed its answer although asked not to")
        declared = response.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise InvalidRequest(f"the image has {declared[:20]} bytes; the limit is {limit}")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > limit:
                raise InvalidRequest(f"the image has more than {limit} bytes, which is the limit")
        return bytes(content)


@dataclass(frozen=True)
class _Redirect:
    url: str


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which to try them."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def parse_url(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """An http(s) URL without credentials, relative to `base` if given. Raises InvalidRequest.

    What parsers read differently (backslashes, control characters, blanks) is refused before anything parses it.
    """
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"the image's URL has {len(url)} characters; the limit is {MAX_URL_CHARS}")
    if re.search(r"[\x00-\x20\x7f-\xa0\\]", url):
        raise InvalidRequest("the image's URL holds blanks, control characters or backslashes")
    try:
        parsed = base.join(url) if base else httpx.URL(url)
    except httpx.InvalidURL:
        raise InvalidRequest("the image's URL is not valid") from None
    if parsed.scheme not in ("http", "https"):
        raise InvalidRequest(f"the image redirects to a {parsed.scheme}: URL; only http: and https: are fetched")
    if parsed.userinfo:
        raise InvalidRequest("the image's URL holds credentials; they are not sent")
    if not parsed.host or "%" in parsed.host:
        raise InvalidRequest("the image's URL names no valid host")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise InvalidRequest(f"the image's URL has port {parsed.port}; ports are 1 to 65535")
    return parsed


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, whichever way it is written."""
    return all(_is_public(ip) for ip in _unwrap(ipaddress.ip_address(address)))


def _unwrap(ip: IPAddress) -> list[IPAddress]:
    """The address or, for an IPv6 address that stands for IPv4 addresses, those."""
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
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _host_key(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The content of `data:image/...;base64,...`; its size is checked before it is decoded. Raises InvalidRequest."""
    header, comma, body = url.partition(",")
    media_type, *parameters = header[len("data:") :].lower().split(";")
    if not comma or "base64" not in parameters:
        raise InvalidRequest("the data: URL is not of the form data:image/...;base64,...")
    if not media_type.startswith("image/"):
        raise InvalidRequest(f"the data: URL holds {media_type[:64]!r}; expected an image")
    if (size := len(body) * 3 // 4 - body[-2:].count("=")) > max_bytes:
        raise InvalidRequest(f"the image has {size} bytes; the limit is {max_bytes}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data: URL is not valid base64") from None


def decode_image(content: bytes, max_pixels: int) -> DecodedImage:
    """Bytes to a picture; of an animation the first frame. What it is follows from the content alone.

    Raises InvalidRequest, never with words of the decoder: they can hold addresses of this process's memory.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            _check_size(opened.size, max_pixels)
            image = _to_rgb(opened)
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest(f"the image has more than {max_pixels} pixels, which is the limit") from None
    except Exception:  # decoders raise nearly anything on broken files
        raise InvalidRequest("the image could not be decoded; PNG, JPEG, WebP and GIF are supported") from None
    return DecodedImage(image, _content_hash(image))


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise InvalidRequest(f"the image has {width} x {height} = {width * height} pixels; the limit is {max_pixels}")
    check_sides(width, height)


def check_sides(width: int, height: int) -> None:
    """Raises InvalidRequest for a picture without area, and for a sliver: Qwen's processors raise on both."""
    if min(width, height) < 1 or max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise InvalidRequest(
            f"the image has {width} x {height} pixels; its longer side may have {MAX_SIDE_RATIO} times the shorter one"
        )


def _to_rgb(opened: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip to 8
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _content_hash(image: Image.Image) -> str:
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height} ".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()
