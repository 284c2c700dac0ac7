"""Models of three families, two engines each: a conversation goes on with the same tokens after it was handed over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.placement import ConversationKeys, TakenOver
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.snapshot_store.exchange import Sharing
from tests.engine.snapshot_store.peers import Damage, Relay
from tests.support.cold_runner import load_cold
from tests.support.driver import fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.tiny import Tiny, build
from tests.support.zoo import make

LIMIT_S = 120.0
NUM_PROMPT, NUM_TOKENS = 300, 12
GREETING_BYTES = 75


THREE = ("llama", "hybrid", "deepseek_v3")

others_at_night = some_at_night(THREE, {"hybrid"}, "the hybrid's caches have all that those of the others have")


def made(family: str, path: Path) -> Path:
    return build(path, Tiny(layers=4, interval=2)) if family == "hybrid" else make(path, FAMILIES[family])


@asynccontextmanager
async def engines(family: str, path: Path) -> AsyncIterator[list[AsyncEngine]]:
    """Two engines with a disk tier each; computing is predicted to be slow."""
    model = await asyncio.to_thread(made, family, path / "model")
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        both = []
        for name in ("there", "here"):
            options = {
                "model": str(model),
                "dtype": "float32",
                "prefix_cache": {"disk": {"path": str(path / name)}},
            }
            config = EngineConfig.model_validate(options)
            sharing = Sharing("127.0.0.1", b"secret")
            both.append(AsyncEngine(config, lambda config, progress: load_cold(config), sharing))
            stack.push_async_callback(both[-1].shutdown)
            await both[-1].wait_ready()
            await both[-1]._thread.call(lambda core: fix_prefill_costs(core, 0.0, 1.0))
        yield both


def first_turn() -> EngineRequest:
    ids = np.random.default_rng(3).integers(20, 90, NUM_PROMPT).astype(np.int32)
    boundaries = (Boundary("system", 100), Boundary("turn", 290))
    sampling = SamplingParams(20, temperature=0.0)
    return EngineRequest("first", ids, sampling, (), boundaries=boundaries, keys=ConversationKeys(1, 2, (3,)))


def second_turn(answer: list[int]) -> EngineRequest:
    first, more = first_turn(), np.random.default_rng(4).integers(20, 90, 25)
    ids = np.concatenate([first.token_ids, answer, more]).astype(np.int32)
    sampling, keys = SamplingParams(NUM_TOKENS, temperature=0.0), ConversationKeys(1, 2, (4, 3))
    return replace(first, request_id="second", token_ids=ids, sampling=sampling, keys=keys)


async def answered(one: AsyncEngine, spec: EngineRequest) -> tuple[int, list[int]]:
    """Return the cached tokens of a prompt, and those of its answer."""
    chunks = [chunk async for chunk in one.generate(spec)]
    return chunks[0].num_cached, [token for chunk in chunks for token in chunk.token_ids]


async def hand_over(there: AsyncEngine, here: AsyncEngine, address: str = "") -> TakenOver:
    await there.move_all()
    offered = await there.take_over.offered(100)
    return await here.take_over.take(address or there.placement_facts()["snapshots"], offered, LIMIT_S)


def cut_all_after(num_bytes: int) -> Damage:
    """End each connection behind its greeting, once so many bytes have passed on all of them together."""
    num_left = num_bytes

    def damage(data: bytes, num_before: int) -> bytes:
        nonlocal num_left
        passed = data[: max(num_left, GREETING_BYTES - num_before)]
        num_left -= len(passed)
        return passed

    return damage


@pytest.mark.parametrize("family", others_at_night)
def test_tokens_after_a_hand_over_equal_those_of_an_undisturbed_conversation(family: str, tmp_path):
    async def main() -> None:
        async with engines(family, tmp_path) as (there, here):
            _, answer = await answered(there, first_turn())
            undisturbed = await answered(here, replace(second_turn(answer), tenant="another"))
            assert undisturbed[0] == 0
            beside = replace(first_turn(), request_id="beside", token_ids=np.arange(30, 70, dtype=np.int32))
            beside = replace(beside, boundaries=(), keys=None, sampling=SamplingParams(200, temperature=0.0))
            decoding = asyncio.ensure_future(answered(here, beside))
            taken = await hand_over(there, here)
            assert (taken.refused, taken.num_files) == ({}, 3)
            num_cached, tokens = await answered(here, second_turn(answer))
            assert num_cached >= NUM_PROMPT and tokens == undisturbed[1]
            assert (await decoding)[1] == (await answered(here, replace(beside, tenant="another")))[1], (
                "rows beside it are undisturbed"
            )

    asyncio.run(main())


@pytest.mark.parametrize("family", others_at_night)
def test_an_answer_that_is_moved_goes_on_behind_its_handed_over_prompt(family: str, tmp_path):
    async def main() -> None:
        async with engines(family, tmp_path) as (there, here):
            whole = replace(first_turn(), sampling=SamplingParams(60, temperature=0.0))
            _, expected = await answered(here, replace(whole, tenant="another"))
            stream = there.generate(whole)
            before = list((await anext(stream)).token_ids)
            moving = asyncio.ensure_future(hand_over(there, here))
            async for chunk in stream:
                before += chunk.token_ids
            assert (await moving).refused == {}
            ids = np.concatenate([whole.token_ids, before]).astype(np.int32)
            sampling = SamplingParams(60 - len(before), temperature=0.0)
            num_cached, after = await answered(here, replace(whole, request_id="on", token_ids=ids, sampling=sampling))
            assert num_cached >= 290 and before + after == expected

    asyncio.run(main())


@pytest.mark.parametrize("family", others_at_night)
def test_tokens_after_a_hand_over_that_was_cut_equal_those_of_an_undisturbed_conversation(family: str, tmp_path):
    async def main() -> None:
        async with engines(family, tmp_path) as (there, here):
            _, answer = await answered(there, first_turn())
            _, expected = await answered(here, replace(second_turn(answer), tenant="another"))
            await there.move_all()
            while len(files := list((tmp_path / "there").glob("*.safetensors"))) < 3:
                await asyncio.sleep(0.01)  # a thread writes them
            half = sum(file.stat().st_size for file in files) // 2
            relay = Relay(there.placement_facts()["snapshots"], cut_all_after(half))
            taken = await hand_over(there, here, relay.address)
            relay.close()
            assert 0 < taken.num_files < len(files) and taken.num_taken < taken.num_offered
            num_cached, tokens = await answered(here, second_turn(answer))
            assert 0 < num_cached < NUM_PROMPT and tokens == expected

    asyncio.run(main())
