"""One decode step of a Qwen3.5 recurrent layer, between its projections, as one CUDA kernel.

mlx_vlm 0.7.10 computes the convolution, the norms, the gates and the delta rule of a step as some fifteen operations
per layer, which cost the host more than they cost the device. The kernel computes them in float32, in the same way for
one token and for several that are verified, for each row alone. It can be removed when the library has such a kernel.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5.language import Qwen3_5GatedDeltaNet

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.layer_kinds import in_group
from engine.worker.recurrent_layer import BatchRecurrentLayer

MAX_TOKENS = 16
"""More tokens than this are computed by the library's operations."""
WARPS = 8
"""Warps per block. A block computes one value head of one row, each warp Dv / WARPS of the rows of its state."""

_SOURCE = """
    constexpr int N = Dk / 32, R = Dv / Warps, Channels = 2 * Dk + Dv, Threads = 32 * Warps;
    const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;
    const int n = blockIdx.x, b = n / Hv, hv = n % Hv, hk = hv / (Hv / Hk);
    const int S = qkv_shape[1];
    constexpr int C = 2 * Hk * Dk + Hv * Dv;
    __shared__ float mixed[Channels];
    __shared__ float outputs[Dv];
    __shared__ float warp_sums[Warps];

    // Channel of the layer for one of this head's: Dk of q, Dk of k, Dv of v.
    auto channel = [&](int i) {
        return i < Dk ? hk * Dk + i : i < 2 * Dk ? Hk * Dk + hk * Dk + i - Dk : 2 * Hk * Dk + hv * Dv + i - 2 * Dk;
    };
    // Input of the convolution: the window of earlier tokens, then the new ones.
    auto input = [&](int at, int c) {
        if (at < Taps - 1) return window[(size_t(b) * (Taps - 1) + at) * C + c];
        return qkv[(size_t(b) * S + at - (Taps - 1)) * C + c];
    };

    float s[R][N];
    const size_t first = (size_t(n) * Dv + warp * R) * Dk + lane * N;
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) s[r][i] = state[first + size_t(r) * Dk + i];

    const float rate_of_head = expf(static_cast<float>(a_log[hv])), bias = static_cast<float>(dt_bias[hv]);
    const float scale = rsqrtf(float(Dk));
    for (int t = 0; t < S; ++t) {
        for (int i = thread; i < Channels; i += Threads) {
            const int c = channel(i);
            float sum = 0.0f;
            for (int j = 0; j < Taps; ++j)
                sum += static_cast<float>(input(t + j, c)) * static_cast<float>(taps[c * Taps + j]);
            mixed[i] = sum / (1.0f + expf(-sum));
        }
        __syncthreads();
        float q[N], k[N], q_squares = 0.0f, k_squares = 0.0f;
        for (int i = 0; i < N; ++i) {
            q[i] = mixed[lane * N + i];
            k[i] = mixed[Dk + lane * N + i];
            q_squares += q[i] * q[i];
            k_squares += k[i] * k[i];
        }
        for (int step = 16; step; step >>= 1) {
            q_squares += __shfl_xor_sync(0xffffffffu, q_squares, step);
            k_squares += __shfl_xor_sync(0xffffffffu, k_squares, step);
        }
        const float q_scale = scale * rsqrtf(q_squares + 1e-6f), k_scale = rsqrtf(k_squares + 1e-6f);
        for (int i = 0; i < N; ++i) {
            q[i] *= q_scale;
            k[i] *= k_scale;
        }
        const size_t gate = (size_t(b) * S + t) * Hv + hv;
        const float dt = static_cast<float>(a[gate]) + bias;
        const float decay = expf(-rate_of_head * (dt > 20.0f ? dt : log1pf(expf(dt))));
        const float beta = 1.0f / (1.0f + expf(-static_cast<float>(b_gate[gate])));
        float squares = 0.0f;
        for (int r = 0; r < R; ++r) {
            float memory = 0.0f, out = 0.0f;
            for (int i = 0; i < N; ++i) {
                s[r][i] *= decay;
                memory += s[r][i] * k[i];
            }
            for (int step = 16; step; step >>= 1) memory += __shfl_xor_sync(0xffffffffu, memory, step);
            const float delta = (mixed[2 * Dk + warp * R + r] - memory) * beta;
            for (int i = 0; i < N; ++i) {
                s[r][i] += k[i] * delta;
                out += s[r][i] * q[i];
            }
            for (int step = 16; step; step >>= 1) out += __shfl_xor_sync(0xffffffffu, out, step);
            squares += out * out;
            if (lane == 0) outputs[warp * R + r] = out;
        }
        if (lane == 0) warp_sums[warp] = squares;
        __syncthreads();
        float total = 0.0f;
        for (int w = 0; w < Warps; ++w) total += warp_sums[w];
        const float norm = rsqrtf(total / Dv + EPS);
        for (int d = thread; d < Dv; d += Threads) {
            const size_t at = ((size_t(b) * S + t) * Hv + hv) * Dv + d;
            const float g = static_cast<float>(z[at]);
            const float value = outputs[d] * norm * static_cast<float>(norm_weight[d]) * g / (1.0f + expf(-g));
            y[at] = static_cast<InT>(value);
        }
        if (Record) {
            const size_t to = (((size_t(b) * S + t) * Hv + hv) * Dv + warp * R) * Dk + lane * N;
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < N; ++i) states[to + size_t(r) * Dk + i] = s[r][i];
        }
    }
    if (!Record)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < N; ++i) states[first + size_t(r) * Dk + i] = s[r][i];
    // Heads that share q and k: the first writes their windows.
    const int kept = Record ? Taps - 1 + S : Taps - 1, skipped = Record ? 0 : S;
    for (int i = thread; i < Channels; i += Threads) {
        if (i < 2 * Dk && hv % (Hv / Hk) != 0) continue;
        const int c = channel(i);
        for (int j = 0; j < kept; ++j) windows[(size_t(b) * kept + j) * C + c] = input(skipped + j, c);
    }
"""


def is_supported(layer: Any, inputs: mx.array, mask: mx.array | None, cache: Any) -> bool:
    """Return whether the kernel computes the layer's forward of inputs [B, L, hidden size]."""
    return (
        type(layer) is Qwen3_5GatedDeltaNet
        and in_group(cache)
        and mask is None
        and inputs.shape[1] <= MAX_TOKENS
        and layer.head_k_dim % 32 == 0
        and layer.head_v_dim % WARPS == 0
        and cache[1].dtype == mx.float32
        and cache[0].dtype == inputs.dtype
        and "bias" not in layer.conv1d
    )


def step(layer: Any, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: BatchRecurrentLayer) -> mx.array:
    """Compute everything between a layer's projections, and update the cache.

    Args:
        layer: The Qwen3_5GatedDeltaNet.
        qkv: Queries, keys and values [B, L, C] before the convolution.
        z: Gate of the output [B, L, Hv * Dv].
        b: Rate before its sigmoid [B, L, Hv].
        a: Step size before its bias [B, L, Hv].
        cache: The window [B, taps - 1, C] and the state float32 [B, Hv, Dv, Dk]. While it records, it gets all windows
            and all states instead, which `commit` chooses from.

    Returns:
        The gated output [B, L, Hv, Dv] in the dtype of qkv.
    """
    batch, length, channels = qkv.shape
    width, shape, records = layer.conv_kernel_size - 1, cache[1].shape, cache.recording
    sizes = {"Hk": layer.num_k_heads, "Hv": layer.num_v_heads, "Dk": layer.head_k_dim, "Dv": layer.head_v_dim}
    y, windows, states = _kernel(layer.norm.eps)(
        inputs=[
            qkv,
            z,
            b,
            a,
            cache[0],
            cache[1],
            layer.conv1d.weight,
            layer.A_log,
            layer.dt_bias,
            layer.norm.weight,
        ],
        template=[("InT", qkv.dtype), *sizes.items(), ("Taps", width + 1), ("Warps", WARPS), ("Record", records)],
        grid=(32 * batch * layer.num_v_heads, WARPS, 1),
        threadgroup=(32, WARPS, 1),
        output_shapes=[
            (batch, length, layer.num_v_heads, layer.head_v_dim),
            (batch, width + length if records else width, channels),
            (batch, length, *shape[1:]) if records else shape,
        ],
        output_dtypes=[qkv.dtype, qkv.dtype, mx.float32],
    )
    if records:
        cache.record(windows, states)
    else:
        cache[0], cache[1] = windows, states
    return y


@cache
def _kernel(eps: float) -> CudaKernel:
    return CudaKernel(
        name="delta_layer",
        input_names=["qkv", "z", "b_gate", "a", "window", "state", "taps", "a_log", "dt_bias", "norm_weight"],
        output_names=["y", "windows", "states"],
        header=f"constexpr float EPS = {eps!r}f;",
        source=short(_SOURCE),
    )
