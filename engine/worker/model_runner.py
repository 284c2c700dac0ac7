"""Executes what the scheduler decides. All forward passes start here."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.core.row import Row
from engine.core.runner import (
    PLAIN,
    ChunkTime,
    Drafts,
    Encoded,
    ImageLeft,
    PrefillOutput,
    PromptChunk,
    RowOutput,
    RowSnapshot,
    StepTime,
)
from engine.device_lock import starting
from engine.errors import EngineFailed
from engine.process_lock import ProcessLock
from engine.processing.checkpoint import image_processor_config, num_embeddings
from engine.processing.patch_normalization import PatchNormalization
from engine.processing.reranker import Reranker
from engine.processing.vision_families import vision_family, whole_prompts
from engine.processing.vision_family import image_token_id
from engine.protocol import EngineRequest, SamplingParams
from engine.start_phase import StartPhase
from engine.user_cache import user_cache
from engine.worker import (
    attention_costs,
    blas,
    cost_cache,
    cuda_kernel,
    devices,
    loader,
    memory,
    memory_costs,
    patches,
    split_products,
    warm_up,
)
from engine.worker.burst import EQUAL_LENGTHS, BurstPrefill
from engine.worker.decode import JoiningRow
from engine.worker.decode_batch import DecodeBatch
from engine.worker.drafting import hidden_bytes, most_pending
from engine.worker.fast_paths import FastPaths
from engine.worker.language_model import NO_EXACT_VERIFIER, LanguageModel
from engine.worker.layer_kinds import appends, kind_of
from engine.worker.log_odds import log_odds, unsupported_reason
from engine.worker.mtp import MTP
from engine.worker.patches import quantized_cuda
from engine.worker.pooling import PooledStates
from engine.worker.prefill import Prefill, PromptState, first_tokens
from engine.worker.processors import advance_matchers
from engine.worker.proposer import Target
from engine.worker.proposers import drafting_models, loaded_proposers, offered
from engine.worker.snapshot import StateSnapshot, export, fill, import_arrays
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower

STEPS_SHARE, CHUNKS_SHARE, IMAGES_SHARE = 0.6, 0.7, 0.8
"""Share of the warm-up that is done after the steps, the chunks and the image."""


def load_runner(config: EngineConfig, progress: Callable[[float], None]) -> "MLXRunner":
    """Load the model on the calling thread, which must be the one that will call the runner.

    Args:
        config: The engine's configuration.
        progress: See AsyncEngine's RunnerFactory.

    Raises:
        EngineFailed: The model cannot be loaded, or an engine in another process has the GPU.
    """
    loader.use_device(config.device)
    with starting(devices.device_kind(), config.share_device) as lock:
        runner = MLXRunner(loader.load(config, progress), config, lock)
        memory.set_limits(config)
        runner.warm_up(progress)
        return runner


class MLXRunner:
    """One model, its decode batch, and the prompts in progress. See ModelRunner."""

    encoder: Encoded | None = None

    def __init__(self, model: loader.LoadedModel, config: EngineConfig, device_lock: ProcessLock | None = None):
        """Set up a loaded model. device_lock: released by `close`, when the device's memory is freed."""
        self._device_lock = device_lock
        patches.install(decodes=True)
        self._model = model
        drafting = loaded_proposers(model.proposers)
        self._language_model = LanguageModel(
            model.module.language_model,
            config.mtp_exact,
            config.kv_cache.bits,
            [one.layer_outputs for one in drafting if one.kind.reads_target],
        )
        if config.mtp_exact == "on" and not self._language_model.has_exact_verifier:
            family, names = model.config.get("model_type"), " and ".join(one.name for one in drafting) or "no drafts"
            raise EngineFailed(
                f"mtp_exact is on, but models of the family {family} have no exact verifier with {names}; use auto or "
                "off"
            )
        num_split = 0
        if not devices.on_gpu() and blas.has_idle_core():
            num_split = split_products.install(model.module.language_model, *(one.module for one in drafting))
        self.vocab_size, self.num_embeddings = model.vocab_size, num_embeddings(model.config)
        target = Target(self._language_model, self.vocab_size, self.num_embeddings)
        self._heads = drafting_models(drafting, target)
        self._vision, whole = self._make_vision(model, config), whole_prompts(model.config)
        image_token = image_token_id(model.config)
        self._prefill = Prefill(self._language_model, self._heads, self._vision, image_token, bool(whole))
        self._burst = BurstPrefill(self._language_model, self._heads)
        paths = FastPaths.of(self._language_model, model.config["model_type"])
        compiled = use_compiled(config, paths)
        self._batch = DecodeBatch(self._language_model, self._heads, model.vocab_size, compiled)
        self._prompts: dict[str, PromptState] = {}  # by the ids of the rows that share it
        self.max_context_tokens = model.max_context_tokens
        models = {} if self._heads is None else self._heads.by_name
        self.drafts, self.no_drafts = offered(config, model.proposers, target, models)
        self.image_token_id, self.whole_images = self._prefill.image_token_id, bool(self._prefill.both_ways)
        self.snapshots_prefixes = paths.prefix_snapshots is None and self._heads is None
        self.whole_prompts, self.no_sparse = whole, whole or paths.sparse_prefill
        self.no_pooling = whole or self._language_model.states_unsupported_reason()
        _check_reranker(model, self._language_model)
        self.no_bursts = whole or paths.bursts
        self.memory_limit_bytes = memory.default_limit_bytes()
        self.fingerprint = model.fingerprint
        self.costs, self.snapshot_s = MemoryCosts(), 0.0
        self.step_times: Sequence[StepTime] = ()
        self.chunk_times: Sequence[ChunkTime] = ()
        self._max_running = config.max_running
        self._a_snapshot: StateSnapshot | None = None
        self.capabilities: dict[str, Any] = {
            "media": sorted(model.media_kinds),
            "device": str(mx.default_device()),
            "dtype": model.dtype,
            "kv_bits": config.kv_cache.bits,
            "quantized_weights": model.quantized_weights,
            "blas": blas.preload().source,
            "split_products": num_split,
            "explicit_positions": self._language_model.explicit_positions,
            MTP.name: model.proposers[MTP.name].status,
            "heads": {name: one.text for name, one in model.proposers.items() if one.text},
            "mtp_exact": _exactness(self._language_model),
            "compiled": compiled,
        }

    def warm_up(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Compile kernels with rows, chunks and an image; time steps and chunks, and measure memory costs.

        progress: receives the share that is done, from 0 to 1.
        """
        with StartPhase("compiling") as phase:

            def compiled(share: float) -> None:
                phase.progress = share / IMAGES_SHARE
                progress(share)

            compiled(0.0)
            self.capabilities["bursts"] = self.no_bursts or ("yes" if self._burst.skips_padding else EQUAL_LENGTHS)
            self.step_times, self._a_snapshot = warm_up.time_steps(
                self, self._max_running, lambda share: compiled(STEPS_SHARE * share)
            )
            warm_up.run_like_an_answer(self, self._a_snapshot)
            warm_up.run_burst(self)
            if devices.on_gpu():  # on a CPU it is far less than a chunk, and noise should not decide what is cached
                self.snapshot_s = warm_up.snapshot_s(self)
            self.chunk_times = warm_up.time_chunks(self)
            compiled(CHUNKS_SHARE)
            if self._vision is not None:
                self._vision.probe(self._vision.probe_grids[0])
            compiled(IMAGES_SHARE)
        if self._a_snapshot is not None:
            self._prefill.learn_slots(self._a_snapshot)
            heads = int(getattr(self._language_model.args, "num_attention_heads", 0))
            facts = (self.drafts, *(self.capabilities[name] for name in ("compiled", "blas", "split_products")))
            key, a_snapshot = cost_cache.costs_key(self.fingerprint, *facts), self._a_snapshot
            with StartPhase("measuring memory"):
                self.costs = cost_cache.load_or_measure(
                    user_cache() / "memory-costs",
                    key,
                    lambda: self._measured_costs(a_snapshot, heads),
                )
        if devices.device_kind() == "cuda":
            self.capabilities["kernel_cache"] = next(iter(cuda_kernel.failures()), "yes")
        mx.clear_cache()
        progress(1.0)

    def _measured_costs(self, a_snapshot: StateSnapshot, num_heads: int) -> MemoryCosts:
        head_layers = [layer for one in ([] if self._heads is None else self._heads.make_caches()) for layer in one]
        cache = [*self._language_model.make_cache(), *head_layers]
        kv_formats = [kind_of(layer).kv_format(layer) for layer in cache if appends(layer)]
        quantized = [kv_format for kv_format in kv_formats if kv_format is not None]
        pending = most_pending(self._heads, self.drafts), hidden_bytes(self._heads, self._language_model)
        head = sum(map(appends, head_layers)), *pending
        lm, measured = self._language_model.lm, (self, a_snapshot, self._vision, self.drafts)
        expanded = quantized_cuda.most_expanded_bytes(lm)
        costs = memory_costs.measure(*measured, num_heads, *head, quantized, expanded)
        has_masks = "full" in self._prefill.both_ways or self.whole_prompts is not None
        return attention_costs.with_attention(costs, lm, a_snapshot, num_heads, kv_formats, has_masks)

    def decode(self, drafts: Drafts = PLAIN) -> dict[str, RowOutput]:
        return self._batch.step(drafts)

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        try:
            with blas.all_cores():
                return self._advance(rows, max_tokens)
        except Exception:
            self._forget_prompt(rows)
            raise

    def next_image(self, rows: Sequence[Row]) -> ImageLeft | None:
        return self._prefill.next_image(self._prompt_of(rows), rows[0].spec.images)

    def encode(self, rows: Sequence[Row], num_blocks: int) -> None:
        try:
            if self.next_image(rows) is not None:
                with blas.all_cores():
                    self._prefill.encode(self._prompt_of(rows), num_blocks)
        except Exception:
            self._forget_prompt(rows)
            raise

    def prefill_burst(self, chunks: Sequence[PromptChunk]) -> list[PrefillOutput]:
        assert self.no_bursts is None
        try:
            with blas.all_cores():
                return self._advance_together(chunks)
        except Exception:
            self._forget_prompt([chunk.row for chunk in chunks])
            raise

    def restore(self, rows: Sequence[Row], snapshot: Any, lend: Sequence[Any] = ()) -> None:
        assert isinstance(snapshot, StateSnapshot) and rows[0].id not in self._prompts
        prompt = self._prefill.begin(rows[0])
        self._prefill.restore(prompt, snapshot, rows[0].spec.images, lend)
        self._prompts |= {row.id: prompt for row in rows}

    def snapshot(
        self, rows: Sequence[Row], parent: Any = None, lend: bool = False, num_tokens: int | None = None
    ) -> StateSnapshot | None:
        row_id = rows[0].id
        if num_tokens is None or row_id in self._prompts:
            return self._prefill.snapshot(self._prompts[row_id], parent, lend, num_tokens)
        return self._batch.snapshot_prompt(row_id, num_tokens, parent, lend)

    def pending(self, row_ids: Sequence[str]) -> dict[str, RowOutput]:
        return self._batch.pending(row_ids)

    def snapshot_row(self, row_id: str, parent: Any = None, lend: bool = False) -> RowSnapshot | None:
        return self._batch.snapshot(row_id, parent, lend)

    def export_snapshot(self, snapshot: Any) -> dict[str, np.ndarray]:
        return export(snapshot)

    def import_snapshot(
        self, arrays: dict[str, np.ndarray], num_tokens: int, parent: Any = None, with_state: bool = True
    ) -> Iterator[StateSnapshot | None]:
        assert self._a_snapshot is not None
        return import_arrays(arrays, self._a_snapshot, num_tokens, parent, with_state)

    def fill(self, row_id: str, segments: Sequence[Any]) -> None:
        prompt = self._prompts.get(row_id)
        if prompt is not None:
            fill(segments, prompt.layers)
        else:
            self._batch.fill(row_id, segments)

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Any]] | None = None) -> None:
        lent = lent or {}
        for row_id in row_ids:
            prompt = self._prompts.pop(row_id, None)
            if prompt is not None and row_id in lent:
                layers, prompt.cache, prompt.head_caches = prompt.layers, [], []
                fill(lent[row_id], layers, release=True)
        self._batch.remove(row_ids, lent)

    def reset(self) -> None:
        self._batch.clear()

    def memory(self) -> dict[str, int]:
        return memory.usage() | {
            "weights_bytes": self._model.num_weight_bytes,
            "decode_cache_bytes": self._batch.num_bytes,
            "prefill_cache_bytes": sum(
                prompt.num_bytes for prompt in {id(p): p for p in self._prompts.values()}.values()
            ),
            "vision_cache_bytes": self.feature_bytes,
        }

    @property
    def feature_bytes(self) -> int:
        return self._vision.num_cached_bytes if self._vision is not None else 0

    @property
    def active_bytes(self) -> int:
        return mx.get_active_memory()

    def settled_bytes(self) -> int:
        mx.synchronize()
        return mx.get_active_memory()

    def free_caches(self) -> None:
        if self._vision is not None:
            self._vision.clear()
        mx.clear_cache()

    def probe(self) -> None:
        """Compute one token independent of all rows. Raises what the device raises."""
        row = Row(EngineRequest("probe", np.zeros(1, np.int32), SamplingParams(1), ()))
        row.decode_group = -1
        try:
            self.prefill([row], 1)
        finally:
            self.drop([row.id])

    def close(self) -> None:
        """Free everything on the device thread, which must not use MLX afterwards."""
        self._prompts.clear()
        self._batch.clear()
        del self._model, self._language_model, self._heads, self._prefill, self._vision, self._batch
        self._a_snapshot = None
        gc.collect()
        mx.clear_cache()
        mx.clear_streams()
        if self._device_lock is not None:
            self._device_lock.release()

    def _advance(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        prompt = self._prompt_of(rows)
        if prompt.pooled is not None:
            return self._pool(rows[0], prompt, prompt.pooled, max_tokens)
        assert not rows[0].spec.images or self.next_image(rows) is None, "images are encoded before a prompt's chunks"
        num_tokens, logits = self._prefill.advance(prompt, max_tokens)
        if logits is None:
            return PrefillOutput(num_tokens)
        first = first_tokens(rows, logits, self.vocab_size)
        first[0].prompt_logprobs = None if prompt.logprobs is None else prompt.logprobs.entries()
        self._forget_prompt(rows)
        moves = len(rows) == 1
        self._join(*([self._joining_row(row, prompt, one, moves)] for row, one in zip(rows, first, strict=True)))
        advance_matchers(rows, first)
        return PrefillOutput(num_tokens, {row.id: output for row, output in zip(rows, first, strict=True)})

    def _prompt_of(self, rows: Sequence[Row]) -> PromptState:
        """Return the prompt that these rows share; begin it if necessary."""
        prompt = self._prompts.get(rows[0].id)
        if prompt is None:
            prompt = self._prefill.begin(rows[0])
            self._prompts |= {row.id: prompt for row in rows}
        return prompt

    def _advance_together(self, chunks: Sequence[PromptChunk]) -> list[PrefillOutput]:
        prompts = [self._prompt_of([chunk.row]) for chunk in chunks]
        logits = self._burst.advance(prompts, [chunk.num_tokens for chunk in chunks])
        outputs = [PrefillOutput(chunk.num_tokens) for chunk in chunks]
        if logits is None:
            return outputs
        complete = [i for i, prompt in enumerate(prompts) if prompt.done == len(prompt.token_ids)]
        rows = [chunks[i].row for i in complete]
        first = first_tokens(rows, logits, self.vocab_size)
        self._forget_prompt(rows)
        joining = zip(rows, [prompts[i] for i in complete], first, strict=True)
        self._join([self._joining_row(*one, moves=True) for one in joining])
        advance_matchers(rows, first)
        for i, row, output in zip(complete, rows, first, strict=True):
            outputs[i].first = {row.id: output}
        return outputs

    def _pool(self, row: Row, prompt: PromptState, pooled: PooledStates, max_tokens: int) -> PrefillOutput:
        num_tokens, is_complete = self._prefill.pool(prompt, pooled, max_tokens)
        if not is_complete:
            return PrefillOutput(num_tokens)
        self._forget_prompt([row])
        scored = row.spec.scored_tokens
        result = pooled.vector() if scored is None else log_odds(self._language_model, pooled.state, scored)
        return PrefillOutput(num_tokens, {row.id: RowOutput((), embedding=result)})

    def _joining_row(self, row: Row, prompt: PromptState, first: RowOutput, moves: bool) -> JoiningRow:
        """Return a joining row for a complete prompt. moves: see JoiningRow."""
        token_id, position = first.token_ids[0], prompt.next_position
        return JoiningRow(row, prompt.cache, position, token_id, prompt.head_caches, prompt.hidden, moves, self.drafts)

    def _forget_prompt(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._prompts.pop(row.id, None)

    def _join(self, *together: Sequence[JoiningRow]) -> None:
        """Add rows to the decode batch, either all or none; rows in one sequence join a group together."""
        try:
            for new in together:
                self._batch.join(*new)
        except Exception:
            self._batch.remove([one.row.id for new in together for one in new])
            raise

    @staticmethod
    def _make_vision(model: loader.LoadedModel, config: EngineConfig) -> VisionEncoder | None:
        if "image" not in model.media_kinds:
            return None
        family = vision_family(model.config)
        assert family is not None
        settings = family.settings(image_processor_config(model.path))
        normalization = PatchNormalization.of(settings)
        has_crops = bool(settings.get("do_pan_and_scan"))
        tower = make_tower(model.module, model.config["model_type"], has_crops)
        max_bytes, both_ways = config.vision_cache_mb * 2**20, family.both_ways(model.config)
        return VisionEncoder(tower, normalization, max_bytes, both_ways, family.adds_features)


def _check_reranker(model: loader.LoadedModel, language_model: LanguageModel) -> None:
    """Raise EngineFailed for a reranker whose scores cannot be computed."""
    if Reranker.read(model.path) is not None and (reason := unsupported_reason(language_model)) is not None:
        raise EngineFailed(f"the reranker in {model.path} cannot be served: {reason}")


def _exactness(language_model: LanguageModel) -> str:
    """Return the configured mode of exact verification and its effect on this device, for the status page."""
    one, more = language_model.verifies_exactly(1), language_model.verifies_exactly(2)
    never = "never" if language_model.has_exact_verifier else NO_EXACT_VERIFIER
    return f"{language_model.exact}: {'always' if more else 'with one row' if one else never}"


def use_compiled(config: EngineConfig, paths: FastPaths) -> bool:
    """Return whether decoding is compiled. auto: only on CUDA.

    On a CPU each shape costs seconds of a C++ compiler; on Metal compilation has not been measured.

    Raises:
        EngineFailed: compile is on, but the model does not support it.
    """
    if config.compile == "auto":
        return paths.compiled_step is None and mx.cuda.is_available() and devices.on_gpu()
    if config.compile == "on" and paths.compiled_step is not None:
        raise EngineFailed(f"compile is on, but {paths.compiled_step}; use auto or off")
    return config.compile == "on"
