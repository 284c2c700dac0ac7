"""Gemma 3 270M in float32: the engine's greedy tokens are those that mlx-lm generates, across windows of 512 tokens.

15 of its 18 layers see the last 512 tokens alone. Prompts are shorter than the window, end at its edge, or have several
windows; answers cross the edge. Skipped where the packages with the weights cannot be fetched, see
tests/support/gemma3.py.
"""

from dataclasses import dataclass

import pytest

from engine.worker.model_runner import MLXRunner
from tests.support.gemma3 import NotAvailable, checkpoint
from tests.support.real_weights import NO_CACHE, Library, driver, greedy, load_engine, text_prompts

pytestmark = pytest.mark.night("tiny random checkpoints with sliding windows run in the gate, against the same library")

WINDOW = 512
PROMPTS = {40: 60, 300: 60, 460: 120, 511: 48, 512: 48, 513: 48, 700: 60, 1024: 60, 1800: 60, 2600: 60}
"""Tokens of a text -> of its answer."""
ACROSS = 250
"""Tokens of a short text whose answer is longer than what is left of the window."""


@dataclass(frozen=True)
class Gemma:
    """The checkpoint in the engine and in the library, and the prompts by their length."""

    runner: MLXRunner
    library: Library
    prompts: dict[int, list[int]]


@pytest.fixture(scope="module")
def gemma() -> Gemma:
    try:
        path = checkpoint()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    library = Library(path)
    lengths = [*PROMPTS, ACROSS]
    texts = text_prompts(library.tokenizer, [length - 1 for length in lengths], is_chat=False)
    bos = library.tokenizer.bos_token_id
    prompts = {length: [bos, *text] for length, text in zip(lengths, texts, strict=True)}
    return Gemma(load_engine(path, max_running=6, max_context_tokens=3072), library, prompts)


@pytest.mark.parametrize("chunk", [2048, 300])
@pytest.mark.parametrize("length", PROMPTS)
def test_request_alone_gets_the_tokens_of_mlx_lm(gemma: Gemma, length: int, chunk: int):
    """chunk: most prompt tokens per step, more or fewer than the window."""
    prompt, alone = gemma.prompts[length], driver(gemma.runner, prefill_chunk_tokens=chunk, **NO_CACHE)
    alone.run({0: [greedy("r", prompt, PROMPTS[length])]})
    assert len(prompt) == length
    assert len(gemma.library.check(prompt, alone.tokens["r"])) <= 1


def test_long_answer_across_the_edge_of_the_window_has_the_tokens_of_mlx_lm(gemma: Gemma):
    prompt, num_tokens, alone = gemma.prompts[ACROSS], WINDOW - ACROSS + 100, driver(gemma.runner, **NO_CACHE)
    alone.run({0: [greedy("r", prompt, num_tokens)]})
    assert len(gemma.library.check(prompt, alone.tokens["r"])) <= 2


def test_rows_on_both_sides_of_the_window_that_join_and_leave_get_the_tokens_of_mlx_lm(gemma: Gemma):
    """One is aborted; a row of 460 tokens crosses the edge beside one of several windows."""
    numbers = {460: 120, 300: 40, 513: 48, 1024: 60, 1800: 30, 40: 60}
    requests = [greedy(f"{length}", gemma.prompts[length], most) for length, most in numbers.items()]
    aborted = greedy("aborted", gemma.prompts[700], 100)
    batch = driver(gemma.runner, prefill_chunk_tokens_busy=200, **NO_CACHE)
    batch.run({0: requests[:2], 6: [requests[2], aborted], 25: requests[3:5], 60: requests[5:]}, {18: ["aborted"]})
    ties = [tie for n in numbers for tie in gemma.library.check(gemma.prompts[n], batch.tokens[f"{n}"])]
    assert len(ties) <= 2


@pytest.mark.parametrize("length", [460, 1024])
def test_second_turn_after_a_cached_one_gets_the_tokens_of_mlx_lm(gemma: Gemma, length: int):
    """The first answer of the shorter prompt crosses the edge of the window."""
    first, cached = gemma.prompts[length], driver(gemma.runner)
    cached.run({0: [greedy("first", first, 70)]})
    second = [*first, *cached.tokens["first"], *gemma.prompts[300][1:90]]
    cached.run({0: [greedy("second", second, 60)]})
    assert cached.chunks["second"][0].num_cached >= len(first)
    assert len(gemma.library.check(second, cached.tokens["second"])) <= 1
