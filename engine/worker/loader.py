"""Loads weights into memory: checks, dtype, device and progress."""

import json
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.utils import load_model

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import (
    images_unsupported_reason,
    media_kinds,
    num_embeddings,
    read_config,
    refuse_code,
    resolve_checkpoint,
    vocab_size,
)
from engine.processing.context import REACH, choose_context, declared_scalings, ignored_window, library_config
from engine.processing.cross_encoder import read_reranker
from engine.processing.encoders import encoder_refusal, is_encoder, known_code
from engine.processing.pooling import EmbeddingModel
from engine.processing.vision_families import vision_family
from engine.processing.weight_file import fingerprint, has_output_layer
from engine.start_phase import StartPhase
from engine.worker import cuda_kernel, devices, proposers, run_ahead
from engine.worker.config_fields import check_fields
from engine.worker.drafter import DraftingModel
from engine.worker.dropped_weights import check_dropped
from engine.worker.family import bidirectional_reason, unknown_reason, unsupported_reason
from engine.worker.language_model import LanguageModel
from engine.worker.loaded_model import READY, FoundProposer, LoadedModel, OpenedModel
from engine.worker.patches import families, gated_delta_next, mamba2_rows, metal_on_cpu
from engine.worker.patches.bare_names import bare_names
from engine.worker.proposer import Target
from engine.worker.refused_families import refusal
from engine.worker.rope import check_scaling, fix_long_factors
from engine.worker.weights import cast, choose_dtype, expand_weights, main_dtype, weights_of
from engine.worker.windows import check_windows

log = logging.getLogger("orchard.engine")

STATE_VERSION = 2  # must be increased when prompts' states change: positions, images, the computation of a layer
COMPUTED_BY = (*(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-vlm")), f"state {STATE_VERSION}")
EVAL_BYTES = 256 * 2**20  # weights are read in pieces of this size, to report progress


def open_model(config: EngineConfig) -> OpenedModel:
    """Open `config.model` and check that its family can be served, without reading a weight.

    Code in a checkpoint is never run: `model_file` and `auto_map` are rejected before the library sees them, and no
    processor is loaded.

    Raises:
        EngineFailed: The model cannot be loaded or served; the message has the reason.
    """
    use_device(config.device)
    families.correct()
    own_config = open_config(config)
    if is_encoder(own_config):
        raise EngineFailed(f"{config.model} is an encoder, which generates and drafts no text")
    path = resolve_checkpoint(config.model, config.revision, weights=True)
    max_context_tokens, num_tokens = choose_context(config, own_config), vocab_size(own_config)
    model_config = library_config(config, own_config)
    if EmbeddingModel.read(path) is not None and not has_output_layer(path):
        model_config["tie_word_embeddings"] = True  # the library's module has an output layer, which is never used
    try:
        with bare_names(model_config):
            module = _open_module(path, None if model_config == own_config else model_config)
    except (ValueError, TypeError, AttributeError, FileNotFoundError, KeyError, RuntimeError) as error:
        scaling = "" if config.rope_scaling is None else f" with the rope_scaling {config.rope_scaling.type}"
        raise EngineFailed(f"the model in {path} could not be loaded{scaling}: {error}") from error
    kinds = media_kinds(path, model_config)
    if (reason := unsupported_reason(module, kinds)) is not None:
        raise EngineFailed(f"models of the family {model_config['model_type']} ({path}) cannot be served: {reason}")
    try:
        check_fields(module.language_model, model_config)
        check_windows(module.language_model, own_config, max_context_tokens)
        if EmbeddingModel.read(path) is None:
            check_dropped(module.language_model, path)
    except EngineFailed as error:
        raise EngineFailed(f"the model in {path} cannot be served: {error}") from None
    if config.max_context_tokens is None:
        _log_ignored_window(own_config, max_context_tokens, model_config["model_type"])
    rope_facts = _settle_rope(config, module.language_model, model_config, max_context_tokens)
    cast(module, choose_dtype(config.dtype, model_config))
    dtype = main_dtype(module)
    expansion = expand_weights(config, module, dtype)
    check_kv_bits(config.kv_cache.bits, module)
    gated_delta_next.install()  # these two decide whether drafts can be taken back
    mamba2_rows.install()
    proposers.check_asked_for(config, model_config["model_type"], LanguageModel(module.language_model))
    found = proposers.find(config, path, model_config)
    return OpenedModel(
        module, path, model_config, kinds, max_context_tokens, num_tokens, dtype, expansion, found, rope_facts
    )


def _log_ignored_window(own_config: dict[str, Any], max_context_tokens: int, family: str) -> None:
    """Log that a window of config.json limits the context, if it does."""
    if max_context_tokens == (window := ignored_window(own_config)):
        log.warning(
            "the context is limited to the %s tokens of config.json's %s, as the library's module of the family %s "
            "ignores it",
            f"{window:,}",
            REACH,
            family,
        )


def open_config(config: EngineConfig) -> dict[str, Any]:
    """Read the model's config.json, and check what it tells about the family before any weight is downloaded.

    Raises:
        EngineFailed: The model cannot be served; the message has the reason.
    """
    path = resolve_checkpoint(config.model, config.revision, weights=False)
    refuse_code(path, known_code(path))
    own_config = read_config(path)
    choose_context(config, own_config)
    vocab_size(own_config)
    read_reranker(path)
    if is_encoder(own_config):
        reason = encoder_refusal(own_config)
    else:
        reason = bidirectional_reason(own_config) or refusal(own_config) or unknown_reason(own_config)
    if reason is not None:
        raise EngineFailed(f"models of the family {own_config.get('model_type')} ({path}) cannot be served: {reason}")
    return own_config


def _open_module(path: Path, changed_config: dict[str, Any] | None) -> Any:
    """Return the library's model with lazy weights. Raises whatever the library raises.

    The library reads the configuration from a directory alone: a changed one is written into a temporary directory,
    beside links to the checkpoint's other files.
    """
    if changed_config is None:
        return load_model(path, lazy=True)
    with TemporaryDirectory(prefix="orchard-config-") as name:
        changed = Path(name)
        for file in path.iterdir():
            if file.name != "config.json":
                (changed / file.name).symlink_to(file.resolve())
        (changed / "config.json").write_text(json.dumps(changed_config), encoding="utf-8")
        return load_model(changed, lazy=True)


def _settle_rope(
    config: EngineConfig, language_model: Any, model_config: dict[str, Any], max_context_tokens: int
) -> tuple[str, ...]:
    """Check that every declared scaling is applied, and settle those that change midway; return `rope_facts`."""
    for scaling in declared_scalings(model_config):
        try:
            check_scaling(language_model, scaling)
        except EngineFailed as error:
            source = "config.json declares" if config.rope_scaling is None else "rope_scaling asks for"
            raise EngineFailed(
                f"{source} a rope scaling of the type {scaling['rope_type']} with the factor {scaling.get('factor')}, "
                f"but models of the family {model_config['model_type']} cannot be served with it: {error}. "
                "Remove it to serve the trained context."
            ) from None
    factors = fix_long_factors(language_model, max_context_tokens)
    return (
        *(() if config.rope_scaling is None else (config.rope_scaling.model_dump_json(),)),
        *(() if factors is None else (f"{factors} rope factors",)),
    )


def load(
    config: EngineConfig,
    progress: Callable[[float], None],
    opening: Callable[[EngineConfig], OpenedModel] = open_model,
) -> LoadedModel:
    """Load `config.model` and the model that drafts for it, and evaluate every weight on the calling thread.

    opening: Opens the model; `open_encoder` for an encoder.

    Raises:
        EngineFailed: The model, or that which drafts, cannot be loaded; the message has the reason.
    """
    with StartPhase("reading weights") as phase:

        def report(part: float) -> None:
            phase.progress = part
            progress(part)

        opened = opening(config)
        module, path, dtype = opened.module, opened.path, opened.dtype
        found = with_modules(config, opened)
        drafting = proposers.loaded_proposers(found)
        num_bytes = _read_weights([module, *(one.module for one in drafting)], report)
    module.eval()
    if hasattr(module, "language_model"):
        run_ahead.limit(module.language_model)
    for one in drafting:
        one.kind.check(one.module, opened.config)
    log.info("loaded %s: %.1f MB of weights, %s, on %s", path, num_bytes / 1e6, dtype, mx.default_device())
    log.info("quantized weights: %s", opened.expansion.text)
    for name, each in found.items():
        kind = proposers.kind_of(name, each)
        label = kind.label if name == kind.name else f"{kind.label} {name}"
        log.info("%s: %s", label, each.path or each.status)
    log.info("images: %s", images_unsupported_reason(path, opened.config) or "yes")
    return LoadedModel(
        module=module,
        path=path,
        config=opened.config,
        media_kinds=opened.media_kinds,
        max_context_tokens=opened.max_context_tokens,
        vocab_size=opened.vocab_size,
        num_weight_bytes=num_bytes,
        dtype=dtype,
        quantized_weights=opened.expansion.text,
        proposers=found,
        fingerprint=fingerprint(
            [path, *(one.path for one in found.values() if one.path is not None)], *_facts(config, opened)
        ),
    )


def with_modules(config: EngineConfig, opened: OpenedModel) -> dict[str, FoundProposer]:
    """Return the proposers of an opened model, those that draft with their modules, whose weights are lazy.

    Raises:
        EngineFailed: One cannot be loaded, does not fit the model, or cannot store its cache with `kv_cache.bits`.
    """
    found = {
        name: proposers.kind_of(name, each).load(config, each, opened, open_model) if each.status == READY else each
        for name, each in opened.proposers.items()
    }
    if drafting := proposers.loaded_proposers(found):
        sizes = opened.vocab_size, num_embeddings(opened.config)
        check_kv_bits(
            config.kv_cache.bits,
            opened.module,
            lambda model: [one.drafting_model(Target(model, *sizes)) for one in drafting],
        )
    return found


def _facts(config: EngineConfig, opened: OpenedModel) -> tuple[str, ...]:
    """Return what the states of prompts depend on beside the weights."""
    kv_bits = f"{config.kv_cache.bits} bits per key and value"
    expanded = f"{opened.expansion.num_expanded} quantized modules expanded"
    family = vision_family(opened.config) if "image" in opened.media_kinds else None
    layers = [] if family is None else sorted(family.both_ways(opened.config))
    masks = [f"image tokens see each other in {' and '.join(layers)} layers"] if layers else []
    return opened.dtype, *COMPUTED_BY, devices.device_kind(), kv_bits, expanded, *opened.rope_facts, *masks


def check_kv_bits(
    bits: int, module: Any, drafting: Callable[[LanguageModel], Sequence[DraftingModel]] = lambda model: ()
) -> None:
    """Check that keys and values can be stored with so many bits. Computes nothing.

    Args:
        bits: `kv_cache.bits`.
        module: The mlx_vlm model.
        drafting: Makes the models that draft for it; none before they are loaded.

    Raises:
        EngineFailed: They cannot; the message has the layer and the reason.
    """
    language_model = LanguageModel(module.language_model, kv_bits=bits)
    try:
        language_model.make_cache()
        for one in drafting(language_model):
            one.make_cache()
    except ValueError as error:
        raise EngineFailed(f"kv_cache.bits is {bits}: {error}; use 16") from error


def use_device(device: str) -> None:
    """Set MLX's default device.

    Raises:
        EngineFailed: A GPU is configured and MLX finds none.
    """
    if device == "gpu" and not devices.has_gpu():
        raise EngineFailed("device: gpu is configured, but MLX finds no GPU here; use cpu or auto")
    if device == "cpu":
        mx.set_default_device(mx.cpu)
    if devices.on_gpu() and mx.cuda.is_available():
        cuda_kernel.use_cache_folder()
    metal_on_cpu.install()


def _read_weights(modules: list[nn.Module], progress: Callable[[float], None]) -> int:
    weights = [w for module in modules for _, w in weights_of(module)]
    total = sum(w.nbytes for w in weights)
    done, piece, piece_bytes = 0, [], 0
    for weight in weights:
        piece.append(weight)
        piece_bytes += weight.nbytes
        if piece_bytes >= EVAL_BYTES:
            mx.eval(piece)
            done, piece, piece_bytes = done + piece_bytes, [], 0
            progress(done / total)
    mx.eval(piece)
    progress(1.0)
    return total
