"""Which requests are let in: Host, Origin, content type, API keys; and which are administrative."""

import asyncio
import hashlib
import json
from typing import Any

import httpx
import pytest

KEY = "sk-orchard-0123456789"
KEYS = {"api_keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest() for key in ("other", KEY)]}
REMOTE = ("10.0.0.7", 5000)
CHAT = json.dumps({"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}]})


@pytest.fixture
def ask(make_app: Any) -> Any:
    """ask(method, path, headers, client=address, **config): the response to one request."""

    def ask_one(
        method: str,
        path: str = "/v1/models",
        headers: dict[str, str] | None = None,
        client: tuple[str, int] = ("127.0.0.1", 5000),
        content: str | None = None,
        app: Any = None,
        **config: Any,
    ) -> httpx.Response:
        async def talk() -> httpx.Response:
            transport = httpx.ASGITransport(app or make_app(**config), client=client)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
                return await http.request(method, path, headers=headers, content=content)

        return asyncio.run(talk())

    return ask_one


def assert_refused(response: httpx.Response, status: int, code: str, said: str = "") -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert said in error["message"]


# --- Host: a page that has bound its own name to this address (DNS rebinding) sends that name ------------------------

OWN_HOSTS = [
    "localhost:8000",
    "LOCALHOST",
    "app.localhost",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "192.168.1.5:80",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "[",
    "a b",
]


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_loopback_names_and_ip_addresses_are_answered(ask: Any, host: str):
    assert ask("GET", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/status", "/v1/cache", "/nope"])
def test_foreign_host_name_is_refused(ask: Any, host: str, path: str):
    assert_refused(ask("GET", path, {"Host": host}), 403, "host_not_allowed", "http.allowed_hosts")


def test_allowed_hosts_are_answered_and_other_hosts_are_refused(ask: Any):
    config = {"allowed_hosts": ["Mac.local"], "open": True}
    assert ask("GET", headers={"Host": "mac.local:8000"}, **config).status_code == 200
    assert ask("GET", headers={"Host": "evil.example"}, **config).status_code == 403


@pytest.mark.parametrize("config", [{"open": True}, KEYS], ids=["open", "keys"])
def test_open_server_answers_any_host_name_but_grants_no_administrative_access(ask: Any, config: Any):
    headers = {"Host": "mac.local:8000", "x-api-key": KEY}
    assert ask("GET", headers=headers, client=REMOTE, **config).status_code == 200
    rebound = ask("DELETE", "/v1/cache", {"Host": "evil.example"}, **config)
    assert rebound.status_code in (401, 403)


def test_health_is_answered_without_a_key_and_for_any_host_name(ask: Any):
    for path in ("/health/live", "/health/ready"):
        assert ask("GET", path, {"Host": "evil.example"}, client=REMOTE, **KEYS).status_code == 200


# --- Origin: pages that a browser on this machine shows --------------------------------------------------------------


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1", ""])
def test_a_page_of_another_origin_is_refused(ask: Any, backend: Any, origin: str):
    headers = {"Origin": origin, "Content-Type": "application/json"}
    response = ask("POST", "/v1/chat/completions", headers, content=CHAT)
    assert_refused(response, 403, "origin_not_allowed", "http.allowed_origins")
    assert ask("POST", "/v1/chat/completions/mine/cancel", headers).status_code == 403
    assert "access-control-allow-origin" not in response.headers
    assert backend.requests == []


def test_pages_of_the_server_and_of_allowed_origins_are_answered(ask: Any):
    for origin in ("http://127.0.0.1:8000", "http://chat.example:3000"):
        headers = {"Origin": origin, "Content-Type": "application/json"}
        config = {"allowed_origins": ["http://chat.example:3000"]}
        response = ask("POST", "/v1/chat/completions", headers, content=CHAT, **config)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["vary"] == "Origin"


def test_page_of_an_allowed_origin_can_read_an_error(ask: Any):
    headers = {"Origin": "null", "Content-Type": "application/json"}
    response = ask("POST", "/v1/chat/completions", headers, content="{", allowed_origins=["null"])
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (400, "null")


def test_a_preflight_is_answered_for_allowed_origins_alone_and_without_a_key(ask: Any):
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-lang",
        "Access-Control-Request-Private-Network": "true",
    }
    config = {"allowed_origins": ["https://chat.example"], **KEYS}
    response = ask("OPTIONS", "/v1/chat/completions", {"Origin": "https://chat.example", **asked}, REMOTE, **config)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    assert response.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
    assert response.headers["access-control-allow-private-network"] == "true"
    refused = ask("OPTIONS", "/v1/chat/completions", {"Origin": "https://evil.example", **asked}, **config)
    assert_refused(refused, 403, "origin_not_allowed")


# --- content type ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_body_without_a_json_content_type_is_a_415(ask: Any, backend: Any, sent: str):
    headers = {"Content-Type": sent} if sent else {}
    response = ask("POST", "/v1/chat/completions", headers, content=CHAT)
    assert_refused(response, 415, "unsupported_media_type", "application/json")
    assert backend.requests == []


@pytest.mark.parametrize("sent", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_content_type_is_accepted_in_any_case_and_with_a_charset(ask: Any, sent: str):
    assert ask("POST", "/v1/chat/completions", {"Content-Type": sent}, content=CHAT).status_code == 200


def test_a_request_without_a_body_needs_no_content_type(ask: Any):
    assert ask("POST", "/v1/chat/completions/mine/cancel").status_code == 404
    assert ask("DELETE", "/v1/cache").status_code == 200


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": KEYS["api_keys"][1]},
        {"x-api-key": "é"},
    ],
)
def test_requests_without_a_valid_key_are_refused_with_401(ask: Any, backend: Any, headers: dict[str, str]):
    sent: Any = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/status"), ("DELETE", "/v1/cache"), ("GET", "/nope")):
        response = ask(method, path, sent, **KEYS)
        assert_refused(response, 401, "invalid_api_key", "x-api-key")
        assert response.headers["www-authenticate"] == "Bearer"
    chat = ask("POST", "/v1/chat/completions", {**sent, "Content-Type": "application/json"}, content=CHAT, **KEYS)
    assert chat.status_code == 401 and backend.requests == []


@pytest.mark.parametrize("headers", [{"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, {"X-API-Key": "other"}])
def test_each_configured_key_gives_administrative_access(ask: Any, headers: dict[str, str]):
    assert ask("GET", headers=headers, client=REMOTE, **KEYS).status_code == 200
    assert ask("DELETE", "/v1/cache", headers, client=REMOTE, **KEYS).status_code == 200


def test_a_key_that_is_not_a_hash_is_refused_by_the_configuration(make_app: Any):
    for key in (KEY, "sha256:" + "a" * 63, "sha256:" + "A" * 64):
        with pytest.raises(ValueError, match="api_keys"):
            make_app(api_keys=[key])
    with pytest.raises(ValueError, match="allowed_origins"):
        make_app(allowed_origins=["*"])


# --- administrative requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "headers", "is_administrative"),
    [
        (("127.0.0.1", 1), {}, True),
        (("::1", 1), {}, True),
        (("::ffff:127.0.0.1", 1), {}, True),
        (REMOTE, {}, False),
        (("127.0.0.1", 1), {"X-Forwarded-For": "127.0.0.1"}, False),
        (("127.0.0.1", 1), {"Forwarded": "for=127.0.0.1"}, False),
        (("127.0.0.1", 1), {"Host": "mac.local"}, False),
    ],
)
def test_a_local_request_is_administrative_unless_a_gateway_has_passed_it_on(
    ask: Any, backend: Any, client: tuple[str, int], headers: dict[str, str], is_administrative: bool
):
    response = ask("DELETE", "/v1/cache", headers, client, open=True)
    if is_administrative:
        assert response.status_code == 200 and backend.num_entries == 0
    else:
        assert_refused(response, 403, "not_administrative", "DELETE /v1/cache")
        assert backend.num_entries == 4
