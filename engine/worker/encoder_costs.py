"""Measures the memory that an encoder takes for a text, from the peaks of a few forwards."""

import gc
from collections.abc import Callable

import mlx.core as mx

from engine.core.memory.costs import MemoryCosts
from engine.worker.encoder_model import EncoderModel
from engine.worker.memory_costs import CHUNK_MARGIN, LATE_BYTES, MARGIN

FEW, MANY = 64, 192
"""Tokens of the two texts from which the bytes per token follow."""

ATTENTION_TOKENS = 512
"""Tokens of the shorter of the two probes of attention alone; the longer one has twice as many."""


def measure(model: EncoderModel, forward: Callable[[int], object], max_tokens: int) -> MemoryCosts:
    """Measure the costs of a warm encoder.

    A text of n tokens takes a + b * n + c * n * n bytes: c of attention alone, which stores the scores of all pairs of
    tokens on a CPU and little on a GPU, b and a of whole forwards, in which it is small.

    Args:
        model: The encoder.
        forward: Computes a text of so many tokens.
        max_tokens: The most tokens of a text.
    """
    gc.collect()  # what is freed between two probes would count as the difference between them
    mx.synchronize()
    mx.clear_cache()
    base = mx.get_active_memory()
    few, many = min(FEW, max_tokens // 3), min(MANY, max_tokens)
    short, long = (_peak(lambda n=n: forward(n)) - base for n in (few, many))
    token = max((long - short) / (many - few), short / (2 * few), 0.0)
    fixed = max(0.0, short - few * token)
    once, twice = (_peak(lambda n=n: mx.eval(model.attend(n))) - base for n in (ATTENTION_TOKENS, 2 * ATTENTION_TOKENS))
    pair = max(0.0, twice - 2 * once) / (2 * ATTENTION_TOKENS**2)  # what grows with the tokens cancels out
    return MemoryCosts(
        base_bytes=base + LATE_BYTES,
        chunk_bytes=int(CHUNK_MARGIN * fixed),
        token_step_bytes=CHUNK_MARGIN * token,
        pair_bytes=MARGIN * pair,
    )


def _peak(work: Callable[[], object]) -> int:
    """Return the peak bytes in use during the work."""
    mx.clear_cache()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory()
