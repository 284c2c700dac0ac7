"""Scores of embedding models and rerankers, through the planner, the engine and the HTTP API."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ray import serve

from deployments.args import AppArgs
from deployments.dispatch.pair_scorer import PairScorer, probability
from deployments.dispatch.text_group import TextResults
from deployments.ingress import Ingress
from deployments.model_replica import ModelReplica
from deployments.planners.prompt_planner import PromptPlanner
from deployments.planners.text import TextMTP
from deployments.requests import ChatRequest, ScoreRequest
from engine.config import EngineConfig
from engine.errors import EngineFailed, InvalidRequest
from engine.processing.pooling import EmbeddingModel
from engine.processing.reranker import Reranker
from engine.processing.tokenizer import ChatTokenizer
from tests.support.cold_runner import cold_engines
from tests.support.embedding_models import PROMPTS, describe_embeddings
from tests.support.pooled_plans import planned
from tests.support.rerankers import INSTRUCTION, TEMPLATE, library_log_odds, prompt_of, tiny_reranker
from tests.support.tiny import Tiny, build

TOLERANCE = 1e-5
QUERY = "Where do apples grow?"
DOCUMENTS = ["Apples grow on trees.", "The sea is deep, and few have seen its ground.", "No.", "Apples grow on trees."]


class Here(Ingress.func_or_class):  # type: ignore[misc, name-defined]
    def __del__(self) -> None:
        """Serve awaits the one of the ingress; here nothing does."""


@asynccontextmanager
async def serving(path: Path, name: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server of the checkpoint."""
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", mtp="off")
    with cold_engines():
        engine = serve.run(ModelReplica.bind(config), name=f"{name}-engine", _local_testing_mode=True)
        text = serve.run(TextMTP.bind(AppArgs(engine=config)), name=f"{name}-text", _local_testing_mode=True)
        here: Any = Here.__new__(Here)
        await here.__init__(AppArgs(engine=config), {}, engine, text, text)
        here._graph._ready_until = float("inf")
        transport = httpx.ASGITransport(here.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client
    await asyncio.to_thread(engine.options(method_name="__del__").remote().result)  # Serve does; local mode forgets it


async def scores_of(client: httpx.AsyncClient, path: str = "/v1/rerank", **fields: Any) -> list[float]:
    """The scores of DOCUMENTS, in the order of the documents sent."""
    answer = await client.post(path, json={"model": "model", **fields})
    assert answer.status_code == 200, answer.text
    if path.endswith("score"):
        return [one["score"] for one in answer.json()["data"]]
    results = answer.json()["results"]
    assert [one["relevance_score"] for one in results] == sorted(
        (one["relevance_score"] for one in results), reverse=True
    )
    return [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]


def test_a_reranker_gives_the_librarys_probability_for_each_pair_in_any_order(tmp_path):
    path = tiny_reranker(tmp_path / "model")
    tokenizer = ChatTokenizer(path)

    def expected(document: str, instruction: str = INSTRUCTION, query: str = QUERY) -> float:
        ids = tokenizer.encode_text(prompt_of(query, document, instruction), adds_special=False)
        return library_log_odds(path, ids.tolist())

    async def go() -> None:
        async with serving(path, "reranker") as client:
            known = [1 / (1 + math.exp(-expected(document))) for document in DOCUMENTS]
            for order in ((0, 1, 2, 3), (2, 3, 1, 0)):
                found = await scores_of(client, query=QUERY, documents=[DOCUMENTS[i] for i in order])
                np.testing.assert_allclose(found, [known[i] for i in order], atol=TOLERANCE)
            for document, alone in zip(DOCUMENTS, known, strict=True):
                found = await scores_of(client, query=QUERY, documents=[document])
                np.testing.assert_allclose(found, [alone], atol=TOLERANCE)
            raw = await scores_of(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
            np.testing.assert_allclose(raw, [expected(document) for document in DOCUMENTS], atol=TOLERANCE)
            told = await scores_of(
                client, query=QUERY, documents=DOCUMENTS[:1], instruction="Sort", use_activation=False
            )
            np.testing.assert_allclose(told, [expected(DOCUMENTS[0], "Sort")], atol=TOLERANCE)
            swapped = {"text_1": DOCUMENTS[:2], "text_2": [QUERY, QUERY], "use_activation": False}
            by_hand = [expected(QUERY, query=document) for document in DOCUMENTS[:2]]
            np.testing.assert_allclose(await scores_of(client, "/score", **swapped), by_hand, atol=TOLERANCE)
            usage = (
                await client.post("/v1/rerank", json={"model": "model", "query": QUERY, "documents": DOCUMENTS})
            ).json()
            lengths = [len(tokenizer.encode_text(prompt_of(QUERY, one), adds_special=False)) for one in DOCUMENTS[:3]]
            assert usage["usage"]["total_tokens"] == sum(lengths)  # the same document is computed once
            chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
            refused = {"/v1/chat/completions": chat, "/v1/embeddings": {"model": "model", "input": "a"}}
            for route, body in refused.items():
                answer = await client.post(route, json=body)
                assert (
                    answer.status_code == 400 and "is a reranker and g" in answer.text and "/v1/rerank" in answer.text
                )

    asyncio.run(go())


def test_an_embedding_model_gives_the_cosines_of_its_own_embeddings_with_its_prompts(tmp_path):
    path = describe_embeddings(build(tmp_path / "model", Tiny(layers=2, interval=2, mtp=False)))

    async def go() -> None:
        async with serving(path, "cosines") as client:

            async def embedded(texts: list[str]) -> np.ndarray:
                answer = await client.post("/v1/embeddings", json={"model": "model", "input": texts})
                return np.array([item["embedding"] for item in answer.json()["data"]], np.float64)

            documents = await embedded(DOCUMENTS)
            [search] = await embedded([PROMPTS["query"] + QUERY])
            [plain] = await embedded([QUERY])
            found = await scores_of(client, query=QUERY, documents=DOCUMENTS)
            np.testing.assert_allclose(found, documents @ search, atol=TOLERANCE)
            found = await scores_of(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
            np.testing.assert_allclose(found, documents @ plain, atol=TOLERANCE)
            assert found[0] == found[3]
            assert await scores_of(client, "/score", text_1=DOCUMENTS, text_2=DOCUMENTS) == pytest.approx([1.0] * 4)
            answer = await client.post(
                "/rerank", json={"model": "model", "query": QUERY, "documents": ["a"], "instruction": "Sort"}
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "instruction"
            answer = await client.post("/rerank", json={"model": "model", "query": QUERY, "documents": ["a", "", "c"]})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "documents[1]"
            answer = await client.post(
                "/rerank", json={"model": "model", "query": QUERY, "documents": ["a", "b " * 10**5]}
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "documents[1]"

    asyncio.run(go())


# --- without an engine ----------------------------------------------------------------------------------------------


def request_of(queries: list[str], documents: list[str], **more: Any) -> ScoreRequest:
    fields = [tuple(f"{name}[{i}]" for i in range(len(texts))) for name, texts in (("q", queries), ("d", documents))]
    return ScoreRequest("s", tuple(queries), tuple(documents), fields[0], fields[1], num_parallel=4, **more)


def scored(scorer: PairScorer, request: ScoreRequest) -> tuple[tuple[float, ...], list[ChatRequest]]:
    """The scores where the vector of a text is its length and 1, and the prompts that were computed."""
    asked: list[ChatRequest] = []

    def result(request: ChatRequest) -> tuple[bytes, int]:
        if request.scored_query is not None:
            return np.array([len(request.scored_query) - len(str(request.raw_prompt))], "<f4").tobytes(), 3
        vector = np.array([len(str(request.raw_prompt)), 1.0])
        return (vector / np.linalg.norm(vector)).astype("<f4").tobytes(), 2

    async def compute(texts: Sequence[ChatRequest], num_parallel: int, max_open: int | None) -> TextResults:
        asked.extend(texts)
        return [result(text) for text in texts]

    found = asyncio.run(scorer.score(request, compute))
    assert found.num_prompt_tokens == len(asked) * (3 if scorer.reranker else 2)
    return found.values, asked


def test_each_text_is_embedded_once_behind_the_prompts_that_the_checkpoint_has():
    scorer = PairScorer("m", EmbeddingModel({"query": "Q: ", "passage": "P: "}), None)
    values, asked = scored(scorer, request_of(["a"], ["bb", "a", "bb"]))
    assert [(one.raw_prompt, one.prompt_name) for one in asked] == [("a", "query"), ("bb", None), ("a", None)]
    assert [one.prompt_field for one in asked] == ["q[0]", "d[0]", "d[1]"]
    np.testing.assert_allclose(values, [3 / math.sqrt(10), 1, 3 / math.sqrt(10)])
    _, asked = scored(scorer, request_of(["a", "bb"], ["bb", "a"], is_search=False))
    assert [(one.raw_prompt, one.prompt_name) for one in asked] == [("a", None), ("bb", None)]


def test_each_pair_is_computed_once_by_a_reranker():
    scorer = PairScorer("m", None, Reranker(1, 2))
    values, asked = scored(scorer, request_of(["aaa"], ["b", "bbb", "b"], has_activation=False))
    assert values == (2.0, 0.0, 2.0)
    assert [(one.scored_query, one.raw_prompt, one.prompt_field) for one in asked] == [
        ("aaa", "b", "d[0]"),
        ("aaa", "bbb", "d[1]"),
    ]
    assert scored(scorer, request_of(["aaa"], ["bbb"]))[0] == (0.5,)


@pytest.mark.parametrize(("log_odds", "expected"), [(0.0, 0.5), (1.0, 0.7310585786300049), (1e4, 1.0), (-1e4, 0.0)])
def test_probability_is_the_logistic_function_without_overflow(log_odds, expected):
    assert probability(log_odds) == expected
    assert probability(-log_odds) == pytest.approx(1 - expected)


def test_a_model_that_only_generates_is_refused_with_what_would_work():
    with pytest.raises(InvalidRequest, match=r"'m' generates text and scores no documents.*Qwen3-Reranker") as error:
        scored(PairScorer("m", None, None), request_of(["a"], ["b"]))
    assert error.value.field == "model"


def test_a_documents_control_strings_cannot_close_its_part_of_the_prompt(tmp_path):
    planner = PromptPlanner(EngineConfig(model=str(tiny_reranker(tmp_path / "model"))))

    def token_ids(document: str) -> list[int]:
        request = ChatRequest("r", (), raw_prompt=document, scored_query="q")
        return planned(planner, request)[0].token_ids.tolist()

    [end] = planner.tokenizer.encode_text("<|im_end|>").tolist()
    assert token_ids("x<|im_end|>y").count(end) == token_ids("xy").count(end) == 2


def test_a_reranker_whose_template_leaves_out_a_part_is_refused_at_the_start(tmp_path):
    path = tiny_reranker(tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE.replace('"document"', '"user"'))
    with pytest.raises(EngineFailed, match="leaves out messages of the role document; use a checkpoint that was saved"):
        PromptPlanner(EngineConfig(model=str(path)))
