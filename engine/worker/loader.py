"""Loads weights into memory: checks, dtype, device and progress."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.utils import load_model

from engine.config import DraftLimits, DraftModelConfig, EngineConfig
from engine.errors import EngineFailed
from engine.host_memory import HostMemory
from engine.processing.checkpoint import (
    draft_of,
    images_unsupported_reason,
    media_kinds,
    read_config,
    refuse_code,
    resolve_checkpoint,
    vocab_size,
)
from engine.processing.context import REACH, choose_context, declared_scalings, ignored_window, library_config
from engine.processing.cross_encoder import read_reranker
from engine.processing.encoders import encoder_refusal, is_encoder, known_code
from engine.processing.pooling import EmbeddingModel
from engine.processing.tokenizer_match import why_different
from engine.processing.vision_families import vision_family
from engine.processing.weight_file import fingerprint, has_output_layer
from engine.start_phase import StartPhase
from engine.worker import cuda_kernel, devices, mtp_loader
from engine.worker.config_fields import check_fields
from engine.worker.draft_model import draft_unsupported_reason
from engine.worker.drafting_head import DraftingHead
from engine.worker.dropped_weights import check_dropped
from engine.worker.expanded_weights import Expansion, expand
from engine.worker.family import bidirectional_reason, unknown_reason, unsupported_reason
from engine.worker.language_model import LanguageModel
from engine.worker.patches import families, gated_delta_next, mamba2_rows, metal_on_cpu
from engine.worker.patches.bare_names import bare_names
from engine.worker.refused_families import refusal
from engine.worker.rewind import rewind_unsupported_reason
from engine.worker.rope import check_scaling, fix_long_factors
from engine.worker.windows import check_windows

log = logging.getLogger("orchard.engine")

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
STATE_VERSION = 1  # must be increased when prompts' states change: positions, images, the computation of a layer
COMPUTED_BY = (*(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-vlm")), f"state {STATE_VERSION}")
EVAL_BYTES = 256 * 2**20  # weights are read in pieces of this size, to report progress


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model."""

    module: Any  # The mlx_vlm model.
    path: Path  # Directory of the checkpoint.
    config: dict[str, Any]  # The checkpoint's configuration, with the rope scaling of the settings.
    media_kinds: frozenset[str]  # Media that it accepts, such as image.
    max_context_tokens: int  # Prompt and answer together.
    vocab_size: int  # Number of logits.
    num_weight_bytes: int  # In memory, with the MTP head or draft model.
    dtype: str  # Floating dtype that it computes in.
    quantized_weights: str  # What was done with them.
    mtp_head: Any | None  # See heads/head.py; None without one.
    mtp_status: str  # "ready", or why there is no head.
    draft: Any | None  # The draft model, of mlx_vlm; None without one.
    fingerprint: str  # See ModelRunner.


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights have not been read: they are lazy arrays of the files."""

    module: Any  # The mlx_vlm model, cast to the dtype that it computes in.
    path: Path  # Directory of the checkpoint.
    config: dict[str, Any]  # See LoadedModel.
    media_kinds: frozenset[str]  # See LoadedModel.
    max_context_tokens: int  # See LoadedModel.
    vocab_size: int  # Number of logits.
    dtype: str  # Floating dtype that it computes in.
    expansion: Expansion  # Of its quantized weights, which are lazy.
    head_dir: Path | None  # Directory of the MTP head; None without one.
    mtp_status: str  # "ready", or why there is no head.
    rope_facts: tuple[str, ...]  # What distinguishes states computed with it from those of other settings.


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
    _check_drafts(config, module, model_config)
    found = mtp_loader.find_head(config, path, model_config)
    return OpenedModel(
        module, path, model_config, kinds, max_context_tokens, num_tokens, dtype, expansion, *found, rope_facts
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
    """Load `config.model` and its MTP head, and evaluate every weight on the calling thread.

    opening: Opens the model; `open_encoder` for an encoder.

    Raises:
        EngineFailed: The model or its head cannot be loaded; the message has the reason.
    """
    with StartPhase("reading weights") as phase:

        def report(part: float) -> None:
            phase.progress = part
            progress(part)

        opened = opening(config)
        module, path, head_dir, dtype = opened.module, opened.path, opened.head_dir, opened.dtype
        head = _load_head(config, opened)
        draft_model = config.draft_model
        draft, draft_dir = (None, None) if draft_model is None else _open_draft(config, draft_model, opened)
        num_bytes = _read_weights([one for one in (module, head, draft) if one is not None], report)
    module.eval()
    if head is not None:
        mtp_loader.check_values(head, opened.config)
        check_kv_bits(config.kv_cache.bits, module, head)
    log.info("loaded %s: %.1f MB of weights, %s, on %s", path, num_bytes / 1e6, dtype, mx.default_device())
    log.info("quantized weights: %s", opened.expansion.text)
    log.info("MTP head: %s", head_dir or opened.mtp_status)
    log.info("draft model: %s", draft_dir or "none")
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
        mtp_head=head,
        mtp_status=opened.mtp_status,
        draft=draft,
        fingerprint=fingerprint(
            [one for one in (path, head_dir, draft_dir) if one is not None], *_facts(config, opened)
        ),
    )


def _open_draft(config: EngineConfig, draft_config: DraftModelConfig, target: OpenedModel) -> tuple[Any, Path]:
    """Open the draft model as a target is opened; return the library's model, in eval mode, and its directory.

    Raises:
        EngineFailed: It cannot be loaded, cannot draft, or has another tokenizer than the target.
    """
    settings = EngineConfig(
        model=draft_of(draft_config.model),
        revision=draft_config.revision,
        device=config.device,
        dtype=config.dtype,
        expand_quantized_weights=config.expand_quantized_weights,
        mtp="off",
    )
    try:
        opened = open_model(settings)
    except EngineFailed as error:
        raise EngineFailed(f"draft_model {draft_config.model!r}: {error}") from error
    named = f"draft_model {draft_config.model!r} ({opened.path})"
    if (difference := why_different(target.path, opened.path)) is not None:
        raise EngineFailed(f"{named} has another tokenizer than the model: {difference}")
    if (reason := draft_unsupported_reason(LanguageModel(opened.module.language_model))) is not None:
        raise EngineFailed(f"{named}: models of the family {opened.config['model_type']} cannot draft: {reason}")
    if opened.max_context_tokens < target.max_context_tokens:
        log.warning(
            "%s was trained for %d tokens, the model takes %d: beyond that few drafts may be accepted",
            named, opened.max_context_tokens, target.max_context_tokens,
        )  # fmt: skip
    if not any(name.endswith(".scales") for name, _ in weights_of(opened.module)):
        cast(opened.module, DTYPES[target.dtype])
    log.info("quantized weights of the draft model: %s", opened.expansion.text)
    opened.module.eval()
    return opened.module, opened.path


def _facts(config: EngineConfig, opened: OpenedModel) -> tuple[str, ...]:
    """Return what the states of prompts depend on beside the weights."""
    kv_bits = f"{config.kv_cache.bits} bits per key and value"
    expanded = f"{opened.expansion.num_expanded} quantized modules expanded"
    family = vision_family(opened.config) if "image" in opened.media_kinds else None
    layers = [] if family is None else sorted(family.both_ways(opened.config))
    masks = [f"image tokens see each other in {' and '.join(layers)} layers"] if layers else []
    return opened.dtype, *COMPUTED_BY, devices.device_kind(), kv_bits, expanded, *opened.rope_facts, *masks


def expand_weights(config: EngineConfig, module: nn.Module, dtype: str) -> Expansion:
    """Expand the quantized weights of a module as configured; see expanded_weights.expand."""
    available_bytes = HostMemory(0).available()
    return expand(config.expand_quantized_weights, module, DTYPES[dtype], devices.on_gpu(), available_bytes)


def _check_drafts(config: EngineConfig, module: Any, model_config: dict[str, Any]) -> None:
    """Check that the proposers that are asked for can draft for this model. Raises EngineFailed."""
    asked_for = {
        "draft_model": config.draft_model is not None,
        "prompt_lookup with limits": isinstance(config.prompt_lookup, DraftLimits),
    }
    names = " and ".join(name for name, is_asked_for in asked_for.items() if is_asked_for)
    if names and (reason := rewind_unsupported_reason(LanguageModel(module.language_model))) is not None:
        family = model_config["model_type"]
        raise EngineFailed(f"{names} cannot draft for models of the family {family}: {reason}; remove it")


def check_kv_bits(bits: int, module: Any, head: Any | None = None) -> None:
    """Check that keys and values can be stored with so many bits. Computes nothing.

    Args:
        bits: `kv_cache.bits`.
        module: The mlx_vlm model.
        head: Its MTP head; None without one, or before it is loaded.

    Raises:
        EngineFailed: They cannot; the message has the layer and the reason.
    """
    language_model = LanguageModel(module.language_model, kv_bits=bits)
    try:
        language_model.make_cache()
        if head is not None:
            DraftingHead(head, language_model).make_cache()
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


def choose_dtype(dtype: str, model_config: dict[str, Any]) -> mx.Dtype | None:
    """Return the dtype to cast to; None to keep the checkpoint's, as for a quantized one on a GPU."""
    if dtype != "auto":
        return DTYPES[dtype]
    if not devices.on_gpu():
        return mx.float32
    quantized = "quantization" in model_config or "quantization_config" in model_config
    return None if quantized else mx.bfloat16


def weights_of(module: nn.Module) -> list[tuple[str, mx.array]]:
    """Return all weights by name."""
    flat: Any = tree_flatten(module.parameters())
    return flat


def cast(module: nn.Module, dtype: mx.Dtype | None) -> None:
    """Cast floating weights, except those that the model's `cast_predicate` keeps, such as recurrent decays."""
    if dtype is None:
        return
    may_cast = getattr(module, "cast_predicate", None) or (lambda name: True)
    weights = [
        (name, w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) and may_cast(name) else w)
        for name, w in weights_of(module)
    ]
    module.update(tree_unflatten(weights))


def _load_head(config: EngineConfig, opened: OpenedModel) -> Any | None:
    """Load the head in the dtype that the model computes in; a quantized one by the rule for quantized models."""
    if opened.head_dir is None:
        return None
    head: Any = mtp_loader.load_head(opened.head_dir, opened.config, opened.module.language_model)
    mtp_loader.check_limits(head, config.mtp)
    quantized = mtp_loader.is_quantized(head)
    cast(head, choose_dtype(config.dtype, {"quantization": {}}) if quantized else DTYPES[opened.dtype])
    if quantized:
        log.info("quantized weights of the MTP head: %s", expand_weights(config, head, opened.dtype).text)
    return head


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


def main_dtype(module: nn.Module) -> str:
    """Return the floating dtype of most bytes, in which the model computes; packed integer weights do not count."""
    size: dict[str, int] = {}
    for _, w in weights_of(module):
        if not mx.issubdtype(w.dtype, mx.floating):
            continue
        name = str(w.dtype).removeprefix("mlx.core.")
        size[name] = size.get(name, 0) + w.nbytes
    return max(size, key=lambda name: size[name])
