"""No Metal kernels on the CPU device of a Mac.

mlx-vlm 0.7.10 builds them wherever Metal exists, and MLX refuses on the CPU: "[metal_kernel] Only supports the GPU."
Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 (`_HAS_METAL` of models/rope_utils.py and models/kernels.py) could not be
loaded there, Nemotron-Labs-Diffusion and linear layers of 1 bit could not compute, nor could exact verification of
drafts by weights that are not quantized. It can be removed when the library asks for the default device instead, as in
models/gated_delta.py.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models import exact_speculative_verify, kernels, rope_utils
from mlx_vlm.models.nemotron_labs_diffusion import language as nemotron_labs_diffusion
from mlx_vlm.quantization import one_bit

MODULES: tuple[Any, ...] = (rope_utils, kernels)
"""They look at `_HAS_METAL` when a kernel is wanted."""


def _no_kernel(*args: Any) -> None:
    """Take the place of a function that returns a kernel, or None where there is none."""


ON_CPU: dict[tuple[Any, str], Any] = {
    (nemotron_labs_diffusion, "_BM32_LINEAR_KERNEL"): None,
    (nemotron_labs_diffusion, "_SMALL_ROW_GEMV_KERNEL"): None,
    (nemotron_labs_diffusion, "_SMALL_ROW_SWIGLU_KERNEL"): None,
    (exact_speculative_verify, "_EXACT_SPECULATIVE_VERIFY_GEMV"): None,
    (exact_speculative_verify, "_EXACT_SPECULATIVE_VERIFY_SWITCH_GEMV"): None,
    (one_bit, "_one_bit_qmv_kernel"): _no_kernel,
    (one_bit, "_one_bit_qmm_kernel"): _no_kernel,
}
"""Values of other kernels on the CPU, by module and name, with which the library uses its plain operations."""

LIBRARY = {(module, name): getattr(module, name) for module, name in ON_CPU}
"""Their values on the GPU."""


def install() -> None:
    """Make the library use its plain operations from now on, in new models, if the default device is the CPU."""
    has_kernels = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
    for module in MODULES:
        module._HAS_METAL = has_kernels
    for (module, name), kernel in (LIBRARY if has_kernels else ON_CPU).items():
        setattr(module, name, kernel)
