"""POST /v1/embeddings: inputs of all shapes, vectors as numbers and base64."""

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from deployments.dispatch.embedding import embed_all
from deployments.dispatch.text_group import ComputeGroup, TextResults
from deployments.http.openai.embeddings import embeddings_body
from deployments.requests import ChatRequest, Embeddings, EmbedRequest
from engine.errors import EngineFailed, InvalidRequest
from tests.deployments.http.conftest import assert_refused


@pytest.fixture
def embed(send) -> Callable[..., httpx.Response]:
    def post(app: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", "input": "a text", **fields}
        return send("POST", "/v1/embeddings", app=app, content=json.dumps(body))

    return post


def test_each_input_has_a_vector_in_its_order(embed, backend):
    body = embed(input=["ab", "c"], user="u").json()
    assert body == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0, 1, 0]},
            {"object": "embedding", "index": 1, "embedding": [1, 1, 0]},
        ],
        "model": "org/demo",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    [request] = backend.embeds
    assert (request.prompts, request.fields) == (("ab", "c"), ("input[0]", "input[1]"))
    assert (request.client, request.num_parallel, request.num_dimensions) == ("u", 2, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("ab", ("ab",)), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,))), (["a"] * 9, ("a",) * 9)],
)
def test_embedding_inputs_of_all_shapes_reach_the_engine(embed, backend, given, expected):
    assert len(embed(input=given).json()["data"]) == len(expected)
    assert backend.embeds[0].prompts == expected
    assert backend.embeds[0].num_parallel == min(4, len(expected))


def test_base64_is_little_endian_float32(embed):
    [item] = embed(encoding_format="base64").json()["data"]
    assert struct.unpack("<3f", base64.b64decode(item["embedding"])) == (0, 1, 0)


def test_embedding_values_in_json_are_exact_in_float32():
    vector = np.random.default_rng(0).normal(size=300).astype("<f4")
    vector[:3] = 1e-38, -0.0, 1 / 3
    body = json.loads(asyncio.run(embeddings_body(Embeddings((vector.tobytes(),), 1), False, "m")))
    assert np.array_equal(np.array(body["data"][0]["embedding"], np.float32), vector)


def test_openai_client_reads_base64_and_float_embeddings(make_app):
    async def talk() -> None:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://127.0.0.1")
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=http) as client:
            default = await client.embeddings.create(model="org/demo", input=["a", "b"])
            numbers = await client.embeddings.create(model="org/demo", input=["a", "b"], encoding_format="float")
            assert [d.embedding for d in default.data] == [d.embedding for d in numbers.data] == [[0, 1, 0], [1, 1, 0]]

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"input": []}, "input", ["at least 1"]),
        ({"input": ["a"] * 2049}, "input", ["2048", "2049"]),
        ({"input": {}}, "input", ["array of strings"]),
        ({"encoding_format": "binary"}, "encoding_format", ["float"]),
        ({"dimensions": 0}, "dimensions", ["1"]),
        ({"embed_dtype": "float16"}, "embed_dtype", ["float32"]),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", ["`input`"]),
    ],
)
def test_invalid_or_unsupported_field_is_refused_by_name(embed, backend, fields, param, named):
    assert_refused(embed(**fields), backend, param, named)
    assert backend.embeds == []


def test_errors_and_ignored_fields_are_reported_as_for_other_requests(embed, backend):
    assert embed(model="other").status_code == 404
    assert embed(keep_alive=1).headers["X-Orchard-Ignored"] == "keep_alive"
    backend.start_script = [EngineFailed("secret")]
    failed = embed()
    assert failed.status_code == 500 and "secret" not in failed.text
    backend.unready = "No engine is ready."


def test_embedding_request_without_a_ready_engine_is_a_503(embed, backend):
    backend.unready = "No engine is ready."
    assert embed().status_code == 503


# --- several prompts ------------------------------------------------------------------------------------------------


def test_results_keep_the_order_of_the_prompts_and_their_tokens_are_added():
    async def compute(texts: Sequence[ChatRequest], num_parallel: int, max_open: int | None) -> TextResults:
        for _ in range(len(str(texts[0].raw_prompt)) * 7 % 5):
            await asyncio.sleep(0)
        return [(str(text.raw_prompt).encode() * 4, 2) for text in texts]

    prompts = tuple(f"{i:03}" for i in range(100))
    found = run_all(EmbedRequest("e", prompts, tuple(f"input[{i}]" for i in range(100)), num_parallel=3), compute)
    assert found == Embeddings(tuple(prompt.encode() * 4 for prompt in prompts), 200)


def test_dimensions_other_than_those_of_the_model_are_refused_after_the_first_group():
    asked = 0

    async def compute(texts: Sequence[ChatRequest], num_parallel: int, max_open: int | None) -> TextResults:
        nonlocal asked
        asked += 1
        return [(bytes(4 * 192), 1) for _ in texts]

    assert run_all(EmbedRequest("e", ("a",), ("input",), num_dimensions=192), compute).num_prompt_tokens == 1
    prompts, fields = ("a",) * 200, ("input",) * 200
    with pytest.raises(InvalidRequest, match="`dimensions` is 100: it must be 192, as the embeddings") as error:
        run_all(EmbedRequest("e", prompts, fields, num_dimensions=100), compute)
    assert (error.value.field, asked) == ("dimensions", 2)


def run_all(request: EmbedRequest, compute: ComputeGroup) -> Embeddings:
    async def go() -> Embeddings:
        async with asyncio.timeout(60):
            return await embed_all(request, compute)

    return asyncio.run(go())
