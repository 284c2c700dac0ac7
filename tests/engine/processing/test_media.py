"""Pictures from clients: what is fetched, from where, within which limits, and what every refusal says."""

import asyncio
import base64
import hashlib
import io
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from engine.config import MediaConfig
from engine.processing import media
from engine.processing.media import DecodedImage, MediaLoader, decode_image, is_public
from engine.protocol import InvalidRequest

FIELD = "messages[0].content[1].image_url.url"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(width: int = 8, height: int = 6, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def load(*urls: str, **limits: Any) -> list[DecodedImage]:
    loader = MediaLoader(MediaConfig(**limits))
    return asyncio.run(loader.load_images([(FIELD, url) for url in urls]))


def refusal(*urls: str, **limits: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load(*urls, **limits)
    assert caught.value.field == FIELD
    return caught.value.message


PNG = encoded(picture())


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

    async def resolve(host: str, port: int) -> list[str]:
        table["lookups"].append(host)
        return table[host]

    monkeypatch.setattr(media, "resolve", resolve)
    return table


LOCAL: Any = {"allowed_private_hosts": ["127.0.0.1"]}

# --- data URLs -----------------------------------------------------------------------------------------------------


def test_a_data_url_is_decoded_to_rgb_with_a_hash_over_its_pixels():
    (decoded,) = load(data_url(PNG))
    assert (decoded.image.mode, decoded.image.size) == ("RGB", (8, 6))
    assert decoded.image.tobytes() == picture().tobytes()
    assert decoded.content_hash == hashlib.sha256(b"RGB 8x6 " + picture().tobytes()).hexdigest()


def test_the_same_pixels_in_another_shape_have_another_hash():
    pixels = bytes(range(48)) * 3
    wide, tall = (Image.frombytes("RGB", size, pixels) for size in ((8, 6), (6, 8)))
    assert len({decoded.content_hash for decoded in load(data_url(encoded(wide)), data_url(encoded(tall)))}) == 2


def test_pictures_come_back_in_order():
    urls = [data_url(encoded(picture(8 + i, 8))) for i in range(5)]
    assert [decoded.image.width for decoded in load(*urls)] == [8, 9, 10, 11, 12]
    assert load() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,iVBORw0KGgo", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png,abc", "not of the form data:image/...;base64,..."),
        ("data:image/png;base64", "not of the form"),
        ("data:text/html;base64,AAAA", "holds 'text/html'; expected an image"),
        ("data:;base64,AAAA", "holds ''; expected an image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "could not be decoded; PNG, JPEG, WebP and GIF are supported"),
        ("data:image/png;base64,", "could not be decoded"),
    ],
)
def test_a_bad_data_url_is_refused(url: str, message: str):
    assert message in refusal(url)


def test_a_data_url_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    exact = data_url(b"x" * 1024, "image/png")
    assert "could not be decoded" in refusal(exact, max_bytes=1024)
    monkeypatch.setattr(base64, "b64decode", None)
    assert refusal(data_url_of(1025), max_bytes=1024) == "the image has 1025 bytes; the limit is 1024"


def data_url_of(num_bytes: int) -> str:
    return data_url(b"x" * num_bytes)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "file: URLs are not supported"),
        ("ftp://example.com/a.png", "ftp: URLs are not supported"),
        ("gopher://example.com", "gopher: URLs are not supported"),
        ("/etc/passwd", "paths and bare data are not supported"),
        ("iVBORw0KGgo=", "paths and bare data are not supported"),
        ("", "paths and bare data are not supported"),
    ],
)
def test_other_schemes_and_paths_are_refused_by_name(url: str, message: str):
    assert message in refusal(url)


def test_too_many_images_are_refused_before_any_is_loaded():
    assert refusal(*["http://example.com"] * 3, max_images=2) == "the request has 3 images; the limit is 2"


# --- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_supported_format_is_known_by_its_content(kind: str):
    (decoded,) = load(data_url(encoded(picture(), kind), "image/x-whatever"))
    assert (decoded.image.mode, decoded.image.size) == ("RGB", (8, 6))


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str):
    assert "PNG, JPEG, WebP and GIF are supported" in refusal(data_url(encoded(picture(16, 16), kind)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused_without_the_decoders_words(kind: str):
    content = encoded(picture(64, 64), kind)
    for length in (3, 20, len(content) // 2):
        message = refusal(data_url(content[:length]))
        assert message == "the image could not be decoded; PNG, JPEG, WebP and GIF are supported"


def test_pixels_are_counted_before_decoding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(media, "_to_rgb", None)
    message = refusal(data_url(encoded(picture(64, 33))), max_pixels=2048)
    assert message == "the image has 64 x 33 = 2112 pixels; the limit is 2048"


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_decompression_bomb_is_refused(kind: str):
    content = encoded(Image.new("L", (15000, 12000)), kind)
    assert len(content) < 2**20
    assert "pixels" in refusal(data_url(content))


def test_a_sliver_is_refused():
    message = refusal(data_url(encoded(picture(402, 2))))
    assert message == "the image has 402 x 2 pixels; its longer side may have 200 times the shorter one"
    assert load(data_url(encoded(picture(400, 2))))[0].image.width == 400


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)
        red, _, blue = (int(v) for v in np.asarray(decode_image(content, 10**4).image)[4, 4])
        assert red > 200 and blue < 50, kind


def test_the_orientation_of_a_photograph_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    (decoded,) = load(data_url(encoded(picture(8, 6), "JPEG", exif=exif)))
    assert decoded.image.size == (6, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode: str):
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 2, 4))
    content = encoded(image.convert(mode)) if mode != "P" else encoded(image.quantize(4))
    pixels = np.asarray(decode_image(content, 10**4).image)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 3].tolist() != [255, 255, 255]


def test_grey_of_16_bits_keeps_its_shades():
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = np.asarray(decode_image(encoded(Image.fromarray(grey)), 10**4).image)
    assert pixels[..., 0].tolist() == (grey >> 8).tolist()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_colour_modes_become_rgb(mode: str):
    content = encoded(picture().convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert decode_image(content, 10**4).image.mode == "RGB"


# --- fetching ------------------------------------------------------------------------------------------------------


def test_a_picture_is_fetched(server: Server):
    (decoded,) = load(server.url("/ok.png"), **LOCAL)
    assert decoded.image.tobytes() == picture().tobytes()
    ((_, headers),) = server.seen
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


def test_the_name_is_what_tls_asks_for(names: dict):
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
def test_public_addresses_are_public(address: str):
    assert is_public(address)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::1]", "0"])
def test_no_way_of_writing_loopback_gets_through(host: str, server: Server):
    assert "is not public" in refusal(server.url("/ok.png", host))
    assert not server.seen


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:secret@example.com/a.png", "holds credentials"),
        ("http://user@example.com/a.png", "holds credentials"),
        ("http://example.com\\@127.0.0.1/a.png", "backslashes"),
        ("http://exa mple.com/a.png", "blanks"),
        ("http://example.com/a\r\nHost: b", "control characters"),
        ("http://example.com/\x00", "control characters"),
        (" http://example.com/", "paths and bare data"),
        ("http:///a.png", "names no valid host"),
        ("http:a.png", "names no valid host"),
        ("http://example.com:99999999/", "has port 99999999; ports are 1 to 65535"),
        ("http://example.com:0/", "has port 0;"),
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
    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror("nope")

    monkeypatch.setattr(media, "resolve", resolve)
    assert refusal("http://nowhere.test/") == "the image could not be fetched: its server is not reachable"


def test_redirects_are_followed_up_to_the_limit(server: Server):
    server.redirect("/1", "/2", 301)
    server.redirect("/2", server.url("/3"), 307)
    server.redirect("/3", "ok.png", 308)
    assert load(server.url("/1"), max_redirects=3, **LOCAL)
    assert all("cookie" not in headers for _, headers in server.seen)
    assert refusal(server.url("/1"), max_redirects=2, **LOCAL) == "the image is behind more than 2 redirects"
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
        ("//user:pw@127.0.0.1/", "holds credentials"),
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
    assert "compressed its answer" in refusal(server.url("/gzip"), **LOCAL)
    assert server.seen[0][1]["accept-encoding"] == "identity"


def test_the_time_of_a_fetch_is_limited(server: Server):
    message = refusal(server.url("/slow"), fetch_timeout_s=0.2, **LOCAL)
    assert message == "the image could not be fetched within 0.2 s"


def test_an_error_of_the_server_is_named(server: Server):
    assert refusal(server.url("/missing"), **LOCAL) == "the image's server answered 404; expected 200"


def test_what_is_fetched_must_be_a_picture(server: Server):
    server.routes["/page"] = (200, {"Content-Type": "image/png"}, b"<html>secret</html>")
    message = refusal(server.url("/page"), **LOCAL)
    assert "could not be decoded" in message and "secret" not in message


def test_the_field_of_the_failing_picture_is_named_and_the_others_are_given_up(server: Server):
    sources = [("a", data_url(PNG)), ("b", server.url("/slow")), ("c", "file:///x")]

    async def run() -> int:
        with pytest.raises(InvalidRequest) as caught:
            await MediaLoader(MediaConfig(**LOCAL)).load_images(sources)
        assert caught.value.field == "c"
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
