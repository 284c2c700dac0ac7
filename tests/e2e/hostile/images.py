"""Rows: images by URL and as data, as bombs, as wrecks and as something else; and odd ones that must work."""

from collections.abc import Callable
from typing import Any

from PIL import Image

from tests.e2e.hostile import image_files as files
from tests.e2e.hostile.rows import OK, Answered, Either, Http, Refused, Row, bad, chat, user
from tests.e2e.pictures import shape

MIB = 2**20
URL_FIELD = "messages[0].content[0].image_url.url"
QUESTION = {"type": "text", "text": "What is in the image?"}
SEEN = Answered("circle")
RED_CIRCLE = Answered("red circle")
NO_IMAGE = bad(URL_FIELD)
NOT_DECODED = bad(URL_FIELD)
BOUNDED = Either((OK, bad()))
"""A bomb may be refused, or defused and answered."""


def about(*urls: str | Callable[[], str]) -> Http:
    """A question about images by their URLs."""

    def messages() -> list[Any]:
        made = [url if isinstance(url, str) else url() for url in urls]
        return [user([*({"type": "image_url", "image_url": {"url": url}} for url in made), QUESTION])]

    return chat(messages=messages, max_tokens=16)


def file(make: Callable[[], bytes], media_type: str = "image/png") -> Http:
    return about(lambda: files.data_url(make(), media_type))


def _part(part: Any) -> Http:
    return chat(messages=[user([part, QUESTION])])


SHAPES = tuple(
    Row(f"image part: {name}", _part(part), "message shapes", bad(f"messages[0].content[0]{path}"))
    for name, part, path in (
        ("nothing", {"type": "image_url"}, ".image_url"),
        ("null", {"type": "image_url", "image_url": None}, ".image_url"),
        ("a number", {"type": "image_url", "image_url": 5}, ".image_url"),
        ("a list", {"type": "image_url", "image_url": ["data:"]}, ".image_url"),
        ("an object without a URL", {"type": "image_url", "image_url": {}}, ".image_url.url"),
        ("a URL that is a number", {"type": "image_url", "image_url": {"url": 5}}, ".image_url.url"),
        ("an empty URL", {"type": "image_url", "image_url": {"url": ""}}, ".image_url.url"),
        ("an unknown detail", {"type": "image_url", "image_url": {"url": "data:", "detail": "ultra"}},
            ".image_url.detail"),
        ("an unknown field beside", {"type": "image_url", "image_url": {"url": "data:", "headers": {"Cookie": "a"}}},
            ".image_url.url"),
    )
)  # fmt: skip

SCHEMES = tuple(
    Row(f"URL {url[:60]!r}", about(url), "media URLs", NO_IMAGE)
    for url in (
        "file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "C:\\Windows\\win.ini", "ftp://example.com/a.png",
        "gopher://127.0.0.1:6379/_INFO", "dict://127.0.0.1:11211/stat", "ldap://127.0.0.1/", "s3://bucket/key",
        "blob:http://127.0.0.1/x", "javascript:alert(1)", "about:blank", "jar:http://example.com!/x", "unix:///tmp/sock",
        "//example.com/a.png", "http:", "http://", "http:///a.png", "http://[", "http://[::1", "http://:80/",
        "http://example.com:99999/", "http://example.com:0/", "http://example.com:-1/", "http://example.com:x/",
        "http://user:secret@example.com/", "http://example.com\\@127.0.0.1/", "http://exa mple.com/",
        "http://example.com/\r\nHost: evil", "http://example.com/\0", "\nhttp://example.com/", "http://%31%32%37.0.0.1/",
        "http://" + "a" * 64 + ".example/", "http://" + "a." * 200 + "example/", "http://example.com/" + "a" * 9000,
        "https://xn--/", "x" * 2**20,
    )
)  # fmt: skip

PRIVATE = tuple(
    Row(f"private address {name}", about(f"http://{host}/"), "public addresses only",
        Refused((400,), URL_FIELD, "", ("public",)))
    for name, host in {
        "of this machine": "127.0.0.1",
        "of the Ray dashboard": "127.0.0.1:8265",
        "by name": "localhost",
        "of any": "0.0.0.0",
        "as one number": "2130706433",
        "in hexadecimal": "0x7f000001",
        "in octal": "017700000001",
        "with two parts": "127.1",
        "with ideographic stops": "127。0。0。1",
        "of a router": "192.168.0.1",
        "of a network": "10.0.0.1",
        "of another network": "172.16.0.1",
        "behind a carrier": "100.64.0.1",
        "of Alibaba's metadata": "100.100.100.200",
        "of AWS's metadata": "169.254.169.254",
        "of AWS's metadata as a number": "2852039166",
        "of AWS's metadata, mapped": "[::ffff:169.254.169.254]",
        "of AWS's metadata, IPv6": "[fd00:ec2::254]",
        "of Azure's wire server": "168.63.129.16",
        "of Azure's wire server, mapped": "[::ffff:168.63.129.16]",
        "of Oracle's metadata": "192.0.0.192",
        "of a group": "224.0.0.1",
        "of all": "255.255.255.255",
        "IPv6 of this machine": "[::1]",
        "IPv6 of any": "[::]",
        "IPv6, mapped": "[::ffff:7f00:1]",
        "IPv6, compatible": "[::7f00:1]",
        "IPv6, NAT64": "[64:ff9b::7f00:1]",
        "IPv6, local NAT64": "[64:ff9b:1::7f00:1]",
        "IPv6, 6to4": "[2002:7f00:1::]",
        "IPv6, Teredo": "[2001:0:7f00:1::80ff:fffe]",
        "IPv6 of the link": "[fe80::1]",
        "IPv6, unique local": "[fd00::1]",
        "IPv6 of a group": "[ff02::1]",
        "IPv6 of documentation": "[2001:db8::1]",
    }.items()
)  # fmt: skip

UNREAD = tuple(
    Row(f"private address {name}", about(f"http://{host}/"), "media URLs", NO_IMAGE)
    for name, host in {
        "by name with a dot": "localhost.",
        "with octal bytes": "0177.0.0.01",
        "with wide digits": "１２７.０.０.１",
    }.items()
)
"""Whether they are read as addresses or not at all, depends on the resolver."""

CREDENTIALS = Row("private address behind credentials", about("http://example.com@127.0.0.1/"), "media URLs", NO_IMAGE)

DATA_URLS = tuple(
    Row(f"data URL: {name}", about(url), "data URLs", NO_IMAGE)
    for name, url in (
        ("nothing", "data:"),
        ("a comma", "data:,"),
        ("no content", "data:image/png;base64,"),
        ("no comma", "data:image/png;base64"),
        ("not base64", "data:image/png,%89PNG"),
        ("no media type", "data:;base64,AAAA"),
        ("another media type", "data:text/html;base64,PGh0bWw+"),
        ("base64 garbage", "data:image/png;base64,!!!!"),
        ("base64 of another alphabet", "data:image/png;base64,__--"),
        ("base64 with line breaks", "data:image/png;base64,AA\nAA"),
        ("base64 of one letter", "data:image/png;base64,A"),
        ("base64, padded in front", "data:image/png;base64,=AAA"),
        ("base64 with letters beyond ASCII", "data:image/png;base64,ÄÖÜß"),
        ("a media type of 1 MiB", lambda: "data:image/" + "p" * MIB + ";base64,AAAA"),
    )
)

FLOODS = (
    Row("data URL: a million parameters", about(lambda: "data:image/png" + ";a=b" * MIB + ";base64,AAAA"), "data URLs",
        NO_IMAGE, cost="large"),
    Row("data URL: 16 MiB of semicolons", about(lambda: "data:" + ";" * (16 * MIB)), "data URLs", NO_IMAGE,
        cost="large"),
    Row("an image a byte too large", file(lambda: bytes(20 * MIB + 1)), "media.max_bytes",
        bad(URL_FIELD, str(20 * MIB + 1), str(20 * MIB)), cost="large"),
    Row("20 MiB of noise", file(lambda: bytes(range(256)) * (20 * MIB // 256)), "media.max_bytes", NOT_DECODED,
        cost="large"),
    Row("17 images", about(*[lambda: files.data_url(files.circle())] * 17), "media.max_images",
        bad("", "17", "16")),
    Row("1000 images", about(*["data:image/png;base64,AAAA"] * 1000), "media.max_images", bad("", "1000", "16")),
    Row("16 URLs of one dead host", about(*["http://does-not-exist.invalid/"] * 16), "media.fetch_timeout_s",
        bad("")),
)  # fmt: skip

WRECKS = tuple(
    Row(f"broken file: {name}", file(make), "image files", NOT_DECODED)
    for name, make in {
        "one byte": lambda: b"\x89",
        "the head of a PNG": lambda: files.circle()[:40],
        "half a PNG": lambda: files.circle()[: len(files.circle()) // 2],
        "half a JPEG": lambda: files.circle("JPEG")[:600],
        "the start of a JPEG": lambda: b"\xff\xd8",
        "half a GIF": lambda: files.circle("GIF")[:200],
        "half a WebP": lambda: files.circle("WEBP")[:100],
        "a PNG without pixels": lambda: files.png(100, 100, content=b""),
        "a PNG of compressed garbage": lambda: files.png(100, 100, content=b"\x78\x9c" + b"\xff" * 500),
        "a PNG whose checksum is wrong": lambda: files.circle()[:30] + b"abc" + files.circle()[33:],
        "a chunk of two gigabytes": lambda: files.circle()[:33] + b"\x7f\xff\xff\xffIDAT" + bytes(100),
        "a GIF without frames": lambda: files.circle("GIF")[:13] + b"\x3b",
        "a JPEG without tables": lambda: files.circle("JPEG").replace(b"\xff\xdb", b"\xff\xe9"),
        "a RIFF without WebP": lambda: b"RIFF" + bytes(4) + b"WEBPVP8 " + bytes(100),
    }.items()
)

FOREIGN = tuple(
    Row(f"file of another format: {name}", file(make), "PNG, JPEG, WebP, GIF", NOT_DECODED)
    for name, make in files.OTHER_FORMATS.items()
)

SIZES = (
    Row("PNG: 30 000 x 30 000 in the header", file(lambda: files.png(30_000, 30_000, b"\0")), "media.max_pixels",
        bad(URL_FIELD, str(30_000**2), "40000000")),
    Row("PNG: two billion pixels wide", file(lambda: files.png(2**31 - 1, 2**31 - 1, b"\0")), "media.max_pixels",
        bad(URL_FIELD, "40000000")),
    Row("PNG: 10 000 x 10 000, all there", file(lambda: files.png(10_000, 10_000)), "media.max_pixels",
        bad(URL_FIELD, str(10_000**2), "40000000")),
    Row("JPEG: 65 500 x 65 500 in the header", file(lambda: files.jpeg_of_size(65_500, 65_500)), "media.max_pixels",
        bad(URL_FIELD, str(65_500**2), "40000000")),
    Row("GIF: 65 535 x 65 535 in the header", file(lambda: files.gif_of_size(65_535, 65_535)), "media.max_pixels",
        bad(URL_FIELD, "40000000")),
    Row("WebP: 16 million x 16 million in the header", file(lambda: files.webp_of_size(2**24, 2**24)),
        "media.max_pixels", NOT_DECODED),
    Row("PNG: 0 x 0", file(lambda: files.png(0, 0, b"")), "image sides", NOT_DECODED),
    Row("PNG: 0 x 10", file(lambda: files.png(0, 10)), "image sides", NOT_DECODED),
    Row("JPEG: no height", file(lambda: files.jpeg_of_size(100, 0)), "image sides", NOT_DECODED),
    Row("GIF: 0 x 0", file(lambda: files.gif_of_size(0, 0)), "image sides", BOUNDED),
    Row("a sliver of 1 x 10 000", file(lambda: files.png(1, 10_000)), "image sides", bad(URL_FIELD, "10000", "200")),
    Row("a sliver of 10 000 x 1", file(lambda: files.png(10_000, 1)), "image sides", bad(URL_FIELD, "10000", "200")),
    Row("1 x 201", file(lambda: files.png(1, 201)), "image sides", bad(URL_FIELD, "201", "200")),
    Row("1 x 200", file(lambda: files.png(1, 200)), "image sides", OK),
    Row("a PNG with too few rows", file(lambda: files.png(100, 100, files.zlib.compress(bytes(101 * 3)))),
        "image files", BOUNDED),
    Row("one pixel", file(lambda: files.png(1, 1)), "image sides", OK),
)  # fmt: skip

BOMBS = (
    Row("pixel bomb: 6320 x 6320 of one colour, RGBA", file(lambda: files.png(6320, 6320, color=6)),
        "media.max_pixels", OK, cost="large"),
    Row("pixel bomb: four of them", about(*[lambda: files.data_url(files.png(6320, 6320, color=6))] * 4),
        "media.decode_budget_mb", BOUNDED, cost="large", within_s=120),
    Row("scan bomb: 2000 scans of 6000 x 6000", file(lambda: files.progressive_bomb(6000, 2000)), "64 scans",
        bad(URL_FIELD, "64"), cost="large", within_s=20),
    Row("scan bomb: 300 scans of 500 x 500", file(lambda: files.progressive_bomb(500, 300)), "64 scans",
        bad(URL_FIELD, "64")),
    Row("text bomb: zTXt of 200 MiB", file(lambda: files.png_text_bomb(b"zTXt", 200)), "image files", BOUNDED,
        cost="large"),
    Row("text bomb: iTXt of 200 MiB", file(lambda: files.png_text_bomb(b"iTXt", 200)), "image files", BOUNDED,
        cost="large"),
    Row("text bomb: a colour profile of 200 MiB", file(lambda: files.png_text_bomb(b"iCCP", 200)), "image files",
        BOUNDED, cost="large"),
    Row("text bomb: 50 000 chunks of text", file(lambda: files.png_text_flood(50_000)), "image files", BOUNDED,
        cost="large"),
    Row("frame bomb: a GIF of 3000 frames", file(lambda: files.gif(3000)), "the first frame", OK, cost="large"),
    Row("frame bomb: an APNG of 1000 frames", file(lambda: files.apng(1000)), "the first frame", OK, cost="large"),
    Row("frame bomb: a WebP of 300 frames", file(lambda: files.webp(300)), "the first frame", OK, cost="large"),
    Row("segment bomb: 50 000 comments in a JPEG",
        file(lambda: files.jpeg_with(files.segment(0xFE, b"x") * 50_000)), "image files", BOUNDED, cost="large"),
    Row("segment bomb: 20 000 tables in a JPEG",
        file(lambda: files.jpeg_with(files.segment(0xDB, b"\0" + b"\1" * 64) * 20_000)), "image files", BOUNDED,
        cost="large"),
    Row("segment bomb: 255 pieces of a colour profile", file(lambda: files.jpeg_with(b"".join(
        files.segment(0xE2, b"ICC_PROFILE\0" + bytes([i, 255]) + bytes(60_000)) for i in range(1, 256)))),
        "image files", BOUNDED, cost="large"),
    Row("16 photographs of 12 million pixels",
        about(*[lambda seed=seed: files.data_url(files.photograph(4000, 3000, seed)) for seed in range(16)]),
        "media.max_images", OK, cost="large", within_s=120),
)  # fmt: skip

POLYGLOTS = (
    Row("a GIF that is a script", file(lambda: b"GIF89a/*" + b"*/=1;alert(1)//" * 20), "image files", NOT_DECODED),
    Row("a JPEG with an archive behind it", file(lambda: files.circle("JPEG") + b"PK\3\4" + bytes(2000)), "image files",
        RED_CIRCLE),
    Row("a PNG with 1 MiB behind it", file(lambda: files.circle() + b"<script>" * 2**17), "image files", RED_CIRCLE),
    Row("a PNG that is called JPEG", file(files.circle, "image/jpeg"), "image files", RED_CIRCLE),
    Row("a GIF that is called SVG", file(lambda: files.circle("GIF"), "image/svg+xml"), "image files", RED_CIRCLE),
    Row("a URL in capitals", about(lambda: files.data_url(files.circle()).replace(
        "data:image/png;base64", "DATA:IMAGE/PNG;BASE64")), "data URLs", RED_CIRCLE),
    Row("a URL with parameters", about(lambda: files.data_url(files.circle(), "image/png;name=a.png;charset=utf-8")),
        "data URLs", RED_CIRCLE),
)  # fmt: skip

FINE = tuple(
    Row(f"fine: {name}", file(make), "odd images work", answer)
    for name, make, answer in (
        ("a CMYK JPEG", lambda: files.circle("JPEG", "CMYK"), RED_CIRCLE),
        ("a grey JPEG", lambda: files.circle("JPEG", "L"), SEEN),
        (
            "a progressive JPEG",
            lambda: files.saved(shape("red", "circle"), "JPEG", progressive=True, quality=95),
            RED_CIRCLE,
        ),
        ("a turned JPEG", files.turned_jpeg, RED_CIRCLE),
        (
            "a JPEG with a broken EXIF part",
            lambda: files.jpeg_with(files.segment(0xE1, b"Exif\0\0II*\0" + b"\xff" * 50)),
            RED_CIRCLE,
        ),
        ("a PNG of 16 bits", files.png_of_sixteen_bits, SEEN),
        ("a PNG of one bit", lambda: files.circle("PNG", "1"), OK),
        ("a PNG with alpha", files.png_with_alpha, RED_CIRCLE),
        ("a PNG with a palette", files.png_with_a_palette, OK),
        ("a PNG of grey and alpha", lambda: files.circle("PNG", "LA"), SEEN),
        ("a lossless WebP", lambda: files.saved(shape("red", "circle"), "WEBP", lossless=True), RED_CIRCLE),
        ("a GIF", lambda: files.circle("GIF"), RED_CIRCLE),
        ("all of one colour", lambda: files.saved(Image.new("RGB", (300, 200), "white")), OK),
    )
)

PLACES = (
    Row("an image in a system message", chat(messages=lambda: [{"role": "system", "content": [
        {"type": "image_url", "image_url": {"url": files.data_url(files.circle())}}]}, user("Hello!")]),
        "the chat template", bad("")),
    Row("an image of the assistant", chat(messages=lambda: [user("Hello!"), {"role": "assistant", "content": [
        {"type": "image_url", "image_url": {"url": files.data_url(files.circle())}}]}, user("Hello!")]),
        "the chat template", bad("")),
    Row("an image beside placeholders of images", chat(messages=lambda: [user([
        {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>" * 3},
        {"type": "image_url", "image_url": {"url": files.data_url(files.circle())}}, QUESTION])]), "text stays text",
        OK),
)  # fmt: skip

ROWS = (
    *SHAPES, *SCHEMES, *PRIVATE, *UNREAD, CREDENTIALS, *DATA_URLS, *FLOODS, *WRECKS, *FOREIGN, *SIZES, *BOMBS,
    *POLYGLOTS, *FINE, *PLACES,
)  # fmt: skip
