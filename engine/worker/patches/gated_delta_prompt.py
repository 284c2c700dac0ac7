"""The gated delta rule of a prompt's tokens as one CUDA kernel, one token after the other.

Eight lanes share two rows of a head's state, which lie in their registers; a block has 32 rows. Keys and queries of
TOKENS tokens lie in the block's shared memory, as float32, while those of the next ones are loaded. A warp that has one
row alone reads them for that row, and spends five times as many instructions on a number of the state. Token after
token, what a prompt gives does not depend on where its chunks of two and more tokens end; a single one is a step's
(gated_delta_cuda.py), whose sums have another order.
"""

from functools import cache

import mlx.core as mx

from engine.worker.cuda_kernel import CudaKernel, short

LANES, ROWS, TOKENS = 8, 32, 16
"""Lanes per two rows of the state, rows per block, tokens that are loaded together."""
MAX_KEY_DIM = 160
"""With larger keys so many tokens would take more than the 48 KB of shared memory that a block has without asking."""

SOURCE = """
    constexpr int Threads = Lanes * Rows / 2, N = Dk / (4 * Lanes), Numbers = 16 / sizeof(InT);
    constexpr int Packs = Tokens * Dk / Numbers, Loads = (Packs + Threads - 1) / Threads;
    constexpr int Singles = (Tokens * Rows + Threads - 1) / Threads;
    struct alignas(16) Pack { InT x[Numbers]; };
    struct alignas(16) Four { float x[4]; };
    __shared__ Four keys[2][Tokens * Dk / 4], queries[2][Tokens * Dk / 4];
    __shared__ float values[2][Tokens * Rows], decays[2][Tokens], rates[2][Tokens], products[Tokens];
    const int T = length[0];
    const int thread = threadIdx.x, lane = thread % Lanes, row = thread / Lanes * 2;
    const int n = blockIdx.y, b = n / Hv, hv = n % Hv, hk = hv / (Hv / Hk);
    const int first_row = blockIdx.x * Rows, dv = first_row + row;

    // A lane has every eighth group of four numbers of its rows.
    Four s[2][N];
    size_t state_rows[2];
    for (int r = 0; r < 2; ++r) {
        state_rows[r] = (size_t(n) * Dv + min(dv + r, Dv - 1)) * Dk + lane * 4;
        for (int i = 0; i < N; ++i)
            for (int j = 0; j < 4; ++j) s[r][i].x[j] = state_in[state_rows[r] + i * Lanes * 4 + j];
    }

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
        for (int t = thread / Lanes; t < Tokens; t += Threads / Lanes) {
            float product = 0.0f;
            for (int i = 0; i < N; ++i) {
                const int group = t * (Dk / 4) + i * Lanes + lane;
                for (int j = 0; j < 4; ++j) product += keys[at][group].x[j] * queries[at][group].x[j];
            }
            for (int step = 1; step < Lanes; step *= 2) product += __shfl_xor_sync(0xffffffffu, product, step);
            if (lane == 0) products[t] = product;
        }
        __syncthreads();
        const int count = min(Tokens, T - from);
        for (int t = 0; t < count; ++t) {
            // Both products of the state before the token; its own part of the output follows from its key's.
            Four key[N];
            float memories[2][4] = {}, outs[2][4] = {};
            for (int i = 0; i < N; ++i) {
                key[i] = keys[at][t * (Dk / 4) + i * Lanes + lane];
                const Four query = queries[at][t * (Dk / 4) + i * Lanes + lane];
                for (int r = 0; r < 2; ++r)
                    for (int j = 0; j < 4; ++j) {
                        memories[r][j] += s[r][i].x[j] * key[i].x[j];
                        outs[r][j] += s[r][i].x[j] * query.x[j];
                    }
            }
            const float decay = decays[at][t], rate = rates[at][t];
            float deltas[2], out[2];
            for (int r = 0; r < 2; ++r) {
                float memory = (memories[r][0] + memories[r][1]) + (memories[r][2] + memories[r][3]);
                out[r] = (outs[r][0] + outs[r][1]) + (outs[r][2] + outs[r][3]);
                for (int step = 1; step < Lanes; step *= 2) memory += __shfl_xor_sync(0xffffffffu, memory, step);
                deltas[r] = (values[at][t * Rows + row + r] - decay * memory) * rate;
            }
            for (int r = 0; r < 2; ++r)
                for (int i = 0; i < N; ++i)
                    for (int j = 0; j < 4; ++j)
                        s[r][i].x[j] = s[r][i].x[j] * decay + key[i].x[j] * deltas[r];
            // Even lanes add up the first row's output, odd ones the second's.
            const bool odd = lane & 1;
            float own = (odd ? out[1] : out[0]) + __shfl_xor_sync(0xffffffffu, odd ? out[0] : out[1], 1);
            for (int step = 2; step < Lanes; step *= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
            if (lane < 2 && dv + lane < Dv) {
                const float value = own * decay + (odd ? deltas[1] : deltas[0]) * products[t];
                y[((size_t(b) * T + from + t) * Hv + hv) * Dv + dv + lane] = static_cast<InT>(value);
            }
        }
        if (from + Tokens < T) store(at ^ 1);
        __syncthreads();
    }
    for (int r = 0; r < 2; ++r)
        for (int i = 0; dv + r < Dv && i < N; ++i)
            for (int j = 0; j < 4; ++j) state_out[state_rows[r] + i * Lanes * 4 + j] = s[r][i].x[j];
"""


def is_supported(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Return whether the kernel supports these arrays, whose shapes `gated_delta_cuda.supported` allows."""
    is_small = k.shape[-1] <= MAX_KEY_DIM
    return is_small and q.dtype == k.dtype == v.dtype and q.dtype in (mx.bfloat16, mx.float16, mx.float32)


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
    threads = LANES * ROWS // 2
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
