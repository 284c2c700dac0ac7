"""Depthwise convolutions as one elementwise kernel, and convolutions of whole inputs as a matrix product.

On CUDA MLX 0.32.4 asks cuDNN for a plan at each new shape of the input. For the depthwise convolution of a recurrent
layer that takes 0.16 to 0.27 s on an H200, once for each length of a prompt and number of rows, where the forward of a
4B model takes 0.024 s; for the patches of an image it is once for each number of patches. On a CPU MLX computes a
depthwise convolution with a plain loop: 2048 tokens of 768 channels take 43 ms, and 3 ms as one kernel. On CUDA
most have a kernel of their own (depthwise_cuda.py). It can be removed when the library does so.
"""

from functools import partial, reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.worker.patches import depthwise_cuda

MAX_TAPS = 8
"""Widest depthwise kernel that is computed as one elementwise kernel, which reads its input once per tap."""

_library_calls: dict[type[nn.Module], Any] = {kind: kind.__call__ for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


@partial(mx.compile, shapeless=True)
def _weighted_sum(*inputs_then_weights: mx.array) -> mx.array:
    """Return the sum of input[i] * weight[i], added in float32, in the inputs' dtype."""
    middle = len(inputs_then_weights) // 2
    pairs = zip(inputs_then_weights[:middle], inputs_then_weights[middle:], strict=True)
    terms = [x.astype(mx.float32) * weight.astype(mx.float32) for x, weight in pairs]
    return reduce(mx.add, terms).astype(inputs_then_weights[0].dtype)


def depthwise(x: mx.array, weight: mx.array) -> mx.array:
    """Convolve each channel by itself.

    Args:
        x: [B, L + taps - 1, channels].
        weight: [channels, taps, 1].

    Returns:
        [B, L, channels].
    """
    if depthwise_cuda.is_supported(x, weight):
        return depthwise_cuda.convolve(x, weight)
    num_taps = weight.shape[1]
    num_new = x.shape[1] - num_taps + 1
    inputs = [x[:, i : i + num_new] for i in range(num_taps)]
    return _weighted_sum(*inputs, *(weight[:, i, 0] for i in range(num_taps)))


def whole(x: mx.array, weight: mx.array) -> mx.array:
    """Convolve inputs of the kernel's own size. x [N, *size, in], weight [out, *size, in] -> [N, 1, ..., 1, out]."""
    num_inputs, num_outputs = x.shape[0], weight.shape[0]
    product = x.reshape(num_inputs, -1) @ weight.reshape(num_outputs, -1).T
    return product.reshape(num_inputs, *(1 for _ in x.shape[1:-1]), num_outputs)


def convolve(self: Any, x: mx.array) -> mx.array:
    """Stand for `__call__` of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""
    weight, groups = self.weight, getattr(self, "groups", 1)
    is_plain = _all(self.padding, 0) and _all(getattr(self, "dilation", 1), 1)
    if is_plain and groups == 1 and x.shape[1:] == weight.shape[1:]:
        y = whole(x, weight)
    elif is_plain and _all(self.stride, 1) and _is_depthwise(weight, groups) and x.shape[1] >= weight.shape[1]:
        y = depthwise(x, weight)
    else:
        return _library_calls[next(kind for kind in type(self).__mro__ if kind in _library_calls)](self, x)
    return y + self.bias if "bias" in self else y


def _is_depthwise(weight: mx.array, groups: int) -> bool:
    return weight.ndim == 3 and weight.shape[0] == groups and weight.shape[2] == 1 and weight.shape[1] <= MAX_TAPS


def _all(value: int | tuple[int, ...], expected: int) -> bool:
    return all(one == expected for one in (value if isinstance(value, tuple) else (value,)))


def install() -> None:
    """Replace the library's methods. May be called several times."""
    for kind in _library_calls:
        kind.__call__ = convolve
