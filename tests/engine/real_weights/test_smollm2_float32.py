"""SmolLM2-135M-Instruct in float32: the engine's greedy tokens are those that mlx-lm generates.

The prompts are texts of this repository, of 40 to 4,000 tokens. Each test counts the places where the library's two
best tokens are level (tests/support/real_weights.py) and allows few of them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine.worker.model_runner import MLXRunner
from tests.support.real_weights import (
    NO_CACHE,
    Library,
    driver,
    float32_smollm2,
    greedy,
    load_engine,
    text_prompts,
)

pytestmark = pytest.mark.night("tiny random checkpoints of all families run in the gate, against the same library")

LENGTHS = (40, 120, 75, 250, 400, 60, 160, 90, 600, 200, 1000, 50, 2000, 130, 4000, 300)
NUM_TOKENS = 80


@dataclass(frozen=True)
class Model:
    """The checkpoint in the engine and in the library, and the prompts."""

    runner: MLXRunner
    library: Library
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    path = float32_smollm2()
    library = Library(path)
    yield Model(load_engine(path), library, text_prompts(library.tokenizer, LENGTHS))


@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_request_alone_gets_the_tokens_of_mlx_lm(model: Model, number: int):
    prompt = model.prompts[number]
    alone = driver(model.runner, prefill_chunk_tokens=512, **NO_CACHE)
    alone.run({0: [greedy("r", prompt, NUM_TOKENS)]})
    assert len(alone.tokens["r"]) == NUM_TOKENS
    assert len(model.library.check(prompt, alone.tokens["r"])) <= 1


@pytest.mark.parametrize("half", [0, 1])
def test_rows_that_join_and_leave_at_any_step_get_the_tokens_of_mlx_lm(model: Model, half: int):
    """Answers have different lengths, and every second request comes with another one that is aborted."""
    rng = random.Random(half)
    prompts = dict(list(enumerate(model.prompts))[half::2])
    arrivals, aborts, lengths = {}, {}, {}
    for number, prompt in prompts.items():
        step, lengths[f"{number}"] = rng.randrange(90), rng.randint(NUM_TOKENS // 2, NUM_TOKENS)
        arrivals.setdefault(step, []).append(greedy(f"{number}", prompt, lengths[f"{number}"]))
        if number % 4 == half:
            arrivals[step].append(greedy(f"aborted {number}", prompt[:100], NUM_TOKENS))
            aborts.setdefault(step + rng.randint(1, 30), []).append(f"aborted {number}")
    batch = driver(model.runner, prefill_chunk_tokens_busy=128, **NO_CACHE)
    batch.run(arrivals, aborts)
    ties = [tie for number in prompts for tie in model.library.check(prompts[number], batch.tokens[f"{number}"])]
    assert {name: len(batch.tokens[name]) for name in lengths} == lengths and len(ties) <= 2


@pytest.mark.parametrize("number", [3, 8, 10])
def test_second_turn_after_a_cached_one_gets_the_tokens_of_mlx_lm(model: Model, number: int):
    first, other = model.prompts[number], model.prompts[number - 2]
    cached = driver(model.runner)
    cached.run({0: [greedy("first", first, 40)]})
    second = [*first, *cached.tokens["first"], *other[-60:]]
    cached.run({0: [greedy("second", second, NUM_TOKENS)]})
    assert cached.chunks["second"][0].num_cached >= len(first)
    ties = model.library.check(first, cached.tokens["first"]) + model.library.check(second, cached.tokens["second"])
    assert len(ties) <= 1


def test_requests_with_a_common_system_part_get_the_tokens_of_mlx_lm(model: Model):
    """It is computed once; the last request comes when the others have begun to decode."""
    system = model.prompts[12][:900]
    prompts = {f"{i}": [*system, *model.prompts[i][:70]] for i in (1, 4, 9)}
    requests = [greedy(name, prompt, NUM_TOKENS, len(system)) for name, prompt in prompts.items()]
    shared = driver(model.runner)
    shared.run({0: requests[:2], 12: requests[2:]})
    cached = sorted(shared.chunks[name][0].num_cached for name in prompts)
    assert cached == [0, len(system), len(system)]
    assert sum(len(model.library.check(prompts[name], shared.tokens[name])) for name in prompts) <= 1
