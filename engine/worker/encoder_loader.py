"""Opens the checkpoints of encoders: the library's modules, with the defaults that transformers has for config.json."""

from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_vlm.models import bert, modernbert, xlm_roberta
from mlx_vlm.utils import load_model_weights

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import resolve_checkpoint, vocab_size
from engine.processing.context import choose_context
from engine.processing.encoders import NOMIC, has_classes
from engine.processing.nomic_bert import DYNAMIC, native_config
from engine.processing.reference_config import reference_config
from engine.worker import loader, nomic_bert, proposers
from engine.worker.loaded_model import FoundProposer, OpenedModel
from engine.worker.patches import modernbert_gelu
from engine.worker.weights import cast, choose_dtype, expand_weights, main_dtype

LIBRARY: dict[str, ModuleType] = {
    "bert": bert,
    "camembert": xlm_roberta,
    "modernbert": modernbert,
    NOMIC: nomic_bert,
    "roberta": xlm_roberta,
    "xlm-roberta": xlm_roberta,
}
"""Modules by `model_type`: the library's, which does not know them all by this name, and one of the engine."""

NO_TEXT = "an encoder generates no text"

ROPES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
"""Kind of layers -> the library's name of its rope's base."""

OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Endings of tensors' names in old checkpoints -> those of today, as transformers renames them."""


def open_encoder(config: EngineConfig) -> OpenedModel:
    """Open the encoder `config.model`, without reading a weight; see `loader.open_model`.

    Raises:
        EngineFailed: The model cannot be loaded or served, or an option has no meaning for an encoder.
    """
    loader.use_device(config.device)
    own_config = loader.open_config(config)
    _check_options(config)
    path = resolve_checkpoint(config.model, config.revision, weights=True)
    try:
        module = _open_module(path, own_config)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise EngineFailed(f"the model in {path} could not be loaded: {error}") from error
    cast(module, choose_dtype(config.dtype, own_config))
    dtype = main_dtype(module)
    expansion = expand_weights(config, module, dtype)
    return OpenedModel(
        module=module,
        path=path,
        config=own_config,
        media_kinds=frozenset(),
        max_context_tokens=choose_context(config, own_config),
        vocab_size=vocab_size(own_config),
        dtype=dtype,
        expansion=expansion,
        proposers={one.name: FoundProposer(NO_TEXT) for one in proposers.with_models()},
        rope_facts=(),
    )


def _check_options(config: EngineConfig) -> None:
    """Raise EngineFailed for an option that an encoder could only ignore."""
    asked_for = {
        "rope_scaling": config.rope_scaling is not None,
        **{name: True for one in proposers.PROPOSERS for name in one.asked_for(config)},
        "mtp_exact": config.mtp_exact == "on",
        "compile": config.compile == "on",
        "kv_cache.bits": config.kv_cache.bits != 16,
        "prefix_cache.pinned": bool(config.prefix_cache.pinned),
    }
    if names := [name for name, is_asked_for in asked_for.items() if is_asked_for]:
        raise EngineFailed(
            f"{' and '.join(names)} cannot be used with {config.model}: it is an encoder, which generates no text, "
            "keeps no keys and values, and has the positions that it was trained for; remove the option"
        )


def _open_module(path: Path, own_config: dict[str, Any]) -> Any:
    """Return the library's module with lazy weights. Raises EngineFailed, and whatever the library raises."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EngineFailed(f"the model in {path} could not be loaded: there are no *.safetensors")
    if own_config.get("quantization_config") and not own_config.get("quantization"):
        raise EngineFailed(f"the model in {path} has the weights of another quantization than MLX's; use another one")
    library = LIBRARY[own_config["model_type"]]
    build = library.SequenceClassificationModel if has_classes(own_config) else library.Model
    module = build(library.ModelConfig(**_library_config(library.ModelConfig, own_config)))
    weights: dict[str, mx.array] = {}
    for file in files:
        tensors: Any = mx.load(str(file))
        weights |= {_renamed(name): weight for name, weight in tensors.items()}
    modernbert_gelu.correct(module)
    return load_model_weights(module, own_config, module.sanitize(weights), path, lazy=True)


def _library_config(fields_of: Any, own_config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the library's fields as transformers resolves config.json.

    Raises:
        EngineFailed: transformers refuses config.json, or it asks for something that the library's module lacks.
    """
    is_nomic = own_config["model_type"] == NOMIC
    reference: Any = reference_config(native_config(own_config) if is_nomic else own_config)
    if reference is None:
        raise EngineFailed("transformers refuses config.json")
    known = {field.name for field in fields(fields_of)}
    values = {name: getattr(reference, name) for name in known if hasattr(reference, name)}
    values |= {"model_type": own_config["model_type"], "num_labels": 1, "id2label": None}
    if is_nomic:
        rope = reference.rope_parameters
        is_dynamic = rope["rope_type"] == DYNAMIC
        values |= {"rope_theta": rope["rope_theta"], "rope_factor": rope["factor"] if is_dynamic else None}
    if own_config["model_type"] == "modernbert":
        values |= _pattern(own_config, reference)
    return {name: value for name, value in values.items() if name in known}


def _pattern(own_config: dict[str, Any], reference: Any) -> dict[str, Any]:
    """Return how ModernBERT's layers alternate, and the bases of their ropes. Raises EngineFailed."""
    every = own_config.get("global_attn_every_n_layers", 3)
    expected = ["sliding_attention" if i % every else "full_attention" for i in range(reference.num_hidden_layers)]
    if list(reference.layer_types) != expected:
        raise EngineFailed(
            f"config.json has the layer_types {reference.layer_types}; the library's module has full attention in each "
            f"layer whose number is a multiple of {every} (global_attn_every_n_layers), and in no other"
        )
    ropes = {name: reference.rope_parameters[kind] for kind, name in ROPES.items()}
    for rope in ropes.values():
        if (kind := rope.get("rope_type", "default")) != "default":
            raise EngineFailed(f"config.json has a rope of the type {kind!r}; supported is default")
    return {"global_attn_every_n_layers": every, **{name: rope["rope_theta"] for name, rope in ropes.items()}}


def _renamed(name: str) -> str:
    old = next((ending for ending in OLD_NAMES if name.endswith(ending)), None)
    return name if old is None else name.removesuffix(old) + OLD_NAMES[old]
