"""A checkpoint of sentence-transformers behind the planner and the ingress."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.dispatch.embedding import embed_all
from deployments.dispatch.text_group import TextResults
from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest, EmbedRequest
from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest
from tests.deployments.local_mode import serving
from tests.support.embedding_models import PROMPTS, demo_embedding_model, describe_embeddings
from tests.support.pooled_plans import planned
from tests.support.tiny import Tiny, build


def embedded(planner: PromptPlanner, text: Any, **fields: Any) -> list[int]:
    request = ChatRequest("r", (), raw_prompt=text, **fields)
    return planned(planner, request)[0].token_ids.tolist()


def test_the_named_or_default_prompt_is_put_in_front_of_a_text(tmp_path):
    planner = PromptPlanner(EngineConfig(model=str(demo_embedding_model(tmp_path / "a"))))
    with_default = demo_embedding_model(tmp_path / "b", default_prompt_name="query")
    by_default = PromptPlanner(EngineConfig(model=str(with_default)))
    query = planner.tokenizer.encode_text(PROMPTS["query"] + "apples").tolist()
    plain = planner.tokenizer.encode_text("apples").tolist()
    assert embedded(planner, "apples", prompt_name="query") == embedded(by_default, "apples") == query
    assert embedded(planner, "apples") == embedded(by_default, "apples", prompt_name="document") == plain
    assert embedded(by_default, tuple(plain)) == plain  # token ids are complete


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("a", "passage", "`prompt_name` is 'passage'; it must be one of document, query"),
        ((5, 6), "query", "`prompt_name` is 'query', but the input is token ids"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_by_field(tmp_path, text, name, reason):
    planner = PromptPlanner(EngineConfig(model=str(demo_embedding_model(tmp_path / "model"))))
    with pytest.raises(InvalidRequest, match=reason) as error:
        embedded(planner, text, prompt_name=name)
    assert error.value.field == "prompt_name"


def test_a_prompt_is_refused_where_the_model_has_none_or_leaves_it_out_of_the_pooling(tmp_path):
    with pytest.raises(InvalidRequest, match="it must be not set, as this model has none"):
        embedded(PromptPlanner(EngineConfig()), "a", prompt_name="query")
    path = demo_embedding_model(tmp_path / "model")
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    planner = PromptPlanner(EngineConfig(model=str(path)))
    assert embedded(planner, "a", prompt_name="document")
    with pytest.raises(InvalidRequest, match="include_prompt is false"):
        embedded(planner, "a", prompt_name="query")


def test_an_input_beyond_the_models_own_limit_is_an_error_with_both_numbers(tmp_path):
    path = demo_embedding_model(tmp_path / "model")
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    planner = PromptPlanner(EngineConfig(model=str(path)))
    assert len(embedded(planner, (5,) * 8)) == 8
    with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 8 tokens.* 9 in the prompt"):
        embedded(planner, (5,) * 9)


def test_broken_prompts_are_refused_with_the_file(tmp_path):
    path = demo_embedding_model(tmp_path / "model", default_prompt_name="passage")
    with pytest.raises(EngineFailed, match=r"config_sentence_transformers\.json.*'passage'"):
        PromptPlanner(EngineConfig(model=str(path)))


def test_a_module_that_is_not_computed_is_refused_by_name(tmp_path):
    path = demo_embedding_model(tmp_path / "model")
    modules = json.loads((path / "modules.json").read_text())
    modules.append({"path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InvalidRequest, match=r"3_Dense \(sentence_transformers.models.Dense\)"):
        embedded(PromptPlanner(EngineConfig(model=str(path))), "a")


def test_an_embedding_model_needs_no_chat_template(tmp_path):
    path = demo_embedding_model(tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    planner = PromptPlanner(EngineConfig(model=str(path)))
    assert embedded(planner, "apples") == planner.tokenizer.encode_text("apples").tolist()
    (path / "modules.json").unlink()
    with pytest.raises(EngineFailed, match="no chat template"):
        PromptPlanner(EngineConfig(model=str(path)))


def test_an_embedding_model_embeds_through_http_and_refuses_to_generate_text(tmp_path):
    path = describe_embeddings(build(tmp_path / "model", Tiny(layers=2, interval=2, mtp=False)))

    async def go(client: httpx.AsyncClient) -> None:
        async def embed(**fields: Any) -> np.ndarray:
            answer = await client.post("/v1/embeddings", json={"model": "model", **fields})
            return np.array([item["embedding"] for item in answer.json()["data"]])

        texts = ["red apples", "a story about the sea"]
        whole = await embed(input=texts)
        short = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
        np.testing.assert_allclose(await embed(input=texts, dimensions=16), short, atol=1e-6)
        by_name = await embed(input=texts, prompt_name="query")
        by_hand = await embed(input=[PROMPTS["query"] + text for text in texts])
        np.testing.assert_allclose(by_name, by_hand, atol=1e-5)
        chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
        for path, body in {"/v1/chat/completions": chat, "/v1/messages": {**chat, "max_tokens": 5}}.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 400 and "embedding model and generates no text" in answer.text

    serving(path, "embedding", go, mtp="off")


@pytest.mark.parametrize(("wanted", "expected"), [(3, [0.6, 0.0, 0.8]), (1, [1.0]), (4, [0.48, 0.0, 0.64, 0.6])])
def test_embeddings_of_an_embedding_model_are_shortened_and_normalized_again(wanted, expected):
    async def compute(texts: Sequence[ChatRequest], num_parallel: int, max_open: int | None) -> TextResults:
        return [(np.array([0.48, 0.0, 0.64, 0.6], "<f4").tobytes(), 1) for _ in texts]

    request = EmbedRequest("e", ("a",), ("input",), num_dimensions=wanted)
    [vector] = asyncio.run(embed_all(request, compute, may_shorten=True)).vectors
    np.testing.assert_allclose(np.frombuffer(vector, "<f4"), expected, atol=1e-7)
    with pytest.raises(InvalidRequest, match="`dimensions` is 5: it must be at most 4"):
        asyncio.run(embed_all(EmbedRequest("e", ("a",), ("input",), num_dimensions=5), compute, may_shorten=True))
