"""Rows: what is not HTTP, or HTTP that servers read in different ways."""

import gzip
import json

from tests.e2e.hostile.rows import (
    CHAT,
    CLOSED,
    MALFORMED,
    OK,
    Either,
    Http,
    Raw,
    Refused,
    Row,
    Status,
    bad,
    encode,
    post,
    raw_get,
    raw_post,
)

BODY = encode()
CHUNKED = b"Transfer-Encoding: chunked"
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(190))
LARGE_HEADERS = Status((400, 431, CLOSED))
"""The connection may be closed while the client still sends, which can cost it the answer."""
LARGISH_HEADERS = Status((200, *LARGE_HEADERS.statuses))
"""Headers that arrive in one read of the server, up to 256 KiB, are parsed before the limit is checked."""
OUR_ANSWER_OR_MALFORMED = Either((OK, MALFORMED))

HOST_REFUSED = Refused((403,), None, "host_not_allowed")
ORIGIN_REFUSED = Refused((403,), None, "origin_not_allowed")
TYPE_REFUSED = Refused((415,), None, "unsupported_media_type", ("application/json",))


def _chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n", **options: bool) -> Raw:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return Raw(raw_post(body + end, CHUNKED), **options)


def _length(value: bytes) -> Raw:
    return Raw(raw_post(BODY, b"Content-Length: " + value))


REQUEST_LINES = (
    Row("every byte once", Raw(bytes(range(256)) * 4), "HTTP syntax", MALFORMED),
    Row("a TLS handshake on the plain port", Raw(TLS_HELLO, ends=True), "HTTP syntax", MALFORMED),
    Row("an SSH client", Raw(b"SSH-2.0-OpenSSH_9.6\r\n", ends=True), "HTTP syntax", MALFORMED),
    Row("HTTP/0.9", Raw(b"GET /health/live\r\n\r\n", ends=True), "HTTP version", Status((200, 400, CLOSED))),
    Row("HTTP/1.0", Raw(b"GET /health/live HTTP/1.0\r\n\r\n"), "HTTP version", Status((200,))),
    Row("HTTP/2 without negotiation", Raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "HTTP version", MALFORMED),
    Row("HTTP/9.9", Raw(b"GET / HTTP/9.9\r\nHost: {host}\r\n\r\n", ends=True), "HTTP version", MALFORMED),
    Row("a method in lower case", Raw(b"get / HTTP/1.1\r\nHost: {host}\r\n\r\n"), "HTTP syntax", MALFORMED),
    Row("an unknown method", Raw(b"BREW / HTTP/1.1\r\nHost: {host}\r\n\r\n"), "HTTP syntax", MALFORMED),
    Row("blanks in the path", Raw(raw_get(path=b"/v1/ models /x")), "HTTP syntax", MALFORMED),
    Row("a NUL in the path", Raw(raw_get(path=b"/v1/\0models")), "HTTP syntax", MALFORMED),
    Row(
        "bare line feeds",
        Raw(b"GET /health/live HTTP/1.1\nHost: {host}\nConnection: close\n\n", ends=True),
        "HTTP syntax",
        Status((200, 400, CLOSED)),
    ),
    Row(
        "empty lines before the request",
        Raw(b"\r\n\r\n\r\n" + raw_get(path=b"/health/live")),
        "HTTP syntax",
        Status((200,)),
    ),
    Row(
        "CONNECT to another host",
        Raw(b"CONNECT evil.example:443 HTTP/1.1\r\nHost: {host}\r\n\r\n", ends=True),
        "no proxy",
        Status((400, 404, 405, CLOSED)),
    ),
    Row(
        "the URL of another host",
        Raw(raw_get(path=b"http://evil.example/v1/models")),
        "no proxy",
        Status((200, 400, 403, 404)),
    ),
    Row(
        "OPTIONS *",
        Raw(b"OPTIONS * HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"),
        "routes",
        Status((400, 404, 405)),
    ),
    Row(
        "TRACE",
        Raw(b"TRACE /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"),
        "routes",
        Status((400, 405)),
    ),
    Row(
        "a path of 1 MiB",
        Raw(lambda: raw_get(path=b"/" + b"a" * 2**20)),
        "64 KiB of headers",
        Status((400, 414, 431, CLOSED)),
    ),
    Row(
        "a query of 1 MiB",
        Raw(lambda: raw_get(path=b"/v1/models?" + b"a=b&" * 2**18)),
        "64 KiB of headers",
        Status((400, 414, 431, CLOSED)),
    ),
)

LENGTHS = (
    Row("Content-Length and chunked", Raw(raw_post(BODY, b"Content-Length: 4", CHUNKED)), "one length", MALFORMED),
    Row("two lengths", Raw(raw_post(BODY, b"Content-Length: 4", b"Content-Length: 5")), "one length", MALFORMED),
    Row("a list of lengths", _length(b"5, 5"), "one length", MALFORMED),
    Row("a negative length", _length(b"-1"), "Content-Length", MALFORMED),
    Row("a length with a sign", _length(b"+5"), "Content-Length", MALFORMED),
    Row("a length in hexadecimal", _length(b"0x10"), "Content-Length", MALFORMED),
    Row("a length in words", _length(b"many"), "Content-Length", MALFORMED),
    Row("an empty length", _length(b""), "Content-Length", MALFORMED),
    Row("a length of 31 digits", _length(b"9" * 31), "Content-Length", MALFORMED),
    Row(
        "a length of ten terabytes",
        Raw(raw_post(b"{", b"Content-Length: 10000000000000")),
        "http.max_body_bytes",
        Refused((413,), None, "request_too_large", ("10000000000000",)),
    ),
    Row(
        "a body shorter than its length",
        Raw(raw_post(BODY[:20], b"Content-Length: %d" % len(BODY)), ends=True),
        "Content-Length",
        Status((400, 408, 499, CLOSED)),
    ),
    Row(
        "a body longer than its length",
        Raw(raw_post(BODY + b"GARBAGE\r\n\r\n", b"Content-Length: %d" % len(BODY))),
        "Content-Length",
        OUR_ANSWER_OR_MALFORMED,
    ),
    Row(
        "a second request in the body",
        Raw(raw_post(raw_get(), b"Content-Length: 0")),
        "Content-Length",
        Status((200, 400)),
    ),
)

CHUNKS = (
    Row("a body byte by byte in chunks", _chunked(*(BODY[i : i + 1] for i in range(len(BODY)))), "chunks", OK),
    Row("a chunk size that is none", Raw(raw_post(b"zz\r\nabc\r\n0\r\n\r\n", CHUNKED)), "chunks", MALFORMED),
    Row("a negative chunk size", Raw(raw_post(b"-5\r\nabcde\r\n0\r\n\r\n", CHUNKED)), "chunks", MALFORMED),
    Row("a chunk size of 17 digits", Raw(raw_post(b"f" * 17 + b"\r\nabc\r\n", CHUNKED)), "chunks", MALFORMED),
    Row("a chunk longer than its size", Raw(raw_post(b"2\r\nabcdef\r\n0\r\n\r\n", CHUNKED)), "chunks", MALFORMED),
    Row(
        "a chunk that breaks off",
        _chunked(BODY[:30], end=b"ff\r\nabc", ends=True),
        "chunks",
        Status((400, 408, 499, CLOSED)),
    ),
    Row("chunks without an end", _chunked(BODY, end=b"", ends=True), "chunks", Status((400, 408, 499, CLOSED))),
    Row(
        "a chunk extension of 1 MiB",
        Raw(lambda: raw_post(b"%x;%b\r\n%b\r\n0\r\n\r\n" % (len(BODY), b"a" * 2**20, BODY), CHUNKED)),
        "chunks",
        Either((OK, Status((400, 413, 431, CLOSED)))),
    ),
    Row(
        "ten thousand trailers",
        _chunked(BODY, end=b"0\r\n" + b"X-T: 1\r\n" * 10_000 + b"\r\n"),
        "chunks",
        Either((OK, Status((400, 413, 431, CLOSED)))),
    ),
    Row(
        "trailers of 40 MiB",
        Raw(
            lambda: raw_post(
                b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY) + (b"X-T: " + b"t" * 2**16 + b"\r\n") * 640 + b"\r\n", CHUNKED
            )
        ),
        "chunks",
        Status((400, 408, 413, 431, CLOSED)),
        cost="large",
    ),
    Row("chunked twice", Raw(raw_post(BODY, b"Transfer-Encoding: chunked, chunked")), "Transfer-Encoding", MALFORMED),
    Row(
        "chunked, then something else",
        Raw(raw_post(BODY, b"Transfer-Encoding: chunked, gzip")),
        "Transfer-Encoding",
        MALFORMED,
    ),
    Row(
        "an unknown transfer encoding",
        Raw(raw_post(BODY, b"Transfer-Encoding: xchunked"), ends=True),
        "Transfer-Encoding",
        Status((400, 408, 499, 501, CLOSED)),
    ),
    Row(
        "chunks beyond the limit of a body",
        Raw(lambda: raw_post(b"100000\r\n%b\r\n" % (b" " * 2**20) * 80, CHUNKED)),
        "http.max_body_bytes",
        Refused((413,), None, "request_too_large"),
        cost="large",
    ),
)

HEADERS = (
    Row("a header without a colon", Raw(raw_get(b"nonsense")), "HTTP syntax", MALFORMED),
    Row("a blank before the colon", Raw(raw_get(b"X-A : b")), "HTTP syntax", MALFORMED),
    Row("a folded header", Raw(raw_get(b"X-A: b\r\n c")), "HTTP syntax", MALFORMED),
    Row("a NUL in a header", Raw(raw_get(b"X-A: b\0c")), "HTTP syntax", MALFORMED),
    Row("a bare carriage return in a header", Raw(raw_get(b"X-A: b\rX-B: c")), "HTTP syntax", MALFORMED),
    Row("a header name that is no name", Raw(raw_get("Grüße: b".encode())), "HTTP syntax", MALFORMED),
    Row(
        "every byte from 128 on in a header",
        Raw(raw_get(b"X-A: " + bytes(range(128, 256)))),
        "HTTP syntax",
        Status((200, 400)),
    ),
    Row(
        "fifty thousand headers",
        Raw(lambda: raw_get(*[b"X-%d: a" % i for i in range(50_000)])),
        "64 KiB of headers",
        LARGE_HEADERS,
    ),
    Row("a header of 60 KiB", Raw(raw_get(b"X-A: " + b"a" * 60 * 2**10)), "64 KiB of headers", Status((200,))),
    Row("a header of 1 MiB", Raw(lambda: raw_get(b"X-A: " + b"a" * 2**20)), "64 KiB of headers", LARGE_HEADERS),
    Row("a cookie of 64 KiB", Raw(raw_get(b"Cookie: a=" + b"a" * 2**16)), "64 KiB of headers", LARGISH_HEADERS),
    Row(
        "a bearer token of 64 KiB",
        Raw(raw_get(b"Authorization: Bearer " + b"a" * 2**16)),
        "64 KiB of headers",
        LARGISH_HEADERS,
    ),
    Row("Expect: 100-continue", post(BODY, Expect="100-continue"), "Expect", OK),
    Row("Expect of something else", post(BODY, Expect="the-unexpected"), "Expect", Either((OK, Status((400, 417))))),
    Row(
        "an upgrade to WebSocket",
        Raw(
            raw_get(
                b"Upgrade: websocket",
                b"Connection: Upgrade",
                b"Sec-WebSocket-Version: 13",
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
                path=CHAT.encode(),
            )
        ),
        "routes",
        Status((400, 403, 404, 405, 426)),
    ),
    Row(
        "an upgrade to HTTP/2",
        Raw(raw_get(b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")),
        "routes",
        Status((200, 400)),
    ),
    Row(
        "a gzip bomb",
        post(gzip.compress(bytes(10**8)), Content_Encoding="gzip"),
        "it is decompressed up to max_body_bytes",
        Status((413,)),
    ),
    Row("a timeout that is no number", post(BODY, X_Request_Timeout_Seconds="soon"), "Ray's headers", OK),
    Row("a negative timeout", post(BODY, X_Request_Timeout_Seconds="-1"), "Ray's headers", OK),
    Row("no detection of disconnects", post(BODY, X_Request_Disconnect_Disabled="true"), "Ray's headers", OK),
    Row("another model by Ray's header", post(BODY, Serve_Multiplexed_Model_Id="../../etc"), "Ray's headers", OK),
)

HOSTS = (
    Row("no Host", Raw(raw_get(host=None)), "http.allowed_hosts", Status((200, 400, 403))),
    Row("the Host of a foreign page", Raw(raw_get(host=b"evil.example")), "http.allowed_hosts", HOST_REFUSED),
    Row(
        "a Host that begins like ours",
        Raw(raw_get(host=b"127.0.0.1.evil.example:8000")),
        "http.allowed_hosts",
        HOST_REFUSED,
    ),
    Row(
        "a Host with credentials",
        Raw(raw_get(host=b"localhost@evil.example")),
        "http.allowed_hosts",
        Status((400, 403)),
    ),
    Row("a Host that is half an address", Raw(raw_get(host=b"[::1")), "http.allowed_hosts", Status((200, 400, 403))),
    Row("a Host of blanks", Raw(raw_get(host=b"a b c")), "http.allowed_hosts", Status((400, 403))),
    Row(
        "a Host of letters beyond ASCII",
        Raw(raw_get(host="löcalhost".encode())),
        "http.allowed_hosts",
        Status((400, 403)),
    ),
    Row("a Host of 64 KiB", Raw(raw_get(host=b"a" * 2**16)), "http.allowed_hosts", Status((400, 403, 431, CLOSED))),
    Row("our Host and a foreign one", Raw(raw_get(b"Host: evil.example")), "http.allowed_hosts", Status((400, 403))),
    Row("localhost with a dot", Raw(raw_get(host=b"LocalHost.:1")), "http.allowed_hosts", Status((200,))),
    Row("an IPv6 address of this machine", Raw(raw_get(host=b"[::1]:8000")), "http.allowed_hosts", Status((200,))),
    Row(
        "the Host of a foreign page deletes the cache",
        Raw(raw_get(host=b"evil.example", path=b"/v1/cache").replace(b"GET", b"DELETE")),
        "http.allowed_hosts",
        HOST_REFUSED,
    ),
    Row(
        "the Origin of a foreign page", post(BODY, Origin="http://evil.example"), "http.allowed_origins", ORIGIN_REFUSED
    ),
    Row("the Origin of a sandboxed page", post(BODY, Origin="null"), "http.allowed_origins", ORIGIN_REFUSED),
    Row("an Origin that is no origin", post(BODY, Origin="]" * 5000), "http.allowed_origins", ORIGIN_REFUSED),
    Row(
        "a preflight of a foreign page",
        Http("OPTIONS", CHAT, headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}),
        "http.allowed_origins",
        ORIGIN_REFUSED,
    ),
)

TYPES = (
    Row(
        "text/plain, as pages send it without asking",
        post(BODY, Content_Type="text/plain"),
        "Content-Type",
        TYPE_REFUSED,
    ),
    Row("a form", post(BODY, Content_Type="application/x-www-form-urlencoded"), "Content-Type", TYPE_REFUSED),
    Row("a multipart form", post(BODY, Content_Type="multipart/form-data; boundary=x"), "Content-Type", TYPE_REFUSED),
    Row(
        "no content type",
        Raw(raw_post(BODY).replace(b"Content-Type: application/json\r\n", b"")),
        "Content-Type",
        TYPE_REFUSED,
    ),
    Row(
        "a content type of 64 KiB",
        post(BODY, Content_Type="a/" + "b" * 2**16),
        "Content-Type",
        Status((415, 431, CLOSED)),
    ),
    Row(
        "JSON in capitals with a charset",
        post(BODY, Content_Type="Application/JSON; charset=UTF-8"),
        "Content-Type",
        OK,
    ),
    Row(
        "UTF-16, as its content type says",
        post(json.dumps({"model": "demo"}).encode("utf-16"), Content_Type="application/json; charset=utf-16"),
        "UTF-8",
        bad(None, "UTF-8"),
    ),
)

PIPELINES = (
    Row(
        "twenty requests in one packet",
        Raw(raw_get(path=b"/health/live").replace(b"Connection: close\r\n", b"") * 19 + raw_get(path=b"/health/live")),
        "HTTP/1.1 pipelining",
        Status((200,)),
    ),
    Row(
        "a chat completion behind another",
        Raw(raw_post(BODY).replace(b"Connection: close\r\n", b"") + raw_post(BODY)),
        "HTTP/1.1 pipelining",
        OK,
    ),
    Row(
        "garbage behind a request",
        Raw(raw_get(path=b"/health/live").replace(b"Connection: close\r\n", b"") + b"\0" * 99),
        "HTTP/1.1 pipelining",
        Status((200, 400)),
    ),
)

PATHS = tuple(
    Row(f"path {shown}", Raw(raw_get(path=path)), "routes", Status((400, 404)))
    for shown, path in {
        "up and out": b"/../../../etc/passwd",
        "up and out, encoded": b"/v1/..%2f..%2f..%2fetc%2fpasswd",
        "up and out, encoded twice": b"/%252e%252e/%252e%252e/etc/passwd",
        "with backslashes": b"/v1\\..\\..\\etc\\passwd",
        "with a NUL, encoded": b"/v1/models/%00",
        "with broken escapes": b"/v1/models/%zz%f",
        "with bytes that are no UTF-8": b"/v1/models/%ff%fe%c0%80",
        "with two slashes": b"//v1//models",
        "in capitals": b"/V1/MODELS",
        "with a slash at the end": b"/v1/models/",
        "of a model with line breaks": b"/v1/models/a%0d%0aSet-Cookie:%20a=b",
        "of a model of 10 kB": b"/v1/models/" + b"m" * 10_000,
        ".env": b"/.env",
        ".git/config": b"/.git/config",
        "out of the page": b"/page/../web_page.py",
        "out of the page, encoded": b"/page/..%2fweb_page.py",
        "a file of the page's folder that is not served": b"/page/screenshot.png",
        "the page's folder": b"/page/",
        "a semicolon": b"/v1/models;jsessionid=1",
    }.items()
)  # fmt: skip

ROWS = (*REQUEST_LINES, *LENGTHS, *CHUNKS, *HEADERS, *HOSTS, *TYPES, *PIPELINES, *PATHS)
