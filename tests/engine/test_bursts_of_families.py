"""Prompts that arrive together at an engine that has started by itself, with costs that it has measured."""

import asyncio

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.protocol import EngineRequest, SamplingParams
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import make, prompt

NUM_PROMPTS = 8

FIVE = ("llama", "qwen3", "gemma3_text", "falcon_h1", "mixtral")
"""Plain, with norms of queries and keys, with windows, recurrent layers beside attention, with experts."""

MAX_WAVES = 20
"""On a busy machine the warm-up may measure that prompts have no fixed cost; a few waves correct it."""


def request(number: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    return EngineRequest(f"r{number}", np.array(prompt(20 + number, seed=number), np.int32), sampling, ())


@pytest.mark.parametrize(
    "family", some_at_night(FIVE, {"llama", "falcon_h1"}, "test_burst.py runs all forms of caches")
)
def test_prompts_at_once_share_forwards_and_get_the_tokens_that_they_get_alone(family: str, tmp_path) -> None:
    path = make(tmp_path / "model", FAMILIES[family])
    config = {"model": str(path), "max_context_tokens": 192, "max_running": NUM_PROMPTS}

    async def main() -> None:
        started = AsyncEngine(EngineConfig.model_validate({**config, "prefix_cache": {"enabled": False}}))

        async def tokens(number: int) -> list[int]:
            return [id for chunk in [one async for one in started.generate(request(number))] for id in chunk.token_ids]

        try:
            await started.wait_ready()
            alone = [await tokens(number) for number in range(NUM_PROMPTS)]
            assert started.status().num_bursts == 0
            for _ in range(MAX_WAVES):
                assert await asyncio.gather(*(tokens(number) for number in range(NUM_PROMPTS))) == alone
                if started.status().num_bursts:
                    break
            assert started.status().num_bursts > 0
        finally:
            await started.shutdown()

    asyncio.run(main())
