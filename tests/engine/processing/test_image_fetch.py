"""Fetching images: from public addresses only, resolved once, within bytes, time and redirects."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing.byte_budget import ByteBudget
from engine.processing.media import MAX_FETCHES, MediaLoader
from engine.processing.message import ImageSource
from engine.processing.public_addresses import Resolver, is_public
from tests.support.image_files import PNG, UNCHANGED, data_url, load, picture, pixels_of, refusal


class Server(ThreadingHTTPServer):
    """Serves /name from `routes`: (status, headers, body). A body may be a list of chunks without a length."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, tuple[int, dict[str, str], bytes | list[bytes]]] = {"/ok.png": (200, {}, PNG)}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.released = threading.Event()
        self.port = self.server_address[1]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def redirect(self, path: str, to: str, status: int = 302) -> str:
        self.routes[path] = (status, {"Location": to, "Content-Length": "0", "Set-Cookie": "a=b"}, b"")
        return self.url(path)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(Server, self.server)
        server.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.path == "/slow":
            server.released.wait(10)
        status, headers, body = server.routes.get(self.path, (404, {}, b""))
        with suppress(ConnectionError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for chunk in [body] if isinstance(body, bytes) else body:
                self.wfile.write(chunk)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The name service of the test: host -> addresses. Lookups are counted in `lookups`."""
    table: dict[str, list[str]] = {"127.0.0.1": ["127.0.0.1"], "lookups": []}

    async def resolve(self: Resolver, host: str, port: int) -> list[str]:
        table["lookups"].append(host)
        return table[host]

    monkeypatch.setattr(Resolver, "resolve", resolve)
    return table


LOCAL: Any = {"allowed_private_hosts": ["127.0.0.1"]}


def test_an_image_is_fetched_without_cookies_or_credentials(server: Server):
    (image,) = load(server.url("/ok.png"), **LOCAL)
    assert pixels_of(image).tolist() == np.asarray(picture()).tolist()
    ((_, headers),) = server.seen
    assert headers["user-agent"].startswith("Orchard/")
    assert headers["host"] == f"127.0.0.1:{server.port}"
    assert not {"cookie", "authorization", "referer"} & set(headers)


def test_a_name_is_resolved_once_and_stays_the_host(server: Server, names: dict):
    names["pictures.test"] = ["127.0.0.1"]
    load(server.url("/ok.png", "Pictures.Test"), allowed_private_hosts=["pictures.test"])
    assert names["lookups"] == ["pictures.test"]
    assert server.seen[0][1]["host"] == f"pictures.test:{server.port}"


def test_an_allowed_address_may_be_fetched_by_any_name(server: Server, names: dict):
    names["pictures.test"] = ["127.0.0.1"]
    assert load(server.url("/ok.png", "pictures.test"), **LOCAL)


def test_the_next_address_is_tried_when_one_does_not_answer(server: Server, names: dict):
    names["pictures.test"] = ["127.0.0.9", "127.0.0.1"]
    assert load(server.url("/ok.png", "pictures.test"), allowed_private_hosts=["pictures.test"])


def test_tls_asks_for_the_name_of_the_url(names: dict):
    """The server has no certificate, so the handshake fails; by then the client has said which name it wants."""
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)

    def accept(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            context.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=[listener])
        thread.start()
        names["pictures.test"] = ["127.0.0.1"]
        url = f"https://pictures.test:{listener.getsockname()[1]}/a.png"
        assert "not reachable" in refusal(url, allowed_private_hosts=["pictures.test"])
        thread.join()
    assert asked == ["pictures.test"]


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_proxies_of_the_environment_are_not_used(server: Server, variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert load(server.url("/ok.png"), **LOCAL)


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"],
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["100.64.0.1"],
        ["168.63.129.16"],
        ["::ffff:168.63.129.16"],
        ["0.0.0.0"],
        ["224.0.0.1"],
        ["240.0.0.1"],
        ["192.168.1.1"],
        ["::1"],
        ["::"],
        ["::ffff:127.0.0.1"],
        ["::ffff:169.254.169.254"],
        ["::127.0.0.1"],
        ["fe80::1%eth0"],
        ["fec0::1"],
        ["fd00::1"],
        ["ff0e::1"],
        ["2002:7f00:1::"],
        ["2001:0:7f00:1::"],
        ["64:ff9b::10.0.0.1"],
        ["64:ff9b:1::1"],
        ["2001:db8::1"],
        ["93.184.216.34", "10.0.0.1"],
    ],
)
def test_a_name_with_any_address_that_is_not_public_is_refused(addresses: list[str], names: dict):
    names["evil.test"] = addresses
    message = refusal("http://evil.test/a.png")
    assert message == "the host 'evil.test' is not public; images are fetched from public hosts only"
    assert not any(address in message for address in addresses)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"])
def test_public_addresses_are_recognized_as_public(address: str):
    assert is_public(address)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::1]", "0"])
def test_every_spelling_of_a_loopback_address_is_refused(host: str, server: Server):
    assert "is not public" in refusal(server.url("/ok.png", host))
    assert not server.seen


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:secret@example.com/a.png", "contains credentials"),
        ("http://user@example.com/a.png", "contains credentials"),
        ("http://example.com\\@127.0.0.1/a.png", "backslashes"),
        ("http://exa mple.com/a.png", "spaces"),
        ("http://example.com/a\r\nHost: b", "control characters"),
        ("http://example.com/\x00", "control characters"),
        (" http://example.com/", "paths and bare data"),
        ("http:///a.png", "has no valid host"),
        ("http:a.png", "has no valid host"),
        ("http://example.com:99999999/", "has port 99999999; ports are 1 to 65535"),
        ("http://example.com:0/", "has port 0;"),
        ("http://example.com:22/", "has port 22; images are fetched from ports 80, 443 and 1024 or higher"),
        ("https://example.com:1023/", "has port 1023;"),
        ("http://example.com:x/", "is not valid"),
        ("http://[::1/", "is not valid"),
        ("http://[fe80::1%25eth0]/", "not valid|no valid host"),
        ("http://example.com/" + "a" * 9000, "has 9019 characters; the limit is 8192"),
    ],
)
def test_a_url_that_parsers_may_read_differently_is_refused(url: str, message: str, names: dict):
    assert any(part in refusal(url) for part in message.split("|"))
    assert not names["lookups"]


def test_a_name_that_does_not_resolve_is_refused(monkeypatch: pytest.MonkeyPatch):
    async def resolve(self: Resolver, host: str, port: int) -> list[str]:
        raise socket.gaierror("nope")

    monkeypatch.setattr(Resolver, "resolve", resolve)
    assert refusal("http://nowhere.test/") == "the image could not be fetched: its server is not reachable"


def test_redirects_are_followed_up_to_the_limit(server: Server):
    server.redirect("/1", "/2", 301)
    server.redirect("/2", server.url("/3"), 307)
    server.redirect("/3", "ok.png", 308)
    assert load(server.url("/1"), max_redirects=3, **LOCAL)
    assert all("cookie" not in headers for _, headers in server.seen)
    assert refusal(server.url("/1"), max_redirects=2, **LOCAL) == "the image's URL has more than 2 redirects, the limit"
    assert "0 redirects" in refusal(server.url("/1"), max_redirects=0, **LOCAL)


def test_every_hop_of_a_redirect_is_checked(server: Server, names: dict):
    names |= {"ok.test": ["127.0.0.1"], "meta.test": ["169.254.169.254"], "other.test": ["127.0.0.1"]}
    allowed: Any = {"allowed_private_hosts": ["ok.test"]}
    for to in ("http://meta.test/", server.url("/ok.png", "other.test"), f"http://127.0.0.1:{server.port}/ok.png"):
        server.redirect("/r", to)
        assert "is not public" in refusal(server.url("/r", "ok.test"), **allowed)
    assert [path for path, _ in server.seen] == ["/r"] * 3


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("file:///etc/passwd", "redirects to a file: URL"),
        ("//user:pw@127.0.0.1/", "contains credentials"),
        ("http:\\\\127.0.0.1/", "backslashes"),
        ("http://[::1/", "not valid"),
    ],
)
def test_a_redirect_to_a_bad_url_is_refused(server: Server, to: str, message: str):
    assert message in refusal(server.redirect("/r", to), **LOCAL)


def test_a_large_answer_is_refused_by_its_declared_length(server: Server):
    server.routes["/big"] = (200, {"Content-Length": "2000"}, b"x" * 2000)
    assert refusal(server.url("/big"), max_bytes=1024, **LOCAL) == "the image has 2000 bytes; the limit is 1024"


def test_a_large_answer_without_length_is_cut_off(server: Server):
    server.routes["/endless"] = (200, {}, [b"x" * 1000] * 5000)
    message = refusal(server.url("/endless"), max_bytes=4096, **LOCAL)
    assert message == "the image has more than 4096 bytes, which is the limit"


def test_a_compressed_answer_is_refused(server: Server):
    server.routes["/gzip"] = (200, {"Content-Encoding": "gzip"}, b"x")
    assert "sent the content-encoding 'gzip'; expected identity" in refusal(server.url("/gzip"), **LOCAL)
    assert server.seen[0][1]["accept-encoding"] == "identity"


def test_the_time_of_a_fetch_is_limited(server: Server):
    message = refusal(server.url("/slow"), fetch_timeout_s=0.2, **LOCAL)
    assert message == "the image could not be fetched within 0.2 s"


def test_an_error_of_the_server_is_named(server: Server):
    assert refusal(server.url("/missing"), **LOCAL) == "the image's server returned status 404; expected 200"


def test_a_fetched_file_that_is_no_image_is_refused(server: Server):
    server.routes["/page"] = (200, {"Content-Type": "image/png"}, b"<html>secret</html>")
    message = refusal(server.url("/page"), **LOCAL)
    assert "could not be decoded" in message and "secret" not in message


def test_the_field_of_the_failing_image_is_named_and_other_fetches_are_cancelled(server: Server):
    sources = [ImageSource("a", data_url(PNG)), ImageSource("b", server.url("/slow")), ImageSource("c", "file:///x")]

    async def run() -> int:
        with pytest.raises(InvalidRequest) as caught:
            async with MediaLoader(MediaConfig(**LOCAL), UNCHANGED).load(sources):
                raise AssertionError
        assert caught.value.field == "c"
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_http_urls_can_be_forbidden(server: Server, names: dict):
    message = "http: URLs are not fetched (media.allow_http is false); use an https: URL"
    assert refusal(server.url("/ok.png"), allow_http=False, **LOCAL) == message
    assert not server.seen and not names["lookups"]


def test_a_redirect_to_a_port_other_than_those_of_web_servers_is_refused(server: Server):
    assert "has port 25;" in refusal(server.redirect("/r", "http://127.0.0.1:25/"), **LOCAL)


class DeadNameServer:
    """Lookups of dead.test wait for `released`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.num_now = self.num_at_once = 0

    def __call__(self, host: str, port: int, **options: Any) -> list[Any]:
        with self.lock:
            self.num_now += 1
            self.num_at_once = max(self.num_at_once, self.num_now)
        self.released.wait(60)
        with self.lock:
            self.num_now -= 1
        raise socket.gaierror("dead")


def test_a_dead_name_server_does_not_delay_other_requests():
    name_server = DeadNameServer()
    dead = [ImageSource("dead", f"http://{i}.dead.test/") for i in range(16)]

    async def go() -> None:
        loader = MediaLoader(MediaConfig(**LOCAL), UNCHANGED, Resolver(name_server))
        try:
            async with asyncio.timeout(60):
                requests = [asyncio.create_task(loader.load(dead).__aenter__()) for _ in range(3)]
                while name_server.num_now < 3 * MAX_FETCHES:
                    await asyncio.sleep(0.01)
                async with loader.load([ImageSource("data", data_url(PNG))]) as images:
                    assert len(images) == 1
                assert await asyncio.to_thread(lambda: "free") == "free"
                assert name_server.num_at_once == 3 * MAX_FETCHES and not any(task.done() for task in requests)
                name_server.released.set()
                results = await asyncio.gather(*requests, return_exceptions=True)
                assert all(isinstance(error, InvalidRequest) and error.field == "dead" for error in results)
        finally:
            name_server.released.set()
            loader.workers.close()

    asyncio.run(go())


def test_fetched_bytes_are_bounded_across_requests(server: Server):
    server.routes["/ok.png"] = (200, {"Content-Length": str(len(PNG))}, PNG)
    sources = [ImageSource("f", server.url("/ok.png")) for _ in range(8)]

    async def go() -> None:
        loader = MediaLoader(MediaConfig(max_bytes=10_000, **LOCAL), UNCHANGED)
        loader.fetched = ByteBudget(25_000)

        async def request() -> None:
            async with loader.load(sources) as images:
                assert len(images) == 8

        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(request() for _ in range(5)))
            assert 10_000 < loader.fetched.peak_bytes <= 25_000 and loader.fetched.held_bytes == 0
        finally:
            loader.workers.close()

    asyncio.run(go())
