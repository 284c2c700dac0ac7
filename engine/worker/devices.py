"""The devices that MLX has, and the one that computes."""

import mlx.core as mx


def has_gpu() -> bool:
    """Return whether MLX has a GPU."""
    return mx.metal.is_available() or mx.cuda.is_available()


def on_gpu() -> bool:
    """Return whether MLX's default device is a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def device_kind() -> str:
    """Return which kernels compute: cpu, metal or cuda."""
    if not on_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
