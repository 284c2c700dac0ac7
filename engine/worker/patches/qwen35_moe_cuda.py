"""The mixture of experts of Qwen3.5 on CUDA, of few kernels.

mlx_vlm 0.7.10 computes a layer's experts by some thirty operations, and on an H200 the 40 layers of Qwen3.5-35B-A3B
take 16 ms for one token, most of it the host's launches. Here they take five kernels: the norm with the products that
choose experts and weigh the shared one, the choice, the two products of all of them (experts_cuda), and the sum with
the hidden states. What a kernel does not support is computed as in the library. It
can be removed when the library computes a layer by as few.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5_moe.language import Qwen3_5MoeDecoderLayer, Qwen3_5MoeSparseMoeBlock

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.patches import experts_cuda, few_rows_cuda, qwen35_layers_cuda

ROWS, THREADS = 4, 256
"""Tokens of a block that chooses experts, a warp each; threads of a block that adds up."""
MAX_CHOSEN = 32

_library_experts: Any = Qwen3_5MoeSparseMoeBlock.__call__

_CHOICE = """
    // A warp per token. Each lane has every 32nd expert; the best is taken Chosen times, of equal ones the first.
    const int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
    if (row >= logits_shape[0]) return;
    constexpr int Own = (Experts + 31) / 32;
    const float none = -INFINITY;
    float own[Own], highest = none, sum = 0.0f, chosen_sum = 0.0f, mine = none;
    int mine_at = 0;
    for (int i = 0; i < Own; ++i) {
        const int expert = i * 32 + lane;
        own[i] = expert < Experts ? static_cast<float>(logits[size_t(row) * Experts + expert]) : none;
        highest = fmaxf(highest, own[i]);
    }
    for (int mask = 16; mask > 0; mask /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, mask));
    for (int i = 0; i < Own; ++i) sum += expf(own[i] - highest);
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    for (int j = 0; j < Chosen; ++j) {
        float best = none;
        int at = Experts - 1;  // also where all numbers are NaN
        for (int i = 0; i < Own; ++i)
            if (own[i] > best) {
                best = own[i];
                at = i * 32 + lane;
            }
        for (int mask = 16; mask > 0; mask /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, best, mask);
            const int other_at = __shfl_xor_sync(0xffffffffu, at, mask);
            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
            }
        }
        for (int i = 0; i < Own; ++i)
            if (i * 32 + lane == at) own[i] = none;
        chosen_sum += expf(best - highest);
        if (lane == j) {
            mine = best;
            mine_at = at;
        }
    }
    if (lane < Chosen) {
        indices[size_t(row) * Chosen + lane] = mine_at;
        scores[size_t(row) * Chosen + lane] = expf(mine - highest) / (Normalized ? chosen_sum : sum);
    }
"""

_SUM = """
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, size = to_shape[1];
    if (column >= size) return;
    float sum = 0.0f;
    for (int j = 0; j < Chosen; ++j)
        sum += scores[size_t(row) * Chosen + j] * static_cast<float>(y[(size_t(row) * Chosen + j) * size + column]);
    const size_t place = size_t(row) * size + column;
    const float shared = static_cast<float>(y[(size_t(to_shape[0]) * Chosen + row) * size + column]);
    sum += shared / (1.0f + expf(-static_cast<float>(gates[row])));
    out[place] = static_cast<T>(sum + static_cast<float>(to[place]));
"""


def choice(logits: mx.array, num_chosen: int, is_normalized: bool) -> tuple[mx.array, mx.array]:
    """Choose the experts with the largest logits [N, experts], of equal ones the first.

    Returns:
        The experts, int32 [N, num_chosen], from the largest logit on; and their probabilities, float32, by softmax
        over all experts or, normalized, over those that are chosen.
    """
    num_rows, num_experts = logits.shape
    shape = (num_rows, num_chosen)
    indices, scores = _choice()(
        inputs=[logits],
        template=[("Experts", num_experts), ("Chosen", num_chosen), ("Normalized", is_normalized)],
        grid=(32 * -(-num_rows // ROWS), ROWS, 1),
        threadgroup=(32, ROWS, 1),
        output_shapes=[shape, shape],
        output_dtypes=[mx.int32, mx.float32],
    )
    return indices, scores


def total(to: mx.array, y: mx.array, scores: mx.array, gates: mx.array) -> mx.array:
    """Add the results of experts to something.

    Args:
        to: What they are added to [N, out].
        y: Results [N * k + N, out], as `experts_cuda.with_shared` returns them.
        scores: Their weights [N, k].
        gates: Numbers [N] whose sigmoid weighs the shared ones.
    """
    num_rows, size = to.shape
    (out,) = _sum()(
        inputs=[to, y, scores, gates],
        template=[("T", to.dtype), ("Chosen", scores.shape[1])],
        grid=(THREADS * -(-size // THREADS), num_rows, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[to.shape],
        output_dtypes=[to.dtype],
    )
    return out


@cache
def _choice() -> CudaKernel:
    return CudaKernel("chosen_experts", ["logits"], ["indices", "scores"], short(_CHOICE))


@cache
def _sum() -> CudaKernel:
    return CudaKernel("sum_of_experts", ["to", "y", "scores", "gates"], ["out"], short(_SUM))


def is_supported(self: Any, x: mx.array) -> bool:
    """Return whether the kernels compute a Qwen3_5MoeSparseMoeBlock for x [..., in]."""
    fits = self.num_experts <= experts_cuda.MAX_EXPERTS and self.top_k <= min(MAX_CHOSEN, self.num_experts)
    return fits and experts_cuda.is_supported(self.switch_mlp, x)


def mixture(self: Any, x: mx.array, norm: Any) -> mx.array:
    """Return x + the `Qwen3_5MoeSparseMoeBlock.__call__` of norm(x)."""
    if not is_supported(self, x):
        return x + _library_experts(self, norm(x))
    shape, to, gates = x.shape, x.reshape(-1, x.shape[-1]), (self.gate, self.shared_expert_gate)
    x = to
    if not few_rows_cuda.is_normed_by_kernel(norm, x) or few_rows_cuda.weights_of_one_kernel(x, gates) is None:
        x, norm = norm(x), None
    logits, gate = few_rows_cuda.products(gates, x, norm)
    indices, scores = choice(logits, self.top_k, self.norm_topk_prob)
    y = experts_cuda.with_shared(self.switch_mlp, self.shared_expert, x, indices, norm)
    return total(to, y, scores, gate.reshape(-1)).reshape(shape)


def decoder_layer(
    self: Any,
    x: mx.array,
    mask: Any = None,
    cache: Any = None,
    position_ids: mx.array | None = None,
    position_embeddings: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Stand for `Qwen3_5MoeDecoderLayer.__call__`."""
    x = qwen35_layers_cuda.mixer(self, x, mask, cache, position_ids, position_embeddings)
    return mixture(self.mlp, x, self.post_attention_layernorm)


def install() -> None:
    """Replace the library's forwards; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        Qwen3_5MoeDecoderLayer.__call__ = decoder_layer
