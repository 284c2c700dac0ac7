"""SmolLM2-135M-Instruct of 8 and 4 bits, as mlx-lm quantizes it: the engine's greedy tokens are those of mlx-lm.

On a CPU the engine expands quantized weights. It is compared with mlx-lm on the same checkpoint with the weights that
mlx-lm's own function expands; behind short prompts, as MLX's products with quantized weights are slow on CPUs, also
with mlx-lm as it loads the checkpoint. Those products add up in another order, group by group, and are the only
difference: it is rounding of float32, far below the tolerance of equal logprobs (tests/support/real_weights.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.worker.model_runner import MLXRunner
from tests.support.real_weights import (
    NO_CACHE,
    Library,
    driver,
    greedy,
    load_engine,
    quantized_smollm2,
    text_prompts,
)

pytestmark = pytest.mark.night("tiny quantized checkpoints run in the gate, against the same library")

LENGTHS = (60, 300, 1000, 3000)
NUM_TOKENS = 60
SHORT_LENGTHS, FEW_TOKENS = (40, 12), 16


@dataclass(frozen=True)
class Model:
    """The checkpoint in the engine and in the library, both expanded, and the prompts."""

    path: Path
    runner: MLXRunner
    library: Library
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=[8, 4], ids=["8 bits", "4 bits"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    path = quantized_smollm2(request.param)
    library, runner = Library(path, expand=True), load_engine(path, expand_quantized_weights="on")
    yield Model(path, runner, library, text_prompts(library.tokenizer, LENGTHS))


@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_request_alone_gets_the_tokens_of_mlx_lm(model: Model, number: int):
    prompt, alone = model.prompts[number], driver(model.runner, prefill_chunk_tokens=512, **NO_CACHE)
    alone.run({0: [greedy("r", prompt, NUM_TOKENS)]})
    assert len(alone.tokens["r"]) == NUM_TOKENS
    assert len(model.library.check(prompt, alone.tokens["r"])) <= 1


def test_rows_that_join_and_leave_get_the_tokens_of_mlx_lm(model: Model):
    requests = [greedy(f"{i}", prompt, NUM_TOKENS - 10 * i) for i, prompt in enumerate(model.prompts)]
    aborted = greedy("aborted", model.prompts[1][:100], NUM_TOKENS)
    batch = driver(model.runner, prefill_chunk_tokens_busy=128, **NO_CACHE)
    batch.run({0: requests[:1], 3: [aborted, requests[3]], 20: requests[1:3]}, {15: ["aborted"]})
    ties = [tie for i, prompt in enumerate(model.prompts) for tie in model.library.check(prompt, batch.tokens[f"{i}"])]
    assert [len(batch.tokens[f"{i}"]) for i in range(4)] == [60, 50, 40, 30] and len(ties) <= 2


@pytest.mark.parametrize("number", [1, 2])
def test_second_turn_after_a_cached_one_gets_the_tokens_of_mlx_lm(model: Model, number: int):
    first, cached = model.prompts[number], driver(model.runner)
    cached.run({0: [greedy("first", first, 40)]})
    second = [*first, *cached.tokens["first"], *model.prompts[0]]
    cached.run({0: [greedy("second", second, NUM_TOKENS)]})
    assert cached.chunks["second"][0].num_cached >= len(first)
    assert len(model.library.check(second, cached.tokens["second"])) <= 1


def test_products_with_quantized_weights_give_the_same_tokens_expanded_or_not(model: Model):
    library = Library(model.path)
    prompts = text_prompts(library.tokenizer, SHORT_LENGTHS)
    limits = {"max_running": 2, "max_context_tokens": 128}  # so that the warm-up times only small chunks and batches
    for runner in (model.runner, load_engine(model.path, expand_quantized_weights="off", **limits)):
        batch = driver(runner, **NO_CACHE)
        batch.run({0: [greedy(f"{i}", prompt, FEW_TOKENS) for i, prompt in enumerate(prompts)]})
        assert sum(len(library.check(prompt, batch.tokens[f"{i}"])) for i, prompt in enumerate(prompts)) <= 1
