"""Raw prompts, embeddings and token counts, from a planner alone, and through HTTP to a real engine."""

import asyncio
import base64
import io
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from ray import serve

from deployments.args import AppArgs
from deployments.dispatch.prompt_field import naming_prompt
from deployments.ingress import Ingress
from deployments.model_replica import ModelReplica
from deployments.planners.mllm import MLLM
from deployments.planners.prompt_planner import PromptPlanner
from deployments.planners.text import TextMTP
from deployments.requests import ChatRequest, Tool
from engine.config import EmbeddingConfig, EngineConfig, PrefixCacheConfig
from engine.errors import ContextLengthExceeded, InvalidRequest
from tests.support.cold_runner import cold_engines
from tests.support.pooled_plans import planned
from tests.support.vision_families import SIGHTED
from tests.support.vision_zoo import write_files

USER = {"role": "user", "content": "What is 12 + 30?"}


@pytest.fixture(scope="module")
def planner() -> PromptPlanner:
    return PromptPlanner(EngineConfig())


def raw(prompt: Any, **fields: Any) -> ChatRequest:
    return ChatRequest("r", (), raw_prompt=prompt, **fields)


def plan(planner: PromptPlanner, request: ChatRequest) -> Any:
    return asyncio.run(planner.engine_request(request, request.messages))


def test_raw_prompt_is_tokenized_without_the_chat_template(planner):
    text = "<|im_start|>user\nHi<|im_end|>\n"
    planned = plan(planner, raw(text, max_tokens=5))
    assert planned.token_ids.tolist() == planner.tokenizer.encode_text(text).tolist()
    assert planner.tokenizer.decode(planned.token_ids.tolist()) == text
    assert planned.boundaries == () and planned.sampling.max_tokens == 5
    same = plan(planner, raw(tuple(planned.token_ids.tolist())))
    assert np.array_equal(same.token_ids, planned.token_ids) and same.token_ids.dtype == np.int32


@pytest.mark.parametrize("caches", [True, False])
def test_raw_prompt_that_is_empty_out_of_vocabulary_or_too_long_is_refused(caches):
    small = PromptPlanner(EngineConfig(max_context_tokens=64, prefix_cache=PrefixCacheConfig(enabled=caches)))
    for prompt in ("", ()):
        with pytest.raises(InvalidRequest, match="has 0 tokens"):
            plan(small, raw(prompt))
    with pytest.raises(InvalidRequest, match="The token id at index 1 is 4096; this model's token ids are 0 to 4095"):
        plan(small, raw((5, 4096)))
    for prompt in ("apple " * 100, "apple " * 200_000, (5,) * 64):
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 64 tokens"):
            plan(small, raw(prompt))
    assert len(plan(small, raw((5,) * 63)).token_ids) == 63


def test_a_raw_prompt_may_have_tokens_without_a_logit_which_end_no_answer(tmp_path: Path):
    """Molmo2 has eight more embeddings than logits."""
    planner = PromptPlanner(EngineConfig(model=str(write_files(tmp_path, SIGHTED["molmo2"]))))
    most = SIGHTED["molmo2"].config["text_config"]["vocab_size"] + 8 - 1
    assert plan(planner, raw((5, most))).token_ids.tolist() == [5, most]
    with pytest.raises(InvalidRequest, match=rf"index 0 is {most + 1}; this model's token ids are 0 to {most}"):
        plan(planner, raw((most + 1,)))
    with pytest.raises(InvalidRequest, match=rf"stop_token_ids\[0\] is {most}; .* are 0 to {most - 8}"):
        plan(planner, raw((5,), stop_token_ids=(most,)))


def test_an_embedding_may_take_the_whole_context():
    small = PromptPlanner(EngineConfig(max_context_tokens=64, embedding=EmbeddingConfig(pooling="mean")))
    [request] = planned(small, raw((5,) * 64, client="c", priority=2))
    assert (len(request.token_ids), request.pooling, request.client, request.priority) == (64, "mean", "c", 2)
    with pytest.raises(ContextLengthExceeded, match="65 in the prompt and 0 for the answer"):
        planned(small, raw((5,) * 65))


def test_token_count_is_the_length_of_the_rendered_prompt(planner):
    tool = Tool("get_weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
    plain, with_tool = ChatRequest("r", (USER,)), ChatRequest("r", (USER,), tools=(tool,), max_tokens=1, min_tokens=9)
    same_prompt = ChatRequest("r", (USER,), tools=(tool,))
    for request, rendered in ((plain, plain), (with_tool, same_prompt), (raw("Hi"), raw("Hi"))):
        expected = len(plan(planner, rendered).token_ids)
        assert asyncio.run(planner.count_tokens(request, request.messages)) == expected
    assert asyncio.run(planner.count_tokens(with_tool, (USER,))) > asyncio.run(planner.count_tokens(plain, (USER,)))


def test_prompt_beyond_the_context_is_counted_unless_the_work_is_too_large():
    small = PromptPlanner(EngineConfig(max_context_tokens=64))
    assert asyncio.run(small.count_tokens(raw((5,) * 100), ())) == 100
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(small.count_tokens(raw("apple " * 200_000), ()))


def test_token_ids_are_detokenized_and_ids_out_of_vocabulary_are_refused(planner):
    ids = planner.tokenizer.encode_text("Once 🙂<|im_end|>").tolist()
    assert asyncio.run(planner.text_of(ids, "tokens")) == "Once 🙂<|im_end|>"
    assert asyncio.run(planner.text_of((), "tokens")) == ""
    texts = asyncio.run(planner.token_texts(ids))
    assert len(texts) == len(ids) and texts[-1] == "<|im_end|>"
    with pytest.raises(InvalidRequest, match="index 0 is 5000") as error:
        asyncio.run(planner.text_of((5000,), "tokens"))
    assert error.value.field == "tokens"


def test_errors_about_a_raw_prompt_name_the_field_of_the_client():
    def field_of(request: ChatRequest, error: InvalidRequest) -> str | None:
        with pytest.raises(InvalidRequest) as raised, naming_prompt(request):
            raise error
        return raised.value.field

    embedding = raw("x", prompt_field="input[3]")
    assert field_of(embedding, ContextLengthExceeded(9, 0, 8)) == "input[3]"
    assert field_of(embedding, InvalidRequest("x")) == "input[3]"
    assert field_of(embedding, InvalidRequest("x", "n")) == "n"
    assert field_of(ChatRequest("r", (USER,)), ContextLengthExceeded(9, 0, 8)) == "messages"


# --- through HTTP ---------------------------------------------------------------------------------------------------


class Here(Ingress.func_or_class):  # type: ignore[misc, name-defined]
    def __del__(self) -> None:
        """Serve awaits the one of the ingress; here nothing does."""


@pytest.fixture(scope="module")
def graph() -> Iterator[tuple[Any, Any, Any]]:
    config = EngineConfig(max_running=4, prefix_cache=PrefixCacheConfig(min_tokens=4))
    with cold_engines():
        engine = serve.run(ModelReplica.bind(config), name="raw-engine", _local_testing_mode=True)
        text = serve.run(TextMTP.bind(AppArgs(engine=config)), name="raw-text", _local_testing_mode=True)
        yield engine, text, text
    engine.options(method_name="__del__").remote().result()  # as Serve does; the local mode forgets it


@pytest.fixture
def talk(graph) -> Callable[[Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]], None]:
    """talk(test): runs test(client) against the HTTP face in front of a real planner and engine."""

    def run(test: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
        async def go() -> None:
            here: Any = Here.__new__(Here)
            await here.__init__(AppArgs(engine=EngineConfig(max_running=4)), {}, *graph)
            here._graph._ready_until = float("inf")
            transport = httpx.ASGITransport(here.__serve_build_asgi_app__())
            async with (
                asyncio.timeout(120),
                httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
            ):
                await test(client)

        asyncio.run(go())

    return run


def test_a_completion_of_a_rendered_prompt_is_the_chat_completion(talk):
    async def test(client: httpx.AsyncClient) -> None:
        chat = {"model": "demo", "messages": [USER], "temperature": 0, "max_tokens": 20}
        said = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]["content"]
        rendered = (await client.post("/tokenize", json={"messages": [USER], "return_token_strs": True})).json()
        text = (await client.post("/detokenize", json={"tokens": rendered["tokens"]})).json()["prompt"]
        assert "".join(rendered["token_strs"]) == text and rendered["max_model_len"] == 32768
        assert (await client.post("/tokenize", json={"prompt": text})).json()["tokens"] == rendered["tokens"]
        body = {"model": "demo", "prompt": [text, text], "temperature": 0, "max_tokens": 20, "logprobs": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == [said, said]
        logprobs = answer["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == said and logprobs["text_offset"][0] == 0
        of_tokens = {**body, "prompt": rendered["tokens"], "echo": True, "logprobs": None}
        assert (await client.post("/v1/completions", json=of_tokens)).json()["choices"][0]["text"] == text + said

    talk(test)


def test_embeddings_have_unit_length_and_do_not_depend_on_concurrent_requests(talk):
    async def test(client: httpx.AsyncClient) -> None:
        texts = [f"The number {i} is a number. " * (i + 1) for i in range(6)]

        async def embed(given: Any) -> np.ndarray:
            body = {"model": "demo", "input": given, "encoding_format": "base64"}
            data = (await client.post("/v1/embeddings", json=body)).json()["data"]
            return np.array([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])

        alone = np.concatenate([await embed(text) for text in texts])
        np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-5)
        story = {"model": "demo", "messages": [USER], "max_tokens": 60, "ignore_eos": True}
        busy = asyncio.ensure_future(client.post("/v1/chat/completions", json=story))
        np.testing.assert_allclose(await embed(texts), alone, atol=1e-5)
        assert (await busy).status_code == 200
        ids = (await client.post("/tokenize", json={"prompt": texts[3]})).json()["tokens"]
        np.testing.assert_allclose(await embed([ids]), alone[3:4], atol=1e-5)
        answer = (await client.post("/v1/embeddings", json={"model": "demo", "input": texts[3]})).json()
        assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
        np.testing.assert_allclose(answer["data"][0]["embedding"], alone[3], atol=1e-5)

    talk(test)


def test_prompt_that_cannot_be_embedded_or_completed_is_refused_by_field(talk):
    async def test(client: httpx.AsyncClient) -> None:
        async def error_of(**fields: Any) -> tuple[int, str]:
            answer = await client.post("/v1/embeddings", json={"model": "demo", **fields})
            return answer.status_code, answer.json()["error"]["param"]

        assert await error_of(input=["a", ""]) == (400, "input[1]")
        assert await error_of(input=[[5], [5000]]) == (400, "input[1]")
        assert await error_of(input="apple " * 40_000) == (400, "input")
        assert await error_of(input="a", dimensions=7) == (400, "dimensions")
        answer = await client.post("/v1/completions", json={"model": "demo", "prompt": ["a", "apple " * 40_000]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt[1]")
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    talk(test)


def test_token_count_and_token_ids_include_the_tokens_of_an_image():
    buffer = io.BytesIO()
    Image.new("RGB", (128, 64), "red").save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    request = ChatRequest("r", ({"role": "user", "content": parts},))

    async def go() -> tuple[int, list[int], int]:
        make: Any = MLLM.func_or_class
        planner = make(AppArgs())
        planned = await planner.plan(request)
        return await planner.count_tokens(request), await planner.token_ids(request), len(planned.request.token_ids)

    count, ids, num_planned = asyncio.run(go())
    assert (len(ids), ids.count(6), count) == (num_planned, 8, num_planned)
