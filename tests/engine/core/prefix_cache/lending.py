"""An engine over a fake model that knows where the keys and values of each snapshot are, and checks it in each step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.memory.costs import MemoryCosts
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.row import Row
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.snapshot_store.files import SnapshotFiles
from tests.support.clock import Clock
from tests.support.driver import Driver
from tests.support.fake_runner import BYTES_PER_TOKEN, STATE_BYTES, FakeRunner, answer

CHUNK = 64
COSTS = MemoryCosts(token_bytes=BYTES_PER_TOKEN, state_bytes=STATE_BYTES, layer_share=0.0)
GENERATION = [7, 8]


class HoldingRunner(FakeRunner):
    """Knows which row has the keys and values of which segments: those of a row that it lets go of are lost.

    breaks_at: by method, after how many of the segments it raises. lacking: rows that cannot fill anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holder: dict[Any, str] = {}
        self.breaks_at: dict[str, int] = {}
        self.lacking: set[str] = set()

    def restore(self, rows: Sequence[Row], snapshot: Any, lend: Sequence[Any] = ()) -> None:
        num_moved = self.breaks_at.pop("restore", None)
        super().restore(rows, snapshot, lend)
        for segment in lend:
            assert segment not in self.holder, "the keys and values are in one place"
            self.holder[segment] = rows[0].id
        if num_moved is not None:
            for segment in lend[num_moved:]:
                segment.is_lent = False
                del self.holder[segment]
            for segment in lend[:num_moved]:
                del self.holder[segment]
            del self.prompts[rows[0].id]
            raise RuntimeError("restore failed half-way")

    def snapshot(self, rows: Sequence[Row], parent: Any, lend: bool = False, num_tokens: int | None = None) -> Any:
        snapshot = super().snapshot(rows, parent, lend, num_tokens)
        if lend:
            self.holder[snapshot] = rows[0].id
        return snapshot

    def snapshot_row(self, row_id: str, parent: Any = None, lend: bool = False) -> Any:
        taken = super().snapshot_row(row_id, parent, lend)
        if taken is not None and lend:
            self.holder[taken.snapshot] = row_id
        return taken

    def fill(self, row_id: str, segments: Sequence[Any]) -> None:
        num_filled = self.breaks_at.pop("fill", len(segments))
        self._called("fill", row_id, *(segment.num_tokens for segment in segments))
        assert [one.num_tokens for one in segments] == sorted(one.num_tokens for one in segments)
        for segment in segments[:num_filled]:
            assert segment.is_lent, "no segment is copied twice"
            if self.holder.get(segment) == row_id and row_id not in self.lacking:
                segment.is_lent = False
                del self.holder[segment]
        if num_filled < len(segments):
            raise RuntimeError("fill failed half-way")

    def export_snapshot(self, snapshot: Any) -> dict[str, np.ndarray]:
        assert not snapshot.is_lent, "what is written has its keys and values"
        return super().export_snapshot(snapshot)

    def prefill(self, rows: Sequence[Row], max_tokens: int) -> Any:
        try:
            return super().prefill(rows, max_tokens)
        except Exception:  # as the real one does
            self.prompts.pop(rows[0].id, None)
            self._lose()
            raise

    def drop(self, row_ids: Sequence[str], lent: Mapping[str, Sequence[Any]] | None = None) -> None:
        for row_id in lent or ():
            assert row_id in row_ids
        super().drop(row_ids, lent)
        self._lose()

    def reset(self) -> None:
        super().reset()
        self._lose()

    def has(self, row_id: str) -> bool:
        return row_id in self.rows or row_id in self.prompts

    def _lose(self) -> None:
        self.holder = {segment: row_id for segment, row_id in self.holder.items() if self.has(row_id)}


def request(name: str, *parts: Sequence[int], max_tokens: int = 40, **more: Any) -> EngineRequest:
    """The first of the parts is the system part if there are several; a turn ends behind the last one."""
    ids = [token for part in parts for token in part]
    boundaries = [Boundary("system", len(parts[0]))] if len(parts) > 1 else []
    boundaries.append(Boundary("turn", len(ids)))
    spec = {"boundaries": tuple(boundaries), **more}
    return EngineRequest(
        name, np.array([*ids, *GENERATION], np.int32), SamplingParams(max_tokens, seed=len(name)), (), **spec
    )


def following(name: str, before: EngineRequest, *more: int, said: int = 0, **changes: Any) -> EngineRequest:
    """The next turn of a conversation: `said` tokens of the answer before, then more; its turn ends behind them."""
    ids = np.concatenate([before.token_ids, np.array([*answer(before)[:said], *more], np.int32)])
    boundaries = (*before.boundaries, Boundary("turn", len(ids)))
    ids = np.concatenate([ids, np.array(GENERATION, np.int32)])
    spec: dict[str, Any] = {"boundaries": boundaries, **changes}
    return replace(before, request_id=name, token_ids=ids, **spec)


def tokens(seed: int, count: int) -> list[int]:
    return [20 + (seed * 7919 + i * 31) % 900 for i in range(count)]


class Engine(Driver):
    """max_bytes: all that its memory holds. room: what of that its prefix cache may take."""

    def __init__(
        self,
        max_bytes: int = 2**30,
        files: SnapshotFiles | None = None,
        cache: Mapping[str, Any] | None = None,
        clock: Callable[[], float] | None = None,
        **config: Any,
    ):
        self.runner = HoldingRunner()
        self.runner.costs, self.runner.memory_limit_bytes = COSTS, max_bytes
        memory = {"headroom_gb": 0, **config.pop("memory", {})}
        settings = {
            "prefill_chunk_tokens": CHUNK,
            "mtp": "off",
            **config,
            "memory": memory,
            "prefix_cache": cache or {},
        }
        self.config = EngineConfig.model_validate(settings)
        super().__init__(self.runner, self.config, clock)
        if files is not None:
            # By default the clock stands still, so that no reading takes too long, however busy the machine is.
            self.core = EngineCore(self.config, self.runner, self._publish, clock=clock or Clock(), files=files)
        self.is_checked = True

    @property
    def cache(self) -> Any:
        return self.core.prefixes.store

    def nodes(self) -> list[SnapshotNode]:
        return [*(node for node in self.cache.nodes() if node.snapshot is not None), *self.cache._stateless]

    def lent(self) -> dict[str, list[int]]:
        """Where segments end whose keys and values are in rows, by row id."""
        found: dict[str, list[int]] = {}
        for node in self.nodes():
            if node.kv_segment.is_lent:
                found.setdefault(node.owner or "", []).append(node.num_tokens)
        return {row_id: sorted(ends) for row_id, ends in found.items()}

    def assigned(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for node in self.nodes():
            if node.owner is not None and not node.kv_segment.is_lent:
                found.setdefault(node.owner, []).append(node.num_tokens)
        return {row_id: sorted(ends) for row_id, ends in found.items()}

    def stored(self) -> list[int]:
        return sorted(node.num_tokens for node in self.cache.nodes() if node.snapshot is not None)

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.core.step()
            if self.is_checked:
                self.check()

    def check(self) -> None:
        """Each byte is counted once: as the cache's or as a row's, and it is where it is counted."""
        cache, runner = self.cache, self.runner
        held_bytes = 0
        for node in self.nodes():
            segment: Any = node.segment
            held_bytes += node.segment_bytes + (node.state_bytes if node.snapshot is not None else 0)
            if segment.is_lent:
                is_where_it_says = node.owner is not None and runner.holder.get(segment) == node.owner
                assert is_where_it_says or not cache.nodes_that_need(node), "it is lost"
                assert node.segment_bytes == 0
            elif node.owner is None:
                assert node.segment_bytes == BYTES_PER_TOKEN * segment.num_own
            assert node.owner is None or node in cache.owned_by(node.owner)
        assert held_bytes == cache.num_bytes
        assert cache.num_bytes <= self.core.prefixes.memory.max_bytes
        assert self.core.budget.free_bytes >= 0, f"{-self.core.budget.free_bytes} bytes are counted for two things"
        assert len(self.nodes()) == cache.num_segments

    def start(self, *requests: EngineRequest) -> None:
        """Until all of them decode."""
        for one in requests:
            self.core.add_request(one)
        ids = {f"{one.request_id}/{i}" for one in requests for i in range(one.num_choices)}
        for _ in range(200):
            self.step()
            if ids <= self.runner.rows.keys():
                return
        raise AssertionError(f"{ids} do not decode")

    def begin(self, one: EngineRequest) -> None:
        """Until its prompt is in progress."""
        self.core.add_request(one)
        for _ in range(200):
            self.step()
            if f"{one.request_id}/0" in self.runner.prompts:
                return
        raise AssertionError(f"{one.request_id} does not begin")

    def finish_all(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert not self.cache.owners and not self.lent() and not self.assigned()
        assert self.cache.integrity_error() is None
        assert self.cache.counters.num_integrity_errors == 0

    def ask(self, *requests: EngineRequest) -> list[int]:
        """One after the other, to their ends; returns how many tokens came from the cache."""
        for one in requests:
            self.core.add_request(one)
            self.finish_all()
            assert self.tokens[one.request_id] == answer(one), self.errors[one.request_id]
        return [self.chunks[one.request_id][0].num_cached for one in requests]
