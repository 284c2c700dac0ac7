"""A readable report on a model: whether it can be served, with what, and what it needs of this machine's memory.

No weight is read: sizes come from the files' headers and from a forward that is described but never computed.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np

from engine.config import EngineConfig, KVBits
from engine.core.memory.budget import limit_and_headroom
from engine.errors import EngineFailed
from engine.processing.checkpoint import (
    draft_of,
    images_unsupported_reason,
    is_local,
    num_embeddings,
    resolve_checkpoint,
    videos_unsupported_reason,
)
from engine.processing.context import declared_scalings
from engine.processing.cross_encoder import read_reranker
from engine.processing.encoders import is_encoder_checkpoint
from engine.processing.pooling import EmbeddingModel, choose_pooling
from engine.processing.reranker import Reranker
from engine.processing.tokenizer_match import why_different
from engine.processing.vision_families import whole_prompts
from engine.worker import loader, memory, proposers
from engine.worker.draft_model import SeparateModel
from engine.worker.encoder_loader import NO_TEXT, open_encoder
from engine.worker.fast_paths import FastPaths
from engine.worker.kv_layer import SLOTS_STEP
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import appends, kind_of
from engine.worker.mtp import MTP
from engine.worker.prompt_lookup import PromptLookup
from engine.worker.proposer import Target
from engine.worker.window_layer import ring_bytes, slot_bytes

CONTEXTS = (8192, 32768, 131072)
"""Lengths whose memory is shown, and besides them the longest that the model takes."""


@dataclass(frozen=True)
class RowBytes:
    """Memory of one request's row, in bytes."""

    per_token: int
    """Keys and values, over all layers that keep those of all tokens."""
    per_window_slot: int
    """Keys and values, over all layers with the largest window."""
    window_slots: int
    fixed: int
    """Recurrent states, and smaller windows."""
    per_step_slot: int = 0
    """Keys and values of the largest layer as computed, which a step dequantizes; 0 if they are stored so."""

    @classmethod
    def of(cls, language_model: LanguageModel, drafting: Sequence[Any] = ()) -> "RowBytes":
        """Read the sizes off caches. drafting: the layers of the caches of models that draft, with arrays."""
        cache = [*_described_cache(language_model), *drafting]
        windows = [layer for layer in cache if kind_of(layer).window(layer)]
        attention = [layer for layer in cache if appends(layer)]
        states = [layer for layer in cache if not appends(layer) and not kind_of(layer).window(layer)]
        largest, window_slots, smaller = ring_bytes([(layer.max_size, _slot_bytes(layer)) for layer in windows])
        return cls(
            math.ceil(sum(_slot_bytes(layer) / kind_of(layer).tokens_per_slot(layer) for layer in attention)),
            sum(largest),
            window_slots,
            sum(smaller) + sum(layer.nbytes for layer in states),
            max((one.token_bytes for one in language_model.kv_formats if one is not None), default=0),
        )

    def row(self, num_tokens: int) -> int:
        """Return the bytes of a row of `num_tokens` tokens."""
        slots = -(-num_tokens // SLOTS_STEP) * SLOTS_STEP
        return slots * self.per_token + min(slots, self.window_slots) * self.per_window_slot + self.fixed

    def longest(self, num_bytes: int) -> int:
        """Return the tokens of the longest row that fits, with one layer dequantized; 2**31 if its memory is fixed."""
        left, per_token = num_bytes - self.fixed - self.window_slots * self.per_window_slot, self.per_token
        return max(0, left // (per_token + self.per_step_slot) // SLOTS_STEP * SLOTS_STEP) if per_token else 2**31


def report(config: EngineConfig, draft: str | None = None) -> Iterator[str]:
    """Yield the lines of the report on `config.model`. draft: a draft model for sparse prefill, to be compared.

    Raises:
        EngineFailed: The model cannot be served; the message has the reason.
    """
    if is_encoder_checkpoint(resolve_checkpoint(config.model, config.revision, weights=False)):
        yield from _of_encoder(config, draft)
        return
    opened = loader.open_model(config)
    language_model = LanguageModel(opened.module.language_model, kv_bits=config.kv_cache.bits)
    yield f"model            {config.model} ({opened.path})"
    yield f"family           {opened.config['model_type']}: can be served"
    yield f"computes in      {opened.dtype}, on {mx.default_device()}"
    yield f"media            {', '.join(['text', *sorted(opened.media_kinds)])}{_missing_media(opened)}"
    yield f"context          {opened.max_context_tokens} tokens{_scaling(opened.config)}"
    paths = FastPaths.of(language_model, opened.config["model_type"])
    whole = whole_prompts(opened.config)
    sparse = whole or paths.sparse_prefill
    yield f"prefix cache     {'yes' if whole is None else f'no: {whole}'}"
    yield f"bursts           {whole or paths.bursts or 'yes'}"
    yield f"MTP head         {_heads(opened)}"
    yield f"prompt lookup    {paths.drafts[PromptLookup.name] or 'yes'}"
    yield f"sparse prefill   {'yes' if sparse is None else f'no: {sparse}'}"
    if draft is not None:
        yield f"draft model      {draft}: {_draft_reason(opened.path, draft) or 'has the same tokenizer'}"
    yield from _without_text(opened, language_model)
    yield from _memory(config, opened)


def _described_cache(language_model: LanguageModel) -> list[Any]:
    """Return a cache after one token, whose forward is not computed."""
    cache = language_model.make_cache()
    language_model.extend(mx.zeros((1, 1), mx.int32), None, cache, np.zeros((3, 1, 1), np.int32), launch=False)
    return cache


def _heads(opened: loader.OpenedModel) -> str:
    """Return the directory of each MTP head, with its proposer if there are several, or why there is none."""
    first, *others = [(name, one) for name, one in opened.proposers.items() if one.kind == MTP.name]
    if not others:
        return str(first[1].path or first[1].status)
    return ", ".join(f"{one.path} ({name})" for name, one in (first, *others))


def _of_encoder(config: EngineConfig, draft: str | None) -> Iterator[str]:
    """Yield the lines of the report on an encoder."""
    opened = open_encoder(config)
    yield f"model            {config.model} ({opened.path})"
    yield f"family           {opened.config['model_type']}: can be served, as an encoder"
    yield f"computes in      {opened.dtype}, on {mx.default_device()}"
    yield "media            text"
    yield f"context          {opened.max_context_tokens} tokens, each text in one forward"
    yield "prefix cache     no: the tokens of a text see each other, so no prefix has a state of its own"
    yield "bursts           yes"
    if read_reranker(opened.path) is None:
        pooling = choose_pooling(config.embedding, opened.path)
        yield f"embeddings       yes, and nothing else: it is an embedding model, with the pooling {pooling}"
        yield "scores           yes, by the cosine of two embeddings"
    else:
        yield "scores           yes, and nothing else: it is a reranker"
    if draft is not None:
        yield f"draft model      {draft}: no, {NO_TEXT}"
    yield from _weights(config, opened, _num_bytes(opened.module))


def _without_text(opened: loader.OpenedModel, language_model: LanguageModel) -> Iterator[str]:
    """Yield what the model gives besides text, or instead of it."""
    reason = whole_prompts(opened.config) or language_model.states_unsupported_reason()
    if Reranker.read(opened.path) is not None:
        yield f"scores           {reason or 'yes, and nothing else: it is a reranker'}"
        return
    is_embedding_model = EmbeddingModel.read(opened.path) is not None
    only = ", and nothing else: it is an embedding model" if is_embedding_model else ""
    yield f"embeddings       {reason or f'yes{only}'}"
    if is_embedding_model:
        yield f"scores           {reason or 'yes, by the cosine of two embeddings'}"


def check_before_start(config: EngineConfig, weight_bytes: int | None = None) -> None:
    """Check whether `config.model` can be served here, without downloading or reading a weight.

    Args:
        config: The engine's configuration.
        weight_bytes: Size of the weights of a hub repository; None if it is not known.

    Raises:
        EngineFailed: It cannot be; the message has the reason.
    """
    loader.use_device(config.device)
    if is_local(config.model):
        deque(report(config), maxlen=0)
        return
    loader.open_config(config)
    if weight_bytes is not None:
        _left_beside(config, weight_bytes, "the repository")


def check_each(models: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield for each local model its `reason` not to be served, None without one, and the lines of its report."""
    for model in models:
        lines: dict[str, str] = {}
        reason = None
        try:
            for line in report(EngineConfig(model=model)):
                label, _, value = line.partition("  ")
                lines[label] = value.strip()
        except EngineFailed as error:
            reason = error.message
        yield {"model": model, "reason": reason, "lines": lines}


def _memory(config: EngineConfig, opened: loader.OpenedModel) -> Iterator[str]:
    """Yield what the weights and a row take, with those of the models that draft, and the longest row that fits."""
    if config.draft_model is not None and not is_local(draft_of(config.draft_model.model)):
        yield f"not counted      {config.draft_model.model}, which drafts and is a repository"
        local = {name: one for name, one in opened.proposers.items() if one.kind != SeparateModel.name}
        opened = replace(opened, proposers=local)
    drafting = proposers.loaded_proposers(loader.with_modules(config, opened))
    weights = sum(map(_num_bytes, [opened.module, *(one.module for one in drafting)]))
    yield from _weights(config, opened, weights)
    most, row = opened.max_context_tokens, _row_bytes(opened, config.kv_cache.bits, drafting)
    for length in [*(length for length in CONTEXTS if length < most), most]:
        yield f"row              {_gb(row.row(length))} for {length} tokens"
    left = _left_beside(config, weights, opened.dtype)
    longest = min(row.longest(left), most)
    yield f"longest context  {longest} tokens fit beside the weights, before the intermediate results of a step"
    for bits in get_args(KVBits):
        yield f"kv_cache.bits    {bits}: {_with_bits(opened, bits, drafting, left)}"


def _row_bytes(opened: loader.OpenedModel, bits: int, drafting: Sequence[proposers.LoadedProposer]) -> RowBytes:
    """Return the memory of a row. Raises ValueError if keys and values cannot be stored with so many bits."""
    language_model = LanguageModel(opened.module.language_model, kv_bits=bits)
    target, layers = Target(language_model, opened.vocab_size, num_embeddings(opened.config)), list[Any]()
    for one in drafting:
        if isinstance(one.kind, SeparateModel):
            layers += _described_cache(LanguageModel(one.module.language_model))
        else:
            layers += one.drafting_model(target).make_cache()
    return RowBytes.of(language_model, layers)


def _num_bytes(module: Any) -> int:
    return sum(array.nbytes for _, array in loader.weights_of(module))


def _weights(config: EngineConfig, opened: loader.OpenedModel, num_bytes: int) -> Iterator[str]:
    """Yield what the weights take. Raises EngineFailed if they leave no memory."""
    limit, _ = limit_and_headroom(config.memory, memory.default_limit_bytes())
    yield f"weights          {_gb(num_bytes)}"
    yield f"quantized        {opened.expansion.text}"
    yield f"memory limit     {_gb(limit)} on this machine"
    _left_beside(config, num_bytes, opened.dtype)


def _left_beside(config: EngineConfig, weights: int, where: str) -> int:
    """Return the bytes that are left beside the weights. Raises EngineFailed if there are none.

    Args:
        config: The engine's configuration.
        weights: Bytes of the weights.
        where: Their dtype, or their place, for the error.
    """
    limit, headroom = limit_and_headroom(config.memory, memory.default_limit_bytes())
    left = limit - headroom - weights
    if left <= 0:
        raise EngineFailed(
            f"the weights of {config.model} take {_gb(weights)} in {where}; the limit here is {_gb(limit)} "
            f"(memory.limit_gb), of which {_gb(headroom)} stay free (memory.headroom_gb). Use a smaller model, or one "
            "with fewer bits per weight"
        )
    return left


def _with_bits(
    opened: loader.OpenedModel, bits: int, drafting: Sequence[proposers.LoadedProposer], num_bytes: int
) -> str:
    """Return what a row takes with so many bits per key and value, and the longest that fits, or why it is refused."""
    try:
        row = _row_bytes(opened, bits, drafting)
    except ValueError as error:
        return f"no, {error}"
    return f"{row.per_token} bytes per token, memory for {row.longest(num_bytes)} tokens beside the weights"


def _scaling(model_config: dict[str, Any]) -> str:
    kinds = dict.fromkeys((one["rope_type"], one.get("factor")) for one in declared_scalings(model_config))
    named = [kind if factor is None else f"{kind} with the factor {factor:g}" for kind, factor in kinds]
    return f" (rope scaling: {', '.join(named)})" if named else ""


def _missing_media(opened: loader.OpenedModel) -> str:
    """Return why a model with a vision tower accepts no images or videos."""
    if opened.config.get("vision_config") is None:
        return ""
    if (reason := images_unsupported_reason(opened.path, opened.config)) is not None:
        return f"; no images: {reason}"
    reason = videos_unsupported_reason(opened.path, opened.config)
    return "" if reason is None else f"; no videos: {reason}"


def _slot_bytes(layer: Any) -> int:
    return slot_bytes((layer.keys, layer.values))


def _draft_reason(model_dir: Path, draft: str) -> str | None:
    return why_different(model_dir, resolve_checkpoint(draft_of(draft), None, weights=False))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
