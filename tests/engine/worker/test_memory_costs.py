"""Costs of images from probes whose memory is known."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.worker import devices
from engine.worker.memory_costs import GPU_PAGE_BYTES, MARGIN, _exact, _of_images, buffer_slack
from engine.worker.snapshot import DeviceSegment, StateSnapshot

KB = 1024
PAGE_SIZES = (5000, 20_000, 100_000, 1_000_000)
GRIDS = [(1, 4, 4), (1, 8, 8), (1, 16, 16)]


class Probes:
    """A vision tower that needs `num_bytes(patches)` for an image and keeps 1 KB between its pieces."""

    probe_grids = GRIDS

    def __init__(self, num_bytes: Callable[[int], int], freed: list[mx.array] | None = None):
        self._num_bytes, self._freed = num_bytes, freed

    def probe(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        num_patches = grid[0] * grid[1] * grid[2]
        work = mx.zeros((self._num_bytes(num_patches),), mx.uint8)
        mx.eval(work)
        mx.synchronize()
        if grid == GRIDS[1] and self._freed is not None:
            self._freed.clear()
        return num_patches, num_patches // 4, KB

    def probe_pieces(self, grid: tuple[int, int, int]) -> int:
        return KB


def cost(vision: Any, num_patches: int) -> float:
    costs = _of_images(vision)
    each = costs["image_bytes"] + num_patches * costs["patch_bytes"] + num_patches**2 * costs["patch_pair_bytes"]
    return each / MARGIN


@pytest.mark.parametrize("num_patches", [16, 64, 256, 1024])
def test_a_quadratic_cost_is_found_and_continued(num_patches: int):
    def num_bytes(n: int) -> int:
        return 64 * KB + 16 * KB * n + 128 * n * n

    assert cost(Probes(num_bytes), num_patches) == pytest.approx(num_bytes(num_patches), rel=0.02)


def test_memory_freed_between_two_probes_changes_no_cost():
    def num_bytes(n: int) -> int:
        return 16 * KB * n

    ballast = [mx.zeros((64 * KB * KB,), mx.uint8)]
    mx.eval(ballast)
    assert cost(Probes(num_bytes, ballast), 1024) == pytest.approx(num_bytes(1024), rel=0.02)
    assert not ballast


@pytest.mark.parametrize("peaks", [(9, 9, 9), (9, 5, 3), (3, 9, 3), (3, 9, 8)])
def test_peaks_that_do_not_grow_are_covered_and_larger_images_still_cost_more(peaks: tuple[int, ...]):
    by_size = {h * w: peak * 1024 * KB for (_, h, w), peak in zip(GRIDS, peaks, strict=True)}
    vision = Probes(by_size.__getitem__)
    assert all(cost(vision, n) >= 0.99 * num_bytes for n, num_bytes in by_size.items())
    assert cost(vision, 2048) - cost(vision, 256) >= 0.99 * (2048 - 256) * KB / 16


def test_snapshots_may_have_half_of_the_arrays_that_metal_allows(monkeypatch):
    keys = mx.zeros((1, 2, 8, 4))
    segment = DeviceSegment(None, [(keys, keys)] * 24, (8,) * 24)
    snapshot = StateSnapshot(8, segment, ((keys, keys),), None, (0,), (1,) * 24, (0,) * 24, (0,))
    assert _exact(snapshot, 1, 0, 0, 0).max_snapshots > 2**25
    monkeypatch.setattr(mx, "device_info", lambda: {"resource_limit": 499000})
    assert _exact(snapshot, 1, 0, 0, 0).max_snapshots == 249500 // 51


@pytest.mark.parametrize("num_bytes", PAGE_SIZES)
def test_no_buffer_that_is_reused_exceeds_its_array_by_more_than_the_slack(num_bytes: int):
    def excess(larger: int) -> int:
        """Return by how much an array's buffer exceeds it when one that is so much larger has just been freed."""
        mx.clear_cache()
        free = mx.zeros((num_bytes + larger,), mx.uint8)
        mx.eval(free)
        mx.synchronize()
        del free
        before = mx.get_active_memory()
        array = mx.zeros((num_bytes,), mx.uint8)
        mx.eval(array)
        mx.synchronize()
        return mx.get_active_memory() - before - array.nbytes

    slack = buffer_slack()
    found = [excess(larger) for larger in (slack // 2, slack - 1, slack, slack + 1, 2 * slack)]
    assert max(found) <= slack
    assert devices.on_gpu() or num_bytes < slack or max(found) == slack - 1, "and not by much less"


def test_slack_on_a_gpu_covers_pages_that_are_rounded_up_and_reused(monkeypatch: pytest.MonkeyPatch):
    """By the sources of MLX's allocators for CUDA and Metal, which do not run on a CPU."""
    monkeypatch.setattr(devices, "on_gpu", lambda: True)
    for num_bytes in (*PAGE_SIZES, GPU_PAGE_BYTES + 1, 5 * GPU_PAGE_BYTES):
        rounded = -(-num_bytes // GPU_PAGE_BYTES) * GPU_PAGE_BYTES
        largest = min(2 * rounded, rounded + 2 * GPU_PAGE_BYTES)
        assert largest - num_bytes <= buffer_slack()
