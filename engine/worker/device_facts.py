"""Facts about the device for reports: its name, its limits, the memory that MLX holds, and how products are rounded."""

import mlx.core as mx
import numpy as np

from engine.worker import devices, memory

INNER = 512
"""Length of the sums of which `product_error` computes."""


def device_facts() -> dict[str, str]:
    """Return the device's name and limits in words, by what they are; None has become 'not on this device'."""
    info = mx.device_info()
    sizes = {
        "memory of the device": memory.device_bytes(),
        "memory limit of the engine": memory.default_limit_bytes(),
        "memory limit of MLX": mx.get_memory_limit(),
        "recommended working set": info.get("max_recommended_working_set_size"),
        "largest buffer": info.get("max_buffer_length"),
    }
    return {
        "device": f"{mx.default_device()}, {devices.device_kind()}",
        "chip": f"{info.get('device_name', 'unknown')}, {info.get('architecture', 'unknown')}",
        **{name: _gib(size) if isinstance(size, int) else "not on this device" for name, size in sizes.items()},
    }


def held_bytes() -> int:
    """Return the bytes of all arrays, without buffers that MLX keeps for reuse."""
    return mx.get_active_memory()


def begin_peak() -> None:
    """Begin a new measurement of `peak_bytes`, without buffers kept for reuse."""
    mx.clear_cache()
    mx.reset_peak_memory()


def peak_bytes() -> int:
    """Return the most bytes held since `begin_peak`."""
    return mx.get_peak_memory()


def product_error() -> float:
    """Return the relative error (root mean square) of a product of float32 matrices.

    About 1e-7 where products are computed in float32, and 1e-4 or more where the device shortens their inputs (TF32).
    """
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((INNER, INNER)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.array(mx.array(a) @ mx.array(b)).astype(np.float64) - exact
    return float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
