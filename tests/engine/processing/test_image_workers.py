"""Image workers: decoding, and their end at a limit while others go on."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing import image_workers
from engine.processing.byte_budget import ByteBudget
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.image_worker import WorkerSettings
from engine.processing.image_workers import ImageWorkers
from engine.processing.images import ImagePreprocessor
from engine.processing.worker_process import environment
from tests.support.image_files import PNG, QWEN3_VL, UNCHANGED, encoded, picture, scan_bomb

SETTINGS = WorkerSettings.of(MediaConfig(), UNCHANGED)
BUDGET = 10**9


def run(
    test: Callable[[ImageWorkers], Awaitable[Any]], budget: int = BUDGET, num_workers: int = 2, **settings: Any
) -> None:
    async def go() -> None:
        workers = ImageWorkers(replace(SETTINGS, **settings), ByteBudget(budget), num_workers)
        try:
            async with asyncio.timeout(120):
                await test(workers)
        finally:
            workers.close()

    asyncio.run(go())


async def refusal(workers: ImageWorkers, content: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await workers.cut(lambda: content)
    return caught.value.message


@pytest.fixture(scope="module")
def slow() -> bytes:
    """A JPEG under all limits that are counted, which takes more than a second to decode."""
    return scan_bomb(64, 6000)


@pytest.fixture(scope="module")
def large() -> bytes:
    return encoded(Image.new("RGB", (6000, 6000)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_cut_as_in_this_process(kind: str):
    preprocessor, content = ImagePreprocessor(DEMO_MODEL), encoded(picture(700, 500), kind)

    async def test(workers: ImageWorkers) -> None:
        cut, expected = await workers.cut(lambda: content), preprocessor.read(content, 10**6)
        assert cut.layout.grid_thw == expected.grid_thw and cut.content_hash == expected.content_hash
        assert np.array_equal(cut.patches, expected.patches)
        again = await workers.cut(lambda: content)
        assert again.content_hash == cut.content_hash

    run(test, grid=preprocessor.grid)


def test_a_broken_image_is_refused_and_its_worker_continues():
    async def test(workers: ImageWorkers) -> None:
        assert "could not be decoded" in await refusal(workers, PNG[:60])
        pids = workers.pids
        await workers.cut(lambda: PNG)
        assert workers.pids == pids and workers.counts.num_replaced == 0
        assert (workers.counts.num_images, workers.counts.num_refused) == (1, 1)

    run(test)


def test_an_image_that_takes_too_much_cpu_is_refused_and_the_next_one_is_decoded(slow: bytes):
    async def test(workers: ImageWorkers) -> None:
        refused, other = await asyncio.gather(refusal(workers, slow), workers.cut(lambda: PNG))
        assert refused == "decoding the image takes more than 0.05 s of CPU time, which is the limit"
        assert other.layout.grid_thw == (1, 6, 8)
        assert (await workers.cut(lambda: PNG)).content_hash == other.content_hash
        assert workers.counts.num_replaced == 1

    run(test, cpu_s=0.05)


def test_the_limit_of_cpu_time_is_that_of_one_image():
    part = scan_bomb(8, 6000)  # on a busy machine an image takes several times as much

    async def test(workers: ImageWorkers) -> None:
        await workers.cut(lambda: PNG)
        (pid,) = workers.pids
        while sum(psutil.Process(pid).cpu_times()[:2]) < 3:
            await workers.cut(lambda: part)
        assert workers.pids == [pid], "one worker has used more than the limit with several images"

    run(test, cpu_s=3, grid=QWEN3_VL.limited(64), num_workers=1)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS")
def test_an_image_that_takes_too_much_memory_is_refused_by_the_system(large: bytes):
    async def test(workers: ImageWorkers) -> None:
        message = "decoding the image takes more than 64 MiB of memory, which is the limit"
        assert await refusal(workers, large) == message
        assert (await workers.cut(lambda: PNG)).layout.grid_thw == (1, 6, 8)

    run(test, memory_bytes=64 * 2**20)


def test_an_image_that_takes_too_much_memory_is_refused_where_the_system_has_no_limit(slow: bytes):
    async def test(workers: ImageWorkers) -> None:
        message = "decoding the image takes more than 16 MiB of memory, which is the limit"
        assert await refusal(workers, slow) == message
        assert (await workers.cut(lambda: PNG)).layout.grid_thw == (1, 6, 8)
        assert workers.counts.num_replaced == 1

    run(test, memory_bytes=16 * 2**20, limits_address_space=False)


def test_a_worker_that_gets_no_cpu_is_killed_at_the_time_limit(slow: bytes):
    async def test(workers: ImageWorkers) -> None:
        await workers.cut(lambda: PNG)
        (pid,) = workers.pids
        os.kill(pid, signal.SIGSTOP)
        assert await refusal(workers, slow) == "decoding the image took longer than 3 s, which is the limit"
        assert (await workers.cut(lambda: PNG)).layout.grid_thw == (1, 6, 8)
        assert not psutil.pid_exists(pid)

    run(test, wall_s=3)


def test_the_worker_of_a_cancelled_request_is_stopped(slow: bytes):
    async def test(workers: ImageWorkers) -> None:
        await workers.cut(lambda: PNG)
        (pid,) = workers.pids
        task = asyncio.create_task(workers.cut(lambda: slow))
        idle = psutil.Process(pid).cpu_times().user
        while psutil.Process(pid).cpu_times().user < idle + 0.1:  # it decodes
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.01)
        assert (await workers.cut(lambda: PNG)).layout.grid_thw == (1, 6, 8)

    run(test)


def test_a_crashing_decoder_fails_only_its_own_image(slow: bytes):
    async def test(workers: ImageWorkers) -> None:
        await workers.cut(lambda: PNG)
        (pid,) = workers.pids
        task = asyncio.create_task(refusal(workers, slow))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGSEGV)
        assert "could not be decoded" in await task
        assert (await workers.cut(lambda: PNG)).layout.grid_thw == (1, 6, 8)

    run(test)


def test_images_beyond_the_budget_of_pixels_wait():
    content = encoded(picture(100, 100))

    async def test(workers: ImageWorkers) -> None:
        cut = await asyncio.gather(*(workers.cut(lambda: content) for _ in range(12)))
        assert len({one.content_hash for one in cut}) == 1
        assert 40_000 <= workers._budget.peak_bytes <= 60_000 and workers._budget.held_bytes == 0

    run(test, budget=60_000)


def test_a_worker_is_replaced_after_many_images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_workers, "MAX_IMAGES_PER_WORKER", 3)

    async def test(workers: ImageWorkers) -> None:
        pids = set[int]()
        for _ in range(7):
            await workers.cut(lambda: PNG)
            pids |= set(workers.pids)
        assert len(pids) == 3 and len(workers.pids) == 1

    run(test)


def test_the_workers_end_with_their_pool():
    pids: list[int] = []

    async def test(workers: ImageWorkers) -> None:
        await asyncio.gather(*(workers.cut(lambda: PNG) for _ in range(6)))
        pids.extend(workers.pids)

    run(test)
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_ends_when_its_planner_dies():
    code = (
        "import asyncio, os\n"
        "from tests.engine.processing.test_image_workers import *\n"
        "async def go():\n"
        "    workers = ImageWorkers(SETTINGS, ByteBudget(BUDGET))\n"
        "    await workers.cut(lambda: PNG)\n"
        "    print(workers.pids[0], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(go())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_imports_no_heavy_modules_and_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import sys, engine.processing.image_worker; print(sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.stderr == "" and "'PIL'" in done.stdout
    for name in ("pydantic", "ray", "transformers", "httpx", "mlx", "asyncio"):
        assert f"'{name}'" not in done.stdout
    assert "secret" not in environment().values()


def test_settings_survive_the_command_line():
    assert WorkerSettings.from_json(SETTINGS.to_json()) == SETTINGS
