"""Device memory: its limits and its use."""

import mlx.core as mx

from engine.config import EngineConfig
from engine.host_memory import total_bytes


def set_limits(config: EngineConfig) -> None:
    """Limit the buffers that MLX keeps for reuse. No wired limit is set: on macOS it can cause kernel panics."""
    mx.set_cache_limit(config.mlx_cache_mb * 2**20)


def usage() -> dict[str, int]:
    """Return MLX's memory in bytes: active, peak and cached."""
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "mlx_cache_bytes": mx.get_cache_memory(),
    }


CPU_SHARE = 0.8
"""Share of a machine's memory on a CPU, where other processes need memory as well."""


def default_limit_bytes() -> int:
    """Return the bytes that the engine may use where no limit is configured."""
    share = 1.0 if mx.default_device().type == mx.DeviceType.gpu else CPU_SHARE
    return int(share * device_bytes())


def device_bytes() -> int:
    """Return the memory of the GPU (on Metal the recommended working set), or of the machine or container."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(size := info.get(name), int) and size > 0:
                return size
    return total_bytes()
