"""Encoders behind the planner and the ingress: embeddings, scores of pairs, and no text."""

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.http.config import HttpConfig
from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.protocol import TokenChunk
from tests.deployments.local_mode import serving
from tests.support.encoders import POSITIONS, TEXTS, Reference, make_cross_encoder, make_encoder, tokenizer
from tests.support.pooled_plans import planned

CHAT = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("family", ["modernbert", "camembert", "nomic_bert"])
def test_an_encoder_embeds_through_http_scores_by_the_cosine_and_generates_no_text(tmp_path, family):
    path = make_encoder(tmp_path / "model", family, "mean_tokens")
    reference = Reference(path)
    expected = np.array([reference.states(tokenizer(family).encode(text).ids).mean(axis=0) for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)

    async def go(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/embeddings", json={"model": "model", "input": list(TEXTS)})
        found = np.array([item["embedding"] for item in answer.json()["data"]])
        np.testing.assert_allclose(found, expected, atol=5e-6)
        body = {"model": "model", "query": TEXTS[0], "documents": list(TEXTS[1:])}
        results = (await client.post("/v1/rerank", json=body)).json()["results"]
        cosines = {i: expected[0] @ expected[i + 1] for i in range(3)}
        assert [one["index"] for one in results] == sorted(cosines, key=lambda i: -cosines[i])
        answer = await client.post("/v1/embeddings", json={"model": "model", "input": "red " * POSITIONS})
        assert answer.status_code == 400 and f"{POSITIONS} tokens" in answer.text
        for route, more in {"/v1/chat/completions": {}, "/v1/messages": {"max_tokens": 5}}.items():
            answer = await client.post(route, json={**CHAT, **more})
            assert answer.status_code == 400 and "embedding model and generates no text" in answer.text

    serving(path, f"encoder-{family}", go)


@pytest.mark.parametrize("family", ["bert", "roberta", "nomic_bert"])
def test_a_cross_encoder_reranks_through_http_by_the_probability_of_its_only_class(tmp_path, family):
    path = make_cross_encoder(tmp_path / "model", family)
    reference = Reference(path)
    pairs = [tokenizer(family).encode(TEXTS[0], document) for document in TEXTS[1:]]
    logits = [reference.score(pair.ids, pair.type_ids.index(1) if 1 in pair.type_ids else None) for pair in pairs]

    async def go(client: httpx.AsyncClient) -> None:
        body = {"model": "model", "query": TEXTS[0], "documents": list(TEXTS[1:])}
        results = (await client.post("/v1/rerank", json=body)).json()["results"]
        assert [one["index"] for one in results] == sorted(range(3), key=lambda i: -logits[i])
        for one in results:
            assert one["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logits[one["index"]])), abs=1e-5)
        plain = (await client.post("/v1/rerank", json={**body, "use_activation": False})).json()["results"]
        assert plain[0]["relevance_score"] == pytest.approx(max(logits), abs=2e-5)
        answer = await client.post("/v1/rerank", json={**body, "instruction": "Find fruit."})
        assert answer.status_code == 400 and "write the instruction into the query" in answer.text
        for route, more in {"/v1/chat/completions": CHAT, "/v1/embeddings": {"input": "a"}}.items():
            answer = await client.post(route, json={"model": "model", **more})
            assert answer.status_code == 400 and "reranker" in answer.text

    serving(path, f"cross-encoder-{family}", go)


def test_the_texts_of_a_key_with_few_choices_wait_for_each_other_in_an_idle_engine(tmp_path, monkeypatch):
    path, keys, num_open, most = make_encoder(tmp_path / "model", "bert"), tmp_path / "keys.json", 0, 0
    secrets = {"few": 2, "many": 9, "any": None}
    hashes = {name: "sha256:" + hashlib.sha256(name.encode()).hexdigest() for name in secrets}
    keys.write_text(json.dumps([{"hash": hashes[name], "name": name, "max_rows": n} for name, n in secrets.items()]))
    keys.chmod(0o600)
    generate = AsyncEngine.generate

    async def counted(self: AsyncEngine, *arguments: Any) -> AsyncIterator[TokenChunk]:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        try:
            async for chunk in generate(self, *arguments):
                yield chunk
        finally:
            num_open -= 1

    monkeypatch.setattr(AsyncEngine, "generate", counted)

    async def go(client: httpx.AsyncClient) -> None:
        nonlocal most
        texts = [f"red apples {i}" for i in range(30)]
        vectors, scores, found = [], [], dict[str, int]()
        for name in secrets:
            most, headers = 0, {"Authorization": f"Bearer {name}"}
            answer = await client.post("/v1/embeddings", json={"model": "model", "input": texts}, headers=headers)
            vectors.append([item["embedding"] for item in answer.json()["data"]])
            body = {"model": "model", "query": TEXTS[0], "documents": texts}
            scores.append((await client.post("/v1/rerank", json=body, headers=headers)).json()["results"])
            found[name] = most
        assert (found["few"], found["many"]) == (2, 9) and found["any"] > 9
        for one in vectors[1:]:
            np.testing.assert_allclose(one, vectors[0], atol=1e-6)
        assert all(len(one) == len(texts) for one in scores)

    serving(path, "keyed-encoder", go, HttpConfig(api_keys_file=str(keys)))


def test_the_planner_lowercases_where_the_checkpoint_says_so_and_has_the_models_own_limits(tmp_path):
    path = make_encoder(tmp_path / "model", "modernbert")

    def embedded(text: str) -> list[int]:
        request = ChatRequest("r", (), raw_prompt=text)
        return planned(PromptPlanner(EngineConfig(model=str(path))), request)[0].token_ids.tolist()

    plain = embedded("Red Apples")
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    assert embedded("Red Apples") == tokenizer("modernbert").encode("red apples").ids != plain
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 20 tokens"):
        embedded("red " * 30)
    (path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(InvalidRequest, match="an encoder without 1_Pooling"):
        embedded("red apples")


def test_a_pair_beyond_the_models_own_limit_is_refused_with_both_numbers(tmp_path):
    path = make_cross_encoder(tmp_path / "model", "xlm-roberta")
    planner = PromptPlanner(EngineConfig(model=str(path)))
    request = ChatRequest("r", (), raw_prompt="red " * 200, scored_query="apples")
    with pytest.raises(ContextLengthExceeded, match=rf"maximum context length is {POSITIONS} tokens"):
        planned(planner, request)
