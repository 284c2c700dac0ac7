"""Device memory: its limits and its use."""

import mlx.core as mx

from engine.config import EngineConfig
from engine.host_memory import CPU_SHARE, on_small_mac, total_bytes

MAC_OTHERS_BYTES = 8 * 2**30
"""Memory of a Mac for everything but the engine: macOS 4 to 6 GiB, Ray and Serve 1.5 GiB."""

MLX_CACHE_MB, SMALL_MLX_CACHE_MB = 2048, 512
"""Default of mlx_cache_mb, and that of a small Mac."""


def set_limits(config: EngineConfig) -> None:
    """Limit the buffers that MLX keeps for reuse. No wired limit is set: on macOS it can cause kernel panics."""
    default_mb = SMALL_MLX_CACHE_MB if on_small_mac() else MLX_CACHE_MB
    mx.set_cache_limit((default_mb if config.mlx_cache_mb is None else config.mlx_cache_mb) * 2**20)


def usage() -> dict[str, int]:
    """Return MLX's memory in bytes: active, peak and cached."""
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "mlx_cache_bytes": mx.get_cache_memory(),
    }


def default_limit_bytes() -> int:
    """Return the bytes that the engine may use where no limit is configured.

    A Mac's GPU has no memory of its own: macOS, Ray and Serve get at least MAC_OTHERS_BYTES, or half of a small one.
    """
    if mx.default_device().type != mx.DeviceType.gpu:
        return int(CPU_SHARE * device_bytes())
    if not mx.metal.is_available():
        return device_bytes()
    total = total_bytes()
    return min(device_bytes(), max(total // 2, total - MAC_OTHERS_BYTES))


def device_bytes() -> int:
    """Return the memory of the GPU (on Metal the recommended working set), or of the machine or container."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(size := info.get(name), int) and size > 0:
                return size
    return total_bytes()
