"""Real texts by SmolLM2 135M and Gemma 3 270M: prompt logprobs are mlx-lm's, and fewer bits lose no more than measured.

The bounds are the losses of perplexity in tests/benchmarks/README.md with a margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support import gemma3
from tests.support.perplexity import perplexity, text_logprobs
from tests.support.real_weights import Library, float32_smollm2, load_engine, text_prompts

pytestmark = pytest.mark.night("prompt logprobs and quantized keys of tiny models run in the gate")

NUM_TOKENS, NUM_TEXTS = 700, 2
"""More tokens than Gemma's windows have."""
LOGPROB_TOLERANCE = 1e-3
LIMITS = {8: 0.01, 4: 0.2}
"""Largest relative loss of perplexity by the number of bits."""


@dataclass(frozen=True)
class Model:
    """The checkpoint, the texts, and their logprobs with 16 bits."""

    path: Path
    library: Library
    texts: list[list[int]]
    plain: list[np.ndarray]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Model:
    is_gemma = request.param == "gemma3"
    try:
        path = gemma3.checkpoint() if is_gemma else float32_smollm2()
    except gemma3.NotAvailable as reason:
        pytest.skip(str(reason))
    library = Library(path)
    begin = [library.tokenizer.bos_token_id] if is_gemma else []
    texts = [[*begin, *text] for text in text_prompts(library.tokenizer, [NUM_TOKENS] * NUM_TEXTS, is_chat=False)]
    plain = text_logprobs(load_engine(path, max_running=1), texts)
    return Model(path, library, texts, plain)


def test_logprobs_of_a_text_are_those_of_mlx_lm(model: Model):
    for text, logprobs in zip(model.texts, model.plain, strict=True):
        np.testing.assert_allclose(logprobs, model.library.text_logprobs(text), rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("bits", [8, 4])
def test_perplexity_with_fewer_bits_stays_near_that_of_all(model: Model, bits: int):
    runner = load_engine(model.path, max_running=1, kv_cache={"bits": bits})
    found = text_logprobs(runner, model.texts, bits)
    assert not np.array_equal(found[0], model.plain[0])
    assert total(found) / total(model.plain) - 1 < LIMITS[bits]


def total(logprobs: Sequence[np.ndarray]) -> float:
    return perplexity(np.concatenate(logprobs))
