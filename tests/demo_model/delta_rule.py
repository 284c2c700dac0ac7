"""The gated delta rule over whole sequences, in chunks, so that gradients flow and the device has large products to do.

Source: Yang et al. 2024, arXiv 2412.06464, section 3.3. The tests compare it with the engine's layers.
"""

import mlx.core as mx

CHUNK = 64


def gated_delta_rule(q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array) -> mx.array:
    """Return the outputs of the rule for sequences that begin with an empty state.

    Args:
        q, k: float32 [B, T, H, Dk]; T is a multiple of CHUNK.
        v: float32 [B, T, H, Dv].
        log_decay: float32 [B, T, H]; a very negative one forgets the state.
        beta: float32 [B, T, H], how much of the difference to the old value is written.

    Returns:
        float32 [B, T, H, Dv].
    """
    batch_size, length, num_heads, value_size = v.shape
    q, k, v = _chunks(q), _chunks(k), _chunks(v)
    log_decay, beta = mx.cumsum(_chunks(log_decay[..., None]), axis=-2), _chunks(beta[..., None])
    seen = mx.tril(mx.ones((CHUNK, CHUNK), mx.bool_))
    between = mx.where(seen, log_decay - mx.swapaxes(log_decay, -1, -2), 0)
    decay = mx.where(seen, mx.exp(between), 0)
    keys = mx.swapaxes(k, -1, -2)
    coupling = mx.tril(beta * (k @ keys) * decay, -1)
    inverse = invert_unit_lower(coupling + mx.eye(CHUNK))
    values, from_state = inverse @ (v * beta), inverse @ (k * beta * mx.exp(log_decay))
    scores, queries = (q @ keys) * decay, q * mx.exp(log_decay)
    last = log_decay[..., -1:, :]
    written_keys = mx.swapaxes(k * mx.exp(last - log_decay), -1, -2)
    state, outputs = mx.zeros((batch_size, num_heads, k.shape[-1], value_size)), []
    for chunk in range(length // CHUNK):
        deltas = values[chunk] - from_state[chunk] @ state
        outputs.append(queries[chunk] @ state + scores[chunk] @ deltas)
        state = state * mx.exp(last[chunk]) + written_keys[chunk] @ deltas
    return mx.stack(outputs, axis=1).swapaxes(2, 3).reshape(batch_size, length, num_heads, value_size)


def invert_unit_lower(matrix: mx.array) -> mx.array:
    """Return the inverse of lower triangular matrices [..., n, n] with ones on the diagonal; n is a power of 2."""
    size = matrix.shape[-1]
    if size == 1:
        return matrix
    half = size // 2
    blocks = mx.stack([matrix[..., :half, :half], matrix[..., half:, half:]])
    first, second = invert_unit_lower(blocks)
    corner = -second @ matrix[..., half:, :half] @ first
    upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([corner, second], axis=-1)], axis=-2)


def _chunks(x: mx.array) -> mx.array:
    """[B, T, H, D] to [T / CHUNK, B, H, CHUNK, D]."""
    batch_size, length, num_heads, size = x.shape
    return x.reshape(batch_size, length // CHUNK, CHUNK, num_heads, size).transpose(1, 0, 3, 2, 4)
