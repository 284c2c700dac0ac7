"""Answers that go on in another engine, with everything a request can ask for, as if nothing had happened.

ORCHARD_SCHEDULES=100 runs that many more random batches of each model.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.protocol import EngineRequest, FinishReason, Progress, SamplingParams
from engine.worker.model_runner import MLXRunner
from tests.support.cold_runner import load_cold
from tests.support.conversations import DRAFTS, SharedSpecimens
from tests.support.driver import Driver
from tests.support.moves import NO_CACHE, PLAIN, Moves
from tests.support.night import some_at_night
from tests.support.schedules import Specimens
from tests.support.sparse_prompts import with_random_plan

NUM_BATCHES = 2 + int(os.environ.get("ORCHARD_SCHEDULES", "0"))
MODELS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 4, "interval": 4, "agree": 0.3},
    "alternating": {"layers": 4, "interval": 2, "agree": 0.1, "seed": 1},
    "foreign head": {"layers": 2, "interval": 2, "seed": 3},
    "no head": {"layers": 4, "interval": 2, "mtp": False},
}
DRAFTING: dict[str, Any] = {"mtp": DRAFTS, "prompt_lookup": "off"}
LOOKING_UP: dict[str, Any] = {"mtp": "off", "prompt_lookup": {"max_draft_tokens": 3, "max_rows": 8}}


class SparseSpecimens(Specimens):
    """Specimens with random sparse plans, some without."""

    def _spec(self, number: int) -> EngineRequest:
        spec = super()._spec(number)
        return with_random_plan(random.Random(f"plan {number}"), spec, self.image_token_id)


@pytest.fixture(scope="module")
def moves_of(tiny_model: Callable[..., Path]) -> Callable[..., Moves]:
    """moves_of(model, specimens, **config). Runners are never closed: see conftest.py."""

    @cache
    def runner(name: str, kv_bits: int) -> MLXRunner:
        config = {"model": str(tiny_model(**MODELS[name])), "kv_cache": {"bits": kv_bits}, "max_running": 8}
        return load_cold(EngineConfig.model_validate(config))

    @cache
    def make(name: str, kind: type[Specimens] = Specimens, kv_bits: int = 16) -> Moves:
        return Moves(runner(name, kv_bits), kind(tiny_model(**MODELS[name]), 512, sees=True))

    return make


one_model = pytest.mark.parametrize(
    "model", some_at_night(MODELS, {"alternating"}, "its state is that of the layers and of a head")
)


@pytest.mark.parametrize(
    ("model", "drafts"),
    some_at_night(
        product(MODELS, ("plain", "head", "prompt lookup")),
        [("alternating", "head"), ("alternating", "prompt lookup"), ("no head", "plain")],
        "the gate has each kind of drafts, a model with a head and one without",
        are_sets=True,
    ),
)
def test_random_requests_cut_anywhere_go_on_with_their_tokens(moves_of, model, drafts):
    """Sampled with seeds, penalties, biases, min_tokens, grammars, stop tokens, images, up to 3 choices."""
    options = {"plain": PLAIN, "head": DRAFTING, "prompt lookup": LOOKING_UP}[drafts]
    moves, rng = moves_of(model), random.Random(f"{model} {drafts}")
    for batch in range(NUM_BATCHES):
        config = options | (NO_CACHE if batch % 2 else {})
        moves.check_cuts(rng.sample(range(60), 5), rng, **config, prefill_chunk_tokens=rng.choice([64, 16, 2048]))
    print(f"\n{model}, {drafts}: {dict(moves.figures)}")  # noqa: T201


@one_model
def test_random_requests_with_shared_prompts_go_on_behind_snapshots_of_others(moves_of, model):
    moves, rng = moves_of(model, SharedSpecimens), random.Random(model)
    for _ in range(NUM_BATCHES):
        moves.check_cuts(rng.sample(range(40), 6), rng, **DRAFTING, prefill_chunk_tokens=rng.choice([64, 16, 2048]))
    assert moves.figures["cached_tokens"] > 0


@one_model
def test_sparse_prompts_go_on_at_the_positions_of_the_whole_prompt(moves_of, model):
    moves, rng = moves_of(model, SparseSpecimens), random.Random(f"sparse {model}")
    assert any(moves.specimens.spec(number).sparse for number in range(10))
    for batch in range(NUM_BATCHES):
        moves.check_cuts(rng.sample(range(40), 5), rng, **DRAFTING, **(NO_CACHE if batch % 2 else {}))


@pytest.mark.parametrize("bits", some_at_night([8, 4], {8}, "the gate packs 8 bits"))
def test_answers_of_quantized_keys_and_values_go_on_with_their_tokens(moves_of, bits):
    moves, rng = moves_of("alternating", Specimens, bits), random.Random(bits)
    for batch in range(NUM_BATCHES):
        moves.check_cuts(rng.sample(range(40), 5), rng, **DRAFTING, **(NO_CACHE if batch % 2 else {}))


@one_model
@pytest.mark.parametrize("kind", [Specimens, SharedSpecimens], ids=["own prompts", "shared prompts"])
def test_pieces_of_answers_that_move_at_random_steps_are_the_undisturbed_answers(moves_of, model, kind):
    moves, rng = moves_of(model, kind), random.Random(f"moves {model} {kind.__name__}")
    for batch in range(10 * NUM_BATCHES):
        if batch >= NUM_BATCHES and moves.figures["moved"] and moves.figures["continued"]:
            break
        configs = [
            rng.choice([PLAIN, DRAFTING, LOOKING_UP])
            | rng.choice([NO_CACHE, {}])
            | {"prefill_chunk_tokens": rng.choice([16, 64]), "max_running": rng.choice([3, 8])}
            for _ in range(rng.randint(2, 4))
        ]
        moves.check_moves(rng.sample(range(40), rng.randint(1, 6)), rng, configs)
    assert moves.figures["moved"] > 0 and moves.figures["continued"] > 0
    print(f"\n{model}: {dict(moves.figures)}")  # noqa: T201


@pytest.mark.parametrize("drafts", [PLAIN, DRAFTING], ids=["plain", "head"])
def test_four_choices_go_on_from_different_tokens_and_their_prompt_is_computed_once(moves_of, drafts):
    """The second is finished; the fourth has no token yet."""
    runner = moves_of("alternating").runner
    sampling = SamplingParams(24, temperature=0.8, seed=5, frequency_penalty=0.5, min_tokens=12, logprobs=1)
    prompt = np.random.default_rng(0).integers(20, 512, 100).astype(np.int32)
    asked = EngineRequest("r", prompt, sampling, tuple(range(100, 300)), num_choices=4)
    names = ["r", "r/1", "r/2", "r/3"]
    whole = Driver(runner, EngineConfig.model_validate(NO_CACHE | PLAIN))
    whole.run({0: [asked]})
    assert all(whole.finish[name] is FinishReason.STOP and len(whole.tokens[name]) >= 12 for name in names)
    cuts = {0: 3, 1: None, 2: 12, 3: 0}
    progress = (Progress(tuple(whole.tokens[names[i]][:cut]), is_finished=cut is None) for i, cut in cuts.items())
    driver = Driver(runner, EngineConfig.model_validate(drafts))
    driver.run({0: [replace(asked, progress=tuple(progress))]})
    assert driver.tokens == {names[i]: whole.tokens[names[i]][cut:] for i, cut in cuts.items() if cut is not None}
    assert driver.finish == {names[i]: FinishReason.STOP for i in (0, 2, 3)}
    assert driver.core.stats.num_prompt_tokens == 100 + (1 + 3) + (1 + 12)


def test_images_are_seen_again_where_an_answer_goes_on(moves_of):
    moves = moves_of("alternating")
    seeing = [number for number in range(80) if moves.specimens.spec(number).images][:6]
    for seed in range(3):
        moves.check_cuts(seeing, random.Random(seed), **DRAFTING)
