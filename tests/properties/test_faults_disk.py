"""The disk tier fails, hangs, or somebody leaves while it reads: every prompt is answered as without it."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.engine_core import EngineCore
from engine.protocol import FinishReason
from engine.snapshot_store.directory import SnapshotDirectory
from tests.support.fake_runner import until
from tests.support.faults import Failing, Faults, Hanging, Meanwhile
from tests.support.faulty_engine import PLAIN, RUNS, TINY, WAITS, Bench, Scene

SEED = replace(PLAIN, request_id="before")


@pytest.fixture(scope="module")
def bench(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    disk = {"path": str(tmp_path_factory.mktemp("disk")), "max_gb": 1}
    with Bench(tiny_model(**TINY), prefix_cache={"disk": disk}) as bench:
        yield bench


@pytest.fixture
def faults(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Those of the bench. Seams of the thread that writes and reads: `read`, `write`."""
    monkeypatch.setattr("engine.core.prefix_cache.disk_tier.READ_TIMEOUT_S", 0.3)
    for method in ("read", "write"):
        monkeypatch.setattr(SnapshotDirectory, method, bench.faults.around(getattr(SnapshotDirectory, method), method))
    return bench.faults


async def evict(bench: Bench) -> None:
    """All that is in memory, once it is written."""

    def go(core: EngineCore) -> int:
        assert core.prefixes._disk is not None
        core.prefixes._disk._files.flush()
        entries = [entry for entry in core.prefixes.store.nodes() if entry.snapshot is not None]
        for entry in entries:
            core.prefixes.store.evict(entry)
        return len(entries)

    assert await bench.engine._thread.call(go) > 0


@asynccontextmanager
async def fails(faults: Faults, seam: str, phase: Any, error: Exception | None = None) -> AsyncIterator[None]:
    """Once, at the latest soon after: the disk's thread has a pace of its own."""
    fault = faults.arm(seam, Failing(error), phase=phase)
    yield
    await until(lambda: fault.num_fired == 1)


async def assert_all_are_answered(bench: Bench, scene: Scene) -> None:
    for reader, request in ((scene.runs, RUNS), (scene.victim, PLAIN), (scene.waits, WAITS)):
        assert await bench.is_undisturbed(reader, request), f"{reader.name}: {reader.errors}"


ERRORS = [OSError(5, "Input/output error"), ValueError("not of this model"), MemoryError(), RuntimeError("[malloc]")]


@pytest.mark.parametrize(
    ("seam", "phase", "error"),
    [
        *(("read", "before", error) for error in ERRORS),
        ("read", "after", ERRORS[0]),
        *(("import_snapshot", "before", error) for error in ERRORS[1:3]),
    ],
)
def test_a_snapshot_that_cannot_be_read_back_costs_no_answer(
    bench: Bench, faults: Faults, seam: str, phase: str, error: Exception
):
    async def test() -> None:
        async with bench.scene(PLAIN, before=[SEED], prepare=evict) as scene, fails(faults, seam, phase, error):
            await scene.go()
        await assert_all_are_answered(bench, scene)
        await bench.check(PLAIN, 3)

    bench.run(test)


@pytest.mark.parametrize(("seam", "phase"), [("write", "before"), ("write", "after"), ("export_snapshot", "before")])
def test_a_snapshot_that_cannot_be_written_costs_no_answer(bench: Bench, faults: Faults, seam: str, phase: str):
    async def test() -> None:
        full = OSError(28, "No space left on device")
        async with bench.scene(PLAIN) as scene, fails(faults, seam, phase, full):
            await scene.go()
        await assert_all_are_answered(bench, scene)
        await bench.check(PLAIN, 3)

    bench.run(test)


def test_a_prompt_does_not_wait_for_a_hanging_disk_read(bench: Bench, faults: Faults):
    async def test() -> None:
        with Hanging() as hang:
            async with bench.scene(PLAIN, before=[SEED], prepare=evict) as scene:
                faults.arm("read", hang)
                await scene.go()
                assert hang.began.is_set()
            await assert_all_are_answered(bench, scene)
            assert scene.victim.num_cached == 0
        await bench.check(PLAIN, 3)

    bench.run(test)


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_aborted_while_its_prefix_is_read_ends_at_once(bench: Bench, faults: Faults, how: str):
    async def test() -> None:
        with Hanging() as hang:
            async with bench.scene(PLAIN, before=[SEED], prepare=evict) as scene:
                faults.arm("read", hang)

                async def leave() -> None:
                    if how == "abort":
                        assert bench.engine.abort("victim")
                    else:
                        await scene.victim.cancel()

                left = faults.arm("decode", Meanwhile(leave), behind=faults.arm("read", lambda: None))
                await scene.go()
            assert left.num_fired == 1 and scene.victim.tokens == [()]
            assert scene.victim.reasons == [FinishReason.ABORT if how == "abort" else None]
            assert await bench.is_undisturbed(scene.runs, RUNS) and await bench.is_undisturbed(scene.waits, WAITS)
        await bench.check(PLAIN, 3, 1)

    bench.run(test)


def test_a_hanging_disk_write_delays_no_answer_and_no_shutdown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("engine.core.engine_core.DISK_CLOSE_S", 0.2)
    other = bench.another(prefix_cache={"disk": {"path": str(tmp_path), "max_gb": 1}})
    monkeypatch.setattr(SnapshotDirectory, "write", other.faults.around(SnapshotDirectory.write, "write"))

    async def test() -> None:
        other.faults.arm("write", hang)
        async with other.scene(PLAIN) as scene:
            await scene.go()
        await assert_all_are_answered(other, scene)
        await until(hang.began.is_set)
        await other.engine.shutdown()
        assert other.engine.status().state == "stopped"

    with other, Hanging() as hang:
        other.run(test)
