"""Random tiny checkpoints of many families, and the tokens that mlx_vlm itself gives for them."""

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import get_model_and_args, load_model, update_module_configs

from engine.worker import mlx_lm_families
from engine.worker.patches import families
from tests.support.families.family import VOCAB_SIZE, Family

NUM_TOKENS = {"first": 12, "second": 8, "short": 5}
"""Tokens of each answer of `conversation`."""


@dataclass(frozen=True)
class Greedy:
    """A greedy answer.

    Attributes:
        tokens: Its tokens.
        logprobs: Natural logarithms of their probabilities, float64 [num_tokens].
        margin: Least difference of the logprobs of a token and the second best.
    """

    tokens: list[int]
    logprobs: np.ndarray
    margin: float


@dataclass(frozen=True)
class Turn:
    """A prompt and the answer that the library gives without any state."""

    token_ids: list[int]
    answer: Greedy


def make(out: Path, family: Family) -> Path:
    """Write the family's checkpoint, without a tokenizer, in float32 or quantized; return its directory."""
    config = copy.deepcopy(family.config)
    module = new_module(config)
    language_model = module.language_model
    rng = np.random.default_rng(family.seed)
    parameters: Any = tree_flatten(language_model.parameters())
    weights = [(key, drawn(rng, key, value)) for key, value in sorted(parameters)]
    language_model.update(tree_unflatten(weights))
    if family.quantization is not None:
        quantizable = partial(_is_quantizable, group_size=family.quantization["group_size"])
        nn.quantize(language_model, **family.quantization, class_predicate=quantizable)
        config["quantization"] = family.quantization
    named = _named(module, family.has_bare_names, rng)
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), named, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def _named(module: Any, has_bare_names: bool, rng: np.random.Generator) -> dict[str, mx.array]:
    """Return the language model's weights by name, and those without which the library loads no checkpoint.

    It drops towers without weights, but not the arrays beside them, such as the separator of image rows.
    """
    language_model = module.language_model
    [name] = [name for name, part in module.items() if part is language_model]
    flat: Any = tree_flatten(language_model.parameters(), prefix="" if has_bare_names else f".{name}")
    beside = {name: part for name, part in module.parameters().items() if not isinstance(module[name], nn.Module)}
    others: Any = tree_flatten(beside)
    return dict(flat) | {name: drawn(rng, name, value) for name, value in sorted(others)}


def load(path: Path) -> Any:
    """Load the language model of a checkpoint with mlx_vlm, which computes some families wrongly without a patch."""
    families.correct()
    return load_model(path).language_model


def empty_cache(lm: Any) -> list[Any]:
    """Return caches for a new sequence, and forget the rope positions of the last one, which some models keep."""
    for state in ("_position_ids", "_rope_deltas"):
        if hasattr(lm, state):
            setattr(lm, state, None)
    return make_prompt_cache(lm)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(12, VOCAB_SIZE, num_tokens).tolist()


def conversation(lm: Any) -> dict[str, Turn]:
    """Return a first turn, a second one that continues it, and a short one of its own.

    The first two prompts are longer than all windows, the short one ends inside its second window.
    """
    first = prompt(45)
    answer = reference_greedy(lm, first, NUM_TOKENS["first"])
    prompts = {"second": first + answer.tokens + prompt(20, seed=1), "short": prompt(13, seed=2)}
    turns = {name: Turn(ids, reference_greedy(lm, ids, NUM_TOKENS[name])) for name, ids in prompts.items()}
    return {"first": Turn(first, answer), **turns}


def reference_greedy(lm: Any, token_ids: list[int], num_tokens: int) -> Greedy:
    """Return the answer to a prompt, each token from one forward over all tokens before it with an empty cache."""
    logits = []
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        logits.append(np.array(_forward(lm, token_ids + tokens, empty_cache(lm))))
        tokens.append(int(logits[-1].argmax()))
    return greedy(tokens, logits)


def incremental_greedy(lm: Any, token_ids: list[int], num_tokens: int, chunk: int = 2048) -> Greedy:
    """Return the answer to a prompt with the library's caches: the prompt in chunks, then token by token."""
    cache = empty_cache(lm)
    logits, out = [], mx.zeros(0)
    tokens: list[int] = []
    pieces = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    while len(tokens) < num_tokens:
        for piece in pieces:
            out = _forward(lm, piece, cache)
            mx.eval(out, [layer.state for layer in cache])
        logits.append(np.array(out))
        tokens.append(int(logits[-1].argmax()))
        pieces = [tokens[-1:]]
    return greedy(tokens, logits)


def _forward(lm: Any, token_ids: list[int], cache: list[Any]) -> mx.array:
    """Return the logits [vocab] behind the tokens."""
    start = getattr(cache[0], "offset", 0)  # layers of states count no tokens
    positions = given_positions(lm, start, len(token_ids))
    return lm(mx.array([token_ids], mx.int32), cache=cache, **positions).logits[0, -1]


def given_positions(lm: Any, start: int, num_tokens: int) -> dict[str, mx.array]:
    """Return the positions [3, 1, num_tokens] from `start` on as an argument of a language model that needs them.

    The language model of MiniCPM-o counts positions by fields that its configuration lacks; the whole model gives them.
    """
    if getattr(lm, "model_type", "") != "minicpmo":
        return {}
    return {"position_ids": mx.broadcast_to(mx.arange(start, start + num_tokens), (3, 1, num_tokens))}


def new_module(config: dict[str, Any]) -> Any:
    """Return a model with the library's initial weights, configured as load_model does."""
    config = copy.deepcopy(config)
    mlx_lm_families.register(config["model_type"])
    arch: Any = get_model_and_args(config)[0]
    if "llm_config" in config:
        config["text_config"] = config.pop("llm_config")
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    model_config = arch.ModelConfig.from_dict(config)
    modules = ["text", "vision", "perceiver", "projector", "audio"]
    return arch.Model(update_module_configs(model_config, arch, config, modules))


def drawn(rng: np.random.Generator, name: str, weight: mx.array) -> mx.array:
    """Return random values: matrices keep the scale of their input, gains are about 1, biases about 0.

    Embeddings are small, so that the layers, and not the last token alone, decide which token comes next.
    """
    noise = rng.standard_normal(weight.shape)
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    if weight.ndim < 2:
        values = 0.1 * noise + (0 if name.endswith("bias") else 1)
    else:
        fan_in = np.prod(weight.shape[1:]) if "conv" in name or "patch_embed" in name else weight.shape[-1]
        values = (0.5 if "embed_tokens" in name else 1.5) * noise / fan_in**0.5
    return mx.array(values.astype(np.float32))


def _is_quantizable(name: str, module: Any, group_size: int) -> bool:
    """Whether the checkpoint has the module quantized; routers are kept, as converters do, and partial groups."""
    has_form = hasattr(module, "to_quantized") and not name.endswith("mlp.gate")
    return has_form and module["weight"].shape[-1] % group_size == 0


def greedy(tokens: list[int], logits: list[np.ndarray]) -> Greedy:
    """Return the answer of these tokens, each the best of its logits [vocab]."""
    best = np.sort(np.array(logits, np.float64), axis=-1)
    logprobs = -np.log(np.exp(best - best[:, -1:]).sum(-1))
    return Greedy(tokens, logprobs, float((best[:, -1] - best[:, -2]).min()))
