"""PrefixCacheSessions: connects prompts in progress to the prefix cache, from their first chunk to their end.

Each prompt is looked up when its first chunk is due. If another prompt in progress is computing its prefix, `lookup`
names that one, so that the scheduler advances it to the boundary instead of computing the prefix twice. Snapshots are
stored at the prompt's boundaries; if a later chunk fails, all snapshots that the prompt stored are discarded.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from engine.config import BoundaryKind, PrefixCacheConfig
from engine.core.batch import ModelRunner
from engine.core.cost_model import CostModel
from engine.core.prefix_cache.answer_statistics import AnswerStatistics
from engine.core.prefix_cache.cache import PrefixCache
from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.eligibility import Eligibility
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.lookup import PrefixLookup
from engine.core.prefix_cache.miss import explain
from engine.core.prefix_cache.node import CacheEntry
from engine.core.prefix_cache.prefix_fetcher import PrefixFetcher
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.restorer import PrefixRestorer
from engine.core.prefix_cache.returns import SegmentReturns
from engine.core.prefix_cache.session import PrefixCacheSession
from engine.core.prefix_cache.snapshot_boundaries import choose_boundaries
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prefix_cache.snapshot_taker import SnapshotTaker
from engine.core.prefix_cache.status import cache_status
from engine.core.request import Request
from engine.core.stats import Stats
from engine.protocol import Boundary, CacheCleared, CacheMiss, CacheStatus
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.snapshot_client import SnapshotClient

log = logging.getLogger("orchard.engine")


class PrefixCacheSessions:
    """Begins and ends the sessions of prompts, and maintains the cache between them.

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
        cache: The stored snapshots.
        memory: How much memory they may take.
        lookup: What is cached of prompts that have not begun.
        snapshots: Takes snapshots.
        returns: Brings KV segments of rows back.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        runner: ModelRunner,
        stats: Stats,
        costs: CostModel,
        room: Callable[[], int],
        files: SnapshotFiles | None = None,
        peers: SnapshotClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config
        self._runner = runner
        self._stats = stats
        self._prompt_s = costs.prompt_s
        self._clock = clock
        self._sessions: dict[str, PrefixCacheSession] = {}  # by the id of the first row
        self._next_check_s = 0.0
        self.off_reason = runner.no_snapshots if config.enabled else "prefix_cache.enabled is false"
        if self.off_reason is not None:
            files = None
        self.cache = PrefixCache(clock) if files is None else PrefixCache(clock, files.parent_of)
        max_bytes = runner.memory_limit_bytes if config.max_gb is None else config.max_gb * 2**30
        self.memory = SnapshotMemory(
            self.cache, int(max_bytes), costs.prompt_s, costs.read_s, room, runner.costs.max_snapshots
        )
        self._loans = Loans(self.memory, runner)
        self._disk = None if files is None else DiskTier(files, self.memory, self._loans, runner, clock, costs)
        self._eligibility = Eligibility(runner, self.off_reason)
        self.lookup = PrefixLookup(self.cache, self._eligibility, self._loans, self._sessions, config.min_tokens)
        self.returns = SegmentReturns(self.memory, self._loans, self._disk, runner)
        answers = AnswerStatistics(config.answers)
        self._fetcher: PrefixFetcher | None = None
        if peers is not None and self._disk is not None:
            self._fetcher = PrefixFetcher(peers, self._disk, self.memory, costs, clock)
        shared = runner, self.memory, self._eligibility, self._loans, self.returns, self._disk
        self._restorer = PrefixRestorer(*shared, self._fetcher, answers)
        self.snapshots = SnapshotTaker(*shared, answers, self._sessions, config.min_tokens)

    def begin(self, rows: Sequence[Request], wait_s: float = 0.0, copy_s: float = 0.0) -> bool:
        """Restore the longest stored prefix of a prompt that has not begun.

        Args:
            rows: The rows that share the prompt.
            wait_s: How long to wait for the disk or another node, in seconds.
            copy_s: How long to copy layers read from disk to the device, in seconds; at least one layer is copied.

        Returns:
            False while the prefix is still being fetched or read from disk: call again in the next step.
        """
        row = rows[0]
        if not self._eligibility.uses_cache(row):
            return True
        session = self._sessions.get(row.id)
        if session is None:
            key = self._eligibility.key_of(row)
            max_tokens = self._eligibility.max_tokens(row, key)
            session = self._sessions[row.id] = PrefixCacheSession(row, key, max_tokens, holder=row.spec.holder)
        elif session.is_computing:
            return True
        if not self._restorer.restore(rows, session, wait_s, copy_s):
            return False
        num_cached = row.num_prefilled
        if not num_cached:
            self._loans.break_promise(row.id)
        miss = None
        if not row.num_generated:  # a preempted row was recorded before
            miss = self._record(rows, session.key, num_cached)
        saved_s = self._prompt_s(0, num_cached) if num_cached else 0.0
        for one in rows:
            one.record.restored(num_cached, saved_s, miss)
        session.todo = self._boundaries(row, session.key, num_cached)
        return True

    def boundary_digests(self, row: Request) -> list[tuple[BoundaryKind, int, str]]:
        """Return kind, number of tokens and digest of each boundary of a prompt; empty if it does not use the cache."""
        if not self._eligibility.uses_cache(row) or not row.spec.boundaries:
            return []
        digests = dict(self._eligibility.key_of(row).digests(sorted(one.num_tokens for one in row.spec.boundaries)))
        return [(b.kind, b.num_tokens, digests[b.num_tokens]) for b in row.spec.boundaries if b.num_tokens in digests]

    def clip(self, rows: Sequence[Request], max_tokens: int) -> int:
        """Return the size of a chunk of at most `max_tokens` that ends where the runner must take a snapshot.

        A chunk always ends with the system part, which other prompts may wait for.
        """
        session = self._sessions.get(rows[0].id)
        if session is None:
            return max_tokens
        ends = [b.num_tokens for b in session.todo if b.kind == "system" or not self._runner.snapshots_prefixes]
        return min([max_tokens, *(end - rows[0].num_prefilled for end in ends)])

    def end(self, row_ids: Iterable[str], failed: bool = False) -> None:
        """End the sessions of these prompts. failed: discard the snapshots that they have stored."""
        for row_id in row_ids:
            if (session := self._sessions.pop(row_id, None)) is not None:
                self._end(session, failed)

    def write_behind(self) -> None:
        """Retry postponed writes to disk."""
        if self._disk is not None:
            self._disk.save_waiting()

    def write_now(self, digest: str) -> bool:
        """Write a snapshot that is only in memory to disk, for another node.

        Keys and values that are lent to a row are copied back, as for a prompt of this node.

        Returns:
            Whether it is on disk, or queued for writing.
        """
        entry = self.cache.index.get(digest)
        if self._disk is None or entry is None:
            return False
        if entry.node is not None and self._disk.lacks(entry) and self.returns.copy_back(entry):
            self._disk.save(entry)
        return not self._disk.lacks(entry)

    def adopt(self, digest: str) -> None:
        """Add a snapshot whose file another node has sent, and its ancestors. Unknown digests are ignored."""
        if self._disk is not None:
            self._disk.adopt(digest)

    def check_integrity(self) -> None:
        """Check the cache's consistency while no prompt is in progress, using at most a thousandth of the time.

        An inconsistent cache is emptied, because it might serve wrong tokens.
        """
        assert not self._sessions
        if (began_s := self._clock()) < self._next_check_s:
            return
        if (error := self.cache.integrity_error()) is not None:
            log.error("the prefix cache is inconsistent and is cleared: %s", error)
            self.cache.reset()
            self.cache.counters.num_integrity_errors += 1
            if self._disk is not None:
                self._disk.clear()
        now = self._clock()
        self._next_check_s = now + 1000 * (now - began_s)

    def clear(self) -> CacheCleared:
        """Remove all snapshots from memory but pinned ones."""
        return CacheCleared(*self.cache.clear())

    def clear_files(self) -> Future[int] | None:
        """Remove all files; return the future of their number, None without a disk tier."""
        return self._disk.clear() if self._disk is not None else None

    def status(self) -> CacheStatus:
        """Return the status of the prefix cache and its disk tier."""
        return cache_status(self.memory, self.off_reason, self.disk_status())

    def disk_status(self) -> dict[str, int] | None:
        """Return the figures of the disk tier; None without one."""
        return self._disk.status() if self._disk is not None else None

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for pending writes, then release all snapshots on the device thread."""
        self.end(list(self._sessions))
        if self._disk is not None:
            self.returns.write_all()
            self._disk.shut_down(timeout_s)
        self.cache.reset()

    def _end(self, session: PrefixCacheSession, failed: bool) -> None:
        if failed:
            for entry in session.stored:
                if self.cache.index.get(entry.digest) is entry:
                    self._forget(entry)
            self._loans.settle([session.row.id])
        if session.base is not None:
            self.cache.tree.release(session.base)
        if session.reading is not None and self._disk is not None:
            self._disk.close(session.reading)
        if session.fetching is not None and self._fetcher is not None:
            self._fetcher.stop(session.fetching)

    def _forget(self, entry: CacheEntry) -> None:
        if self._disk is not None:
            self._disk.forget(entry)
        else:
            self.cache.forget(entry)

    def _record(self, rows: Sequence[Request], key: PromptKey, num_cached: int) -> CacheMiss | None:
        """Count a hit or a miss. Returns why the prompt got fewer cached tokens than it could have."""
        spec, counters = rows[0].spec, self.cache.counters
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
        miss = explain(self.cache, spec.request_id, key, spec.origin, num_cached, self._config.min_tokens)
        if miss is not None:
            self.cache.recent_misses.appendleft(miss)
            if not num_cached:
                counters.misses[miss.reason] = counters.misses.get(miss.reason, 0) + 1
        return miss

    def _boundaries(self, row: Request, key: PromptKey, start: int) -> list[Boundary]:
        """Return where to take snapshots: at boundaries of configured kinds before the first skipped token."""
        spec, kinds = row.spec, {*self._config.boundaries, *(("system",) if row.spec.pinned else ())}
        wanted = [*spec.boundaries, Boundary("prompt", len(spec.token_ids) - 1)]
        wanted = [one for one in wanted if one.kind in kinds and one.num_tokens <= row.num_dense_tokens]
        return choose_boundaries(wanted, key, self._config.min_tokens, start, spec.pinned)
