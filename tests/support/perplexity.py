"""Logprobs of real texts by the engine's own prompt logprobs, and the perplexity that they give."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.worker.model_runner import MLXRunner
from tests.support.real_weights import NO_CACHE, driver, greedy


def text_logprobs(runner: MLXRunner, texts: Sequence[Sequence[int]], bits: int = 16) -> list[np.ndarray]:
    """Return the logprobs of each text's tokens from the second one on, float64 [len(text) - 1].

    Args:
        runner: It has been loaded with these bits.
        texts: Their token ids.
        bits: `kv_cache.bits`.
    """
    reading = driver(runner, kv_cache={"bits": bits}, **NO_CACHE)
    reading.run({0: [replace(greedy(f"{i}", text, 1), prompt_logprobs=0) for i, text in enumerate(texts)]})
    found = [reading.chunks[f"{i}"][0].prompt_logprobs or () for i in range(len(texts))]
    return [np.array([one.logprob for one in entries]) for entries in found]


def perplexity(logprobs: np.ndarray) -> float:
    return math.exp(-float(logprobs.mean()))
