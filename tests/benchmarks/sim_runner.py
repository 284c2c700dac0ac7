"""The engine's core over a virtual clock: machines, a runner that computes nothing, and requests of clients."""

import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.memory.costs import MemoryCosts
from engine.core.row import Row, RowState
from engine.core.runner import (
    PLAIN,
    SEGMENT_ARRAYS,
    ChunkTime,
    Drafts,
    Encoded,
    PrefillOutput,
    PromptChunk,
    RowOutput,
    RowSnapshot,
    StepTime,
)
from engine.core.scheduler_output import Published
from engine.placement import ConversationKeys
from engine.protocol import Boundary, EngineRequest, FinishReason, SamplingParams, TokenChunk
from engine.snapshot_store.files import MAX_QUEUED_BYTES, SnapshotMeta
from tests.support.clock import Clock

GIB, MIB, KIB = 2**30, 2**20, 2**10

VOCAB_SIZE = 248_320
STOP = 2

MAX_TOKENS = 32_000
"""The ceiling that coding agents send with each request."""

GENERATION_TOKENS = 5
"""Tokens of the generation prompt, which the next turn's prompt repeats at the same place, after the turn's
boundary."""

MAX_S = 200_000.0
"""Virtual seconds after which a load that does not end is given up."""

FIGURES_PERIOD_S = 60.0
"""Virtual seconds after which the core reads the figures of the status page: no policy, but half of the CPU time."""

STEP_S = 0.0005
"""Seconds of the host in each call."""


@dataclass(frozen=True)
class Machine:
    """A device with a model on it: how many bytes and seconds everything takes."""

    name: str
    memory_bytes: int
    """Memory that the device recommends (Metal's working set) or has."""
    costs: MemoryCosts
    chunk_s: float
    """Seconds of a chunk, whatever its size: weights are read, kernels are started."""
    token_s: float
    """Seconds of a prompt token besides attention."""
    pair_s: float
    """Seconds of attention of one prompt token to one token in front of it."""
    weights_s: float
    """Seconds of a decode step of one decode group without its rows."""
    row_s: float
    """Seconds of a row in a decode step, besides reading its keys and values."""
    draft_s: float
    """Seconds of one draft token of one row, drafted and verified."""
    bandwidth: float
    """Bytes per second of the device's memory."""
    acceptance: tuple[float, ...]
    """How often the draft at each depth holds when those before it did."""
    disk_bandwidth: float = 2e9
    """Bytes per second that are read from or written to its disk, checksums included."""

    def chunk_seconds(self, start: int, num_tokens: int, num_rows: int = 1) -> float:
        """Return the seconds of num_tokens prompt tokens behind `start` others, of each of `num_rows` prompts."""
        num_pairs = num_tokens * (start + num_tokens / 2)
        return STEP_S + self.chunk_s + num_rows * (self.token_s * num_tokens + self.pair_s * num_pairs)

    def prompt_seconds(self, num_tokens: int, chunk_tokens: int = 2048) -> float:
        """Return the seconds of a whole prompt in chunks of a fixed size."""
        starts = range(0, num_tokens, chunk_tokens)
        return sum(self.chunk_seconds(start, min(chunk_tokens, num_tokens - start)) for start in starts)

    def step_seconds(self, groups: Iterable[tuple[int, int]], num_drafts: int) -> float:
        """Return the seconds of a decode step. groups: (rows, tokens of the longest row)."""
        seconds = STEP_S
        for num_rows, longest in groups:
            reading = num_rows * longest * self.costs.token_bytes / self.bandwidth
            seconds += self.weights_s + reading + num_rows * (self.row_s + num_drafts * self.draft_s)
        return seconds

    def row_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a row of so many tokens."""
        return self.costs.rows(1, self.costs.slots(num_tokens + self.costs.overshoot))

    def copy_seconds(self, num_bytes: int) -> float:
        """Return the seconds of reading and writing so many bytes."""
        return STEP_S + 2 * num_bytes / self.bandwidth


def _costs(base_gib: float, token_kib: int, state_mib: float, attention_layers: int, pair_bytes: float) -> MemoryCosts:
    return MemoryCosts(
        base_bytes=int(base_gib * GIB),
        token_bytes=token_kib * KIB,
        state_bytes=int(state_mib * MIB),
        layer_share=1 / attention_layers,
        slots_step=256,
        overshoot=9,
        row_step_bytes=24 * MIB,
        slot_step_bytes=552.0,
        chunk_bytes=64 * MIB,
        token_step_bytes=200_000.0,
        pair_bytes=pair_bytes,
    )


MAC_27B = Machine(
    "27B-4bit/64GB", 48 * GIB, _costs(16.5, 68, 147, 17, 265.0),
    chunk_s=0.03, token_s=3.2e-3, pair_s=2.4e-8, weights_s=0.036, row_s=0.0, draft_s=9e-3, bandwidth=400e9,
    acceptance=(0.8, 0.7, 0.6),
)  # fmt: skip
"""Qwen3.5-27B in 4 bits on a Mac of 400 GB/s: a prompt of 60k tokens takes 240 s, a step of 4 rows of 60k tokens 78 ms,
42 GiB are used, 25.5 GiB of which by requests."""

MAC_35B_A3B = Machine(
    "35B-A3B-4bit/64GB", 48 * GIB, _costs(19.5, 22, 61.5, 11, 185.0),
    chunk_s=0.045, token_s=1.0e-3, pair_s=1.0e-8, weights_s=0.010, row_s=2.5e-3, draft_s=2.5e-3, bandwidth=400e9,
    acceptance=(0.8, 0.7, 0.6),
)  # fmt: skip
"""Qwen3.5-35B-A3B in 4 bits on the same Mac: each chunk reads all experts, each row of a step its own."""

MAC_4B = Machine(
    "4B-4bit/16GB", int(10.67 * GIB), _costs(2.9, 36, 49, 9, 177.0),
    chunk_s=0.025, token_s=2.6e-3, pair_s=4e-8, weights_s=0.026, row_s=1e-3, draft_s=7e-3, bandwidth=100e9,
    acceptance=(0.8, 0.7, 0.6),
)  # fmt: skip
"""Qwen3.5-4B in 4 bits on a Mac of 100 GB/s: 6.4 GiB for requests."""

H200_27B = Machine(
    "27B-bf16/H200", 139 * GIB, _costs(52, 68, 147, 17, 265.0),
    chunk_s=0.012, token_s=1.35e-4, pair_s=2e-9, weights_s=0.018, row_s=2e-4, draft_s=5e-4, bandwidth=3.4e12,
    acceptance=(0.8, 0.7, 0.6),
)  # fmt: skip
"""Qwen3.5-27B in bfloat16 on an H200: 79 GiB for requests."""

MACHINES = {machine.name: machine for machine in (MAC_27B, MAC_35B_A3B, MAC_4B, H200_27B)}


@dataclass(slots=True, eq=False, weakref_slot=True)
class ClockSegment:
    """Keys and values of the tokens behind those of `parent`."""

    parent: "ClockSegment | None"
    end: int
    """Tokens up to here."""
    own_bytes: int
    counted: list[int]
    """Its bytes as long as they are not a row's, else 0."""

    @property
    def is_lent(self) -> bool:
        return self.num_bytes < self.own_bytes

    @property
    def num_bytes(self) -> int:
        return self.counted[0]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ClockSnapshot:
    """A core Snapshot of the prompt's first tokens."""

    token_ids: np.ndarray
    segment: ClockSegment
    state_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def segment_bytes(self) -> int:
        return self.segment.num_bytes


@dataclass(slots=True)
class Prompt:
    """A prompt in progress."""

    num_bytes: int
    done: int = 0
    """Tokens that are computed or restored."""
    reached: int = 0
    """Tokens that the row had computed or restored before it lost its place."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a prompt, as it was computed."""

    request_id: str
    start: int
    """Tokens in front of it."""
    num_tokens: int
    reached: int
    """See Prompt."""
    seconds: float
    num_decoding: int
    """Rows in the decode batch meanwhile."""


class ClockRunner:
    """A ModelRunner over a virtual clock, with the memory that its rows, prompts and snapshots would really take."""

    max_context_tokens = 262_144
    vocab_size = num_embeddings = VOCAB_SIZE
    image_token_id: int | None = None
    snapshots_prefixes = False
    whole_images = False
    whole_prompts: str | None = None
    encoder: Encoded | None = None
    no_sparse: str | None = "no sparse plans in the simulation"
    no_pooling: str | None = "no embeddings in the simulation"
    no_bursts: str | None = None
    feature_bytes = 0

    def __init__(self, machine: Machine, clock: Clock):
        self.machine = machine
        self.clock = clock
        self.costs = machine.costs
        self.memory_limit_bytes = machine.memory_bytes
        self.fingerprint = machine.name
        self.drafts: Sequence[Drafts] = tuple(Drafts(k) for k in range(1, len(machine.acceptance) + 1))
        self.no_drafts: Mapping[str, str] = {"prompt_lookup": "not simulated"}
        self.step_times: Sequence[StepTime] = [
            StepTime(rows, drafts, machine.step_seconds([(rows, 1)], drafts.num_tokens))
            for rows in (1, 2, 8)
            for drafts in (PLAIN, *self.drafts)
        ]
        self.snapshot_s = 0.0
        self.chunk_times: Sequence[ChunkTime] = [
            ChunkTime(num_tokens, machine.chunk_seconds(0, num_tokens)) for num_tokens in (64, 256)
        ]
        self.capabilities: dict[str, Any] = {"media": [], "mtp": "simulated"}
        self.answers: dict[str, list[int]] = {}
        """Request id -> the tokens that the model answers, STOP behind them."""
        self.chunks: list[Chunk] = []
        self.decode_s = 0.0
        """Seconds of all decode steps."""
        self.slow_factor = 1.0
        """How much longer the next chunk beside decoding rows takes; 1 again behind it."""
        self._rows: dict[str, Row] = {}
        self._prompts: dict[str, Prompt] = {}
        """By the id of the first row."""
        self._reached: dict[str, int] = {}
        """By row id: the most tokens that were computed or restored for it."""
        self._snapshot_bytes = 0
        self._random = random.Random(0)

    @property
    def active_bytes(self) -> int:
        """Bytes that are held now: weights, rows in their groups, prompts in progress, snapshots."""
        costs, prompts = self.costs, sum(prompt.num_bytes for prompt in self._prompts.values())
        rows = sum(n * (costs.slots(longest) * costs.token_bytes + costs.state_bytes) for n, longest in self._groups())
        return costs.base_bytes + rows + prompts + self._snapshot_bytes

    def settled_bytes(self) -> int:
        """The same: nothing is freed late."""
        return self.active_bytes

    def decode(self, drafts: Drafts = PLAIN) -> Mapping[str, RowOutput]:
        num_draft_tokens = drafts.num_tokens
        seconds = self.machine.step_seconds(self._groups(), num_draft_tokens)
        self.decode_s += seconds
        self.clock.advance(seconds)
        return {row_id: self._output(row, num_draft_tokens) for row_id, row in self._rows.items()}

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> PrefillOutput:
        row = rows[0]
        prompt = self._prompts.get(row.id) or self._begin(row)
        assert prompt.done == row.prompt.num_prefilled
        num_tokens = min(max_tokens, row.num_tokens - prompt.done)
        self._compute(row, prompt, num_tokens, self.machine.chunk_seconds(prompt.done, num_tokens))
        return self._taken_in(rows, prompt, num_tokens)

    def _taken_in(self, rows: Sequence[Row], prompt: Prompt, num_tokens: int) -> PrefillOutput:
        row = rows[0]
        if prompt.done < row.num_tokens:
            return PrefillOutput(num_tokens)
        del self._prompts[row.id]
        self._rows |= {each.id: each for each in rows}
        return PrefillOutput(num_tokens, {each.id: self._output(each, 0) for each in rows})

    def next_image(self, rows: Sequence[Row]) -> None:
        """The simulation has no images."""

    def encode(self, rows: Sequence[Row], num_blocks: int) -> None:
        raise NotImplementedError("the simulation has no images")

    def prefill_burst(self, chunks: Sequence[PromptChunk]) -> list[PrefillOutput]:
        """Each chunk takes its part of the seconds of the forward, padded to the longest."""
        prompts = [self._prompts.get(chunk.row.id) or self._begin(chunk.row) for chunk in chunks]
        longest, start = max(chunk.num_tokens for chunk in chunks), max(prompt.done for prompt in prompts)
        each_s = self.machine.chunk_seconds(start, longest, len(chunks)) / len(chunks)
        for chunk, prompt in zip(chunks, prompts, strict=True):
            assert prompt.done == chunk.prompt.num_prefilled
            self._compute(chunk.row, prompt, chunk.num_tokens, each_s)
        taken = zip(chunks, prompts, strict=True)
        return [self._taken_in([chunk.row], prompt, chunk.num_tokens) for chunk, prompt in taken]

    def restore(self, rows: Sequence[Row], snapshot: Any, lend: Sequence[Any] = ()) -> None:
        row, segment = rows[0], snapshot.segment
        assert row.id not in self._prompts
        while segment is not None:
            assert not segment.is_lent, "the keys and values of a snapshot are in another row's cache"
            segment = segment.parent
        for one in lend:
            self._snapshot_bytes -= one.num_bytes
            one.counted[0] = 0
        assert np.array_equal(row.prompt_token_ids[: snapshot.num_tokens], snapshot.token_ids)
        prompt = self._begin(row)
        self._moved(row, prompt, snapshot.num_tokens)
        self.clock.advance(self.machine.copy_seconds(self._size(snapshot.num_tokens)))

    def snapshot(
        self, rows: Sequence[Row], parent: Any, lend: bool = False, num_tokens: int | None = None
    ) -> ClockSnapshot:
        done = self._prompts[rows[0].id].done
        assert num_tokens in (None, done)
        return self._snapshot(rows[0].prompt_token_ids[:done].copy(), parent, lend)

    def _snapshot(self, token_ids: np.ndarray, parent: Any, lend: bool, with_state: bool = True) -> ClockSnapshot:
        num_before = 0 if parent is None else parent.end
        own_bytes = (len(token_ids) - num_before) * self.costs.token_bytes
        segment = ClockSegment(parent, len(token_ids), own_bytes, [0 if lend else own_bytes])
        snapshot = ClockSnapshot(token_ids, segment, self.costs.state_bytes if with_state else 0)
        self._hold(segment, segment.counted)
        self._hold(snapshot, [snapshot.state_bytes])
        self.clock.advance(self.machine.copy_seconds(segment.num_bytes + snapshot.state_bytes))
        return snapshot

    def fill(self, row_id: str, segments: Sequence[Any]) -> None:
        if row_id not in self._rows and row_id not in self._prompts:
            return
        for one in segments:
            assert one.is_lent, "the keys and values are in the cache already"
            one.counted[0] = one.own_bytes
            self._snapshot_bytes += one.own_bytes
            self.clock.advance(self.machine.copy_seconds(one.own_bytes))

    def pending(self, row_ids: Sequence[str]) -> Mapping[str, RowOutput]:
        """No step is under way between two calls."""
        return {}

    def snapshot_row(self, row_id: str, parent: Any = None, lend: bool = False) -> RowSnapshot | None:
        if (row := self._rows.get(row_id)) is None:
            return None
        said = np.array(row.output_token_ids, np.int32)
        if row.state is not RowState.FINISHED:
            said = said[:-1]  # the last token is not computed yet
        snapshot = self._snapshot(np.concatenate([row.spec.token_ids, said]), parent, lend)
        return RowSnapshot(said, snapshot)

    def export_snapshot(self, snapshot: Any) -> dict[str, np.ndarray]:
        """The arrays have the size of the real ones, and no memory."""
        assert not snapshot.segment.is_lent, "the keys and values are in a row's cache"
        sizes = {f"{SEGMENT_ARRAYS}0": snapshot.segment.num_bytes, "state": snapshot.state_bytes}
        sized = {name: np.broadcast_to(np.uint8(0), num_bytes) for name, num_bytes in sizes.items()}
        return sized | {f"{SEGMENT_ARRAYS}tokens": snapshot.token_ids}

    def import_snapshot(
        self, arrays: dict[str, np.ndarray], num_tokens: int, parent: Any, with_state: bool = True
    ) -> Iterator[ClockSnapshot | None]:
        num_layers, tokens = round(1 / self.costs.layer_share), arrays[f"{SEGMENT_ARRAYS}tokens"]
        assert len(tokens) == num_tokens
        num_bytes = (num_tokens - (0 if parent is None else parent.end)) * self.costs.token_bytes
        for _ in range(num_layers - 1):
            self.clock.advance(2 * num_bytes / num_layers / self.machine.bandwidth)
            yield None
        yield self._snapshot(tokens, parent, False, with_state)

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Any]] | None = None) -> None:
        for row_id in row_ids:
            self.fill(row_id, (lent or {}).get(row_id, ()))
            self._rows.pop(row_id, None)
            self._prompts.pop(row_id, None)

    def reset(self) -> None:
        self._rows.clear()

    def memory(self) -> dict[str, int]:
        return {"active_bytes": self.active_bytes}

    def free_caches(self) -> None:
        """There are none."""

    def probe(self) -> None:
        """It works."""

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self, row: Row) -> Prompt:
        if row.output_token_ids:  # preempted: all but the last of its tokens had been computed
            self._reached[row.id] = max(self._reached.get(row.id, 0), row.num_tokens - 1)
        num_bytes = self._size(self.costs.slots(row.num_tokens))
        prompt = self._prompts[row.id] = Prompt(num_bytes, reached=self._reached.get(row.id, 0))
        return prompt

    def _compute(self, row: Row, prompt: Prompt, num_tokens: int, seconds: float) -> None:
        num_decoding = len(self._rows)
        if num_decoding:
            seconds, self.slow_factor = seconds * self.slow_factor, 1.0
        self.clock.advance(seconds)
        chunk = Chunk(row.spec.request_id, prompt.done, num_tokens, prompt.reached, seconds, num_decoding)
        self.chunks.append(chunk)
        self._moved(row, prompt, prompt.done + num_tokens)

    def _moved(self, row: Row, prompt: Prompt, done: int) -> None:
        prompt.done = done
        self._reached[row.id] = max(self._reached.get(row.id, 0), done)

    def _size(self, num_tokens: int) -> int:
        return num_tokens * self.costs.token_bytes + self.costs.state_bytes

    def _hold(self, held: object, counted: list[int]) -> None:
        self._snapshot_bytes += counted[0]
        weakref.finalize(held, self._let_go, counted)

    def _let_go(self, counted: list[int]) -> None:
        self._snapshot_bytes -= counted[0]

    def _groups(self) -> list[tuple[int, int]]:
        """(rows, tokens of the longest) of each decode group."""
        groups: dict[int, tuple[int, int]] = {}
        for row in self._rows.values():
            num_rows, longest = groups.get(row.decode_group, (0, 0))
            groups[row.decode_group] = num_rows + 1, max(longest, row.num_tokens)
        return list(groups.values())

    def _output(self, row: Row, num_drafts: int) -> RowOutput:
        start, num_accepted = len(row.output_token_ids), 0
        while num_accepted < num_drafts and self._random.random() < self.machine.acceptance[num_accepted]:
            num_accepted += 1
        tokens = self.answers[row.spec.request_id][start : start + num_accepted + 1]
        return RowOutput(tuple(tokens), (), num_drafts, min(num_accepted, len(tokens) - 1))


@dataclass(slots=True)
class StoredSnapshot:
    """A file of the simulated disk."""

    meta: SnapshotMeta
    arrays: dict[str, np.ndarray]
    num_bytes: int
    written_s: float
    """When it is written; until then its bytes wait in memory."""


class ClockFiles:
    """SnapshotFiles on a disk over a virtual clock: it reads and writes one after the other, reads first."""

    def __init__(self, clock: Clock, bandwidth: float, max_bytes: float = math.inf):
        self._clock = clock
        self._bandwidth = bandwidth
        self._max_bytes = max_bytes
        self._files: dict[str, StoredSnapshot] = {}
        self._reads: list[tuple[float, Future[dict[str, np.ndarray]], dict[str, np.ndarray]]] = []
        self._read_until_s = self._written_until_s = 0.0
        self.num_read_bytes = self.num_written_bytes = self.num_dropped = 0

    def entries(self) -> list[SnapshotMeta]:
        return []

    def __contains__(self, digest: str) -> bool:
        return digest in self._files

    def meta_of(self, digest: str) -> SnapshotMeta | None:
        return self._files[digest].meta if digest in self._files else None

    def save(self, meta: SnapshotMeta, arrays: dict[str, np.ndarray]) -> bool:
        now, num_bytes = self._clock(), sum(array.nbytes for array in arrays.values())
        queued = sum(
            file.num_bytes
            for file in self._files.values()
            if file.written_s - file.num_bytes / self._bandwidth > now  # not the one that is being written
        )
        if meta.digest in self._files:
            return True
        if queued and queued + num_bytes > MAX_QUEUED_BYTES:
            self.num_dropped += 1
            return False
        assert not meta.parent or meta.parent in self._files, "what is in front of it is not written"
        self._written_until_s = max(now, self._written_until_s, self._read_until_s) + num_bytes / self._bandwidth
        self._files[meta.digest] = StoredSnapshot(meta, dict(arrays), num_bytes, self._written_until_s)
        self.num_written_bytes += num_bytes
        assert sum(file.num_bytes for file in self._files.values()) <= self._max_bytes, "the disk is full"
        return True

    def load(self, digest: str, prefix: str = "") -> Future[dict[str, np.ndarray]]:
        answer: Future[dict[str, np.ndarray]] = Future()
        file, now = self._files[digest], self._clock()
        due_s, arrays = now, {name: array for name, array in file.arrays.items() if name.startswith(prefix)}
        if file.written_s <= now:
            num_bytes = sum(array.nbytes for array in arrays.values())
            due_s = self._read_until_s = max(now, self._read_until_s) + num_bytes / self._bandwidth
            self.num_read_bytes += num_bytes
        self._reads.append((due_s, answer, arrays))
        self._deliver()
        return answer

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> bool:
        """Let the time pass in which a real engine would wait."""
        due_s = [due_s for due_s, future, _ in self._reads if future in futures]
        if due_s:
            self._clock.advance(max(0.0, min(max(due_s) - self._clock(), timeout_s)))
        self._deliver()
        return all(future.done() for future in futures)

    def touch(self, digest: str) -> None:
        """Nothing is evicted."""

    def discard(self, digest: str) -> Future[int]:
        raise AssertionError("no file is lost in the simulation")

    def clear(self) -> Future[int]:
        raise AssertionError("nothing clears the disk in the simulation")

    def status(self) -> dict[str, int]:
        read_us = int(1e6 * self.num_read_bytes / self._bandwidth)
        return {"num_files": len(self._files), "read_bytes": self.num_read_bytes, "read_us": read_us}

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""

    def _deliver(self) -> None:
        now = self._clock()
        for _, future, arrays in [one for one in self._reads if one[0] <= now]:
            future.set_result(arrays)
        self._reads = [one for one in self._reads if one[0] > now]


@dataclass(slots=True, eq=False)
class Ask:
    """One request of a client, over all of its attempts."""

    kind: str
    """Under which its TTFT is shown."""
    conversation: str
    """Requests of one conversation begin with the prompts of the turns before."""
    token_ids: np.ndarray
    answer: list[int]
    """The tokens that the model gives, without STOP."""
    num_before: int = 0
    """Tokens of the prompt that are not new: the prompt of the turn before, or a system part that others have sent."""
    num_system: int = 0
    """Tokens of the system part."""
    turn: int = 0
    """Turn of the conversation, from 0."""
    client: str = ""
    priority: int = 0
    max_tokens: int = MAX_TOKENS
    keys: ConversationKeys | None = None
    """Keys by which quotes find its cached prefix."""
    retries: int = 0
    """How often it is sent again when it expires."""
    arrived_s: float = math.nan
    """When the client sent it first."""
    first_s: float = math.nan
    """When its first token came."""
    output: list[int] = field(default_factory=list)
    """The tokens that the engine gave."""
    reason: FinishReason | None = None
    """How it ended, None before."""

    @property
    def is_answered(self) -> bool:
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_before

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """As processing/boundaries.py finds them: the system part, and the prompt without its generation prompt."""
        turn = Boundary("turn", len(self.token_ids) - GENERATION_TOKENS)
        return (Boundary("system", self.num_system), turn) if self.num_system else (turn,)


class Simulation:
    """An engine core, its clients, and what happened."""

    def __init__(self, machine: Machine, config: dict[str, Any], seed: int = 0, has_disk: bool = False):
        self.machine = machine
        self.clock = Clock(0.0)
        self.runner = ClockRunner(machine, self.clock)
        self.files = ClockFiles(self.clock, machine.disk_bandwidth) if has_disk else None
        files: Any = self.files
        self.core = EngineCore(EngineConfig.model_validate(config), self.runner, self._published, self.clock, files)
        self.asks: list[Ask] = []
        self.longest_step_s = 0.0
        self.random = np.random.default_rng(seed)
        self._open: dict[str, tuple[Ask, Callable[[Ask], None]]] = {}
        self._by_request: dict[str, Ask] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def tokens(self, num_tokens: int) -> np.ndarray:
        """Return random token ids, none of them STOP."""
        return self.random.integers(STOP + 1, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heappush(self._events, (time_s, next(self._serial), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.clock.now_s + seconds, action)

    def ask_at(self, time_s: float, ask: Ask, then: Callable[[Ask], None] = lambda ask: None) -> None:
        """Send the request at this time; `then` is called when it has ended for good."""
        self.asks.append(ask)

        def send() -> None:
            ask.arrived_s = time_s  # even if the device was busy then
            self._send(ask, then)

        self.at(time_s, send)

    def abort(self, ask: Ask) -> None:
        """The client of a request goes away: before the next step, if the request is open then."""
        self.at(self.clock.now_s, lambda: self._abort(ask))

    def _abort(self, ask: Ask) -> None:
        for request_id in [open_id for open_id, (other, _) in self._open.items() if other is ask]:
            del self._open[request_id]
            self.core.abort(request_id)
            ask.reason = FinishReason.ABORT

    def run(self) -> None:
        """Until no request is open and none will come."""
        with patch("engine.core.engine_core.FIGURES_PERIOD_S", FIGURES_PERIOD_S):
            self._run()

    def _run(self) -> None:
        while (self._events or self.core.has_work) and self.clock.now_s < MAX_S:
            while self._events and self._events[0][0] <= self.clock.now_s:
                heappop(self._events)[2]()
            if self.core.has_work:
                self.step()
            elif self._events:
                self.clock.now_s = max(self.clock.now_s, self._events[0][0])

    def ask_of(self, chunk: Chunk) -> Ask:
        return self._by_request[chunk.request_id]

    def step(self) -> None:
        """Run one step of the engine."""
        began_s = self.clock.now_s
        self.core.step()
        if self.clock.now_s == began_s:
            self.clock.advance(0.001)  # the device thread's own
        self.longest_step_s = max(self.longest_step_s, self.clock.now_s - began_s)

    def _send(self, ask: Ask, then: Callable[[Ask], None]) -> None:
        request_id = f"{ask.kind}-{next(self._serial)}"
        request = EngineRequest(
            request_id,
            ask.token_ids,
            SamplingParams(ask.max_tokens),
            (STOP,),
            boundaries=ask.boundaries,
            client=ask.client,
            priority=ask.priority,
            keys=ask.keys,
        )
        self._open[request_id], self._by_request[request_id] = (ask, then), ask
        self.runner.answers[request_id] = [*ask.answer, STOP]
        self.core.add_request(self.core.budget.needs.clamp_max_tokens(request, self.core.figures.pinned_bytes))

    def _published(self, chunks: Published) -> None:
        for row_id, chunk in chunks.items():
            if chunk.finish_reason is FinishReason.ABORT:  # the client's own wish
                continue
            request_id = row_id.rpartition("/")[0]
            ask, then = self._open[request_id]
            if chunk.token_ids and not ask.output:
                ask.first_s = self.clock.now_s
            ask.output += chunk.token_ids
            if chunk.finish_reason is not None:
                del self._open[request_id]
                self._ended(ask, chunk, then)

    def _ended(self, ask: Ask, chunk: TokenChunk, then: Callable[[Ask], None]) -> None:
        if chunk.finish_reason is FinishReason.EXPIRED and ask.retries:
            ask.retries -= 1
            self.after(chunk.retry_after_s or 1.0, lambda: self._send(ask, then))
            return
        ask.reason = chunk.finish_reason
        then(ask)
