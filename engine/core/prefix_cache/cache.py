"""PrefixCache: the prefix cache as the engine sees it. Prompts in progress use it from their first chunk to their end.

Each prompt is looked up when its first chunk is due. If another prompt in progress is computing its prefix, `source_of`
names that one, so that the scheduler advances it to the boundary instead of computing the prefix twice. Snapshots are
stored at the prompt's boundaries; if a later chunk fails, all snapshots that the prompt stored are discarded.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from typing import Literal

from engine.cache_miss import CacheMiss
from engine.config import BoundaryKind, PrefixCacheConfig
from engine.core.cost_model import CostModel
from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.miss import explain
from engine.core.prefix_cache.node import KVSegment, SnapshotNode
from engine.core.prefix_cache.prefix_fetcher import PrefixFetcher
from engine.core.prefix_cache.prompt_key import PromptKey, key_of, key_of_tokens
from engine.core.prefix_cache.restorer import PrefixCacheSession, PrefixRestorer
from engine.core.prefix_cache.snapshot_boundaries import LEAST_TOKENS, choose_boundaries, least_tokens
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.snapshot_taker import SnapshotTaker
from engine.core.prefix_cache.store import SnapshotStore
from engine.core.prompt import Prompt
from engine.core.row import Row
from engine.core.runner import ModelRunner
from engine.protocol import Boundary, EngineRequest
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.snapshot_client import SnapshotClient
from engine.status import CacheCleared, CacheEntryStatus, CacheStatus, EngineCounters

log = logging.getLogger("orchard.engine")

MAX_ENTRIES_SHOWN = 256


class PrefixCache:
    """Looks prompts up, restores them, takes their snapshots, and brings the KV segments of rows back.

    Implements core.scheduler_context.Prefixes.

    Args:
        config: Options of the prefix cache.
        runner: Takes and restores snapshots.
        stats: Counters to update.
        costs: Predicts the seconds of computing and reading; learns the rate of reading from disk.
        room: Returns the bytes that the engine has for snapshots now.
        files: Files of the disk tier; None without one.
        peers: Fetches prefixes from other nodes into these files; None without any.
        clock: Returns monotonic seconds.

    Attributes:
        off_reason: Why nothing is cached, None if snapshots are cached.
        store: The stored snapshots.
        memory: How much memory they may take.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        runner: ModelRunner,
        stats: EngineCounters,
        costs: CostModel,
        room: Callable[[], int],
        files: SnapshotFiles | None = None,
        peers: SnapshotClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config
        self._min_tokens = config.min_tokens or least_tokens(runner.snapshot_s, costs)
        if config.min_tokens is None and self._min_tokens > LEAST_TOKENS:
            computed_sooner = (
                "prefixes of fewer than %d tokens are not cached: a snapshot of them takes longer, %.1f ms"
            )
            log.info(computed_sooner, self._min_tokens, 1e3 * runner.snapshot_s)
        self._runner = runner
        self._stats = stats
        self._prompt_s = costs.prompt_s
        self._clock = clock
        self._next_check_s = 0.0
        self.off_reason = runner.whole_prompts if config.enabled else "prefix_cache.enabled is false"
        if self.off_reason is not None:
            files = None
        self.store = SnapshotStore(clock) if files is None else SnapshotStore(clock, files.meta_of)
        max_bytes = runner.memory_limit_bytes if config.max_gb is None else config.max_gb * 2**30
        self.memory = SnapshotMemory(
            self.store, int(max_bytes), costs.prompt_s, costs.read_s, room, runner.costs.max_snapshots
        )
        self._disk = None if files is None else DiskTier(files, self.memory, runner, clock, costs)
        self._loans = Loans(self.memory, self._disk, runner)
        fetcher = None
        if peers is not None and self._disk is not None:
            fetcher = PrefixFetcher(peers, self._disk.adopt, costs, clock)
        self._restorer = PrefixRestorer(runner, self.memory, self._loans, self._disk, fetcher)
        self._taker = SnapshotTaker(runner, self.memory, self._loans, self._disk, config.answers, self._min_tokens)

    # Prompts that have not begun

    def num_cached(self, row: Row) -> int:
        """Return how many tokens of a row's prompt are cached now; does not count as a use."""
        if not self._is_used_by(row):
            return 0
        key, counters = key_of(row, self._runner), self.store.counters
        version = (len(key), counters.num_stored, counters.num_evicted, len(self.store))
        if row.cached_hint is None or row.cached_hint[0] != version:
            node = self.store.match(key, _max_tokens(row, key))
            row.cached_hint = version, 0 if node is None else node.num_tokens
        return row.cached_hint[1]

    def peek(self, spec: EngineRequest) -> int:
        """Return how many tokens of a prompt are cached.

        They count as used, so that a plan based on them still finds them.
        """
        if self.off_reason is not None:
            return 0
        key = key_of_tokens(spec, spec.token_ids, self._runner)
        node = self.store.match(key, len(key) - 1)
        if node is None:
            return 0
        self.store.touch(node)
        return node.num_tokens

    def source_of(self, prompt: Prompt, in_progress: Iterable[Prompt]) -> Prompt | None:
        """Return the prompt in progress that will store the longest prefix of a prompt that has not begun.

        None if a prefix as long is cached already, or no prompt in progress shares one.
        """
        others = [(one, one.session) for one in in_progress if one.session is not None and one.session.is_storing]
        if not others or not self._is_used_by(prompt.row) or prompt.session is not None:
            return None
        key = key_of(prompt.row, self._runner)
        longest, source = self.num_cached(prompt.row), None
        for other, session in others:
            if session.key.tenant != key.tenant:
                continue
            num_common = min(key.num_common(session.key), _max_tokens(prompt.row, key))
            reached = max((b.num_tokens for b in session.todo if b.num_tokens <= num_common), default=0)
            if reached >= longest + self._min_tokens:
                longest, source = reached, other
        return source

    def boundary_digests(self, row: Row) -> list[tuple[BoundaryKind, int, str]]:
        """Return kind, number of tokens and digest of each boundary of a prompt; empty if it does not use the cache."""
        if not self._is_used_by(row) or not row.spec.boundaries:
            return []
        key = key_of(row, self._runner)
        digests = dict(key.digests(sorted(one.num_tokens for one in row.spec.boundaries)))
        return [(b.kind, b.num_tokens, digests[b.num_tokens]) for b in row.spec.boundaries if b.num_tokens in digests]

    def assign(self, prompt: Prompt) -> None:
        """Count the keys and values that a queued prompt will take over from the cache as its request's memory."""
        row = prompt.row
        if not row.may_take_over or not prompt.may_lend or self.num_cached(row) == 0:
            return
        key = key_of(row, self._runner)
        node = self.store.match(key, _max_tokens(row, key), in_memory=True)
        if node is not None:
            self._loans.assign(row.id, node)

    def revoke(self, prompt: Prompt) -> None:
        """Undo `assign` for a prompt that is not admitted."""
        self._loans.revoke(prompt.row.id)

    # Prompts in progress

    def begin(self, prompt: Prompt, wait_s: float = 0.0, copy_s: float = 0.0) -> bool:
        """Restore the longest stored prefix of a prompt that has not begun.

        Args:
            prompt: The prompt, with reserved memory.
            wait_s: How long to wait for the disk or another node, in seconds.
            copy_s: How long to copy layers read from disk to the device, in seconds; at least one layer is copied.

        Returns:
            False while the prefix is still being fetched or read from disk: call again in the next step.

        Raises:
            InvalidRequest: The request is at fault, not the snapshot.
            MemoryTaken: The request must be admitted again.
        """
        row, session = prompt.row, prompt.session
        if not self._is_used_by(row) or (session is not None and session.has_restored):
            return True
        if session is None:
            key = key_of(row, self._runner)
            session = PrefixCacheSession(prompt, key, _max_tokens(row, key), holder=row.spec.holder)
            prompt.session = session
        if not self._restorer.restore(session, wait_s, copy_s):
            return False
        if session.base is None:
            self._loans.give_up(row.id)
        elif session.base.kind == "answer":
            self._taker.answer_used()
        num_cached, miss = prompt.num_prefilled, None
        if not row.num_generated:  # a preempted row was recorded before
            miss = self._record(prompt.rows, session.key, num_cached)
        saved_s = self._prompt_s(0, num_cached) if num_cached else 0.0
        for one in prompt.rows:
            one.record.restored(num_cached, saved_s, miss)
        session.todo = self._boundaries(row, session.key, num_cached)
        return True

    def clip(self, prompt: Prompt, max_tokens: int) -> int:
        """Return the size of a chunk of at most `max_tokens` that ends where the runner must take a snapshot.

        A chunk always ends with the system part, which other prompts may wait for.
        """
        if prompt.session is None:
            return max_tokens
        ends = [b.num_tokens for b in prompt.session.todo if b.kind == "system" or not self._runner.snapshots_prefixes]
        return min([max_tokens, *(end - prompt.num_prefilled for end in ends)])

    def take_at_boundaries(self, prompt: Prompt) -> None:
        """Take the snapshots at the boundaries that the last chunk of a prompt has reached or passed."""
        if prompt.session is not None:
            self._taker.take_at_boundaries(prompt.session)

    def take_prompt(self, prompt: Prompt) -> None:
        """Take the state of a preempted prompt after the tokens that it has computed."""
        if prompt.session is not None and prompt.has_started:
            self._taker.take_prompt(prompt.session)

    def end(self, prompt: Prompt, failed: bool = False) -> None:
        """End a prompt's use of the cache, if it has not ended. failed: discard the snapshots that it has stored."""
        if (session := prompt.session) is None:
            return
        prompt.session = None
        if failed:
            for node in filter(None, map(self.store.get, session.stored)):
                if self._disk is not None:
                    self._disk.forget(node)
                else:
                    self.store.forget(node)
            self._loans.lost([prompt.row.id])
        if session.base is not None:
            self.store.release(session.base)
        self._restorer.end(session)

    # Rows

    def take_answer(self, row: Row) -> SnapshotNode | None:
        """Take the state after a complete answer, whose row the runner still has; return None if it is not stored."""
        return self._taker.take_answer(row) if self.off_reason is None else None

    def take_row(self, row: Row) -> None:
        """Take the state of a preempted decoding row, which the runner still has."""
        if self.off_reason is None:
            self._taker.take_row(row)

    def dropping(self, row_ids: Sequence[str]) -> AbstractContextManager[Mapping[str, Sequence[KVSegment]]]:
        """Bring the KV segments of rows back that the runner drops within the block.

        Returns:
            A context of the segments to copy back, by row id; those that are not copied back are lost.
        """
        return self._loans.dropping(row_ids)

    def lost(self, row_ids: Sequence[str]) -> None:
        """Evict the snapshots whose keys and values the runner has lost with these rows."""
        self._loans.lost(row_ids)

    # The disk tier

    def write_behind(self) -> None:
        """Retry postponed writes to disk."""
        if self._disk is not None:
            self._disk.write_waiting()

    def write_now(self, digest: str) -> bool:
        """Write a snapshot that is only in memory to disk, for another node.

        Keys and values that are lent to a row are copied back, as for a prompt of this node.

        Returns:
            Whether it is on disk, or queued for writing.
        """
        node = self.store.get(digest)
        if self._disk is None or node is None:
            return False
        if node.snapshot is not None and self._disk.lacks(node) and self._loans.copy_back(node):
            self._disk.write(node)
        return not self._disk.lacks(node)

    def adopt(self, digest: str) -> None:
        """Add a snapshot whose file another node has sent, and its ancestors. Unknown digests are ignored."""
        if self._disk is not None:
            self._disk.adopt(digest)

    def clear_files(self) -> Future[int] | None:
        """Remove all files; return the future of their number, None without a disk tier."""
        return self._disk.clear() if self._disk is not None else None

    def disk_status(self) -> dict[str, int] | None:
        """Return the figures of the disk tier; None without one."""
        return self._disk.status() if self._disk is not None else None

    # The whole cache

    def check_integrity(self) -> None:
        """Check the cache's consistency while no prompt is in progress, using at most a thousandth of the time.

        An inconsistent cache is emptied, because it might serve wrong tokens.
        """
        if (began_s := self._clock()) < self._next_check_s:
            return
        if (error := self.store.integrity_error()) is not None:
            log.error("the prefix cache is inconsistent and is cleared: %s", error)
            self.store.reset()
            self.store.counters.num_integrity_errors += 1
            if self._disk is not None:
                self._disk.clear()
        now = self._clock()
        self._next_check_s = now + 1000 * (now - began_s)

    def clear(self) -> CacheCleared:
        """Remove all snapshots from memory but pinned ones."""
        return CacheCleared(*self.store.clear())

    def status(self) -> CacheStatus:
        """Return the figures, and the MAX_ENTRIES_SHOWN most recently used snapshots."""
        store, now = self.store, self._clock()
        return CacheStatus(
            off_reason=self.off_reason,
            max_bytes=self.memory.max_bytes if self.off_reason is None else 0,
            num_bytes=store.num_bytes,
            num_entries=len(store),
            num_pinned=len(store.pinned),
            entries=tuple(_entry(node, now, store.has_file(node)) for node in islice(store.nodes(), MAX_ENTRIES_SHOWN)),
            recent_misses=tuple(store.recent_misses),
            disk=self.disk_status(),
            **asdict(store.counters),
        )

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for pending writes, then release all snapshots on the device thread."""
        if self._disk is not None:
            self._loans.write_all()
            self._disk.shut_down(timeout_s)
        self.store.reset()

    def _is_used_by(self, row: Row) -> bool:
        """Return whether a row's prompt may continue from a snapshot."""
        has_started = bool(row.output_token_ids)  # then the logprobs of its prompt have been sent
        return self.off_reason is None and (has_started or not row.spec.computes_all)

    def _record(self, rows: Sequence[Row], key: PromptKey, num_cached: int) -> CacheMiss | None:
        """Count a hit or a miss. Returns why the prompt got fewer cached tokens than it could have."""
        spec, counters = rows[0].spec, self.store.counters
        for row in rows:
            row.num_cached = min(num_cached, len(spec.token_ids))  # the snapshot may contain a part of the answer
        if spec.sparse is not None and not num_cached and not spec.sparse.num_dense:
            return None  # nothing could have been cached
        self._stats.num_cached_tokens += num_cached
        counters.num_cached_tokens += num_cached
        counters.num_hits += num_cached > 0
        counters.num_misses += num_cached == 0
        if spec.sparse is not None and num_cached >= spec.sparse.num_dense:
            return None  # as much as its plan allows
        miss = explain(self.store, spec.request_id, key, spec.origin, num_cached, self._min_tokens)
        if miss is not None:
            self.store.recent_misses.appendleft(miss)
            if not num_cached:
                counters.misses[miss.reason] = counters.misses.get(miss.reason, 0) + 1
        return miss

    def _boundaries(self, row: Row, key: PromptKey, start: int) -> list[Boundary]:
        """Return where to take snapshots: at boundaries of configured kinds before the first skipped token."""
        spec, kinds = row.spec, {*self._config.boundaries, *(("system",) if row.spec.pinned else ())}
        wanted = [*spec.boundaries, Boundary("prompt", len(spec.token_ids) - 1)]
        wanted = [one for one in wanted if one.kind in kinds and one.num_tokens <= row.num_dense_tokens]
        return choose_boundaries(wanted, key, self._min_tokens, start, spec.pinned)


def _max_tokens(row: Row, key: PromptKey) -> int:
    """Return the length in tokens of the longest prefix to restore.

    The last token must be computed for its logits, and a sparse plan has gaps after its dense tokens.
    """
    most = len(key) if row.spec.sparse is None else row.num_dense_tokens
    return min(most, len(key) - 1)


def _entry(node: SnapshotNode, now: float, on_disk: bool) -> CacheEntryStatus:
    in_memory = node.snapshot is not None
    where: Literal["memory", "disk", "both"] = "disk" if not in_memory else "both" if on_disk else "memory"
    return CacheEntryStatus(
        kind=node.kind,
        num_tokens=node.num_tokens,
        num_bytes=node.segment_bytes + node.state_bytes if in_memory else 0,
        num_hits=node.num_hits,
        pinned=node.pinned,
        tenant=sha256(node.key.tenant.encode(errors="surrogatepass")).hexdigest()[:12] if node.key.tenant else "",
        where=where,
        age_s=now - node.created_s,
        idle_s=now - node.used_s,
    )
