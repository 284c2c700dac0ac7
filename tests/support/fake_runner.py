"""A ModelRunner without a model: a row's token is a function of its seed and of the position in its output."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.memory.costs import MemoryCosts
from engine.core.row import Row
from engine.core.runner import (
    PLAIN,
    SEGMENT_ARRAYS,
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
from engine.protocol import EngineRequest, TokenLogprobs, choice_seed

VOCAB_SIZE = 1000
STOP = 2


def token(seed: int, position: int) -> int:
    """Never STOP."""
    return 3 + (seed * 7919 + position * 104729) % (VOCAB_SIZE - 3)


def answer(request: EngineRequest, index: int = 0) -> list[int]:
    """All that choice `index` of the request gets."""
    seed = choice_seed(request.sampling.seed, index)
    return [token(seed, position) for position in range(request.sampling.max_tokens)]


class NoSnapshots:
    """The part of a ModelRunner that keeps no states: nothing is stored in the prefix cache."""

    image_token_id: int | None = None
    whole_images = False
    whole_prompts: str | None = None
    encoder: Encoded | None = None
    snapshots_prefixes = False
    no_sparse: str | None = None
    no_pooling: str | None = None
    no_bursts: str | None = "there is no model"
    fingerprint: str = "none"
    costs: MemoryCosts = MemoryCosts()
    step_times: Sequence[StepTime] = ()
    drafts: Sequence[Drafts] = ()
    no_drafts: Mapping[str, str] = MappingProxyType({})
    chunk_times: Sequence[ChunkTime] = ()
    snapshot_s: float = 0.0
    memory_limit_bytes: int = 2**30
    active_bytes: int = 0
    feature_bytes: int = 0

    def settled_bytes(self) -> int:
        """Nothing is freed late."""
        return self.active_bytes

    def free_caches(self) -> None:
        """There are none."""

    def probe(self) -> None:
        """It works."""

    def next_image(self, rows: Sequence[Row]) -> ImageLeft | None:
        """Images take no time."""

    def snapshot(self, rows: Sequence[Row], parent: Any, lend: bool = False, num_tokens: int | None = None) -> None:
        """Return None: nothing is stored."""

    def snapshot_row(self, row_id: str, parent: Any = None, lend: bool = False) -> None:
        """Return None: nothing is stored."""

    prefill_burst: Any = None
    encode: Any = None
    restore: Any = None
    fill: Any = None
    pending: Any = None
    export_snapshot: Any = None
    import_snapshot: Any = None


def _computed(row: Row) -> np.ndarray:
    index = row.computed_positions
    return row.prompt_token_ids if index is None else row.prompt_token_ids[index]


STATE_BYTES, BYTES_PER_TOKEN = 1000, 10


@dataclass(eq=False)
class FakeSnapshot:
    """A core.Snapshot; it is its own segment. num_own: tokens behind its parent, where it was taken with one."""

    token_ids: np.ndarray
    num_own: int
    parent: "FakeSnapshot | None" = None
    is_lent: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def segment(self) -> "FakeSnapshot":
        return self

    @property
    def segment_bytes(self) -> int:
        return 0 if self.is_lent else BYTES_PER_TOKEN * self.num_own

    @property
    def num_bytes(self) -> int:
        return self.segment_bytes

    @property
    def state_bytes(self) -> int:
        return STATE_BYTES


def _behind(parent: "FakeSnapshot | None", token_ids: np.ndarray, is_lent: bool = False) -> FakeSnapshot:
    return FakeSnapshot(token_ids, len(token_ids) - (parent.num_tokens if parent else 0), parent, is_lent)


class FakeRunner:
    """Gives tokens one call after the one that started them, as the real one does.

    accepts: (seed, position) -> whether the draft for that output position holds. stops_at: {seed: position of STOP}.
    broken: the methods that raise. errors: {row id: the error that its next outputs have}. calls: what was asked.
    """

    def __init__(self, max_draft_tokens: int = 0, accepts: Callable[[int, int], bool] = lambda seed, position: True):
        self.max_context_tokens, self.vocab_size, self.num_embeddings = 100_000, VOCAB_SIZE, VOCAB_SIZE
        self.max_draft_tokens = max_draft_tokens
        self.drafts: Sequence[Drafts] = tuple(Drafts(k) for k in range(1, max_draft_tokens + 1))
        self.no_drafts: Mapping[str, str] = {} if max_draft_tokens else {"mtp": "the fake has none"}
        self.image_token_id: int | None = None
        self.whole_images = False
        self.whole_prompts: str | None = None
        self.encoder: Encoded | None = None
        self.snapshots_prefixes = False
        self.no_sparse: str | None = None
        self.no_pooling: str | None = None
        self.no_bursts: str | None = "prompts are computed one by one unless a test says otherwise"
        self.fingerprint = "fake"
        self.costs, self.memory_limit_bytes = MemoryCosts(), 2**30
        self.step_times: Sequence[StepTime] = ()
        self.chunk_times: Sequence[ChunkTime] = ()
        self.snapshot_s = 0.0
        self.active_bytes = self.feature_bytes = 0
        self.capabilities: dict[str, Any] = {"media": []}
        self.accepts = accepts
        self.stops_at: dict[int, int] = {}
        self.broken: set[str] = set()
        self.errors: dict[str, str] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.step_s = 0.0
        self.closed = False
        self.rows: dict[str, Row] = {}
        self.prompts: dict[str, int] = {}  # by the id of the first row: tokens prefilled
        self._positions: dict[str, int] = {}
        self._in_flight: dict[str, RowOutput] = {}

    def settled_bytes(self) -> int:
        """Nothing is freed late."""
        if "settled_bytes" in self.broken:
            raise RuntimeError("the step in flight has failed")
        return self.active_bytes

    def decode(self, drafts: Drafts = PLAIN) -> Mapping[str, RowOutput]:
        num_draft_tokens = drafts.num_tokens
        self._called("decode", num_draft_tokens, *self.rows)
        assert self.rows and drafts in (PLAIN, *self.drafts)
        time.sleep(self.step_s)
        if not self._in_flight:
            self._in_flight = self._launch(num_draft_tokens)
        outputs, self._in_flight = self._in_flight, self._launch(num_draft_tokens)
        return outputs

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        self._called("prefill", rows[0].id, max_tokens)
        return self._advance(rows, max_tokens)

    def _advance(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        first = rows[0]
        prompt, done = _computed(first), self.prompts.get(first.id, 0)
        assert done == first.prompt.num_prefilled and not any(row.id in self.rows for row in rows)
        num_tokens = min(max_tokens, len(prompt) - done)
        self.prompts[first.id] = done + num_tokens
        if done + num_tokens < len(prompt):
            return PrefillOutput(num_tokens)
        del self.prompts[first.id]
        for row in rows:
            self.rows[row.id], self._positions[row.id] = row, len(row.output_token_ids)
        return PrefillOutput(num_tokens, {row.id: self._output(row, 0) for row in rows})

    def next_image(self, rows: Sequence[Row]) -> ImageLeft | None:
        """The fake sees none."""

    encode: Any = None

    def prefill_burst(self, chunks: Sequence[PromptChunk]) -> list[PrefillOutput]:
        self._called("prefill_burst", *((chunk.row.id, chunk.num_tokens) for chunk in chunks))
        return [self._advance([chunk.row], chunk.num_tokens) for chunk in chunks]

    def restore(self, rows: Sequence[Row], snapshot: Any, lend: Sequence[Any] = ()) -> None:
        self._called("restore", rows[0].id, snapshot.num_tokens)
        for one in lend:
            one.is_lent = True
        assert np.array_equal(_computed(rows[0])[: snapshot.num_tokens], snapshot.token_ids)
        at = snapshot
        while at is not None:
            assert not at.is_lent or at in lend
            at = at.parent
        self.prompts[rows[0].id] = snapshot.num_tokens

    def snapshot(
        self, rows: Sequence[Row], parent: Any, lend: bool = False, num_tokens: int | None = None
    ) -> "FakeSnapshot | None":
        first = rows[0]
        done = self.prompts[first.id] if first.id in self.prompts else len(_computed(first))
        if num_tokens is not None:
            assert num_tokens == done or (self.snapshots_prefixes and num_tokens < done)
            assert first.id in self.prompts or (self.snapshots_prefixes and first.id in self.rows)
            done = num_tokens
        self._called("snapshot", first.id, done)
        return _behind(parent, _computed(first)[:done].copy(), lend)

    def fill(self, row_id: str, segments: Sequence[Any]) -> None:
        self._called("fill", row_id, *(segment.num_tokens for segment in segments))
        for segment in segments:
            assert segment.is_lent
            segment.is_lent = row_id not in self.rows and row_id not in self.prompts

    def pending(self, row_ids: Sequence[str]) -> dict[str, RowOutput]:
        self._called("pending", *row_ids)
        return {row_id: self._in_flight[row_id] for row_id in row_ids if row_id in self._in_flight}

    def snapshot_row(self, row_id: str, parent: Any = None, lend: bool = False) -> RowSnapshot | None:
        self._called("snapshot_row", row_id)
        row = self.rows.get(row_id)
        if row is None or row.spec.sparse is not None:
            return None
        taken_in = self._taken_in(row)
        token_ids = np.concatenate([row.spec.token_ids, taken_in]).astype(np.int32)
        return RowSnapshot(taken_in, _behind(parent, token_ids, lend))

    def _taken_in(self, row: Row) -> np.ndarray:
        """All that has been sampled but for the last one, and nothing behind the end of the row."""
        seed, num_sampled = row.sampling.seed, self._positions[row.id]
        stop = self.stops_at.get(seed, row.sampling.max_tokens)
        most = min(stop + 1, row.sampling.max_tokens)
        ids = [STOP if position == stop else token(seed, position) for position in range(min(num_sampled - 1, most))]
        return np.array(ids, np.int32)

    def export_snapshot(self, snapshot: Any) -> dict[str, np.ndarray]:
        num_own = np.array([snapshot.num_own], np.int32)
        return {f"{SEGMENT_ARRAYS}tokens": snapshot.token_ids, f"{SEGMENT_ARRAYS}num_own": num_own}

    def import_snapshot(
        self, arrays: dict[str, np.ndarray], num_tokens: int, parent: Any, with_state: bool = True
    ) -> Iterator["FakeSnapshot | None"]:
        num_own, tokens = num_tokens - (parent.num_tokens if parent else 0), arrays.pop(f"{SEGMENT_ARRAYS}tokens")
        yield None
        if tokens.shape != (num_tokens,) or int(arrays.pop(f"{SEGMENT_ARRAYS}num_own")[0]) != num_own:
            raise ValueError("not of this model, or not behind this parent")
        yield FakeSnapshot(tokens, num_own)

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Any]] | None = None) -> None:
        self._called("drop", *row_ids)
        for row_id in row_ids:
            if lent and row_id in lent:
                self.fill(row_id, lent[row_id])
            for held in (self.rows, self.prompts, self._positions, self._in_flight):
                held.pop(row_id, None)

    def reset(self) -> None:
        for held in (self.rows, self._positions, self._in_flight):
            held.clear()

    def memory(self) -> dict[str, int]:
        if "memory" in self.broken:
            raise RuntimeError("no figures")
        return {"rows": len(self.rows), "prompts": len(self.prompts)}

    def free_caches(self) -> None:
        self._called("free_caches")
        self.feature_bytes = 0

    def probe(self) -> None:
        """A device that cannot prefill cannot do this either."""
        if "prefill" in self.broken:
            raise RuntimeError("the device is broken")

    def close(self) -> None:
        self.closed = True

    def _called(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.broken:
            raise RuntimeError("secret detail of the library")

    def _launch(self, num_draft_tokens: int) -> dict[str, RowOutput]:
        return {row.id: self._output(row, num_draft_tokens) for row in self.rows.values()}

    def _output(self, row: Row, num_draft_tokens: int) -> RowOutput:
        seed, start = row.sampling.seed, self._positions[row.id]
        num_accepted = 0
        while num_accepted < num_draft_tokens and self.accepts(seed, start + num_accepted):
            num_accepted += 1
        positions = range(start, start + num_accepted + 1)
        self._positions[row.id] = positions.stop
        ids = tuple(STOP if p == self.stops_at.get(seed) else token(seed, p) for p in positions)
        logprobs = tuple(TokenLogprobs(-float(p)) for p in positions) if row.sampling.logprobs is not None else ()
        return RowOutput(ids, logprobs, num_draft_tokens, num_accepted, error=self.errors.get(row.id))


def run_engine(test: Callable[[AsyncEngine], Awaitable], runner: Any, config: Mapping[str, Any]) -> None:
    """The test with an engine around this runner, for at most 60 s."""

    async def main() -> None:
        engine = AsyncEngine(EngineConfig.model_validate(config), lambda config, progress: runner)
        await engine.wait_ready()
        try:
            async with asyncio.timeout(60):
                await test(engine)
        finally:
            await engine.shutdown()

    asyncio.run(main())


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
