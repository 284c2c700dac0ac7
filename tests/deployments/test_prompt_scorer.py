"""SpecPrefillScorer with a real draft, alone and in the graph with a real engine, and with a draft that is broken."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import serve

from deployments import prompt_scorer
from deployments.args import AppArgs
from deployments.dispatch.engine_client import EngineClient
from deployments.model_replica import ModelReplica
from deployments.planners.mllm import MLLM
from deployments.planners.text import TextMTP
from deployments.prompt_scorer import SpecPrefillScorer
from deployments.requests import ChatRequest, Plan, Route
from engine.config import EngineConfig
from engine.core.spec_prefill.plan import Scored, ScoreRequest, why_unfit
from engine.errors import EngineFailed, InvalidRequest
from engine.processing.checkpoint import DEMO_MODEL
from engine.protocol import FinishReason
from engine.spec_prefill_config import SpecPrefillConfig
from tests.e2e.pictures import about, image_part, shape
from tests.support.cold_runner import cold_engines

CONFIG = SpecPrefillConfig(enabled=True, threshold_tokens=512, max_running=1, max_queue=0)

SCORER: Any = SpecPrefillScorer.func_or_class


class Replica(SCORER):
    def __del__(self) -> None:
        """Serve awaits the one of SpecPrefillScorer; here the tests do."""


def with_scorer(config: SpecPrefillConfig, use: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        async with asyncio.timeout(60):
            replica: Any = Replica.__new__(Replica)
            await replica.__init__(config, EngineConfig())
            try:
                return await use(replica)
            finally:
                await SCORER.__del__(replica)

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scorer, "replica_info", lambda: {"node_id": "n", "pid": 7})


def test_scorer_and_engine_that_are_stopped_before_they_load_shut_down():
    engine: Any = ModelReplica.func_or_class
    for deployment in (SCORER, engine):
        replica = object.__new__(type("Replica", (deployment,), {"__del__": lambda self: None}))
        asyncio.run(deployment.__del__(replica))


def to_score(num_tokens: int = 600, **options: Any) -> ScoreRequest:
    token_ids = (np.arange(num_tokens) % 300 + 50).astype(np.int32)
    given: dict[str, Any] = {"num_dense": 0, "anchors": np.zeros(0, np.int32), "keep": 0.3, **options}
    return ScoreRequest("r", token_ids, **given)


def test_scored_prompt_becomes_a_plan_and_is_counted_in_the_status():
    async def use(replica: Any) -> tuple[Scored, dict[str, Any]]:
        scored = await replica.score(to_score())
        await replica.check_health()
        return scored, await replica.status()

    scored, status = with_scorer(CONFIG, use)
    assert why_unfit(scored.plan, to_score().token_ids) is None
    assert 0.3 <= len(scored.plan.positions) / 600 < 0.5
    assert (status["node_id"], status["pid"]) == ("n", 7)
    scorer = status["scorer"]
    assert (scorer["state"], scorer["num_scored"], scorer["num_scored_tokens"]) == ("ready", 1, scored.num_scored)


def test_prompt_beyond_max_tokens_scored_is_refused():
    with pytest.raises(InvalidRequest, match="max_tokens_scored"):
        with_scorer(CONFIG.model_copy(update={"max_tokens_scored": 599}), lambda replica: replica.score(to_score()))


def test_cancelled_scoring_is_stopped_and_the_scorer_stays_usable():
    async def use(replica: Any) -> tuple[dict[str, Any], Scored]:
        long = asyncio.ensure_future(replica.score(to_score(20_000)))
        await asyncio.sleep(0.05)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        while (status := await replica.status())["scorer"]["num_running"]:
            await asyncio.sleep(0.01)
        return status, await replica.score(to_score())

    status, scored = with_scorer(CONFIG, use)
    assert status["scorer"]["num_cancelled"] == 1
    assert scored.num_scored == 600


@pytest.fixture
def broken_draft(tmp_path: Path) -> SpecPrefillConfig:
    shutil.copytree(DEMO_MODEL / "draft", tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"no weights")
    return CONFIG.model_copy(update={"draft_model": str(tmp_path / "draft")})


def test_unloadable_draft_leaves_the_replica_healthy_and_its_scorer_unavailable(
    broken_draft: SpecPrefillConfig, caplog: pytest.LogCaptureFixture
):
    async def use(replica: Any) -> dict[str, Any]:
        await replica.check_health()
        with pytest.raises(EngineFailed, match=r"model\.safetensors"):
            await replica.score(to_score())
        return await replica.status()

    scorer = with_scorer(broken_draft, use)["scorer"]
    assert scorer["state"] == "unavailable"
    assert "model.safetensors" in scorer["error"]
    (record,) = [record for record in caplog.records if record.levelname == "ERROR" and record.name == "ray.serve"]
    assert "model.safetensors" in record.getMessage() and str(broken_draft.draft_model) in record.getMessage()


@pytest.mark.parametrize(
    ("nodes", "is_ray", "beside"),
    [(["a", "b"], True, True), (["b"], True, False), ([], True, False), ([], False, True)],
)
def test_a_scorer_knows_whether_an_engine_shares_its_node(
    nodes: list[str], is_ray: bool, beside: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prompt_scorer.ray, "is_initialized", lambda: is_ray)
    monkeypatch.setattr(prompt_scorer, "nodes_offering", {"mlx": nodes}.__getitem__)
    monkeypatch.setattr(prompt_scorer, "node_id", lambda: "a")
    assert prompt_scorer._beside_engine() is beside


# --- in the graph, in Serve's local testing mode -------------------------------------------------------------------

FILLER = " ".join(["The baker of Oakdale sold bread, apples and pears to his neighbours."] * 60)
LONG = ({"role": "user", "content": f"{FILLER} What is 12 + 30?"},)


Answered = tuple[Plan, int, FinishReason | None]
"""The plan, the tokens that the engine left out, and how it ended."""


@serve.deployment()
class Front:
    """The Ingress's part of a request, up to the tokens."""

    def __init__(self, engine: Any, text: Any, mllm: Any, scorer: Any):
        self._client = EngineClient(engine, {Route.TEXT: text, Route.MLLM: mllm})
        self._to_end = [engine, scorer]

    async def answer(self, request: ChatRequest, route: Route) -> Answered:
        async with asyncio.timeout(60):
            stream = await self._client.start(request, route)
            chunks = [chunk async for chunk in stream]
            return stream.plan, stream.num_skipped_tokens, chunks[-1].finish_reason

    async def end(self) -> None:
        """As Serve does; the local mode forgets it."""
        for handle in self._to_end:
            await handle.options(method_name="__del__").remote()


@pytest.fixture(scope="module")
def front() -> Iterator[Any]:
    engine, scorer = ModelReplica.bind(EngineConfig()), SpecPrefillScorer.bind(CONFIG, EngineConfig())
    args = AppArgs(spec_prefill=CONFIG)
    text, mllm = TextMTP.bind(args, engine, scorer), MLLM.bind(args, engine, scorer)
    with cold_engines():
        front = serve.run(Front.bind(engine, text, mllm, scorer), name="front", _local_testing_mode=True)
        yield front
    front.end.remote().result(timeout_s=60)


def answer(front: Any, route: Route = Route.TEXT, **fields: Any) -> Answered:
    request = ChatRequest("r", **{"messages": LONG, "temperature": 0, "max_tokens": 4, **fields})
    return front.answer.remote(request, route).result(timeout_s=60)


def test_long_prompt_is_answered_sparsely_through_the_graph(front: Any):
    plan, num_skipped, finish_reason = answer(front, tenant="first", spec_prefill=True)
    assert plan.request.sparse is not None and plan.spec_prefill is not None
    assert num_skipped == len(plan.request.token_ids) - len(plan.request.sparse.positions) > 256
    assert plan.spec_prefill.dense_because is None and plan.spec_prefill.num_scored == len(plan.request.token_ids)
    assert finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_request_without_sparse_prefill_is_dense_and_its_prefix_is_cached(front: Any):
    whole, num_skipped, _ = answer(front, tenant="second", spec_prefill=False)
    assert (whole.request.sparse, whole.spec_prefill, num_skipped) == (None, None, 0)
    again, _, _ = answer(front, tenant="second", spec_prefill=True)
    assert again.spec_prefill is not None and again.spec_prefill.dense_because is not None
    assert again.spec_prefill.dense_because.startswith("too short")


def test_prompt_with_an_image_is_sparse_only_on_request(front: Any):
    messages = tuple(about(f"{FILLER} What is in the image?", image_part(shape("blue", "square"))))
    unasked, num_skipped, _ = answer(front, Route.MLLM, messages=messages, tenant="third")
    assert unasked.spec_prefill is not None and unasked.spec_prefill.dense_because == "media" and num_skipped == 0
    plan, num_skipped, _ = answer(front, Route.MLLM, messages=messages, tenant="fourth", spec_prefill=True)
    assert plan.spec_prefill is not None and plan.spec_prefill.dense_because is None
    assert plan.request.sparse is not None and num_skipped > 256
    placeholders = np.flatnonzero(plan.request.token_ids == 6)
    assert len(placeholders) and set(placeholders.tolist()) <= set(plan.request.sparse.positions.tolist())
