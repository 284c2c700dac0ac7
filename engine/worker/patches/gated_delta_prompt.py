"""The gated delta rule of a prompt's tokens as one CUDA kernel, one token after the other.

Four lanes share a row of a head's state, which lies in their registers; a block has 32 rows. Keys and queries of TOKENS
tokens lie in the block's shared memory, as float32, while those of the next ones are loaded. A warp that computes one
row reads them for that row alone, and spends five times as many instructions on a number of the state. Token after
token, what a prompt gives does not depend on where its chunks end.
"""

from functools import cache

import mlx.core as mx

from engine.worker.cuda_kernel import CudaKernel, short

LANES, ROWS, TOKENS = 4, 32, 16
"""Lanes per row of the state, rows per block, tokens that are loaded together."""

SOURCE = """
    constexpr int Threads = Lanes * Rows, N = Dk / (4 * Lanes), Numbers = 16 / sizeof(InT);
    constexpr int Packs = Tokens * Dk / Numbers, Loads = (Packs + Threads - 1) / Threads;
    constexpr int Singles = (Tokens * Rows + Threads - 1) / Threads;
    struct alignas(16) Pack { InT x[Numbers]; };
    struct alignas(16) Four { float x[4]; };
    __shared__ Four keys[2][Tokens * Dk / 4], queries[2][Tokens * Dk / 4];
    __shared__ float values[2][Tokens * Rows], decays[2][Tokens], rates[2][Tokens];
    const int T = length[0];
    const int thread = threadIdx.x, lane = thread % Lanes, row = thread / Lanes;
    const int n = blockIdx.y, b = n / Hv, hv = n % Hv, hk = hv / (Hv / Hk);
    const int first_row = blockIdx.x * Rows, dv = first_row + row;
    const bool is_row = dv < Dv;

    // A lane has every fourth group of four numbers of its row.
    Four s[N];
    const size_t state_row = (size_t(n) * Dv + (is_row ? dv : Dv - 1)) * Dk;
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < 4; ++j) s[i].x[j] = state_in[state_row + (i * Lanes + lane) * 4 + j];

    // Tokens behind the last one are loaded as the last one, and never used.
    Pack next_k[Loads], next_q[Loads];
    float next_v[Singles], next_decay = 0.0f, next_rate = 0.0f;
    auto load = [&](int from) {
        for (int i = 0; i < Loads; ++i) {
            const int p = min(thread + i * Threads, Packs - 1), t = min(from + p / (Dk / Numbers), T - 1);
            const size_t at = ((size_t(b) * T + t) * Hk + hk) * Dk + p % (Dk / Numbers) * Numbers;
            next_k[i] = *reinterpret_cast<const Pack*>(k + at);
            next_q[i] = *reinterpret_cast<const Pack*>(q + at);
        }
        for (int i = 0; i < Singles; ++i) {
            const int p = min(thread + i * Threads, Tokens * Rows - 1), t = min(from + p / Rows, T - 1);
            const int of = min(first_row + p % Rows, Dv - 1);
            next_v[i] = static_cast<float>(v[((size_t(b) * T + t) * Hv + hv) * Dv + of]);
        }
        const size_t gate = (size_t(b) * T + min(from + thread % Tokens, T - 1)) * Hv + hv;
        next_decay = static_cast<float>(g[gate]);
        next_rate = static_cast<float>(beta[gate]);
    };
    auto store = [&](int to) {
        for (int i = 0; i < Loads; ++i) {
            const int p = thread + i * Threads;
            if (p >= Packs) break;
            for (int j = 0; j < Numbers / 4; ++j) {
                Four key, query;
                for (int m = 0; m < 4; ++m) {
                    key.x[m] = static_cast<float>(next_k[i].x[j * 4 + m]);
                    query.x[m] = static_cast<float>(next_q[i].x[j * 4 + m]);
                }
                keys[to][p * (Numbers / 4) + j] = key;
                queries[to][p * (Numbers / 4) + j] = query;
            }
        }
        for (int i = 0; i < Singles; ++i)
            if (thread + i * Threads < Tokens * Rows) values[to][thread + i * Threads] = next_v[i];
        if (thread < Tokens) {
            decays[to][thread] = next_decay;
            rates[to][thread] = next_rate;
        }
    };

    load(0);
    store(0);
    __syncthreads();
    for (int from = 0, at = 0; from < T; from += Tokens, at ^= 1) {
        if (from + Tokens < T) load(from + Tokens);
        const int count = min(Tokens, T - from);
        for (int t = 0; t < count; ++t) {
            Four key[N];
            float memories[4] = {}, outs[4] = {};
            for (int i = 0; i < N; ++i) {
                key[i] = keys[at][t * (Dk / 4) + i * Lanes + lane];
                for (int j = 0; j < 4; ++j) memories[j] += s[i].x[j] * key[i].x[j];
            }
            float memory = (memories[0] + memories[1]) + (memories[2] + memories[3]);
            for (int step = 1; step < Lanes; step *= 2) memory += __shfl_xor_sync(0xffffffffu, memory, step);
            const float decay = decays[at][t];
            const float delta = (values[at][t * Rows + row] - decay * memory) * rates[at][t];
            for (int i = 0; i < N; ++i) {
                const Four query = queries[at][t * (Dk / 4) + i * Lanes + lane];
                for (int j = 0; j < 4; ++j) {
                    s[i].x[j] = s[i].x[j] * decay + key[i].x[j] * delta;
                    outs[j] += s[i].x[j] * query.x[j];
                }
            }
            float out = (outs[0] + outs[1]) + (outs[2] + outs[3]);
            for (int step = 1; step < Lanes; step *= 2) out += __shfl_xor_sync(0xffffffffu, out, step);
            if (lane == 0 && is_row)
                y[((size_t(b) * T + from + t) * Hv + hv) * Dv + dv] = static_cast<InT>(out);
        }
        if (from + Tokens < T) store(at ^ 1);
        __syncthreads();
    }
    if (is_row)
        for (int i = 0; i < N; ++i)
            for (int j = 0; j < 4; ++j) state_out[state_row + (i * Lanes + lane) * 4 + j] = s[i].x[j];
"""


def is_supported(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Return whether the kernel supports these dtypes, for shapes that `gated_delta_cuda.supported` allows."""
    return q.dtype == k.dtype == v.dtype and q.dtype in (mx.bfloat16, mx.float16, mx.float32)


def run(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y [B, T, Hv, Dv] and the last state, float32 [B, Hv, Dv, Dk].

    Args:
        q: Queries [B, T, Hk, Dk].
        k: Keys [B, T, Hk, Dk].
        v: Values [B, T, Hv, Dv].
        g: Decay [B, T, Hv].
        beta: Rate [B, T, Hv].
        state: float32 [B, Hv, Dv, Dk].
    """
    batch, length, num_k_heads, k_dim = k.shape
    num_v_heads, v_dim = v.shape[2:]
    constants = {"Hk": num_k_heads, "Hv": num_v_heads, "Dk": k_dim, "Dv": v_dim}
    constants |= {"Lanes": LANES, "Rows": ROWS, "Tokens": TOKENS}
    threads = LANES * ROWS
    y, last = _kernel()(
        inputs=[q, k, v, g, beta, state, mx.array([length], mx.int32)],
        template=[("InT", q.dtype), *constants.items()],
        grid=(-(-v_dim // ROWS) * threads, batch * num_v_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return y, last


@cache
def _kernel() -> CudaKernel:
    return CudaKernel(
        name="gated_delta_prompt",
        input_names=["q", "k", "v", "g", "beta", "state_in", "length"],
        output_names=["y", "state_out"],
        source=short(SOURCE),
    )
