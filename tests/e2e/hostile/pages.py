"""Rows: request ids, cancelling, and the other routes with odd methods, bodies and parameters."""

from tests.e2e.hostile.rows import (
    CHAT,
    MALFORMED,
    OK,
    Either,
    Http,
    Page,
    Raw,
    Refused,
    Row,
    Status,
    encode,
    post,
    raw_get,
    raw_post,
)

BODY = encode()
NO_METHOD = Refused((405,))
NO_REQUEST = Refused((404,), None, "request_not_found")
NO_ROUTE = Refused((404,))
NOT_FOR_YOU = Refused((403,), None, "not_administrative")
THROUGH_A_GATEWAY = {"X-Forwarded-For": "203.0.113.9"}
PAGE = Status((200,))


def _cancel(request_id: str, **options: object) -> Http:
    return Http("POST", f"{CHAT}/{request_id}/cancel", **options)  # pyright: ignore[reportArgumentType]


IDS = (
    Row("X-Request-ID of 128 characters", post(BODY, X_Request_Id="i" * 128), "X-Request-ID", OK),
    Row("X-Request-ID of 10 kB", post(BODY, X_Request_Id="i" * 10_000), "X-Request-ID", OK),
    Row("X-Request-ID with blanks", post(BODY, X_Request_Id="a b c"), "X-Request-ID", OK),
    Row("X-Request-ID of nothing", post(BODY, X_Request_Id=""), "X-Request-ID", OK),
    Row("X-Request-ID beyond ASCII", post(BODY, X_Request_Id="grüße-漢字"), "X-Request-ID", OK),
    Row("X-Request-ID with a line break, encoded", post(BODY, X_Request_Id="a%0d%0aX-B:%20c"), "X-Request-ID", OK),
    Row("X-Request-ID with a line break", Raw(raw_post(BODY, b"Content-Length: %d" % len(BODY),
        b"X-Request-ID: a\r\n X-B: c")), "X-Request-ID", MALFORMED),
    Row("X-Request-ID with terminal control", Raw(raw_post(BODY, b"Content-Length: %d" % len(BODY),
        b"X-Request-ID: \x1b[31mred\x1b[0m")), "X-Request-ID", Either((OK, MALFORMED))),
    Row("X-Request-ID twice", Raw(raw_post(BODY, b"Content-Length: %d" % len(BODY), b"X-Request-ID: one",
        b"X-Request-ID: two")), "X-Request-ID", OK),
    Row("X-Request-ID that is a script", post(BODY, X_Request_Id="<script>alert(1)</script>"), "X-Request-ID", OK),
)  # fmt: skip

CANCELS = (
    Row("cancel what never was", _cancel("never"), "request ids", NO_REQUEST),
    Row("cancel with no id", _cancel(""), "request ids", NO_ROUTE),
    Row("cancel up and out", _cancel("..%2f..%2fetc%2fpasswd"), "request ids", NO_REQUEST),
    Row("cancel with 10 kB", _cancel("i" * 10_000), "request ids", NO_REQUEST),
    Row("cancel with a NUL", _cancel("a%00b"), "request ids", NO_REQUEST),
    Row("cancel with line breaks", _cancel("a%0d%0ab"), "request ids", NO_ROUTE),
    Row("cancel beyond ASCII", _cancel("%e6%bc%a2%ff"), "request ids", NO_REQUEST),
    Row("cancel all", _cancel("*"), "request ids", NO_REQUEST),
    Row("cancel by every completion's first letters", _cancel("chatcmpl-"), "request ids", NO_REQUEST),
    Row("cancel with cancel", _cancel("cancel/cancel"), "request ids", NO_REQUEST),
    Row("cancel with a body", _cancel("never", content=b'{"a": 1}', headers={"Content-Type": "application/json"}),
        "request ids", NO_REQUEST),
    Row("cancel with a body of garbage", _cancel("never", content=b"\xff" * 1000), "request ids",
        Refused((404, 415))),
    Row("cancel by GET", Http("GET", f"{CHAT}/never/cancel"), "methods", NO_METHOD),
    Row("cancel from a foreign page", _cancel("never", headers={"Origin": "http://evil.example"}),
        "http.allowed_origins", Refused((403,), None, "origin_not_allowed")),
)  # fmt: skip

METHODS = tuple(
    Row(f"{method} {path}", Http(method, path), "methods", Status((405,)) if method == "HEAD" else NO_METHOD)
    for method, path in (
        ("GET", CHAT), ("HEAD", CHAT), ("PUT", CHAT), ("DELETE", CHAT), ("PATCH", CHAT),
        ("POST", "/v1/models"), ("DELETE", "/v1/models/demo"), ("PUT", "/v1/models/demo"), ("POST", "/v1/status"),
        ("DELETE", "/v1/status"), ("PATCH", "/v1/status"), ("POST", "/v1/cache"), ("PUT", "/v1/cache"),
        ("PATCH", "/v1/cache"), ("POST", "/health/live"), ("DELETE", "/health/ready"),
    )
)  # fmt: skip

PAGES = (
    Row("status with a query of 60 KiB", Http("GET", "/v1/status?" + "a=b&" * 15_000), "queries", PAGE),
    Row("status with an absurd query", Http("GET", "/v1/status?%00=%ff&[]=&a=b=c&;&&"), "queries", PAGE),
    Row("status with a body", Http("GET", "/v1/status", b"[" * 2**20), "bodies where none is read", PAGE),
    Row("health with a body", Http("GET", "/health/ready", b"\0" * 2**20), "bodies where none is read", PAGE),
    Row("models with a body that is announced and never comes", Raw(raw_get(b"Content-Length: 1000000")),
        "bodies where none is read", PAGE),
    Row("models with a body of ten terabytes", Raw(raw_get(b"Content-Length: 10000000000000")), "http.max_body_bytes",
        Status((200, 413))),
    Row("cache with a body", Http("GET", "/v1/cache", b"{"), "bodies where none is read", PAGE),
    Row("delete the cache with a body", Http("DELETE", "/v1/cache", b'{"only": "mine"}'), "bodies where none is read",
        PAGE),
    Row("delete the cache through a gateway", Http("DELETE", "/v1/cache", headers=THROUGH_A_GATEWAY),
        "administrative requests", NOT_FOR_YOU),
    Row("delete the cache as this machine, through a gateway", Http("DELETE", "/v1/cache", headers={
        "X-Forwarded-For": "127.0.0.1"}), "administrative requests", NOT_FOR_YOU),
    Row("status through a gateway", Http("GET", "/v1/status", headers=THROUGH_A_GATEWAY), "administrative requests",
        Page(("config", "queue", '"draft_model":"', "node_id"))),
    Row("cache through a gateway", Http("GET", "/v1/cache", headers=THROUGH_A_GATEWAY), "administrative requests",
        Page(("recent_misses", "explanation"))),
    Row("delete the cache, forwarded", Http("DELETE", "/v1/cache", headers={"Forwarded": "for=127.0.0.1"}),
        "administrative requests", NOT_FOR_YOU),
    Row("delete the cache from a foreign page", Http("DELETE", "/v1/cache", headers={"Origin": "http://evil.example"}),
        "http.allowed_origins", Refused((403,), None, "origin_not_allowed")),
    Row("health for a load balancer", Http("GET", "/health/live", headers={"Host": "10.1.2.3:80"}), "open paths", PAGE),
    Row("a key where none is configured", post(BODY, Authorization="Bearer sk-nonsense"), "http.api_keys", OK),
    Row("a key that is no key", post(BODY, Authorization="Basic \t:::" + "=" * 1000), "http.api_keys", OK),
    Row("a chat's messages for a completion", Http("POST", "/v1/completions", BODY, {
        "Content-Type": "application/json"}), "fields", Refused((400,), "messages")),
    Row("audio, which is not served", Http("POST", "/v1/audio/speech", BODY, {"Content-Type": "application/json"}),
        "routes", NO_ROUTE),
    Row("the documentation", Http("GET", "/docs"), "open paths", PAGE),
    Row("the OpenAPI document", Http("GET", "/openapi.json"), "open paths", PAGE),
    Row("a body of 1 MiB where no route is", Http("POST", "/v1/nothing", bytes(2**20), {
        "Content-Type": "application/json"}), "routes", NO_ROUTE),
    Row("a GraphQL query", Http("POST", "/graphql", b"{__schema{types{name}}}", {"Content-Type": "application/json"}),
        "routes", NO_ROUTE),
)  # fmt: skip

ROWS = (*IDS, *CANCELS, *METHODS, *PAGES)
