"""Requests with API keys of a file: what they may do, how much of it, and in whose name."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.http.api_keys import ApiKeysError
from deployments.http.generation import TextDelta
from engine.errors import EngineFailed

ADMIN, ANN, BOB = "key-of-the-administrator", "key-of-ann", "key-of-bob"
CHAT = {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}]}
REMOTE = ("10.0.0.7", 5000)
PAGE = "https://chat.example"


def entry(key: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest(), "name": name, **fields}


@pytest.fixture
def make_keyed(make_app: Any, tmp_path: Path) -> Callable[..., FastAPI]:
    """make_keyed(limits of Ann's key): an app with three keys in a file."""

    def make(ann: dict[str, Any] | None = None, **config: Any) -> FastAPI:
        path = tmp_path / "keys.json"
        ann = {"tenant": "acme", "client": "team", **(ann or {})}
        path.write_text(
            json.dumps([entry(ADMIN, "root", is_administrative=True), entry(ANN, "ann", **ann), entry(BOB, "bob")])
        )
        path.chmod(0o600)
        return make_app(api_keys_file=str(path), **config)

    return make


@pytest.fixture
def ask(make_keyed: Callable[..., FastAPI]) -> Callable[..., httpx.Response]:
    """ask(method, path, headers, body): the response of one app; `ask.app` may be set before."""

    class Ask:
        app: FastAPI | None = None

        def __call__(
            self, method: str, path: str, headers: dict[str, str] | None = None, body: Any = None
        ) -> httpx.Response:
            return asyncio.run(self._talk(method, path, headers, body))

        async def _talk(self, method: str, path: str, headers: dict[str, str] | None, body: Any) -> httpx.Response:
            self.app = self.app or make_keyed()
            transport = httpx.ASGITransport(self.app, client=REMOTE)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
                return await http.request(method, path, headers=headers, json=body)

    return Ask()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def chat(ask: Any, key: str, **fields: Any) -> httpx.Response:
    return ask("POST", "/v1/chat/completions", bearer(key), {**CHAT, **fields})


# --- who may do what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [ANN, BOB])
def test_key_without_administrative_access_sees_only_figures_and_cannot_clear_the_cache(
    ask: Any, backend: Any, key: str
):
    async def page() -> dict[str, Any]:
        return {"model": "org/demo", "num_running": 3, "config": {"x": "secret"}, "path": "/secret"}

    backend.status = backend.cache_status = page
    for path in ("/v1/status", "/v1/cache"):
        assert "secret" not in ask("GET", path, bearer(key)).text
        assert "secret" in ask("GET", path, bearer(ADMIN)).text
    refused = ask("DELETE", "/v1/cache", bearer(key))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_administrative")
    assert backend.num_entries == 4
    assert ask("DELETE", "/v1/cache", bearer(ADMIN)).status_code == 200
    assert backend.num_entries == 0


def test_local_client_needs_an_administrative_key_on_a_server_with_keys(make_keyed: Any, backend: Any):
    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(make_keyed(), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.delete("/v1/cache", headers=bearer(ANN))

    assert asyncio.run(talk()).status_code == 403 and backend.num_entries == 4


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/v1/messages/count_tokens", "/nope"])
def test_both_key_headers_are_accepted_on_routes_of_both_dialects(ask: Any, path: str):
    for headers in (bearer(ANN), {"x-api-key": ANN}, {"x-api-key": ANN, **bearer(ANN)}):
        assert ask("GET", path, headers).status_code != 401
    assert ask("GET", path).status_code == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_x_api_key_takes_precedence_on_anthropic_routes(ask: Any, path: str):
    refused = ask("POST", path, {"x-api-key": "wrong", **bearer(ANN)}, {})
    assert refused.status_code == 401
    assert refused.json()["type"] == "error" and refused.json()["error"]["type"] == "authentication_error"
    assert ask("POST", path, {"x-api-key": ANN, **bearer("wrong")}, {}).status_code != 401
    assert ask("POST", path, {"x-api-key": "", **bearer(ANN)}, {}).status_code != 401


def test_either_key_header_is_enough_on_openai_routes(ask: Any):
    for headers in ({"x-api-key": "wrong", **bearer(ANN)}, {"x-api-key": ANN, **bearer("wrong")}):
        assert ask("POST", "/v1/chat/completions", headers, CHAT).status_code == 200
    assert ask("GET", "/v1/models", {"x-api-key": "wrong", **bearer("wrong")}).status_code == 401


def test_empty_key_is_refused_even_when_its_hash_is_configured(make_app: Any, ask: Any):
    ask.app = make_app(api_keys=[entry("", "x")["hash"]])
    for headers in ({"x-api-key": ""}, {"Authorization": "Bearer "}, {"Authorization": "Bearer"}):
        assert ask("GET", "/v1/models", headers).status_code == 401


def test_keys_of_an_environment_variable_are_administrative(make_app: Any, ask: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ORCHARD_TEST_KEYS", f"{ANN},{BOB}")
    ask.app = make_app(api_keys_env="ORCHARD_TEST_KEYS")
    assert ask("DELETE", "/v1/cache", bearer(BOB)).status_code == 200
    assert ask("GET", "/v1/models", bearer(ADMIN)).status_code == 401


def test_missing_api_keys_file_is_an_error_when_the_app_is_built(make_app: Any, tmp_path: Path):
    with pytest.raises(ApiKeysError, match="does not exist"):
        make_app(api_keys_file=str(tmp_path / "nothing"))


# --- in whose name ---------------------------------------------------------------------------------------------------


def test_tenant_and_client_of_a_request_are_prefixed_with_those_of_its_key(ask: Any, backend: Any):
    for key in (ANN, BOB):
        chat(ask, key)
        chat(ask, key, cache_salt="salt", user="eve")
    tenants = [(request.tenant, request.client) for request, _ in backend.requests]
    assert tenants == [
        ("4:acme", "4:team"),
        ("4:acmesalt", "4:teameve"),
        ("", "3:bob"),
        ("0:salt", "3:bobeve"),
    ]


# --- how much of it --------------------------------------------------------------------------------------------------


def test_requests_per_minute_are_limited_and_the_answer_says_how(ask: Any, make_keyed: Any, backend: Any):
    ask.app = make_keyed({"max_requests_per_minute": 2})
    assert [chat(ask, ANN).headers["x-ratelimit-remaining-requests"] for _ in range(2)] == ["1", "0"]
    refused = chat(ask, ANN)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    for part in ("'ann'", "2", "max_requests_per_minute"):
        assert part in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert len(backend.requests) == 2 and chat(ask, BOB).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
def test_counting_tokens_is_a_request(ask: Any, make_keyed: Any, path: str):
    ask.app = make_keyed({"max_requests_per_minute": 1})
    assert ask("POST", path, bearer(ANN), CHAT).status_code == 200
    refused = ask("POST", path, bearer(ANN), CHAT)
    assert refused.status_code == 429 and "max_requests_per_minute" in refused.json()["error"]["message"]
    assert ask("POST", path, bearer(BOB), CHAT).status_code == 200


def test_invalid_bodies_are_not_counted_as_requests(ask: Any, make_keyed: Any):
    ask.app = make_keyed({"max_requests_per_minute": 1})
    for _ in range(3):
        assert chat(ask, ANN, temperature=9).status_code == 400
        assert ask("GET", "/v1/models", bearer(ANN)).status_code == 200
    assert chat(ask, ANN).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompt_and_answer_are_charged(ask: Any, make_keyed: Any, stream: bool):
    ask.app = make_keyed({"max_tokens_per_minute": 1000})
    assert chat(ask, ANN, stream=stream).status_code == 200
    left = int(ask("GET", "/v1/models", bearer(ANN)).headers["x-ratelimit-remaining-tokens"])
    assert 989 <= left <= 995, "7 of the prompt and 4 of the answer are gone, some may have come back"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_an_answer_that_fails_are_charged(ask: Any, make_keyed: Any, backend: Any, stream: bool):
    backend.script = [TextDelta("Hel", 500), EngineFailed("out of memory")]
    ask.app = make_keyed({"max_tokens_per_minute": 510})
    chat(ask, ANN, stream=stream)
    left = int(ask("GET", "/v1/models", bearer(ANN)).headers["x-ratelimit-remaining-tokens"])
    assert left < 300


def test_tokens_of_an_answer_are_charged_and_its_rows_freed_when_its_client_disconnects(
    make_keyed: Any, connect: Any, backend: Any
):
    """Another request with the same key then finds less."""
    backend.script = [TextDelta("Hel", 5000), asyncio.Event()]

    async def talk() -> tuple[Any, Any]:
        app = make_keyed({"max_tokens_per_minute": 1000, "max_rows": 1})
        first, second = (connect(bearer(ANN), app=app, stream=True) for _ in range(2))
        running = asyncio.ensure_future(first.run())
        while not first.sent:
            await asyncio.sleep(0)
        await second.run()
        first.left.set()
        await running
        third = connect(bearer(ANN), app=app)
        await third.run()
        return second, third

    second, third = asyncio.run(talk())
    assert second.status == third.status == 429
    assert b"max_rows" in second.body and b"max_tokens_per_minute" in third.body


# Requests with several texts, each of which is a choice in flight while it is computed
TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]
SEVERAL = {
    "/v1/embeddings": {"input": TEXTS},
    "/v1/rerank": {"query": "q", "documents": TEXTS},
    "/v1/score": {"text_1": "q", "text_2": TEXTS},
    "/api/embed": {"input": TEXTS},
}


@pytest.mark.parametrize("path", SEVERAL)
@pytest.mark.parametrize(("max_rows", "num_parallel"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_a_request_with_several_texts_opens_at_most_as_many_at_once_as_its_key_may(
    ask: Any, make_keyed: Any, backend: Any, path: str, max_rows: int, num_parallel: int
):
    ask.app = make_keyed({"max_rows": max_rows})
    for _ in range(2):  # the first one leaves nothing in flight
        answer = ask("POST", path, bearer(ANN), {"model": "org/demo", **SEVERAL[path]})
        assert answer.status_code == 200, answer.text
    for wanted in (*backend.embeds, *backend.scores):
        assert (wanted.num_parallel, wanted.max_open) == (num_parallel, max_rows)
    ask("POST", path, bearer(BOB), {"model": "org/demo", **SEVERAL[path]})
    [*_, wanted] = (*backend.embeds, *backend.scores)
    assert (wanted.num_parallel, wanted.max_open) == (4, None)


def test_more_choices_of_an_answer_than_max_rows_stay_refused(ask: Any, make_keyed: Any, backend: Any):
    ask.app = make_keyed({"max_rows": 2})
    answer = chat(ask, ANN, n=3)
    assert answer.status_code == 400 and "`n` is 3: the API key 'ann' may have 2 choices in flight" in answer.text
    backend.script = [TextDelta("Hel", 1, "stop", index=index) for index in range(2)]
    assert chat(ask, ANN, n=2).status_code == 200


def test_anthropics_routes_have_anthropics_headers(ask: Any, make_keyed: Any):
    ask.app = make_keyed({"max_requests_per_minute": 2})
    headers = ask("POST", "/v1/messages", {"x-api-key": ANN}, {}).headers
    assert headers["anthropic-ratelimit-requests-limit"] == "2"
    assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert not any(name.startswith("x-ratelimit") for name in headers)


def test_answer_to_a_key_without_limits_has_no_rate_limit_headers(ask: Any):
    assert not any("ratelimit" in name for name in chat(ask, BOB).headers)


# --- web pages -------------------------------------------------------------------------------------------------------


def test_an_allowed_page_can_read_the_headers_and_a_refusal(ask: Any, make_keyed: Any):
    ask.app = make_keyed({"max_requests_per_minute": 1}, allowed_origins=[PAGE])
    page = {"Origin": PAGE}
    answers = [ask("POST", "/v1/chat/completions", {**page, **bearer(ANN)}, CHAT) for _ in range(2)]
    answers.append(ask("GET", "/v1/models", page))
    assert [answer.status_code for answer in answers] == [200, 429, 401]
    for answer in answers:
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert {"x-orchard-ignored", "request-id", "x-request-id", "retry-after"} < set(exposed)
        assert {name for name in answer.headers if "ratelimit" in name} <= set(exposed)


def test_a_page_of_another_origin_cannot_read_a_refusal(ask: Any, make_keyed: Any):
    ask.app = make_keyed(allowed_origins=[PAGE])
    refused = ask("GET", "/v1/models", {"Origin": "https://evil.example"})
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers


def test_a_preflight_names_every_method_that_a_page_may_send(ask: Any, make_keyed: Any):
    ask.app = make_keyed(allowed_origins=[PAGE])
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "x-api-key"}
    response = ask("OPTIONS", "/v1/cache", asked)
    assert response.status_code == 204
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert response.headers["access-control-allow-headers"] == "x-api-key"
