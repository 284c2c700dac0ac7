"""An engine takes over the snapshots of a drained one, over loopback sockets; each has its own device thread."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import take_over
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.errors import EngineFailed
from engine.placement import ConversationKeys, MovableSnapshot, Question, Quote, TakenOver
from engine.protocol import EngineRequest
from engine.snapshot_store.exchange import Sharing
from engine.status import FetchStatus
from engine.take_over import MAX_WARM
from tests.engine.core.prefix_cache.test_disk_tier import SYSTEM, request
from tests.engine.snapshot_store.peers import Relay, cut_at, flip_at
from tests.engine.test_async_engine_fetch import SHARING, ask
from tests.engine.test_async_engine_fetch import make_runner as make_free_runner
from tests.support.driver import fix_prefill_costs
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, FakeRunner

SYSTEM_KEY = 1
LIMIT_S = 60.0


def make_runner(config: EngineConfig, progress: Callable[[float], None]) -> FakeRunner:
    runner = make_free_runner(config, progress)
    runner.costs = MemoryCosts(token_bytes=BYTES_PER_TOKEN, state_bytes=STATE_BYTES)
    return runner


def keys(conversation: int, num_turns: int) -> ConversationKeys:
    turns = tuple(1000 * conversation + turn for turn in range(num_turns, 0, -1))
    return ConversationKeys(SYSTEM_KEY, conversation, turns)


def turn(conversation: int, num_turns: int) -> EngineRequest:
    """The last turn of a conversation: each turn has 20 tokens, and all begin with the same 40."""
    parts = [SYSTEM, *([100 * conversation + each] * 20 for each in range(num_turns))]
    return request(f"{conversation}-{num_turns}", *parts, keys=keys(conversation, num_turns))


def length(num_turns: int) -> int:
    return len(SYSTEM) + 20 * num_turns


@asynccontextmanager
async def engine(path: Path, max_gb: float = 1.0, sharing: Sharing | None = SHARING) -> AsyncIterator[AsyncEngine]:
    options = {"disk": {"path": str(path), "max_gb": max_gb}}
    made = AsyncEngine(EngineConfig.model_validate({"prefix_cache": options}), make_runner, sharing)
    try:
        await made.wait_ready()
        await made._thread.call(lambda core: fix_prefill_costs(core, 0.0, 0.1))
        yield made
    finally:
        await made.shutdown()


def run_engines(test: Callable[[AsyncEngine, AsyncEngine], Awaitable[None]], path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), engine(path / "there") as there, engine(path / "here") as here:
            await test(there, here)

    asyncio.run(main())


async def converse(one: AsyncEngine, conversation: int, num_turns: int) -> None:
    for each in range(1, num_turns + 1):
        await ask(one, turn(conversation, each))
    await flush(one)


async def flush(one: AsyncEngine) -> None:
    files = await one._thread.call(lambda core: core.prefixes._disk._files)  # type: ignore[union-attr]
    await asyncio.to_thread(files.flush)


async def evict(one: AsyncEngine) -> None:
    """Leave all snapshots on disk alone."""
    await flush(one)
    await one._thread.call(lambda core: core.free_evictable())


def address_of(one: AsyncEngine) -> str:
    return one.placement_facts()["snapshots"]


def quote_of(one: AsyncEngine, conversation: int, num_turns: int) -> Quote:
    return one.quote(Question("q", keys(conversation, num_turns), length(num_turns) + 2))


async def fetch_of(one: AsyncEngine) -> FetchStatus:
    fetch = (await one.cache_status()).fetch
    assert fetch is not None
    return fetch


def longest(snapshots: Sequence[MovableSnapshot]) -> MovableSnapshot:
    """Return the snapshot behind a conversation; the time that passed may make the system part worth offering, too."""
    return max(snapshots, key=lambda one: one.num_tokens)


async def offered(there: AsyncEngine) -> tuple[MovableSnapshot, ...]:
    await there.move_all()
    return await there.take_over.offered(100)


def test_the_next_turn_of_a_drained_engines_conversation_is_a_hit_at_the_other_one(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        for conversation in (1, 2):
            await converse(there, conversation, 3)
        assert quote_of(here, 1, 4).cached_tokens == 0
        snapshots = await offered(there)  # the system part too, where the time that passed makes it worth the most
        assert [one.num_tokens for one in snapshots if not one.is_shared] == [length(3)] * 2
        num = len(snapshots)
        taken = await here.take_over.take(address_of(there), snapshots, LIMIT_S)
        assert (taken.num_taken, taken.num_offered, taken.refused) == (num, num, {})
        assert taken.num_files == 7 and f"{num} of {num} snapshots are at other nodes" in str(taken)
        for conversation in (1, 2):
            quote = quote_of(here, conversation, 4)
            assert (quote.cached_tokens, quote.is_resident) == (length(3), True)
            assert await ask(here, turn(conversation, 4)) == length(3)
        assert quote_of(here, 3, 1).cached_tokens == length(0), "a new conversation begins with the same system part"
        got, gave = await fetch_of(here), await fetch_of(there)
        assert (got.taken_over, got.taken_over_bytes) == ({"drain": 7}, {"drain": gave.served_bytes})
        assert (got.failures, got.not_taken_over) == ({}, {})

    run_engines(test, tmp_path)


def test_rows_that_are_moved_leave_their_states_for_the_other_engine(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 2)
        long = replace(turn(1, 3), request_id="long", sampling=replace(turn(1, 3).sampling, max_tokens=5000))
        stream = there.generate(long)
        tokens = list((await anext(stream)).token_ids)
        snapshots = await offered(there)
        tokens += [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]
        taken = await here.take_over.take(address_of(there), snapshots, LIMIT_S)
        assert taken.num_taken == taken.num_offered > 0 and len(tokens) < 5000
        assert await ask(here, turn(1, 4)) == length(3), "the turn of the row that was moved is there"

    run_engines(test, tmp_path)


def test_the_hottest_conversation_comes_first_and_nothing_comes_after_the_deadline(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 1)  # has never come back
        await converse(there, 2, 4)
        snapshots = await offered(there)
        assert [one.num_tokens for one in snapshots if not one.is_shared] == [length(4), length(1)]
        late = await here.take_over.take(address_of(there), snapshots, 0.0)
        assert (late.num_taken, late.refused) == (0, {"deadline": len(snapshots)})
        assert await ask(here, turn(2, 5)) == 0
        assert (await fetch_of(here)).not_taken_over == {"deadline": len(snapshots)}

    run_engines(test, tmp_path)


def test_a_transfer_that_the_deadline_ends_leaves_the_files_that_have_arrived(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 3)
        snapshot = longest(await offered(there))
        size = (await there.cache_status()).disk["num_bytes"]  # type: ignore[index]

        def stall(data: bytes, num_before: int) -> bytes:
            if num_before + len(data) > 0.7 * size:
                time.sleep(LIMIT_S)
            return data

        relay = Relay(address_of(there), stall)
        taken = await here.take_over.take(relay.address, [snapshot], 1.0)
        assert (taken.num_taken, taken.refused) == (0, {"deadline": 1}) and taken.num_files > 0
        num_cached = await ask(here, turn(1, 4))
        assert 0 < num_cached < length(3)

    run_engines(test, tmp_path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize(("damage", "reason"), [(cut_at, "cut"), (flip_at, "")])
def test_a_damaged_or_incomplete_transfer_is_a_miss_and_never_a_wrong_token(tmp_path, damage, reason, share):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 3)
        snapshot = longest(await offered(there))
        size = (await there.cache_status()).disk["num_bytes"]  # type: ignore[index]
        relay = Relay(address_of(there), damage(int(share * size)))
        taken = await here.take_over.take(relay.address, [snapshot], LIMIT_S)
        assert taken.num_taken == 0 and sum(taken.refused.values()) == 1 and reason in str(taken.refused)
        assert await ask(here, turn(1, 4)) < length(3)
        assert not quote_of(here, 2, 1).is_resident

    run_engines(test, tmp_path)


def test_an_engine_without_the_token_gets_nothing_and_does_not_ask_again(tmp_path):
    async def main() -> None:
        stranger = Sharing(SHARING.host, b"another secret")
        async with (
            asyncio.timeout(LIMIT_S),
            engine(tmp_path / "there") as there,
            engine(tmp_path / "here", sharing=stranger) as here,
        ):
            for conversation in (1, 2, 3):
                await converse(there, conversation, 1)
            taken = await here.take_over.take(address_of(there), await offered(there), LIMIT_S)
            assert (taken.num_taken, taken.refused) == (0, {"token": taken.num_offered}) and taken.num_offered >= 3
            assert (await fetch_of(there)).num_refused == 1

    asyncio.run(main())


async def stay(one: AsyncEngine, conversation: int, num_times: int) -> int:
    """Ask for the same turn again and again; return the bytes of the files."""
    for time_ in range(num_times):
        await ask(one, replace(turn(conversation, 3), request_id=f"{conversation}, {time_}"))
    await evict(one)
    disk = (await one.cache_status()).disk
    assert disk is not None
    return disk["num_bytes"]


@pytest.mark.parametrize("is_hot_here", [False, True])
def test_a_full_disk_takes_over_only_what_is_worth_more_than_what_goes(tmp_path, is_hot_here: bool):
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), engine(tmp_path / "there") as there:
            size = await stay(there, 1, 1 if is_hot_here else 8)
            async with engine(tmp_path / "here", max_gb=1.3 * size / 2**30) as here:
                assert await stay(here, 2, 8 if is_hot_here else 1) == pytest.approx(size, rel=0.05)
                taken = await here.take_over.take(address_of(there), await offered(there), LIMIT_S)
                assert taken.refused == ({"room": 1} if is_hot_here else {})
                hot, cold = (2, 1) if is_hot_here else (1, 2)
                assert await ask(here, turn(hot, 4)) == length(3)
                assert await ask(here, turn(cold, 4)) < length(3)

    asyncio.run(main())


def test_an_engine_that_is_drained_itself_takes_nothing_over(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 2)
        snapshots = await offered(there)
        await here.move_all()
        taken = await here.take_over.take(address_of(there), snapshots, LIMIT_S)
        assert (taken.num_taken, taken.refused) == (0, {"draining": 1})
        here.take_requests()
        assert (await here.take_over.take(address_of(there), snapshots, LIMIT_S)).num_taken == 1

    run_engines(test, tmp_path)


def test_engines_that_share_nothing_offer_and_take_nothing(tmp_path):
    async def main() -> None:
        async with (
            asyncio.timeout(LIMIT_S),
            engine(tmp_path / "there") as there,
            engine(tmp_path / "alone", sharing=None) as alone,
        ):
            await converse(there, 1, 2)
            await converse(alone, 1, 2)
            assert await alone.take_over.offered(100) == ()
            with pytest.raises(EngineFailed, match="shares no snapshots"):
                await alone.take_over.take(address_of(there), await offered(there), LIMIT_S)

    asyncio.run(main())


async def warmed(one: AsyncEngine) -> dict[str, int]:
    assert one.take_over._warming is not None
    await one.take_over._warming
    return (await fetch_of(one)).taken_over


def test_an_engine_that_has_joined_warms_itself_by_what_prompts_share(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        for conversation in (1, 2):
            await converse(there, conversation, 2)
        shared = await there.take_over.offered(MAX_WARM, shared_only=True)
        assert [one.num_tokens for one in shared] == [length(0)]
        here.take_over.warm_up([(address_of(there), shared)])
        assert await warmed(here) == {"warm_up": 1}
        assert quote_of(here, 3, 1).cached_tokens == quote_of(there, 3, 1).cached_tokens == length(0)
        assert await ask(here, turn(3, 1)) == length(0)

    run_engines(test, tmp_path)


def test_a_warm_up_waits_until_the_engine_is_idle(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 2)
        shared = await there.take_over.offered(MAX_WARM, shared_only=True)
        long = request("long", [500 + token for token in SYSTEM], [7] * 20)
        stream = here.generate(replace(long, sampling=replace(long.sampling, max_tokens=90_000)))
        await anext(stream)
        here.take_over.warm_up([(address_of(there), shared)])
        await asyncio.sleep(0.5)
        assert (await fetch_of(here)).taken_over == {}
        await stream.aclose()  # type: ignore[attr-defined]
        assert await warmed(here) == {"warm_up": 1}

    run_engines(test, tmp_path)


def test_a_warm_up_makes_way_for_a_node_that_leaves(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 2)
        shared = await there.take_over.offered(MAX_WARM, shared_only=True)
        is_stalled = True

        def stall(data: bytes, num_before: int) -> bytes:
            while is_stalled and num_before > 75:
                time.sleep(0.01)
            return data

        relay = Relay(address_of(there), stall)
        here.take_over.warm_up([(relay.address, shared)])
        while not here.take_over._turn.locked():
            await asyncio.sleep(0.01)
        taken = await here.take_over.take(address_of(there), await offered(there), LIMIT_S / 2)
        assert (taken.num_taken, taken.refused) == (1, {})
        is_stalled = False
        await warmed(here)
        assert (await fetch_of(here)).not_taken_over == {"stopped": 1}

    run_engines(test, tmp_path)


def test_a_warm_up_takes_few_prefixes_and_a_share_of_the_disk(tmp_path):
    def sized(number: int, num_bytes: int) -> MovableSnapshot:
        return MovableSnapshot(f"{number:032x}", 40, num_bytes, 1.0, 0.0, True, False, number)

    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        many = [sized(number, 1) for number in range(20)]
        assert len(here.take_over._bounded([("a", many[:5]), ("b", many[5:])])) == MAX_WARM
        large = [sized(number, 100 << 20) for number in range(4)]
        assert len(here.take_over._bounded([("a", large)])) == 2, "a quarter of a GiB"

    run_engines(test, tmp_path)


def test_an_engine_that_stops_ends_its_warm_up(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 2)
        stream: Any = here.generate(turn(7, 1))
        await anext(stream)
        here.take_over.warm_up([(address_of(there), await there.take_over.offered(1, shared_only=True))])
        await here.shutdown()
        assert here.take_over._warming is not None and here.take_over._warming.cancelled()

    run_engines(test, tmp_path)


async def copied(there: AsyncEngine, here: AsyncEngine, conversation: int) -> TakenOver | None:
    snapshot = await there.take_over.of_conversation(conversation)
    return None if snapshot is None else await here.take_over.copy(address_of(there), snapshot, LIMIT_S)


def test_a_copy_of_a_conversation_outlives_its_engine(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        for num_turns in (1, 2, 3):
            await ask(there, turn(1, num_turns))
            taken = await copied(there, here, 1)
            assert taken is not None and (taken.num_taken, taken.refused) == (1, {})
        quote = quote_of(here, 1, 4)
        assert (quote.cached_tokens, quote.is_resident) == (length(3), False), "it goes on living there"
        await there.shutdown()  # nothing else is asked for
        assert await ask(here, turn(1, 4)) == length(3)
        fetch = await fetch_of(here)
        assert (fetch.taken_over, fetch.num_fetched, fetch.failures) == ({"replica": 4}, 4, {})

    run_engines(test, tmp_path)


def test_only_what_a_turn_has_added_is_copied(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 2)
        first = await copied(there, here, 1)
        await ask(there, turn(1, 3))
        second = await copied(there, here, 1)
        assert first is not None and second is not None
        assert (first.num_files, second.num_files) == (3, 1)

    run_engines(test, tmp_path)


def test_a_conversation_that_does_not_live_here_is_not_copied(tmp_path):
    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        assert await copied(there, here, 1) is None
        await converse(there, 1, 1)
        await there.clear_cache()
        assert await copied(there, here, 1) is None

    run_engines(test, tmp_path)


def test_a_copy_waits_until_nothing_else_is_transferred(tmp_path, monkeypatch):
    monkeypatch.setattr(take_over, "IDLE_WAIT_S", 0.2)

    async def test(there: AsyncEngine, here: AsyncEngine) -> None:
        await converse(there, 1, 1)
        snapshot = await there.take_over.of_conversation(1)
        assert snapshot is not None
        with socket.create_connection(parts_of(address_of(here))):
            await connected(here)
            late = await here.take_over.copy(address_of(there), snapshot, 0.5)
            assert (late.num_taken, late.refused) == (0, {"deadline": 1})
        with socket.create_connection(parts_of(address_of(there))):
            await connected(there)
            assert await there.take_over.of_conversation(1) is None
        assert (await here.take_over.copy(address_of(there), snapshot, LIMIT_S)).num_taken == 1

    run_engines(test, tmp_path)


async def connected(one: AsyncEngine) -> None:
    while not (await fetch_of(one)).num_connections:
        await asyncio.sleep(0.01)


def parts_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
