"""SparsePlanner: which prompts are sparse, and why others are not; the plans are made as a scorer makes them, of
importance that the test chooses."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.planners.sparse_planner import PromptFacts, SparsePlanner
from deployments.requests import ChatRequest, Message, Tool
from engine.core.spec_prefill.plan import ScoreRequest, fingerprint
from engine.errors import InvalidRequest, Overloaded, ScoringTooSlow
from engine.protocol import Boundary, CachedPrefix, GrammarSpec, ImagePatches, PrefillCost, SparsePlan
from engine.spec_prefill_config import SpecPrefillConfig
from tests.deployments.fake_handle import task_error
from tests.deployments.scoring_graph import (
    ASKED,
    CONTROL,
    IMPORTANT,
    NUM_SYSTEM,
    NUM_TOKENS,
    PICTURE,
    THRESHOLD,
    Graph,
    asking,
    dense_because,
    is_left_alone,
    plan,
    plan_of,
    prompt,
    scored,
)

# --- a sparse prompt -----------------------------------------------------------------------------------------------


def test_long_prompt_gets_the_sparse_prefill_plan_of_the_scorer():
    graph, given = Graph(), prompt()
    planner = graph.planner()
    planned, report = plan(planner, asking(), given)
    assert planned.sparse is not None and planned == replace(given, sparse=planned.sparse)
    kept = set(planned.sparse.positions.tolist())
    assert set(IMPORTANT) <= kept and set(range(NUM_SYSTEM)) <= kept and len(kept) < NUM_TOKENS / 2
    assert report is not None and (report.num_scored, report.dense_because) == (7, None)
    assert report.scoring_s >= 0
    assert planner.status() == {"sparse": 1, "replanned": 0, "dense": {}}
    assert graph.log == ["ask", "score node:node-7@0", "ask"]
    assert graph.cancelled == []


def test_score_request_has_tokens_keep_dense_prefix_anchors_and_tenant():
    graph = Graph(engine=[CachedPrefix(200)])
    given = prompt(tenant="acme")
    given.token_ids[[40, 300]] = CONTROL
    plan(graph.planner(), ASKED, given)
    (request,) = graph.to_score
    assert request.token_ids.tolist() == given.token_ids.tolist()
    assert (request.request_id, request.num_dense, request.keep) == ("r", 200, 0.3)
    assert (request.boundaries, request.tenant) == (given.boundaries, "acme")
    anchors = request.anchors.tolist()
    assert {300, 301, 302} <= set(anchors) and min(anchors) >= 200, "what is dense anyway needs no anchor"
    assert anchors == sorted(anchors) and request.anchors.dtype == np.int32


COST = PrefillCost(chunk_s=0.5, token_s=0.01, pair_s=0.0)


def test_score_request_has_the_seconds_saved_as_its_limit():
    graph = Graph(engine=[CachedPrefix(200, cost=COST)])
    plan(graph.planner(), asking())
    (request,) = graph.to_score
    num_behind = NUM_TOKENS - 200
    assert request.limit_s == pytest.approx(0.01 * (num_behind - int(0.3 * num_behind)))


def test_requested_sparse_prefill_has_no_scoring_limit():
    graph = Graph(engine=[CachedPrefix(200, cost=COST)])
    plan(graph.planner(), ASKED)
    assert graph.to_score[0].limit_s is None


def test_prompt_whose_plan_would_save_less_than_scoring_takes_is_dense():
    too_slow = task_error(ScoringTooSlow("scoring 9 tokens would take about 2 s; the plan would save only 1 s"))
    category, reason = dense_because(Graph(engine=[CachedPrefix(0, cost=COST)], scorer=[too_slow]), asking())
    assert category == "no_gain"
    assert reason == "no gain: scoring 9 tokens would take about 2 s; the plan would save only 1 s"


@pytest.mark.parametrize(("num_cached", "num_dense"), [(0, NUM_SYSTEM), (99, NUM_SYSTEM), (101, 101)])
def test_system_part_is_always_dense(num_cached: int, num_dense: int):
    planned, _ = plan(Graph(engine=[CachedPrefix(num_cached)]).planner())
    assert planned.sparse is not None and planned.sparse.num_dense == num_dense


def test_prompt_without_system_part_and_cached_prefix_has_no_dense_tokens():
    planned, _ = plan(Graph().planner(), ASKED, prompt(boundaries=()))
    assert planned.sparse is not None and planned.sparse.num_dense == 0


@pytest.mark.parametrize(("asked", "keep"), [(None, 0.3), (0.1, 0.1), (0.9, 0.9)])
def test_keep_of_a_request_overrides_the_configured_keep(asked: float | None, keep: float):
    graph = Graph()
    plan(graph.planner(), asking(spec_prefill=True, spec_prefill_keep=asked))
    assert graph.to_score[0].keep == keep


def test_short_prompt_is_sparse_on_request():
    planned, _ = plan(Graph().planner(), ASKED, prompt(400))
    assert planned.sparse is not None


def test_image_tokens_are_kept_in_a_requested_sparse_prefill():
    graph = Graph()
    image = ImagePatches(np.ones((16, 3, 16, 16), np.uint8), (1, 4, 4), 4, "hash")
    given = prompt(images=(image,))
    given.token_ids[700:704] = PICTURE
    planned, _ = plan(graph.planner(), ASKED, given)
    assert planned.sparse is not None and {700, 701, 702, 703} <= set(planned.sparse.positions.tolist())
    assert planned.images == (image,)
    asked = graph.asked[0]
    assert [(i.content_hash, i.num_tokens, i.patches.size) for i in asked.images] == [("hash", 4, 0)], "no pixels"


def test_prompt_with_tools_and_grammar_is_sparse_on_request():
    request = replace(ASKED, tools=(Tool("f"),))
    planned, _ = plan(Graph().planner(), request, prompt(grammar=GrammarSpec("json_object")))
    assert planned.sparse is not None


# --- what is dense by intention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "num_tokens"),
    [
        (asking(spec_prefill=False), NUM_TOKENS),
        (asking(), THRESHOLD - 1),
        (asking(), THRESHOLD + NUM_SYSTEM - 1),
    ],
)
def test_unwanted_sparse_prefill_makes_no_call_to_engine_or_scorer(request_: ChatRequest, num_tokens: int):
    graph = Graph()
    assert is_left_alone(graph, request_, prompt(num_tokens))
    assert graph.log == []


def test_threshold_counts_only_uncached_tokens():
    assert is_left_alone(Graph(engine=[CachedPrefix(NUM_TOKENS - THRESHOLD + 1)]), asking())
    planned, _ = plan(Graph(engine=[CachedPrefix(NUM_TOKENS - THRESHOLD)]).planner(), asking())
    assert planned.sparse is not None


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "told", "log"),
    [
        (THRESHOLD - 1, 0, "499 tokens", []),
        (THRESHOLD + NUM_SYSTEM - 1, 0, "499 tokens after the dense prefix", []),
        (NUM_TOKENS, 600, "400 tokens after the dense prefix", ["ask"]),
    ],
)
def test_prompt_below_the_threshold_with_an_explicit_keep_is_dense_with_the_reason(
    num_tokens: int, num_cached: int, told: str, log: list[str], caplog: pytest.LogCaptureFixture
):
    graph = Graph(engine=[CachedPrefix(num_cached)])
    category, reason = dense_because(graph, asking(spec_prefill_keep=0.5), prompt(num_tokens))
    assert (category, reason) == ("below_threshold", f"below threshold_tokens: {told}, the threshold is 500")
    assert graph.log == log
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


IMAGE = ImagePatches(np.zeros((4, 3, 16, 16), np.uint8), (1, 2, 2), 1, "hash")


def saying(message: Message) -> ChatRequest:
    return ChatRequest("r", ({"role": "user", "content": "?"}, message))


@pytest.mark.parametrize(
    ("request_", "options", "reason"),
    [
        (asking(tools=(Tool("f"),)), {}, "tools"),
        (saying({"role": "tool", "tool_call_id": "c", "content": "42"}), {}, "tools"),
        (saying({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}), {}, "tools"),
        (asking(), {"grammar": GrammarSpec("json_object")}, "grammar"),
        (asking(), {"images": (IMAGE,)}, "media"),
    ],
)
def test_long_prompts_with_tools_grammar_or_media_are_dense_by_default(request_: Any, options: Any, reason: str):
    graph = Graph()
    assert dense_because(graph, request_, prompt(**options)) == (reason, reason)
    assert graph.log == []
    assert is_left_alone(graph, request_, prompt(THRESHOLD - 1, **options)), "a short one is none of our business"


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_prompt_whose_logprobs_are_asked_for_is_dense(is_asked: bool):
    request = asking(spec_prefill=is_asked or None)
    category, reason = dense_because(Graph(), request, prompt(prompt_logprobs=1))
    assert category == "logprobs" and "need all of them" in reason


def test_empty_list_of_tool_calls_does_not_make_a_prompt_dense():
    request = saying({"role": "assistant", "content": "42", "tool_calls": []})
    planned, _ = plan(Graph().planner(), request)
    assert planned.sparse is not None


def test_keep_of_1_makes_a_prompt_dense_without_scoring():
    graph = Graph()
    assert dense_because(graph, asking(spec_prefill=True, spec_prefill_keep=1.0)) == ("keep", "keep is 1")
    assert dense_because(graph, ASKED, keep=1.0) == ("keep", "keep is 1")
    assert graph.log == []


def test_a_prompt_that_is_too_long_to_score_names_both_numbers(caplog: pytest.LogCaptureFixture):
    graph = Graph()
    caplog.set_level(logging.INFO, "ray.serve")
    for request in (ASKED, asking()):
        category, reason = dense_because(graph, request, prompt(2001))
        assert category == "too_long" and "2001" in reason and "2000" in reason
    assert graph.log == []
    assert "request r: the prompt is prefilled densely: too long" in caplog.text
    planned, _ = plan(graph.planner(), ASKED, prompt(2000))
    assert planned.sparse is not None


def test_prompt_unsupported_by_the_engine_is_dense_with_the_reason_of_the_engine():
    graph = Graph(engine=[CachedPrefix(0, "this model has no positions")])
    assert dense_because(graph) == ("unsupported", "this model has no positions")
    assert graph.log == ["ask"]


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(NUM_SYSTEM + 127, 0), (NUM_TOKENS, NUM_TOKENS - 127)])
def test_prompt_with_fewer_than_128_tokens_to_choose_from_is_dense(num_tokens: int, num_cached: int):
    category, reason = dense_because(Graph(engine=[CachedPrefix(num_cached)]), ASKED, prompt(num_tokens))
    assert category == "too_short" and "127" in reason and "128" in reason
    enough = prompt(NUM_TOKENS + 1, boundaries=(Boundary("system", NUM_SYSTEM),))
    planned, _ = plan(Graph(engine=[CachedPrefix(num_cached)]).planner(), ASKED, enough)
    assert planned.sparse is not None


def test_a_tiny_threshold_does_not_make_tiny_prompts_sparse():
    assert dense_because(Graph(), asking(), prompt(NUM_SYSTEM + 100), threshold_tokens=1)[0] == "too_short"


def leaving_out(num_tokens: int) -> Graph:
    kept = np.delete(np.arange(NUM_TOKENS, dtype=np.int32), np.arange(num_tokens) + NUM_SYSTEM)
    digest = fingerprint(prompt().token_ids, kept, NUM_SYSTEM)
    return Graph(scorer=[lambda request: scored(request, SparsePlan(kept, NUM_SYSTEM, digest))])


@pytest.mark.parametrize("num_tokens", [0, 89])
def test_plan_that_skips_less_than_a_tenth_is_discarded(num_tokens: int):
    reason = f"too few tokens to skip: {num_tokens} of 900, the minimum is 10%"
    assert dense_because(leaving_out(num_tokens)) == ("nothing", reason)


def test_plan_that_skips_a_tenth_is_followed():
    planned, _ = plan(leaving_out(90).planner())
    assert planned.sparse is not None


def without_end(plan: SparsePlan) -> SparsePlan:
    return replace(plan, positions=plan.positions[:-1])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda request: replace(plan_of(request), fingerprint="0"), "fingerprints differ"),
        (lambda request: plan_of(replace(request, token_ids=request.token_ids + 1)), "fingerprints differ"),
        (lambda request: without_end(plan_of(request)), "last token"),
        (lambda request: plan_of(replace(request, num_dense=NUM_SYSTEM + 1)), "instead of 100"),
    ],
)
def test_plan_that_does_not_fit_the_prompt_is_discarded_with_the_reason(
    spoil: Callable[[ScoreRequest], SparsePlan], told: str
):
    category, reason = dense_because(Graph(scorer=[lambda request: scored(request, spoil(request))]))
    assert category == "unfit" and told in reason


# --- where scoring is switched off ---------------------------------------------------------------------------------


def test_disabled_sparse_prefill_leaves_prompts_dense_and_refuses_explicit_requests():
    planner = SparsePlanner(SpecPrefillConfig(), PromptFacts(frozenset()))
    for request in (asking(), asking(spec_prefill=False)):
        given = prompt()
        assert plan(planner, request, given) == (given, None)
    for request, name in ((ASKED, "specprefill"), (asking(spec_prefill_keep=0.5), "specprefill_keep_pct")):
        with pytest.raises(InvalidRequest, match=rf"`{name}`.*spec_prefill\.enabled: false") as error:
            plan(planner, request)
        assert error.value.field == name
    assert planner.status() is None


# --- when the prefix changes meanwhile -----------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(0, 300), (300, 0), (300, 400)])
def test_changed_cached_prefix_makes_the_same_scorer_plan_once_more(before: int, after: int):
    graph = Graph(engine=[CachedPrefix(before), CachedPrefix(after), CachedPrefix(999)])
    planner = graph.planner()
    planned, report = plan(planner)
    assert planned.sparse is not None and planned.sparse.num_dense == max(after, NUM_SYSTEM)
    assert [request.num_dense for request in graph.to_score] == [max(n, NUM_SYSTEM) for n in (before, after)]
    assert graph.log.count("ask") == 2, "once more, not for ever"
    assert [entry for entry in graph.log if entry.startswith("score")] == 2 * ["score node:node-7@0"]
    assert report is not None and report.num_scored == 14
    assert planner.status() == {"sparse": 1, "replanned": 1, "dense": {}}


def test_changed_cached_prefix_within_the_system_part_makes_no_second_plan():
    planner = Graph(engine=[CachedPrefix(0), CachedPrefix(NUM_SYSTEM)]).planner()
    plan(planner)
    assert planner.status() == {"sparse": 1, "replanned": 0, "dense": {}}


def test_prompt_mostly_cached_after_its_scoring_is_dense_unless_sparse_on_request():
    cached = [CachedPrefix(0), CachedPrefix(600)]
    category, reason = dense_because(Graph(engine=list(cached)), asking())
    assert category == "cached" and "600" in reason
    planned, _ = plan(Graph(engine=list(cached)).planner(), ASKED)
    assert planned.sparse is not None and planned.sparse.num_dense == 600


def test_failed_second_scoring_makes_the_prompt_dense():
    graph = Graph(engine=[CachedPrefix(0), CachedPrefix(300)], scorer=[scored, task_error(Overloaded("full", 1.0))])
    planner = graph.planner()
    _, report = plan(planner)
    assert report is not None and (report.num_scored, report.dense_because) == (7, "busy: full")
    assert planner.status() == {"sparse": 0, "replanned": 1, "dense": {"busy": 1}}


def test_counters_of_sparse_and_dense_prompts_add_up_over_requests():
    graph = Graph(scorer=[scored, task_error(Overloaded("full", 1.0)), task_error(Overloaded("full", 1.0)), scored])
    planner = graph.planner()
    for _ in range(4):
        plan(planner)
    plan(planner, asking(spec_prefill_keep=1.0))
    assert planner.status() == {"sparse": 2, "replanned": 0, "dense": {"busy": 2, "keep": 1}}
