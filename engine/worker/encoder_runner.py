"""EncoderRunner: computes texts as a whole, alone or several in one forward, into embeddings or scores."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

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
from engine.process_lock import ProcessLock
from engine.protocol import EngineRequest, SamplingParams
from engine.start_phase import StartPhase
from engine.user_cache import user_cache
from engine.worker import blas, cost_cache, devices, encoder_costs, encoder_loader, loader, memory, proposers
from engine.worker.encoder_loader import NO_TEXT
from engine.worker.encoder_model import EncoderModel, pooled
from engine.worker.warm_up import BURST_TOKENS, TIMED_CHUNK_TOKENS


def load_runner(config: EngineConfig, progress: Callable[[float], None]) -> "EncoderRunner":
    """Load an encoder, see `runner_factory.make_runner`."""
    loader.use_device(config.device)
    with starting(devices.device_kind(), config.share_device) as lock:
        runner = EncoderRunner(loader.load(config, progress, encoder_loader.open_encoder), lock)
        memory.set_limits(config)
        runner.warm_up(progress)
        return runner


class EncoderRunner:
    """An encoder. See ModelRunner, of which it has no decode batch and no states of prompts."""

    image_token_id: int | None = None
    whole_images = False
    whole_prompts: str | None = "an encoder's tokens see each other"
    snapshots_prefixes = False
    no_sparse: str | None = "an encoder's tokens see each other, so none can be skipped"
    no_pooling: str | None = None
    no_bursts: str | None = None
    snapshot_s = 0.0
    feature_bytes = 0

    def __init__(self, model: loader.LoadedModel, device_lock: ProcessLock | None = None):
        """Set up a loaded model. device_lock: released by `close`, when the device's memory is freed."""
        self._device_lock = device_lock
        self._num_weight_bytes = model.num_weight_bytes
        self._model = EncoderModel(model.module)
        self.encoder: Encoded | None = "scores" if self._model.scores_pairs else "embeddings"
        self.max_context_tokens = model.max_context_tokens
        self.vocab_size = self.num_embeddings = model.vocab_size
        self.drafts: Sequence[Drafts] = ()
        self.no_drafts: Mapping[str, str] = {one.name: NO_TEXT for one in proposers.PROPOSERS}
        self.fingerprint = model.fingerprint
        self.costs = MemoryCosts()
        self.step_times: Sequence[StepTime] = ()
        self.chunk_times: Sequence[ChunkTime] = ()
        self.memory_limit_bytes = memory.default_limit_bytes()
        self.capabilities: dict[str, Any] = {
            "media": [],
            "encoder": self.encoder,
            "device": str(mx.default_device()),
            "dtype": model.dtype,
            "quantized_weights": model.quantized_weights,
            "blas": blas.preload().source,
            "bursts": "yes",
        }

    def warm_up(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Time texts, and measure memory costs. progress: receives the share that is done, from 0 to 1."""
        with StartPhase("compiling"):
            self.chunk_times = [self._time(n) for n in TIMED_CHUNK_TOKENS if n <= self.max_context_tokens]
            self._forward([self._row(n) for n in BURST_TOKENS])
        progress(0.5)
        with StartPhase("measuring memory"):
            self.costs = cost_cache.load_or_measure(
                user_cache() / "memory-costs",
                cost_cache.costs_key(self.fingerprint, "encoder", self.capabilities["blas"]),
                lambda: encoder_costs.measure(self._model, self._text, self.max_context_tokens),
            )
        mx.clear_cache()
        progress(1.0)

    def _time(self, num_tokens: int) -> ChunkTime:
        self._text(num_tokens)
        began_s = time.perf_counter()
        self._text(num_tokens)
        return ChunkTime(num_tokens, time.perf_counter() - began_s)

    def _text(self, num_tokens: int) -> None:
        self._forward([self._row(num_tokens)])

    def _row(self, num_tokens: int) -> Row:
        tokens, start = np.zeros(num_tokens, np.int32), num_tokens if self.encoder == "scores" else None
        return Row(EngineRequest("probe", tokens, SamplingParams(1), (), pooling="cls", pair_start=start))

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        [row] = rows
        assert max_tokens >= row.num_tokens, "a text is computed as a whole"
        [output] = self._forward([row])
        return output

    def prefill_burst(self, chunks: Sequence[PromptChunk]) -> list[PrefillOutput]:
        assert all(chunk.num_tokens == chunk.row.num_tokens for chunk in chunks), "texts are computed as a whole"
        return self._forward([chunk.row for chunk in chunks])

    def _forward(self, rows: Sequence[Row]) -> list[PrefillOutput]:
        specs = [row.spec for row in rows]
        with blas.all_cores():
            hidden = self._model.hidden([spec.token_ids for spec in specs], [spec.pair_start for spec in specs])
            mx.eval(hidden)
            results = [self._result(hidden[i, : len(spec.token_ids)], spec) for i, spec in enumerate(specs)]
        return [
            PrefillOutput(row.num_tokens, {row.id: RowOutput((), embedding=result)})
            for row, result in zip(rows, results, strict=True)
        ]

    def _result(self, hidden: mx.array, spec: EngineRequest) -> bytes | None:
        assert spec.pooling is not None
        return pooled(hidden, spec.pooling) if spec.pair_start is None else self._model.score(hidden)

    def probe(self) -> None:
        self._text(1)

    @property
    def active_bytes(self) -> int:
        return mx.get_active_memory()

    def settled_bytes(self) -> int:
        mx.synchronize()
        return mx.get_active_memory()

    def memory(self) -> dict[str, int]:
        return memory.usage() | {"weights_bytes": self._num_weight_bytes}

    def free_caches(self) -> None:
        mx.clear_cache()

    def close(self) -> None:
        """Free everything on the device thread, which must not use MLX afterwards."""
        del self._model
        gc.collect()
        mx.clear_cache()
        mx.clear_streams()
        if self._device_lock is not None:
            self._device_lock.release()

    # An encoder has no images, no state of a prompt to keep, and no row that decodes

    def next_image(self, rows: Sequence[Row]) -> ImageLeft | None:
        return None

    def snapshot(self, rows: Sequence[Row], parent: Any, lend: bool = False, num_tokens: int | None = None) -> None:
        return None

    def snapshot_row(self, row_id: str, parent: Any = None, lend: bool = False) -> RowSnapshot | None:
        return None

    def pending(self, row_ids: Sequence[str]) -> dict[str, RowOutput]:
        return {}

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Any]] | None = None) -> None:
        """Do nothing: each call of `prefill` frees what it has allocated."""

    def reset(self) -> None:
        """Do nothing: no row decodes."""

    def decode(self, drafts: Drafts = PLAIN) -> NoReturn:
        raise AssertionError(NO_TEXT)

    def encode(self, rows: Sequence[Row], num_blocks: int) -> NoReturn:
        raise AssertionError("an encoder of text has no images")

    def restore(self, rows: Sequence[Row], snapshot: Any, lend: Sequence[Any] = ()) -> NoReturn:
        raise AssertionError("an encoder has no snapshots")

    def fill(self, row_id: str, segments: Sequence[Any]) -> NoReturn:
        raise AssertionError("an encoder has no snapshots")

    def export_snapshot(self, snapshot: Any) -> NoReturn:
        raise AssertionError("an encoder has no snapshots")

    def import_snapshot(
        self, arrays: dict[str, np.ndarray], num_tokens: int, parent: Any, with_state: bool = True
    ) -> Iterator[None]:
        raise ValueError("an encoder has no snapshots")
