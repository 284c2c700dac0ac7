"""Device memory: what the limits are set to, and what is in use for what."""

import mlx.core as mx

from engine.config import EngineConfig
from engine.host_memory import total_bytes


def set_limits(config: EngineConfig) -> None:
    """Bounds the buffers that MLX keeps for reuse. No wired limit: on macOS it is a way to kernel panics."""
    mx.set_cache_limit(config.mlx_cache_mb * 2**20)


def usage() -> dict[str, int]:
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "mlx_cache_bytes": mx.get_cache_memory(),
    }


CPU_SHARE = 0.8
"""Of a machine's memory: on a CPU other processes live in it as well."""


def default_limit_bytes() -> int:
    """What the engine may use where the configuration does not say."""
    share = 1.0 if mx.default_device().type == mx.DeviceType.gpu else CPU_SHARE
    return int(share * device_bytes())


def device_bytes() -> int:
    """What the device can hold: a GPU's memory (on Metal what it may use of it), or the machine's, or container's."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(size := info.get(name), int) and size > 0:
                return size
    return total_bytes()
