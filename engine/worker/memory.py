"""Device memory: what the limits are set to, and what is in use for what."""

import mlx.core as mx

from engine.config import EngineConfig


def set_limits(config: EngineConfig) -> None:
    """Bounds the buffers that MLX keeps for reuse. No wired limit: on macOS it is a way to kernel panics."""
    mx.set_cache_limit(config.mlx_cache_mb * 2**20)


def usage() -> dict[str, int]:
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "mlx_cache_bytes": mx.get_cache_memory(),
    }
