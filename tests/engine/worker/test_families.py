"""The engine on a tiny checkpoint of every model family: what mlx_vlm gives without any state is what it must give.

The gate has the families that call different code of engine/worker (support/family_calls.py), and those that are new.
ORCHARD_FAMILIES=mamba2,lfm2 runs only these.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import make_prompt_cache

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts, PromptChunk
from engine.protocol import Boundary, EngineRequest, Progress, SamplingParams
from engine.worker import prefill
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.family_calls import in_gate, recorded
from tests.support.night import some_at_night
from tests.support.sparse_prompts import with_plan
from tests.support.zoo import NUM_TOKENS, Turn, conversation, load, make

LOGPROB_TOLERANCE = 3e-4
NO_CACHE = {"prefix_cache": {"enabled": False}}

_chosen = os.environ.get("ORCHARD_FAMILIES", "")
CHOSEN = tuple(_chosen.split(",")) if _chosen else tuple(FAMILIES)
LAYOUTS = {FAMILIES[name].layout: name for name in reversed(CHOSEN)}
"""Layout -> the first family that has it."""
CACHES = {FAMILIES[name].layout[0]: name for name in reversed(CHOSEN)}
"""Caches of the layers -> the first family that has them."""
OF_EACH_LAYER = ("llama", "longcat_flash", "qwen3_next", "minimax_m3", "qwen4_exp", "deepseek_v4", "llama4")
"""Families that together have each kind of cache layer."""

every_family = pytest.mark.parametrize(
    "served",
    some_at_night(
        CHOSEN,
        in_gate(CHOSEN, recorded()),
        "families of the gate with the same kinds of caches call each function of ours that serves this one",
    ),
    indirect=True,
    scope="module",
)
KEPT_KEYS = {name for name in CHOSEN if set(FAMILIES[name].layout[0]) == {"KVCache"}}
"""Families all of whose layers keep the keys and values of all tokens."""
PLACED = {"gpt_bigcode", "afm7", "phi3small", "limite", "hunyuan_vl", "jina_vlm", "gemma2"}
"""Those whose attention has code of ours for rows at different positions."""
families_with_states = pytest.mark.parametrize(
    "served",
    some_at_night(
        CHOSEN,
        in_gate(CHOSEN, recorded()) - (KEPT_KEYS - set(LAYOUTS.values())),
        "the keys and values of all tokens come back as in a family of the gate; chunks of a batch begin behind others",
    ),
    indirect=True,
    scope="module",
)
families_with_states_or_positions = pytest.mark.parametrize(
    "served",
    some_at_night(
        CHOSEN,
        in_gate(CHOSEN, recorded()) - (KEPT_KEYS - PLACED - set(LAYOUTS.values())),
        "the gate has each family with states or with code of ours for positions",
    ),
    indirect=True,
    scope="module",
)
one_family_of_each_layout = pytest.mark.parametrize(
    "served",
    some_at_night(CHOSEN, set(LAYOUTS.values()), "the gate runs one family of each layout"),
    indirect=True,
    scope="module",
)
one_family_of_each_cache = pytest.mark.parametrize(
    "served",
    some_at_night(
        CHOSEN,
        set(CACHES.values()),
        "the gate runs one family of each sequence of caches; experts are in its batches and bursts",
    ),
    indirect=True,
    scope="module",
)
one_family_of_each_layer = pytest.mark.parametrize(
    "served",
    some_at_night(
        CHOSEN,
        set(OF_EACH_LAYER),
        "the gate runs one family of each kind of cache layer; a prompt of each sequence of caches gives right tokens",
    ),
    indirect=True,
    scope="module",
)


@dataclass(frozen=True)
class Served:
    """A family's runner, and the conversation that it must have."""

    runner: MLXRunner
    turns: dict[str, Turn]

    def request(self, turn: str, request_id: str | None = None, max_tokens: int | None = None) -> EngineRequest:
        """Return a turn's prompt; max_tokens: None for as many as the turn's answer has."""
        asked = self.turns[turn]
        sampling = SamplingParams(max_tokens or len(asked.answer.tokens), temperature=0.0, logprobs=0)
        return EngineRequest(request_id or turn, np.array(asked.token_ids, np.int32), sampling, ())

    def check(self, driver: Driver, turn: str) -> None:
        """Assert that the driver has got the turn's answer."""
        answer = self.turns[turn].answer
        assert driver.errors[turn] is None
        assert driver.tokens[turn] == answer.tokens
        logprobs = [one.logprob for chunk in driver.chunks[turn] for one in chunk.logprobs]
        np.testing.assert_allclose(logprobs, answer.logprobs, atol=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Runners are never closed: that would take the main thread's streams from the tests that follow.

    Quantized weights stay quantized, as on a GPU; test_expanded_weights.py expands them.

    The gate warms up one family of each kind of cache layer, the night all: experts and quantized weights have none.
    """
    path, turns = made(tmp_path_factory.mktemp("zoo") / "model", request.param)
    is_warm = request.config.option.night or request.param in OF_EACH_LAYER
    return Served(load_runner(config_of(path), lambda progress: None) if is_warm else cold(path), turns)


def made(path: Path, name: str) -> tuple[Path, dict[str, Turn]]:
    """Write a family's checkpoint; return its directory, and the conversation that it must have."""
    make(path, FAMILIES[name])
    return path, conversation(load(path))


def config_of(path: Path) -> EngineConfig:
    limits = {"max_context_tokens": 192, "max_running": 4}  # so that the warm-up times only small chunks and batches
    return EngineConfig.model_validate({"model": str(path), "expand_quantized_weights": "off", **limits})


def cold(path: Path) -> MLXRunner:
    return load_cold(config_of(path))


def test_families_of_each_layer_have_all_kinds_of_cache_layers():
    kinds = {name: set(family.layout[0]) for name, family in FAMILIES.items()}
    assert set().union(*(kinds[name] for name in OF_EACH_LAYER)) == set().union(*kinds.values())


@one_family_of_each_cache
@pytest.mark.parametrize(
    "chunk", some_at_night([16, 23], [23], "the gate has chunks that no window and no block divides")
)
def test_request_alone_gets_the_tokens_of_forwards_without_any_state(served, chunk):
    """chunk: most prompt tokens per step."""
    for turn in served.turns:
        driver = Driver(served.runner, EngineConfig.model_validate({"prefill_chunk_tokens": chunk, **NO_CACHE}))
        driver.run({0: [served.request(turn)]})
        served.check(driver, turn)


@one_family_of_each_cache
@pytest.mark.parametrize("chunk", some_at_night([3, 9], [3], "the gate has the shorter chunks"))
def test_prompt_may_be_cut_into_chunks_shorter_than_a_window(served, chunk):
    row = Row(served.request("first"))
    output = served.runner.prefill([row], chunk)
    while not output.first:
        output = served.runner.prefill([row], chunk)
    served.runner.drop([row.id])
    assert output.first[row.id].token_ids == tuple(served.turns["first"].answer.tokens[:1])


@every_family
def test_request_in_a_batch_gets_the_same_tokens_as_alone(served):
    """Another row is aborted half way, a short one comes and finishes, and a third one comes after the abort."""
    driver = Driver(served.runner, EngineConfig.model_validate({"prefill_chunk_tokens_busy": 32, **NO_CACHE}))
    driver.core.add_request(served.request("first"))
    _step_until(driver, "first", 2)
    driver.core.add_request(served.request("second", "aborted", max_tokens=100))
    driver.core.add_request(served.request("short"))
    _step_until(driver, "aborted", 3)
    driver.core.abort("aborted")
    driver.run({0: [served.request("second")]})
    assert driver.tokens["aborted"][:3] == served.turns["second"].answer.tokens[:3]
    for turn in served.turns:
        served.check(driver, turn)


def _step_until(driver: Driver, request_id: str, num_tokens: int) -> None:
    """Step until a request has so many tokens."""
    for _ in range(100):
        if len(driver.tokens[request_id]) >= num_tokens:
            return
        driver.core.step()
    raise AssertionError(f"{request_id} has {driver.tokens[request_id]}: {driver.errors}")


@one_family_of_each_layout
def test_requests_that_arrive_together_share_forwards_and_get_the_same_tokens_as_alone(served):
    driver = Driver(served.runner, EngineConfig.model_validate(NO_CACHE))
    fix_prefill_costs(driver.core, 0.02, 1e-5)
    driver.run({0: [served.request(turn) for turn in served.turns]})
    for turn in served.turns:
        served.check(driver, turn)
    assert (driver.core.stats.num_bursts > 0) == (served.runner.no_bursts is None)
    assert not driver.core.stats.num_failed_bursts


@one_family_of_each_cache
def test_prompts_with_a_common_beginning_compute_it_once_and_the_rest_in_one_forward(served):
    """The first turn's prompt, and two that end otherwise after its first 30 tokens."""
    token_ids = served.request("first").token_ids
    requests = [
        replace(
            served.request("first", f"{i}", max_tokens=6),
            token_ids=np.append(token_ids[:30], token_ids[30:] + i * (token_ids[30:] < 400)),
            boundaries=(Boundary("system", 30),),
        )
        for i in range(3)
    ]
    alone = Driver(served.runner, EngineConfig.model_validate(NO_CACHE))
    for number, request in enumerate(requests):
        alone.run({number: [request]})
    driver = Driver(served.runner, EngineConfig.model_validate({"prefix_cache": {"boundaries": ["system"]}}))
    fix_prefill_costs(driver.core, 0.02, 1e-5)
    tokens = driver.run({0: requests})
    assert tokens == alone.tokens and tokens["0"] == served.turns["first"].answer.tokens[:6]
    assert [chunks[0].num_cached for chunks in driver.chunks.values()].count(30) == 2
    assert driver.core.stats.num_bursts == (served.runner.no_bursts is None)


@one_family_of_each_layout
def test_pieces_of_prompts_computed_in_one_forward_give_the_same_tokens_as_alone(served):
    """Prompts of 77, 45 and 13 tokens, in pieces of 11, of 1 and 9 in turn, and of 8; windows are of 8 tokens."""
    runner, tokens = served.runner, {}
    if runner.no_bursts is not None:
        pytest.skip(runner.no_bursts)
    left = [Row(served.request(turn)) for turn in ("second", "first", "short")]
    most = {row.id: cycle(sizes) for row, sizes in zip(left, ((11,), (1, 9), (8,)), strict=True)}
    computed = dict.fromkeys(most, 0)
    while left:
        chunks = [PromptChunk(row, min(next(most[row.id]), row.num_tokens - computed[row.id])) for row in left]
        for chunk, output in zip(chunks, runner.prefill_burst(chunks), strict=True):
            computed[chunk.row.id] += output.num_tokens
            if output.first:
                tokens[chunk.row.id] = list(output.first[chunk.row.id].token_ids)
                left.remove(chunk.row)
    for _ in range(max(NUM_TOKENS.values())):
        for row_id, output in runner.decode().items():
            tokens[row_id] += output.token_ids
    runner.drop(list(most))
    for row_id in most:
        answer = served.turns[row_id.partition("/")[0]].answer.tokens
        assert tokens[row_id][: len(answer)] == answer


@families_with_states_or_positions
def test_prompt_that_begins_beside_the_rest_of_another_gets_the_same_tokens_as_alone(served):
    """Recurrent layers may begin a prompt otherwise than with a state of zeros."""
    runner, rows = served.runner, [Row(served.request(turn)) for turn in ("second", "short")]
    if runner.no_bursts is not None:
        pytest.skip(runner.no_bursts)
    rest, begins = rows
    runner.prefill([rest], 48)
    outputs = runner.prefill_burst([PromptChunk(rest, rest.num_tokens - 48), PromptChunk(begins, begins.num_tokens)])
    tokens = {row.id: [*output.first[row.id].token_ids] for row, output in zip(rows, outputs, strict=True)}
    logprobs = {row.id: [*output.first[row.id].logprobs] for row, output in zip(rows, outputs, strict=True)}
    for _ in range(max(NUM_TOKENS.values())):
        for row_id, output in runner.decode().items():
            tokens[row_id] += output.token_ids
            logprobs[row_id] += output.logprobs
    runner.drop(list(tokens))
    for row in rows:
        answer = served.turns[row.spec.request_id].answer
        assert tokens[row.id][: len(answer.tokens)] == answer.tokens
        found = [one.logprob for one in logprobs[row.id][: len(answer.tokens)]]
        np.testing.assert_allclose(found, answer.logprobs, atol=LOGPROB_TOLERANCE)


@families_with_states
def test_second_turn_gets_the_same_tokens_from_the_prefix_cache(served):
    driver = Driver(served.runner, EngineConfig())
    driver.run({0: [served.request("first")]})
    driver.run({0: [served.request("second")]})
    for turn in ("first", "second"):
        served.check(driver, turn)
    num_cached = driver.chunks["second"][0].num_cached
    assert 0 < num_cached < len(served.turns["second"].token_ids)


OF_EVERY_FAMILY = (
    test_request_in_a_batch_gets_the_same_tokens_as_alone,
    test_prompt_that_begins_beside_the_rest_of_another_gets_the_same_tokens_as_alone,
    test_second_turn_gets_the_same_tokens_from_the_prefix_cache,
)
"""The tests with all families, the latter two at night; support/family_calls.py traces them."""


@one_family_of_each_cache
def test_drafts_by_prompt_lookup_change_no_token(served):
    """Rows draft in every second step, whether anything matches or not; a family that cannot do so says why."""
    runner, tokens = served.runner, {}
    rows = {turn: Row(served.request(turn)) for turn in served.turns}
    for row in rows.values():
        while not (first := runner.prefill([row], 64).first):
            pass
        tokens[row.id] = list(first[row.id].token_ids)
    forced, num_drafted, step = Drafts(4, "prompt_lookup", is_forced=True), 0, 0
    while any(len(tokens[row.id]) < NUM_TOKENS[turn] for turn, row in rows.items()):
        for row_id, output in runner.decode(forced if step % 2 else PLAIN).items():
            tokens[row_id] += output.token_ids
            num_drafted += output.num_drafted
        step += 1
    runner.drop([row.id for row in rows.values()])
    for turn, row in rows.items():
        answer = served.turns[turn].answer.tokens
        assert tokens[row.id][: len(answer)] == answer
    assert (num_drafted > 0) == ("prompt_lookup" not in runner.no_drafts)


def _continue(served: Served, whole: Driver, name: str, cuts: Iterable[int], together: int, **config: Any) -> None:
    """Give another engine the answer `name` of an undisturbed run up to each cut, and check what it adds.

    together: how many of the answers it continues at the same time, beside another request.
    """
    tokens, request = tuple(whole.tokens[name]), served.request("first", max_tokens=len(whole.tokens[name]))
    logprobs = [one.logprob for chunk in whole.chunks[name] for one in chunk.logprobs]
    left = list(cuts)
    while left:
        now, left = left[:together], left[together:]
        driver = Driver(served.runner, EngineConfig.model_validate(config))
        begun = [replace(request, request_id=f"{cut}", progress=(Progress(tokens[:cut]),)) for cut in now]
        others = [served.request("short")] if together > 1 else []
        driver.run({0: [*begun[:1], *others], 1: begun[1:]})
        for cut in now:
            assert tuple(driver.tokens[f"{cut}"]) == tokens[cut:], cut
            assert driver.finish[f"{cut}"] is whole.finish[name]
            continued = [one.logprob for chunk in driver.chunks[f"{cut}"] for one in chunk.logprobs]
            np.testing.assert_allclose(continued, logprobs[cut:], atol=LOGPROB_TOLERANCE)
        if others:
            served.check(driver, "short")


@one_family_of_each_layer
def test_answer_cut_anywhere_goes_on_in_another_engine_with_the_same_tokens(served):
    """Beside other rows, behind a prompt that is computed again or comes from the prefix cache."""
    whole = Driver(served.runner, EngineConfig.model_validate(NO_CACHE))
    whole.run({0: [served.request("first")]})
    served.check(whole, "first")
    _continue(served, whole, "first", (1, 6, 11), 3, **NO_CACHE)
    _continue(served, whole, "first", (3, 9), 2)


@pytest.mark.night("the gate cuts the answer of one family of each kind of cache layer at five places")
@every_family
@pytest.mark.parametrize(("together", "config"), [(1, NO_CACHE), (3, {})], ids=["alone", "together, cached"])
def test_answer_cut_after_each_of_32_tokens_goes_on_in_another_engine_with_the_same_tokens(served, together, config):
    whole = Driver(served.runner, EngineConfig.model_validate(NO_CACHE))
    whole.run({0: [served.request("first", max_tokens=33)]})
    _continue(served, whole, "first", range(1, 33), together, **config)


@one_family_of_each_layout
def test_rows_of_a_family_leave_no_memory_behind(served):
    memory = served.runner.memory()
    assert memory["decode_cache_bytes"] == memory["prefill_cache_bytes"] == 0


@one_family_of_each_cache
def test_sparse_prompt_gets_the_tokens_of_a_forward_over_its_kept_tokens(served):
    """Only models whose rope takes three positions per token get them explicitly, and can leave tokens out."""
    lm = served.runner._model.module.language_model
    assert (served.runner.no_sparse is None) == served.runner._language_model.explicit_positions
    if served.runner.no_sparse is not None:
        return
    token_ids = np.array(served.turns["first"].token_ids, np.int32)
    kept = np.array(sorted({0, 1, *range(5, len(token_ids), 3), len(token_ids) - 1}), np.int32)
    spec = EngineRequest("sparse", token_ids, SamplingParams(6, temperature=0.0), ())
    driver = Driver(served.runner, EngineConfig.model_validate({"prefill_chunk_tokens": 16, **NO_CACHE}))
    driver.run({0: [with_plan(spec, kept)], 2: [served.request("second")]})
    tokens, positions = token_ids[kept].tolist(), kept.tolist()
    for i in range(6):
        where = mx.broadcast_to(mx.array(positions, mx.int32), (3, 1, len(positions)))
        hidden = lm.model(mx.array([tokens], mx.int32), cache=make_prompt_cache(lm), position_ids=where)
        tokens.append(int(np.array(served.runner._language_model.logits(hidden[:, -1:]))[0, 0].argmax()))
        positions.append(len(token_ids) + i)
    assert driver.tokens["sparse"] == tokens[len(kept) :]
    served.check(driver, "second")


@one_family_of_each_layer
@pytest.mark.parametrize("chunk", some_at_night([5, 64], [5], "the gate has logits in several pieces"))
def test_logprobs_of_a_prompt_are_those_of_forwards_without_any_state(served, chunk, monkeypatch):
    """With the answer as part of the prompt, alone and beside a row that decodes; then its next tokens are the same."""
    monkeypatch.setattr(prefill, "LOGPROBS_CHUNK_TOKENS", chunk)
    turn = next(iter(served.turns))
    asked = served.turns[turn]
    whole = np.array([*asked.token_ids, *asked.answer.tokens], np.int32)
    plain = replace(served.request(turn, "plain", max_tokens=3), token_ids=whole)
    scored = [replace(plain, request_id=f"scored-{i}", prompt_logprobs=2) for i in range(2)]

    driver = Driver(served.runner, EngineConfig.model_validate({"prefill_chunk_tokens": 16}))
    driver.run({0: [plain], 30: [scored[0]], 33: [served.request(turn, "beside")], 36: [scored[1]]})

    for request in scored:
        first, *others = driver.chunks[request.request_id]
        assert first.prompt_logprobs is not None and not any(chunk.prompt_logprobs for chunk in others)
        assert len(first.prompt_logprobs) == len(whole) - 1 and first.num_cached == 0
        said = [one.logprob for one in first.prompt_logprobs[len(asked.token_ids) - 1 :]]
        np.testing.assert_allclose(said, asked.answer.logprobs, atol=LOGPROB_TOLERANCE)
        best = [one.top[0] for one in first.prompt_logprobs[len(asked.token_ids) - 1 :]]
        assert [token_id for token_id, _ in best] == list(asked.answer.tokens)
        assert all(len(one.top) == 2 for one in first.prompt_logprobs)
        assert driver.tokens[request.request_id] == driver.tokens["plain"]

    begun = replace(scored[0], request_id="begun", progress=(Progress(tuple(driver.tokens["plain"][:1])),))
    driver.run({0: [begun]})
    assert driver.tokens["begun"] == driver.tokens["plain"][1:]
    assert all(chunk.prompt_logprobs is None for chunk in driver.chunks["begun"]), "another engine has sent them"
