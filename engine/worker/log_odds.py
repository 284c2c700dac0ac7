"""The difference of two tokens' logits after a prompt, in float32 whatever the model computes in."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from engine.worker.language_model import LanguageModel

QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
OUTPUT_LAYERS = (nn.Linear, nn.Embedding, *QUANTIZED)


def log_odds(language_model: LanguageModel, state: mx.array, token_ids: tuple[int, int]) -> bytes | None:
    """Return the logit of the first token minus that of the second.

    In bfloat16 logits from 16 to 32 are rounded to steps of 1/8, which would give different documents the same score.

    Args:
        language_model: A model for which `unsupported_reason` returns None.
        state: The hidden state after the last norm, float32 [hidden].
        token_ids: The two tokens.

    Returns:
        Little-endian float32 [1]; None if it is not finite.
    """
    layer = language_model.output_layer
    weights = np.array(_rows(layer, mx.array(token_ids)), np.float64)
    difference = float((weights[0] - weights[1]) @ np.array(state, np.float64))
    if "bias" in layer:
        bias = np.array(layer["bias"][mx.array(token_ids)].astype(mx.float32), np.float64)
        difference += float(bias[0] - bias[1])
    return np.array([difference], "<f4").tobytes() if np.isfinite(difference) else None


def unsupported_reason(language_model: LanguageModel) -> str | None:
    """Return why a model's logits are not its output layer's alone, None if they are. Computes one token."""
    if (reason := language_model.states_unsupported_reason()) is not None:
        return reason
    if not isinstance(language_model.output_layer, OUTPUT_LAYERS):
        return f"its output layer is a {type(language_model.output_layer).__name__}"
    token, positions = mx.zeros((1, 1), mx.int32), np.zeros((3, 1, 1), np.int32)
    whole, _ = language_model.extend_with_logits(token, language_model.make_cache(), positions)
    alone = language_model.logits(language_model.states(token, language_model.make_cache(), positions))
    if not mx.array_equal(whole, alone):
        return "it changes the logits behind its output layer"
    return None


def _rows(layer: Any, token_ids: mx.array) -> mx.array:
    """Return the weights of some tokens in the output layer, float32 [len(token_ids), hidden]."""
    weight = layer.weight[token_ids]
    if not isinstance(layer, QUANTIZED):
        return weight.astype(mx.float32)
    scales, biases = layer.scales[token_ids], layer.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases[token_ids].astype(mx.float32)
    form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(weight, scales, biases, **form).astype(mx.float32)
