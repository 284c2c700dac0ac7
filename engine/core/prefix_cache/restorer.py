"""PrefixRestorer: continues prompts from the longest prefix in memory, other rows' caches, on disk or at a peer."""

import logging
from collections.abc import Sequence

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.answer_statistics import AnswerStatistics
from engine.core.prefix_cache.disk_tier import DiskTier, Reading
from engine.core.prefix_cache.eligibility import Eligibility
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.node import CacheEntry
from engine.core.prefix_cache.prefix_fetcher import PrefixFetcher
from engine.core.prefix_cache.returns import SegmentReturns
from engine.core.prefix_cache.session import PrefixCacheSession
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.request import Request, named
from engine.protocol import Boundary, InvalidRequest

log = logging.getLogger("orchard.engine")

MIN_TOKENS_FROM_DISK = 64
"""A snapshot is read from disk only if it saves at least this many tokens over the best one in memory."""

READ_PATIENCE = 4.0
"""A prompt waits for the disk for at most this many times the predicted seconds of reading, and no longer than
computing takes."""


class PrefixRestorer:
    """Restores prefixes into the caches of rows.

    Args:
        runner: Restores snapshots.
        memory: The cache's memory.
        eligibility: Which prompts may take KV segments over.
        loans: Tracks lent KV segments.
        returns: Copies lent KV segments back.
        disk: The disk tier; None without one.
        fetcher: Fetches prefixes from other nodes; None without any.
        answers: Learns whether answers are reused.
    """

    def __init__(
        self,
        runner: ModelRunner,
        memory: SnapshotMemory,
        eligibility: Eligibility,
        loans: Loans,
        returns: SegmentReturns,
        disk: DiskTier | None,
        fetcher: PrefixFetcher | None,
        answers: AnswerStatistics,
    ):
        self._runner = runner
        self._memory = memory
        self._cache = memory.cache
        self._eligibility = eligibility
        self._loans = loans
        self._returns = returns
        self._disk = disk
        self._fetcher = fetcher
        self._answers = answers

    def restore(self, rows: Sequence[Request], session: PrefixCacheSession, wait_s: float, copy_s: float) -> bool:
        """Restore the longest stored prefix of a prompt, if there is one.

        Args:
            rows: The rows that share the prompt.
            session: Their session.
            wait_s: How long to wait for the disk or another node, in seconds.
            copy_s: How long to copy layers read from disk to the device, in seconds; at least one layer is copied.

        Returns:
            False while the prefix is still being fetched or read from disk.

        Raises:
            InvalidRequest: The request is at fault, not the snapshot.
        """
        while (entry := self._find(rows, session, wait_s, copy_s)) is not None and not self._restore(
            rows, session, entry
        ):
            pass
        return session.is_computing

    def _find(
        self, rows: Sequence[Request], session: PrefixCacheSession, wait_s: float, copy_s: float
    ) -> CacheEntry | None:
        """Return the longest stored prefix in memory; None without one, or while it is still on its way there."""
        while True:
            if session.fetching is not None:
                assert self._fetcher is not None
                if not self._fetcher.is_over(session.fetching, wait_s):
                    return None
                session.fetching = None
            if session.reading is not None and not self._advance(session, session.reading, wait_s, copy_s):
                return None
            entry = self._cache.index.match(session.key, session.max_tokens, session.in_memory)
            if session.holder is not None and self._fetch(rows, session, entry):
                continue
            if entry is None:
                return None
            if entry.node is None:
                self._read(rows, session, entry)
            elif self._returns.copy_back(entry):
                return entry
            else:
                session.max_tokens = entry.num_tokens - 1

    def _fetch(self, rows: Sequence[Request], session: PrefixCacheSession, here: CacheEntry | None) -> bool:
        """Start to fetch the holder's prefix if that is worth it; return False if it is not.

        Args:
            rows: The rows that share the prompt.
            session: Their session, whose holder is asked once.
            here: The longest prefix in memory or on disk.
        """
        holder, session.holder = session.holder, None
        start, costs = 0 if here is None else here.num_tokens, self._runner.costs
        if self._fetcher is None or holder is None or holder.num_tokens > session.max_tokens:
            return False
        num_tokens = holder.num_tokens - start
        num_bytes = max(0, num_tokens) * costs.token_bytes + costs.fixed()
        if num_tokens < (1 if here is None else MIN_TOKENS_FROM_DISK) or not self._has_room(rows, num_bytes):
            return False
        session.fetching = self._fetcher.start(session.key, holder, start, num_bytes)
        return session.fetching is not None

    def _has_room(self, rows: Sequence[Request], num_bytes: int) -> bool:
        """Return whether a prefix of `num_bytes` may be read into the row or into the cache."""
        return self._moves_into_row(rows) or self._memory.can_hold(num_bytes)

    def _moves_into_row(self, rows: Sequence[Request]) -> bool:
        """Return whether keys and values that are read from disk count as the row's."""
        return self._eligibility.may_lend(rows) and not rows[0].spec.pinned

    def _read(self, rows: Sequence[Request], session: PrefixCacheSession, entry: CacheEntry) -> None:
        """Start to read an entry from disk if that is worth it; else limit the session to others."""
        assert self._disk is not None
        here = self._cache.index.match(session.key, session.max_tokens, in_memory=True)
        start, end, costs = 0 if here is None else here.num_tokens, entry.num_tokens, self._runner.costs
        computed_s = self._memory.seconds(start, end)
        num_bytes = (end - start) * costs.token_bytes + costs.fixed()
        row_id = session.row.id if self._moves_into_row(rows) else None
        if not self._has_room(rows, num_bytes):
            session.max_tokens = end - 1
            return
        read_s = self._disk.read_s(num_bytes)
        if (here is not None and end - start < MIN_TOKENS_FROM_DISK) or read_s >= computed_s:
            session.in_memory = True
            return
        session.reading = self._disk.read(entry, row_id, min(computed_s, READ_PATIENCE * read_s))

    def _advance(self, session: PrefixCacheSession, reading: Reading, wait_s: float, copy_s: float) -> bool:
        """Return whether a reading is over, complete or not; False while it is worth waiting for."""
        assert self._disk is not None
        if reading.base is not None and self._loans.is_lost(reading.base):
            self._disk.close(reading)
            session.reading = None
            return True  # what is read would continue keys and values that are gone: look again
        is_complete = self._disk.advance(reading, wait_s, copy_s)
        if is_complete is None and self._cache.clock() < reading.until_s:
            return False
        if is_complete is None:
            slow = "reading a snapshot from disk takes too long: %s is prefilled without it"
            log.warning(slow, session.row.id, extra=named([session.row]))
            self._cache.counters.num_unusable += 1
        session.in_memory = not is_complete
        self._disk.close(reading)
        session.reading = None
        return True

    def _restore(self, rows: Sequence[Request], session: PrefixCacheSession, entry: CacheEntry) -> bool:
        """Restore an entry; return False if that fails, in which case the prompt continues without it."""
        assert entry.node is not None and entry.node.snapshot is not None
        if rows[0].spec.pinned and Boundary("system", entry.num_tokens) in rows[0].spec.boundaries:
            self._cache.tree.pin(entry)  # pinned entries are never lent
        try:
            lent = self._loans.lend(rows[0].id, entry) if self._eligibility.may_lend(rows) else []
            self._runner.restore(rows, entry.node.snapshot, lent)
        except InvalidRequest:
            self._returns.settle([rows[0].id])
            raise
        except Exception:
            self._returns.settle([rows[0].id])
            log.exception("a snapshot of %d tokens could not be restored", entry.num_tokens, extra=named(rows))
            self._cache.counters.num_unusable += 1
            session.max_tokens = entry.num_tokens - 1
            self._runner.drop([row.id for row in rows])  # a partly restored prompt
            return False
        session.go_on_after(entry, self._cache.use(entry))
        self._memory.fit()  # segments read for this row only may not fit into the cache
        self._answers.used(entry.kind)
        for row in rows:
            row.num_prefilled = entry.num_tokens
        if self._disk is not None:
            self._disk.touch(entry)
        return True
