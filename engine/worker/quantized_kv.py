"""Keys and values stored with 8 or 4 bits: how a token's are packed, and the cache of one row that stores them so.

A token's keys and values are quantized when they are written, and every query, also one of the same chunk or step, sees
the quantized ones. Groups lie within one head of one token, so what is stored for a token does not depend on the tokens
beside it: not on the sizes of chunks, on other rows, on drafts, or on what a snapshot has restored. Results differ as
they do without quantization, by the rounding of the forward; where such a difference moves a value across the border
between two steps of the quantization, that one value differs by one step.

Attention reads them dequantized, one layer at a time. The library's attention over quantized arrays takes 4.5 times as
long for a chunk of 256 tokens on a CPU, and neither sinks nor soft caps.

Layers that keep the keys and values of all tokens are stored so, latent attention and the head included; for latent
attention these are the latents and the rotated part of the keys. Sliding windows and recurrent states are stored as
computed: neither grows with the context.
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

UNQUANTIZED_BITS = 16
"""The setting for keys and values stored as computed, in the dtype of the model."""
GROUP_SIZES = (64, 32)
"""Values that share a scale and a bias; the first that divides the dimensions of a head is taken."""
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the keys, or the values, of a layer are packed: per head of a token quantized values, scales, biases."""

    num_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Values of a head."""
    dtype: mx.Dtype
    """Of the values as computed, of scales and of biases."""
    bits: int
    """Of a quantized value."""
    group_size: int
    """Values that share a scale and a bias."""

    @classmethod
    def of(cls, array: mx.array, bits: int) -> "PackedFormat":
        """Return the format for arrays like this one, [B, heads, L, head_dim].

        Raises:
            ValueError: No group size divides the dimensions of a head.
        """
        head_dim = array.shape[-1]
        fitting = [size for size in GROUP_SIZES if head_dim and head_dim % size == 0]
        if not fitting:
            sizes = " or ".join(map(str, GROUP_SIZES))
            raise ValueError(f"{head_dim} dimensions per head, expected a multiple of {sizes}")
        return cls(array.shape[1], head_dim, array.dtype, bits, fitting[0])

    @property
    def token_bytes(self) -> int:
        """Bytes of one token as computed."""
        return self.num_heads * self.head_dim * self.dtype.size

    @property
    def _num_value_words(self) -> int:
        return self.head_dim * self.bits // WORD_BITS

    @property
    def _num_groups(self) -> int:
        return self.head_dim // self.group_size

    def zeros(self, num_slots: int) -> mx.array:
        """Return empty slots of one row: uint32 [1, heads, num_slots, words]."""
        num_words = self._num_value_words + 2 * self._num_groups * 8 * self.dtype.size // WORD_BITS
        return mx.zeros((1, self.num_heads, num_slots, num_words), mx.uint32)

    def pack(self, array: mx.array) -> mx.array:
        """Quantize [B, heads, L, head_dim] to uint32 [B, heads, L, words]; a NaN or inf makes its group NaN."""
        array = array.astype(self.dtype)
        values, scales, biases = mx.quantize(array, self.group_size, self.bits)
        groups = array.reshape(*array.shape[:-1], self._num_groups, self.group_size)
        biases = biases + (groups * 0).sum(axis=-1)  # mx.quantize gives a single NaN some finite value
        return mx.concatenate([values, mx.view(mx.concatenate([scales, biases], axis=-1), mx.uint32)], axis=-1)

    def unpack(self, packed: mx.array) -> mx.array:
        """Dequantize what `pack` returned: slots that were never written are zeros."""
        words, scaling = mx.split(packed, [self._num_value_words], axis=-1)
        scales, biases = mx.split(mx.view(mx.contiguous(scaling), self.dtype), 2, axis=-1)
        if mx.default_device().type == mx.DeviceType.gpu:
            return mx.dequantize(words, scales, biases, self.group_size, self.bits)
        groups = _separate(words, self.bits).reshape(*packed.shape[:-1], self._num_groups, self.group_size)
        values = groups.astype(self.dtype) * scales[..., None] + biases[..., None]
        return values.reshape(*packed.shape[:-1], self.head_dim)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one layer's keys and values are packed."""

    keys: PackedFormat
    values: PackedFormat

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, bits: int) -> "KVFormat":
        """Return the format for keys and values like these, [B, heads, L, head_dim]. Raises ValueError as above."""
        return cls(PackedFormat.of(keys, bits), PackedFormat.of(values, bits))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values as computed."""
        return self.keys.token_bytes + self.values.token_bytes

    def zeros(self, num_slots: int) -> tuple[mx.array, mx.array]:
        """Return empty slots of one row, for keys and for values."""
        return self.keys.zeros(num_slots), self.values.zeros(num_slots)

    def pack(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.keys.pack(keys), self.values.pack(values)

    def unpack(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.keys.unpack(keys), self.values.unpack(values)


def _separate(words: mx.array, bits: int) -> mx.array:
    """Return the quantized values in words [..., W], one per byte: uint8 [..., W * 32 / bits].

    On a CPU mlx 0.32.4 shifts each value out of a word of 32 bits: with the multiplication this takes 2 to 3.6 times as
    long, and twice the memory of the result. On a GPU `mx.dequantize` is one kernel.
    """
    values = mx.view(mx.contiguous(words), mx.uint8)
    if bits == 4:
        pairs = values.astype(mx.uint16)
        values = mx.view((pairs | (pairs << 4)) & 0x0F0F, mx.uint8)  # the lower half of a byte comes first
    return values


class QuantizedKVCache(KVCache):
    """One row's attention layer: KVCache with packed keys and values, uint32 [1, heads, slots, words]."""

    def __init__(self, kv_format: KVFormat):
        super().__init__()
        self.kv_format = kv_format

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [1, heads, L, head_dim]; return those of all tokens, dequantized."""
        packed = super().update_and_fetch(*self.kv_format.pack(keys, values))
        return self.kv_format.unpack(*packed)
