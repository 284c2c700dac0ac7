"""The order in which prompts of several clients get a planning thread."""

import asyncio
import threading

import pytest

from deployments.planners import planning_threads
from deployments.planners.planning_threads import LARGE_BYTES, PlanningThreads

SOON_S = 10.0


class Work:
    """Runs until it is allowed to end, and tells in what order work began."""

    def __init__(self, began: list[str], name: str = ""):
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.was_wanted: bool | None = None
        self._began = began
        self._name = name

    def __call__(self, is_wanted) -> str:
        self._began.append(self._name)
        self.has_begun.set()
        assert self.may_end.wait(SOON_S)
        self.was_wanted = is_wanted()
        return self._name


class House:
    def __init__(self, num_threads: int = 2):
        self.threads = PlanningThreads(num_threads)
        self.began: list[str] = []
        self.works: dict[str, Work] = {}

    def submit(self, name: str, num_bytes: int = 10, client: str = "") -> asyncio.Task[str]:
        self.works[name] = Work(self.began, name)
        return asyncio.create_task(self.threads.run(client, num_bytes, self.works[name]))

    async def until_begun(self, name: str) -> None:
        assert await asyncio.to_thread(self.works[name].has_begun.wait, SOON_S), name

    def end(self, *names: str) -> None:
        for name in names:
            self.works[name].may_end.set()

    def end_all(self) -> None:
        self.end(*self.works)


def run(story) -> None:
    async def told() -> None:
        house = House()
        try:
            async with asyncio.timeout(3 * SOON_S):
                await story(house)
        finally:
            house.end_all()

    asyncio.run(told())


def test_large_conversations_leave_a_thread_to_small_conversations():
    async def story(house: House):
        large = [house.submit(f"large {i}", LARGE_BYTES) for i in range(3)]
        await house.until_begun("large 0")
        small = [house.submit(f"small {i}") for i in range(3)]
        for i in range(3):
            await house.until_begun(f"small {i}")
            house.end(f"small {i}")
            assert await small[i] == f"small {i}"
        assert house.began == ["large 0", "small 0", "small 1", "small 2"]
        house.end_all()
        assert await asyncio.gather(*large) == ["large 0", "large 1", "large 2"]

    run(story)


def test_large_conversations_together_stay_below_a_limit_of_bytes(monkeypatch):
    monkeypatch.setattr(planning_threads, "MAX_LARGE_BYTES", 2 * LARGE_BYTES)

    async def story(house: House):
        house.threads = PlanningThreads(4)
        sizes = {"a": 1, "b": 1, "beyond": 3, "c": 1}
        tasks = [house.submit(name, num * LARGE_BYTES, client=name) for name, num in sizes.items()]
        await house.until_begun("a")
        await house.until_begun("b")
        await asyncio.sleep(0.05)
        assert sorted(house.began) == ["a", "b"]
        house.end("a", "b", "c")
        await house.until_begun("beyond")  # one that is larger than the limit is planned alone
        house.end_all()
        assert await asyncio.gather(*tasks) == list(sizes)

    run(story)


def test_clients_with_little_planned_work_are_served_before_clients_with_much():
    async def story(house: House):
        first = [house.submit(f"running {i}", client="x") for i in range(2)]
        await house.until_begun("running 0")
        await house.until_begun("running 1")
        greedy = [house.submit(f"greedy {i}", 100_000, client="greedy") for i in range(4)]
        modest = [house.submit("modest", 100_000, client="modest")]
        await asyncio.sleep(0)
        house.end("running 1", *(name for name in house.works if name.startswith(("greedy", "modest"))))
        await asyncio.gather(*greedy, *modest)
        assert house.began.index("modest") < house.began.index("greedy 1")
        assert [name for name in house.began if name.startswith("greedy")] == [f"greedy {i}" for i in range(4)]
        house.end_all()
        await asyncio.gather(*first)

    run(story)


def test_waiting_work_of_a_cancelled_caller_is_not_begun():
    async def story(house: House):
        running = [house.submit(f"running {i}") for i in range(2)]
        await house.until_begun("running 0")
        await house.until_begun("running 1")
        waiting, other = house.submit("left"), house.submit("other")
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        house.end_all()
        assert await other == "other"
        await asyncio.gather(*running)
        assert "left" not in house.began

    run(story)


def test_running_work_can_see_that_its_caller_was_cancelled():
    async def story(house: House):
        task = house.submit("left")
        await house.until_begun("left")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        house.end_all()
        following = house.submit("next")
        house.end("next")
        assert await following == "next"
        while house.works["left"].was_wanted is None:
            await asyncio.sleep(0.001)
        assert house.works["left"].was_wanted is False
        assert house.works["next"].was_wanted is True

    run(story)


def test_an_error_reaches_its_caller_and_frees_the_thread():
    async def story(house: House):
        def failing(is_wanted):
            raise ValueError("no")

        for _ in range(5):
            with pytest.raises(ValueError, match="no"):
                await house.threads.run("", LARGE_BYTES, failing)
        task = house.submit("next", LARGE_BYTES)
        house.end("next")
        assert await task == "next"

    run(story)
