"""The proxy's middleware: requests that no ingress accepts, bodies, and request ids."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.http.proxy_limits import EXTENSION, ProxyLimits, TellProxy
from deployments.http.unread_bodies import BodyLimits
from deployments.http_proxy.guard import ProxyGuard, ProxyState
from tests.deployments.fake_handle import FakeRunningHandle

URL = "http://127.0.0.1"


class Proxy:
    """As Serve's HTTPProxy: reads the request, sees its client leave, and relays what the ingress sends."""

    def __init__(self, handle: FakeRunningHandle | None = None):
        self.proxy_router = self
        self.endpoints = {"app": handle} if handle else {}
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.answer: list[dict[str, Any]] = [
            {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"other")]},
            {"type": "http.response.body", "body": b"{}"},
        ]

    def match_route(self, path: str) -> tuple[str, Any, bool] | None:
        return ("/", self.endpoints["app"], False) if self.endpoints else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        for message in self.answer:
            await send(dict(message))


def ask(app: Any, method: str = "GET", **kwargs: Any) -> httpx.Response:
    async def talk() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
            return await client.request(method, "/v1/chat/completions", **kwargs)

    return asyncio.run(talk())


def guard(proxy: Any, limits: ProxyLimits | None = None, **kwargs: Any) -> ProxyGuard:
    return ProxyGuard(proxy, ProxyState(limits), **kwargs)


def assert_refused(response: httpx.Response, status: int, code: str, said: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert said in error["message"]
    assert response.headers.get_list("x-request-id")[0] and len(response.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(
    "handle", [None, FakeRunningHandle(0, has_had_one=False)], ids=["no application", "no ingress yet"]
)
def test_requests_during_the_start_are_refused_at_once_with_a_retry_after(handle: FakeRunningHandle | None):
    proxy = Proxy(handle)
    response = ask(guard(proxy, bridge_s=1000), "POST", content=b"{}")
    assert_refused(response, 503, "unavailable", "starting")
    assert int(response.headers["retry-after"]) >= 1
    assert proxy.headers == [], "nothing was buffered for it"


@pytest.mark.parametrize(("path", "is_logged"), [("/v1/models", True), ("/health/ready", False), ("/ping", False)])
def test_a_refusal_during_the_start_is_a_warning_unless_a_probe_asks(
    path: str, is_logged: bool, caplog: pytest.LogCaptureFixture
):
    async def talk() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard(Proxy())), base_url=URL) as client:
            return await client.get(path, headers={"X-Request-ID": "mine"})

    caplog.set_level("INFO", "orchard.http")
    assert asyncio.run(talk()).status_code == 503
    lines = [record for record in caplog.records if record.name == "orchard.http"]
    assert [(line.levelname, line.__dict__["request_id"]) for line in lines] == [("WARNING", "mine")] * is_logged


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"type": "http.request", "body": b"{", "more_body": True}], "while its body arrived; it was not started"),
        ([{"type": "http.request", "body": b"{}", "more_body": False}], "before its answer; it was ended"),
    ],
    ids=["in its body", "behind its body"],
)
def test_a_client_that_leaves_has_a_line_and_gets_no_refusal(
    messages: list[dict[str, Any]], said: str, caplog: pytest.LogCaptureFixture
):
    proxy, sent, messages = Proxy(FakeRunningHandle(1)), [], [*messages, {"type": "http.disconnect"}]

    async def waits_for_the_end(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    waits_for_the_end.proxy_router = proxy  # type: ignore[attr-defined]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", b"2"), (b"x-request-id", b"mine")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "client": None}
    caplog.set_level("INFO")
    asyncio.run(guard(waits_for_the_end)(scope, receive, send))
    assert (caplog.messages, sent) == ([f"request mine: the client disconnected {said}"], [])
    assert caplog.records[0].__dict__["request_id"] == "mine"


def test_own_routes_of_serve_pass_the_guard():
    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(guard(Proxy()))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            return await client.get("/-/healthz")

    assert asyncio.run(talk()).status_code == 200


def test_request_waits_for_a_replaced_ingress_for_a_limited_time():
    proxy = Proxy(FakeRunningHandle(0))
    assert_refused(ask(guard(proxy, bridge_s=0.3)), 503, "unavailable", "within 0 s")

    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(guard(proxy, bridge_s=1000))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            asking = asyncio.ensure_future(client.get("/v1/models"))
            await asyncio.sleep(0.3)
            assert not asking.done() and proxy.headers == []
            proxy.endpoints["app"].curr_replicas["new"] = None
            return await asking

    assert asyncio.run(talk()).status_code == 200


def test_ingress_that_dies_without_an_answer_gives_a_503():
    proxy = Proxy(FakeRunningHandle(1))
    proxy.answer = []
    response = ask(guard(proxy))
    assert_refused(response, 503, "unavailable", "was lost")
    assert int(response.headers["retry-after"]) >= 1

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("secret path")

    response = ask(guard(broken))
    assert_refused(response, 503, "unavailable", "was lost")
    assert "secret" not in response.text


@pytest.mark.parametrize(("sent", "is_kept"), [("mine", True), ("x" * 129, False), ("a b", False), (None, False)])
def test_a_response_has_one_sane_request_id_which_the_ingress_has_seen(sent: str | None, is_kept: bool):
    proxy = Proxy(FakeRunningHandle(1))
    headers = {"X-Request-ID": sent, "X-Request-Disconnect-Disabled": "?1"} if sent else {}
    response = ask(guard(proxy), headers=headers)
    (request_id,) = response.headers.get_list("x-request-id")
    assert request_id == proxy.headers[0]["x-request-id"]
    assert (request_id == sent) == is_kept
    assert "x-request-disconnect-disabled" not in proxy.headers[0]


SMALL = ProxyLimits(BodyLimits(max_body_bytes=100, max_bytes=100, grace_s=0.05, min_bytes_per_s=10**9))


def test_a_body_is_refused_by_its_length_before_it_is_read():
    proxy = Proxy(FakeRunningHandle(1))
    assert_refused(ask(guard(proxy, SMALL), "POST", content=b"x" * 101), 413, "request_too_large", "101")
    assert proxy.headers == []
    assert ask(guard(proxy, SMALL), "POST", content=b"x" * 100).status_code == 200
    assert proxy.bodies == [b"x" * 100]


@pytest.mark.parametrize(
    ("waits_s", "piece", "status", "code"),
    [(0.0, b"x" * 60, 413, "request_too_large"), (5.0, b"x", 408, "request_timeout")],
)
def test_a_body_without_length_is_stopped_at_the_limit_or_when_it_is_too_slow(
    waits_s: float, piece: bytes, status: int, code: str
):
    async def body() -> Any:
        yield piece
        await asyncio.sleep(waits_s)
        yield piece

    proxy = Proxy(FakeRunningHandle(1))
    guarded = guard(proxy, SMALL)
    assert_refused(ask(guarded, "POST", content=body()), status, code, "bytes")
    assert proxy.bodies == []
    assert guarded._state.bodies.status() == {"num_unread": 0, "unread_bytes": 0}


def test_configured_limits_reach_the_proxy_and_are_hidden_from_clients():
    limits = ProxyLimits(BodyLimits(max_body_bytes=50), send_timeout_s=7.5)
    proxy = Proxy(FakeRunningHandle(1))
    told: list[str] = []

    async def ingress(scope: Any, receive: Any, send: Any) -> None:
        told.append(scope["extensions"][EXTENSION])
        json.loads(told[-1])
        await proxy(scope, receive, send)

    app = TellProxy(ingress, limits)
    app.proxy_router = proxy  # type: ignore[attr-defined]
    guarded = guard(app)
    for _ in range(2):
        assert not [name for name in ask(guarded).headers if "orchard" in name]
    assert told == [ProxyLimits().to_json(), limits.to_json()]
    assert guarded._state.limits == limits
    assert_refused(ask(guarded, "POST", content=b"x" * 51), 413, "request_too_large", "51")


def test_response_without_a_guarded_proxy_does_not_expose_the_limits():
    response = ask(TellProxy(Proxy(FakeRunningHandle(1)), ProxyLimits()))
    assert not [name for name in response.headers if "orchard" in name]
