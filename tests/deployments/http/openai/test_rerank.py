"""POST /v1/rerank: documents by their relevance, in the form of Jina, Cohere and vLLM."""

import asyncio
import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import httpx
import pytest

from engine.errors import EngineFailed, InvalidRequest
from tests.deployments.http.conftest import assert_refused

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


@pytest.fixture
def rerank(send) -> Callable[..., httpx.Response]:
    def post(app: Any = None, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", "query": "which?", "documents": ["ab", "abcd", "abc"], **fields}
        return send("POST", path, app=app, content=json.dumps(body))

    return post


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_with_their_index_the_most_relevant_first(rerank, backend, path):
    body = rerank(path=path, user="u", priority=3).json()
    assert body.pop("id").startswith("rerank-")
    assert body == {
        "model": "org/demo",
        "usage": {"prompt_tokens": 15, "total_tokens": 15},
        "results": [
            {"index": 1, "document": {"text": "abcd"}, "relevance_score": 0.4},
            {"index": 2, "document": {"text": "abc"}, "relevance_score": 0.3},
            {"index": 0, "document": {"text": "ab"}, "relevance_score": 0.2},
        ],
    }
    [request] = backend.scores
    assert (request.queries, request.documents) == (("which?",), ("ab", "abcd", "abc"))
    assert request.document_fields == ("documents[0]", "documents[1]", "documents[2]")
    assert (request.client, request.priority, request.num_parallel) == ("u", 3, 4)
    assert request.is_search and request.has_activation and request.instruction is None


def test_equal_scores_are_in_the_order_of_the_documents(rerank):
    results = rerank(documents=["aa", "b", "cc", "d", "ee"]).json()["results"]
    assert [one["index"] for one in results] == [0, 2, 4, 1, 3]


@pytest.mark.parametrize(
    ("top_n", "expected"), [(1, [1]), (2, [1, 2]), (9, [1, 2, 0]), (0, [1, 2, 0]), (None, [1, 2, 0])]
)
def test_top_n_limits_the_results_and_zero_is_all(rerank, top_n, expected):
    body = rerank(top_n=top_n).json()
    assert [one["index"] for one in body["results"]] == expected
    assert body["usage"]["total_tokens"] == 15  # all were computed


def test_documents_are_left_out_if_the_client_wants_none(rerank):
    assert rerank(return_documents=False).json()["results"][0] == {"index": 1, "relevance_score": 0.4}
    assert "document" in rerank(return_documents=None).json()["results"][0]


def test_texts_may_be_objects(rerank, backend):
    body = rerank(query={"text": "q"}, documents=["ab", {"text": "a", "title": "T"}]).json()
    assert body["results"][1] == {"index": 1, "document": {"text": "a"}, "relevance_score": 0.1}
    assert (backend.scores[0].queries, backend.scores[0].documents) == (("q",), ("ab", "a"))


@pytest.mark.parametrize(
    ("fields", "has_activation"),
    [({}, True), ({"use_activation": False}, False), ({"activation": False}, False), ({"use_activation": True}, True)],
)
def test_activation_and_instruction_reach_the_backend(rerank, backend, fields, has_activation):
    assert rerank(instruction="Find code.", **fields).status_code == 200
    assert (backend.scores[0].has_activation, backend.scores[0].instruction) == (has_activation, "Find code.")


def test_fields_without_effect_are_accepted(rerank):
    neutral = {"rank_fields": ["text"], "truncate_prompt_tokens": None, "max_tokens_per_doc": None, "cache_salt": "s"}
    answer = rerank(return_embeddings=False, mm_processor_kwargs={}, metadata={"a": 1}, keep_alive=1, **neutral)
    assert answer.status_code == 200 and answer.headers["X-Orchard-Ignored"] == "keep_alive"


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"query": 5}, "query", ["5", "string or an object"]),
        ({"query": None}, "query", ["string or an object"]),
        ({"query": {"title": "x"}}, "query.text", ["required"]),
        ({"query": {"text": "x", "image": "data:"}}, "query.image", ["null"]),
        ({"documents": []}, "documents", ["at least 1"]),
        ({"documents": "abc"}, "documents", ["array"]),
        ({"documents": ["a"] * 2049}, "documents", ["2048", "2049"]),
        ({"documents": ["a", "b", "c", 5]}, "documents[3]", ["5"]),
        ({"documents": ["a", {"text": 7}]}, "documents[1].text", ["7"]),
        ({"documents": [{"text": "a", "content": []}]}, "documents[0].content", ["null"]),
        ({"top_n": -1}, "top_n", ["-1", "0"]),
        ({"top_n": 1.5}, "top_n", ["1.5"]),
        ({"return_documents": "yes"}, "return_documents", ["yes"]),
        ({"instruction": ""}, "instruction", ["1"]),
        ({"use_activation": 1}, "use_activation", ["1"]),
        ({"use_activation": True, "activation": False}, "activation", ["same value"]),
        ({"max_tokens_per_doc": 512}, "max_tokens_per_doc", ["scored as a whole"]),
        ({"max_chunks_per_doc": 10}, "max_chunks_per_doc", ["scored as a whole"]),
        ({"rank_fields": ["title"]}, "rank_fields", ["text"]),
        ({"return_embeddings": True}, "return_embeddings", ["false"]),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", ["5"]),
        ({"softmax": True}, "softmax", ["use_activation"]),
        ({"chat_template_kwargs": {"instruction": "x"}}, "chat_template_kwargs", ["`instruction`"]),
        ({"priority": 2**31}, "priority", ["2147483647"]),
        ({"user": "u" * 1025}, "user", ["1024"]),
    ],
)
def test_invalid_or_unsupported_field_is_refused_by_name(rerank, backend, fields, param, named):
    assert_refused(rerank(**fields), backend, param, named)
    assert backend.scores == []


@pytest.mark.parametrize("missing", ["model", "query", "documents"])
def test_missing_field_is_refused_by_name(send, backend, missing):
    body = {"model": "org/demo", "query": "q", "documents": ["a"]}
    del body[missing]
    assert_refused(send("POST", "/rerank", content=json.dumps(body)), backend, missing, ["required"])


def test_errors_have_the_form_of_other_requests_on_every_path(rerank, backend):
    for path in PATHS:
        answer = rerank(path=path, model="other")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    backend.start_script = [InvalidRequest("This document is too long.", "documents[2]")]
    assert rerank().json()["error"]["param"] == "documents[2]"
    backend.start_script = [EngineFailed("secret")]
    failed = rerank()
    assert failed.status_code == 500 and "secret" not in failed.text
    backend.unready = "No engine is ready."
    assert rerank().status_code == 503


def test_keys_and_their_limits_are_those_of_other_requests(rerank, send, make_app, backend, tmp_path):
    entry = {"hash": f"sha256:{sha256(b'secret').hexdigest()}", "name": "anna", "max_tokens_per_minute": 20}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([entry]))
    keys.chmod(0o600)
    app = make_app(api_keys_file=str(keys))
    assert rerank(app=app).status_code == 401
    body = json.dumps({"model": "org/demo", "query": "12345", "documents": ["a" * 15]})
    headers = {"Authorization": "Bearer secret"}
    assert send("POST", "/v2/rerank", app=app, content=body, headers=headers).status_code == 200
    assert send("POST", "/rerank", app=app, content=body, headers=headers).status_code == 429  # 20 tokens were used
    assert [request.client for request in backend.scores] == ["4:anna"]


def test_a_request_can_be_cancelled_by_its_request_id(make_app, backend):
    backend.start_script = [asyncio.Event()]

    async def talk() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"model": "org/demo", "query": "q", "documents": ["a"]}
            asking = asyncio.ensure_future(client.post("/v1/rerank", json=body, headers={"X-Request-Id": "mine"}))
            while not backend.scores:
                await asyncio.sleep(0)
            assert (await client.post("/v1/chat/completions/mine/cancel")).status_code == 200
            assert (await asking).status_code == 499
        assert backend.in_flight.status()["num_in_flight"] == 0

    asyncio.run(talk())
