"""Products with the weights of experts on CUDA: those of few rows, of one expert after the other.

MLX 0.32.4 multiplies each pair of a token and one of its experts by itself, and reads the expert's weights once per
pair: on an H200 `gather_qmm` of 8 of 256 experts of 512 x 2048 weights of 4 bits takes 0.05 ms for one token, 0.25 for
64, 7.0 for 2048, and from 65,536 pairs on it fails. Around it the library sorts the pairs and puts them back, by a
dozen operations per layer, each of which costs the host a launch. Here the two products of an expert's MLP are one
kernel each, that of few_rows_cuda with an expert per block: of up to half as many pairs as there are experts each has
its own block, more are grouped by their experts before, 16 to a block, or up to 64 from MANY_PAIRS on. The result of a
pair depends on its own values, and on which of the two kernels multiplies it. It can be removed when the library groups
pairs of unsorted experts, for weights of 4 and 8 bits, too.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models import switch_layers as text_layers
from mlx_vlm.models import switch_layers

from engine.worker.cuda_kernel import CudaKernel, short
from engine.worker.patches import few_rows_cuda, many_rows
from engine.worker.patches.few_rows_cuda import COLUMNS, MAX_SIZE, OUTPUTS, QUANTIZED_BITS, ROWS, UNQUANTIZED, Weight
from engine.worker.patches.few_rows_kernel import NAMES, Form, PairGrouping, kernel_of

MAX_EXPERTS = 1024
"""More experts are the library's: the kernel that groups pairs has a thread for each."""
MAX_TOKENS = 2**15
"""The library has the experts of more tokens: a grid of CUDA has at most 65,535 blocks one below the other, enough for
MAX_SHARE experts of each of so many tokens, and for adding up their results."""
MAX_SHARE = 30
"""Most experts of a token that the kernels are sure to have the places of, in 32 bits."""
OUT_TILES = 4
"""Output tiles of a block."""
MANY_PAIRS = 24
"""From this many pairs of an expert on, on average, blocks have as many as 64 (many_rows.py), with quantized
weights."""

_GROUPING = """
    // One block with a thread per expert: counts each expert's pairs, gives them places, and lists the tiles.
    __shared__ int counts[Experts], pairs_until[Experts], tiles_until[Experts];
    const int expert = threadIdx.x, num_pairs = experts_shape[0];
    if (expert < Experts) counts[expert] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x) atomicAdd(&counts[experts[pair]], 1);
    __syncthreads();
    const int own = expert < Experts ? counts[expert] : 0, own_tiles = (own + Tile - 1) / Tile;
    if (expert < Experts) {
        pairs_until[expert] = own;
        tiles_until[expert] = own_tiles;
    }
    for (int step = 1; step < Experts; step *= 2) {
        __syncthreads();
        const bool adds = expert >= step && expert < Experts;
        const int more = adds ? pairs_until[expert - step] : 0, more_tiles = adds ? tiles_until[expert - step] : 0;
        __syncthreads();
        if (adds) {
            pairs_until[expert] += more;
            tiles_until[expert] += more_tiles;
        }
    }
    __syncthreads();
    const int num_tiles = tiles_until[Experts - 1];
    const int slots = (num_pairs < Experts ? num_pairs : Experts) + num_pairs / Tile;
    if (expert < Experts) {
        const int begin = pairs_until[expert] - own, first = tiles_until[expert] - own_tiles;
        for (int i = 0; i < own_tiles; ++i) {
            int* tile = tiles + 3 * (first + i);
            tile[0] = expert;
            tile[1] = begin + i * Tile;
            tile[2] = own - i * Tile < Tile ? own - i * Tile : Tile;
        }
        counts[expert] = begin;
    }
    for (int slot = num_tiles + threadIdx.x; slot < slots; slot += blockDim.x) tiles[3 * slot + 2] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x)
        order[atomicAdd(&counts[experts[pair]], 1)] = pair;
"""


def experts(module: Any, x: mx.array, indices: mx.array) -> mx.array:
    """Apply experts to tokens: down(silu(gate(x)) * up(x)). `is_supported` says to which.

    Args:
        module: The library's SwitchGLU.
        x: The tokens [..., in], in the dtype of the weights.
        indices: Experts of each token [..., k].

    Returns:
        The result of each expert [..., k, out].
    """
    tokens = x.reshape(-1, x.shape[-1])
    return with_shared(module, None, tokens, indices.reshape(-1, indices.shape[-1])).reshape(*indices.shape, -1)


def with_shared(module: Any, shared: Any, x: mx.array, indices: mx.array, norm: Any = None) -> mx.array:
    """Apply experts to tokens, and one that all share.

    Args:
        module: The library's SwitchGLU.
        shared: A module with the same three layers for one expert; None for none.
        x: The tokens [N, in], in the dtype of the weights.
        indices: Experts of each token [N, k].
        norm: A norm that is applied to x first; None for nothing.

    Returns:
        The results [N * k, out] of the experts of the first token, of the second, and so on; and behind them those of
        the shared one [N, out].
    """
    if shared is not None and not _are_alike(module, shared):
        x = x if norm is None else norm(x)
        y = shared.down_proj(few_rows_cuda.gated(shared.gate_proj, shared.up_proj, x))
        return mx.concatenate([with_shared(module, None, x, indices), y])
    eps, of_norm = None, []
    if norm is not None and few_rows_cuda.is_normed_by_kernel(norm, x):
        eps, of_norm = norm.eps, [norm.weight]
    elif norm is not None:
        x = norm(x)
    pairs = _Pairs.of(indices, module, shared is not None)
    gates, downs = [module.gate_proj, module.up_proj], [module.down_proj]
    if shared is not None:
        gates, downs = [*gates, shared.gate_proj, shared.up_proj], [*downs, shared.down_proj]
    return _multiply(_multiply(x, gates, of_norm, pairs, "gated", "gather", eps), downs, [], pairs, "plain", "scatter")


class _Pairs(NamedTuple):
    """Pairs of a token and one of its experts, and the blocks that multiply them.

    Attributes:
        num_tokens: Number of tokens.
        share: Pairs of a token.
        slots: Number of blocks, of which some may be empty.
        tile: Most pairs of a block.
        where: The expert [P] of each pair, for blocks of one pair; or what `_grouped` returns.
        with_shared: Whether further blocks multiply all tokens.
    """

    num_tokens: int
    share: int
    slots: int
    tile: int
    where: list[mx.array]
    with_shared: bool

    @classmethod
    def of(cls, indices: mx.array, module: Any, with_shared: bool) -> Self:
        """Return the pairs of the experts [N, k] that are chosen for tokens, of the library's SwitchGLU."""
        (num_tokens, share), experts = indices.shape, indices.reshape(-1).astype(mx.int32)
        num_experts = module.gate_proj.num_experts
        if 2 * experts.size <= num_experts:
            return cls(num_tokens, share, experts.size, ROWS, [experts], with_shared)
        is_many = experts.size >= MANY_PAIRS * num_experts and num_tokens > ROWS  # fewer may be behind a norm
        are_quantized = all(_bits(module[name]) < UNQUANTIZED for name in ("gate_proj", "down_proj"))
        tile = ROWS * many_rows.ROW_TILES if is_many and are_quantized else ROWS
        slots = min(experts.size, num_experts) + experts.size // tile
        return cls(num_tokens, share, slots, tile, _grouped(experts, num_experts, tile, slots), with_shared)


def _grouped(experts: mx.array, num_experts: int, tile: int, slots: int) -> list[mx.array]:
    """Return the pairs [P] in the order of their experts, and the expert, first place and pairs of each tile [S, 3]."""
    threads = -(-num_experts // 32) * 32
    return _grouping()(
        inputs=[experts],
        template=[("Experts", num_experts), ("Tile", tile)],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[experts.shape, (slots, 3)],
        output_dtypes=[mx.int32, mx.int32],
    )


@cache
def _grouping() -> CudaKernel:
    return CudaKernel(
        name="expert_tiles", input_names=["experts"], output_names=["order", "tiles"], source=short(_GROUPING)
    )


def _multiply(
    x: mx.array,
    layers: Sequence[Any],
    others: Sequence[mx.array],
    pairs: _Pairs,
    form: Form,
    grouping: PairGrouping,
    eps: float | None = None,
) -> mx.array:
    """Return the products with the experts' layers, and behind them with the shared ones, if there are any.

    A row's result depends on the number of warps, which depends on the weights and on `pairs.tile`. See
    few_rows_kernel.kernel_of.
    """
    bits, num_outputs = _bits(layers[0]), layers[0].output_dims
    num_weights, num_rows, slots = 2 if form == "gated" else 1, pairs.num_tokens * pairs.share, pairs.slots
    if pairs.with_shared:
        num_rows, slots = num_rows + pairs.num_tokens, slots + -(-pairs.num_tokens // pairs.tile)
    tiling = None
    if pairs.tile > ROWS:
        tiling = many_rows.of_experts(bits)
        constants, per_block = dict(tiling.constants), tiling.num_outputs
    else:
        warps = 8 if x.shape[-1] >= 8 * (512 // bits) else 4
        constants, per_block = {"OutTiles": OUT_TILES, "Ahead": 2, "Warps": warps}, OUTPUTS * OUT_TILES
    per_block //= num_weights
    are_sorted, are_quantized = len(pairs.where) == 2, bits < UNQUANTIZED
    kernel = kernel_of(x.dtype, num_weights, are_quantized, form, eps, grouping, are_sorted, pairs.with_shared, tiling)
    (y,) = kernel(
        inputs=[x, *(array for layer in layers for array in _arrays(layer)), *others, *pairs.where],
        template=[
            ("T", x.dtype),
            ("RowTiles", pairs.tile // ROWS),
            ("Bits", bits),
            *constants.items(),
            ("Share", pairs.share),
        ],
        grid=(32 * -(-num_outputs // per_block), constants["Warps"] * slots, 1),
        threadgroup=(32, constants["Warps"], 1),
        output_shapes=[(num_rows, num_outputs)],
        output_dtypes=[x.dtype],
    )
    return y


def _are_alike(module: Any, shared: Any) -> bool:
    """Return whether a shared expert has the form of a module's experts."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        own, of_all = module[name], shared[name]
        weight = Weight.of(of_all)
        if weight is None or "bias" in of_all or weight.bits != _bits(own):
            return False
        if any(
            one.shape[1:] != other.shape or one.dtype != other.dtype
            for one, other in zip(_arrays(own), weight.arrays, strict=True)
        ):
            return False
    return True


def _bits(layer: Any) -> int:
    return layer.bits if "scales" in layer else UNQUANTIZED


def _arrays(layer: Any) -> list[mx.array]:
    return [layer["weight"], layer["scales"], layer["biases"]] if "scales" in layer else [layer["weight"]]


def is_supported(module: Any, x: mx.array) -> bool:
    """Return whether `experts` computes a SwitchGLU for x [..., in]."""
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    return (
        x.dtype in NAMES
        and type(module.activation) in (switch_layers.SwiGLU, text_layers.SwiGLU)
        and all(_is_form(layer, x.dtype) for layer in layers)
        and len({_bits(layer) for layer in layers[:2]}) == 1
        and len({array.shape for layer in layers[:2] for array in _arrays(layer)[-1:]}) == 1
        and x.shape[-1] == module.gate_proj.input_dims
        and x.size <= MAX_TOKENS * x.shape[-1]
        and x.size // x.shape[-1] * (MAX_SHARE + 1) * module.down_proj.input_dims < 2**32
        and x.shape[-1] % COLUMNS == 0
        and module.down_proj.input_dims % COLUMNS == 0
    )


def _is_form(layer: Any, dtype: mx.Dtype) -> bool:
    """Return whether the kernels have the form of the experts' weights."""
    if type(layer) in (switch_layers.QuantizedSwitchLinear, text_layers.QuantizedSwitchLinear):
        if layer.mode != "affine" or layer.bits not in QUANTIZED_BITS:
            return False
    elif type(layer) not in (switch_layers.SwitchLinear, text_layers.SwitchLinear):
        return False
    num_experts, num_outputs, _ = layer["weight"].shape
    fits = num_experts <= MAX_EXPERTS and num_outputs * layer.input_dims < MAX_SIZE
    return fits and "bias" not in layer and _arrays(layer)[-1].dtype == dtype


_library_call: Any = switch_layers.SwitchGLU.__call__
_library_text_call: Any = text_layers.SwitchGLU.__call__


def switch_glu(
    self: Any, x: mx.array, indices: mx.array, weights: Any = None, shared: Any = None, residual: Any = None
) -> mx.array:
    """Stand for the `SwitchGLU.__call__` of mlx_vlm."""
    if not is_supported(self, x):
        return _library_call(self, x, indices, weights, shared, residual)
    return self._combine(experts(self, x, indices), weights, shared, residual)


def text_switch_glu(self: Any, x: mx.array, indices: mx.array) -> mx.array:
    """Stand for the `SwitchGLU.__call__` of mlx_lm."""
    return experts(self, x, indices) if is_supported(self, x) else _library_text_call(self, x, indices)


def install() -> None:
    """Replace the libraries' methods; CUDA devices of compute capability 8 and above. May be called several times."""
    if int(mx.device_info().get("compute_capability_major", 0)) >= 8:
        switch_layers.SwitchGLU.__call__ = switch_glu
        text_layers.SwitchGLU.__call__ = text_switch_glu
