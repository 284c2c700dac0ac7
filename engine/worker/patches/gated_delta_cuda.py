"""The gated delta rule as one CUDA kernel.

mlx_vlm 0.7.10 (models/qwen3_5/gated_delta.py) has one kernel on Metal only. Elsewhere a token takes half a dozen
operations per layer, and on CUDA, where each costs the host microseconds to launch, verifying four tokens took three
times as long as decoding one, and 2048 tokens of a prompt 14 to 23 ms per layer (2 with the kernel). `install` replaces
the two functions that loop over tokens and the one that computes a prompt in chunks. It can be removed when the
library, or `mx.fast.gated_delta_update`, has a CUDA kernel that also returns the intermediate states.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5 import gated_delta

from engine.worker.cuda_kernel import CudaKernel
from engine.worker.patches import gated_delta_prompt

WARPS_PER_BLOCK = 4

SOURCE = """
    // One warp per value row: a state row S[dv] of Dk floats lies in its lanes' registers, N each. A token is loaded
    // while the one before is computed.
    constexpr int N = Dk / 32;
    const int lane = threadIdx.x;
    const int dv = blockIdx.y * blockDim.y + threadIdx.y;
    const int n = blockIdx.z;
    const int b = n / Hv, hv = n % Hv, hk = hv / (Hv / Hk);
    float s[N];
    const float* from = state_in + (size_t(n) * Dv + dv) * Dk + lane * N;
    for (int i = 0; i < N; ++i) s[i] = from[i];
    float next_k[N], next_q[N], next_v, next_decay, next_beta;
    auto load = [&](int t) {
        const size_t bt = size_t(b) * T + t;
        const auto* k_row = k + (bt * Hk + hk) * Dk + lane * N;
        const auto* q_row = q + (bt * Hk + hk) * Dk + lane * N;
        for (int i = 0; i < N; ++i) {
            next_k[i] = static_cast<float>(k_row[i]);
            next_q[i] = static_cast<float>(q_row[i]);
        }
        next_v = static_cast<float>(v[(bt * Hv + hv) * Dv + dv]);
        next_decay = static_cast<float>(g[bt * Hv + hv]);
        next_beta = static_cast<float>(beta[bt * Hv + hv]);
    };
    load(0);
    for (int t = 0; t < T; ++t) {
        float keys[N], queries[N], memory = 0.0f, out = 0.0f;
        const float value = next_v, decay = next_decay, rate = next_beta;
        for (int i = 0; i < N; ++i) { keys[i] = next_k[i]; queries[i] = next_q[i]; }
        if (t + 1 < T) load(t + 1);
        for (int i = 0; i < N; ++i) {
            s[i] *= decay;
            memory += s[i] * keys[i];
        }
        for (int step = 16; step; step >>= 1) memory += __shfl_xor_sync(0xffffffffu, memory, step);
        const float delta = (value - memory) * rate;
        for (int i = 0; i < N; ++i) {
            s[i] += keys[i] * delta;
            out += s[i] * queries[i];
        }
        for (int step = 16; step; step >>= 1) out += __shfl_xor_sync(0xffffffffu, out, step);
        if (lane == 0) y[((size_t(b) * T + t) * Hv + hv) * Dv + dv] = static_cast<InT>(out);
        if (t < Kept) {
            float* to = states + (((size_t(b) * Kept + t) * Hv + hv) * Dv + dv) * Dk + lane * N;
            for (int i = 0; i < N; ++i) to[i] = s[i];
        }
    }
    float* to = state_out + (size_t(n) * Dv + dv) * Dk + lane * N;
    for (int i = 0; i < N; ++i) to[i] = s[i];
"""


def supported(k: mx.array, v: mx.array, g: mx.array, state: mx.array | None) -> bool:
    """Return whether the kernel supports these shapes and dtypes."""
    fits = k.shape[-1] % 32 == 0 and v.shape[-1] % WARPS_PER_BLOCK == 0 and v.shape[-2] % k.shape[-2] == 0
    return fits and g.ndim == 3 and (state is None or state.dtype == mx.float32)


def run(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None, num_states: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute the delta rule.

    Args:
        q: Queries [B, T, Hk, Dk].
        k: Keys [B, T, Hk, Dk].
        v: Values [B, T, Hv, Dv].
        g: Decay [B, T, Hv].
        beta: Rate [B, T, Hv].
        state: float32 [B, Hv, Dv, Dk]; None for zeros.
        num_states: How many intermediate states to return.

    Returns:
        y [B, T, Hv, Dv], the last state, and the states [B, num_states, Hv, Dv, Dk] after the first tokens.
    """
    batch, length, num_k_heads, k_dim = k.shape
    num_v_heads, v_dim = v.shape[2:]
    if state is None:
        state = mx.zeros((batch, num_v_heads, v_dim, k_dim), mx.float32)
    if length > 1 and num_states == 0 and gated_delta_prompt.is_supported(q, k, v):
        return *gated_delta_prompt.run(q, k, v, g, beta, state), mx.zeros((batch, 0, num_v_heads, v_dim, k_dim))
    sizes = {"T": length, "Kept": num_states, "Hk": num_k_heads, "Hv": num_v_heads, "Dk": k_dim, "Dv": v_dim}
    y, last, states = _kernel()(
        inputs=[q, k, v, g, beta, state],
        template=[("InT", q.dtype), *sizes.items()],
        grid=(32, v_dim, batch * num_v_heads),
        threadgroup=(32, WARPS_PER_BLOCK, 1),
        output_shapes=[v.shape, state.shape, (batch, max(num_states, 1), num_v_heads, v_dim, k_dim)],
        output_dtypes=[q.dtype, mx.float32, mx.float32],
    )
    return y, last, states[:, :num_states]


@cache
def _kernel() -> CudaKernel:
    """Return the kernel of a step, and of a prompt that the other kernel does not support.

    The number of tokens is a constant of it: it is compiled for each.
    """
    return CudaKernel(
        name="gated_delta_rows",
        input_names=["q", "k", "v", "g", "beta", "state_in"],
        output_names=["y", "state_out", "states"],
        source=SOURCE,
    )


def unmasked(g: mx.array, beta: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return decays and rates, [B, T, Hv], with which tokens outside of the mask, bool [B, T], keep the state as it is.

    It stays the same bit by bit: it is multiplied by 1, and 0 times the key is added.
    """
    if mask is None:
        return g, beta
    own = mask[..., None]
    return mx.where(own, g, mx.array(1, g.dtype)), mx.where(own, beta, mx.array(0, beta.dtype))


def install() -> None:
    """Replace the library's functions; CUDA only. May be called several times."""
    if getattr(gated_delta.gated_delta_ops, "is_ours", False):
        return
    ops, with_states = gated_delta.gated_delta_ops, gated_delta._gated_delta_with_states_ops
    chunked = gated_delta.gated_delta_chunked

    def one_kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None) -> Any:
        if not supported(k, v, g, state):
            return ops(q, k, v, g, beta, state, mask)
        return run(q, k, v, *unmasked(g, beta, mask), state, 0)[:2]

    def one_kernel_with_states(
        q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any = None, state_steps: int | None = None
    ) -> Any:
        if not supported(k, v, g, state):
            return with_states(q, k, v, g, beta, state, mask, state_steps)
        num_states = q.shape[1] if state_steps is None else state_steps
        return run(q, k, v, *unmasked(g, beta, mask), state, num_states)

    def one_kernel_for_prompts(
        q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any = None, **kwargs: Any
    ) -> Any:
        if not supported(k, v, g, state):
            return chunked(q, k, v, g, beta, state, mask, **kwargs)
        return run(q, k, v, *unmasked(g, beta, mask), state, 0)[:2]

    one_kernel.is_ours = True  # type: ignore[attr-defined]
    gated_delta.gated_delta_ops = one_kernel
    gated_delta._gated_delta_with_states_ops = one_kernel_with_states
    gated_delta.gated_delta_chunked = one_kernel_for_prompts
