"""Bytes that tasks wait for: never too many, first come, first served, and nothing is lost when a task is cancelled."""

import asyncio
import random

import pytest

from engine.processing.byte_budget import ByteBudget


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_bytes_are_granted_first_come_first_served_even_if_a_later_task_needs_less():
    async def go() -> list[str]:
        budget, order, leave = ByteBudget(10), [], {name: asyncio.Event() for name in "abcd"}

        async def task(name: str, num_bytes: int) -> None:
            async with budget.hold(num_bytes):
                order.append(name)
                await leave[name].wait()

        tasks = [asyncio.create_task(task(name, size)) for name, size in zip("abcd", (6, 8, 1, 9), strict=True)]
        await settle()
        assert (order, budget.held_bytes, budget.num_waiting) == (["a"], 6, 3), "c would fit, but b came first"
        leave["a"].set()
        await settle()
        assert (order, budget.held_bytes) == (["a", "b", "c"], 9)
        for event in leave.values():
            event.set()
        await asyncio.gather(*tasks)
        assert (budget.held_bytes, budget.num_waiting, budget.peak_bytes) == (0, 0, 10)
        return order

    assert asyncio.run(go()) == ["a", "b", "c", "d"]


def test_a_task_that_asks_for_more_than_the_budget_gets_the_whole_budget():
    async def go() -> None:
        budget = ByteBudget(10)
        async with budget.hold(1000) as hold:
            assert (budget.held_bytes, hold.num_bytes) == (10, 10)
            hold.shrink(500)
            hold.shrink(3)
            assert budget.held_bytes == 3
        assert budget.held_bytes == 0

    asyncio.run(go())


def test_bytes_released_early_go_to_the_next_task():
    async def go() -> None:
        budget = ByteBudget(10)
        async with budget.hold(10) as hold:
            manager = budget.hold(4)
            waiting = asyncio.create_task(manager.__aenter__())
            await settle()
            assert not waiting.done()
            hold.shrink(6)
            await settle()
            assert waiting.done() and budget.held_bytes == 10

    asyncio.run(go())


@pytest.mark.parametrize("granted_before", [False, True])
def test_a_cancelled_task_gives_its_turn_to_the_next(granted_before: bool):
    async def go() -> None:
        budget = ByteBudget(10)
        async with budget.hold(10) as hold:
            managers = budget.hold(8), budget.hold(2)
            first, second = (asyncio.create_task(manager.__aenter__()) for manager in managers)
            await settle()
            if granted_before:
                hold.shrink(0)  # grants both; the first is cancelled before it runs
            first.cancel()
            if not granted_before:
                hold.shrink(8)
            await settle()
            assert first.cancelled() and second.done()
            assert budget.held_bytes == hold.num_bytes + 2

    asyncio.run(go())


@pytest.mark.parametrize("seed", range(20))
def test_random_cancellations_never_exceed_the_budget_and_release_all_bytes(seed: int):
    async def go() -> None:
        rng, budget = random.Random(seed), ByteBudget(100)

        async def task() -> None:
            async with budget.hold(rng.randint(1, 120)) as hold:
                assert budget.held_bytes <= 100
                await asyncio.sleep(rng.random() / 500)
                hold.shrink(rng.randint(0, 120))
                await asyncio.sleep(rng.random() / 500)

        tasks = [asyncio.create_task(task()) for _ in range(60)]
        for victim in rng.sample(tasks, 30):
            await asyncio.sleep(rng.random() / 1000)
            victim.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert (budget.held_bytes, budget.num_waiting) == (0, 0) and budget.peak_bytes <= 100

    asyncio.run(go())
