"""SnapshotTaker: stores the states of prompts at their boundaries, of complete answers, and of preempted rows.

A snapshot is stored as soon as a successful chunk ends at its boundary and its state is finite, so that a client that
aborts and retries finds the finished part. Nothing here raises: answers do not depend on snapshots.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from engine.config import SnapshotKind
from engine.core.batch import ModelRunner
from engine.core.prefix_cache.answer_statistics import AnswerStatistics
from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.eligibility import Eligibility
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.node import CacheEntry, Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.returns import SegmentReturns
from engine.core.prefix_cache.session import PrefixCacheSession
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.request import Request, named
from engine.protocol import Boundary

log = logging.getLogger("orchard.engine")


class SnapshotTaker:
    """Takes snapshots where memory is worth it, and stores them.

    Args:
        runner: Takes snapshots.
        memory: Stores them.
        eligibility: Which states may be kept or lent.
        loans: Tracks lent KV segments.
        returns: Copies lent KV segments back.
        disk: The disk tier; None without one.
        answers: Decides whether answers are stored.
        sessions: The prompts in progress by the id of their first row; the mapping of `PrefixCacheSessions`.
        min_tokens: Fewest tokens between a snapshot and the one before it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        memory: SnapshotMemory,
        eligibility: Eligibility,
        loans: Loans,
        returns: SegmentReturns,
        disk: DiskTier | None,
        answers: AnswerStatistics,
        sessions: Mapping[str, PrefixCacheSession],
        min_tokens: int,
    ):
        self._runner = runner
        self._memory = memory
        self._cache = memory.cache
        self._eligibility = eligibility
        self._loans = loans
        self._returns = returns
        self._disk = disk
        self._answers = answers
        self._sessions = sessions
        self._min_tokens = min_tokens

    def take_at_boundaries(self, rows: Sequence[Request]) -> None:
        """Take the snapshots at the boundaries that the last chunk of a prompt has reached or passed."""
        session = self._sessions.get(rows[0].id)
        while session is not None and session.todo and session.todo[0].num_tokens <= rows[0].num_prefilled:
            self._take_or_log(rows, session, session.todo.pop(0))

    def keep_prompt(self, rows: Sequence[Request], num_tokens: int) -> None:
        """Store the state of a preempted prompt after its first `num_tokens` tokens."""
        session = self._sessions.get(rows[0].id)
        if session is None or not session.is_computing or rows[0].spec.sparse is not None:
            return
        start = session.base_tokens if session.base is not None else 0
        if num_tokens - start >= self._min_tokens and session.key.can_split_at(num_tokens):
            self._take_or_log(rows, session, Boundary("prompt", num_tokens))
            if session.base is not None and session.base_tokens == num_tokens:
                session.base.entry.is_resume_point = True

    def keep_answer(self, row: Request) -> CacheEntry | None:
        """Store the state after a complete answer, whose row the runner still has; return None if it is not stored."""
        is_long = len(row.output_token_ids) >= self._min_tokens
        if not is_long or not self._eligibility.may_keep(row) or not self._answers.offer():
            return None
        entry = self._keep_or_log(row, is_awaited=False)
        if entry is not None:
            self._answers.stored()
        return entry

    def keep_row(self, row: Request) -> None:
        """Store the state of a preempted decoding row, which the runner still has."""
        if self._eligibility.may_keep(row):
            self._keep_or_log(row, is_awaited=True)

    def _take_or_log(self, rows: Sequence[Request], session: PrefixCacheSession, boundary: Boundary) -> None:
        try:
            self._take(rows, session, boundary)
        except Exception:
            failed = "the snapshot of %s at its %s boundary failed"
            log.exception(failed, session.row.id, boundary.kind, extra=named(rows))
            self._cache.counters.num_rejected += 1
            session.todo.clear()

    def _take(self, rows: Sequence[Request], session: PrefixCacheSession, boundary: Boundary) -> None:
        base, costs, counters = session.base, self._runner.costs, self._cache.counters
        key, pinned = session.key.prefix(boundary.num_tokens), rows[0].spec.pinned and boundary.kind == "system"
        entry = self._cache.index.get(key.digest())
        if entry is not None and entry.node is not None:  # stored meanwhile by another prompt
            if pinned and self._returns.copy_back(entry):
                self._cache.tree.pin(entry)
            return
        num_new = boundary.num_tokens - (session.base_tokens if base is not None else 0)
        segment_bytes, num_outvalued = num_new * costs.token_bytes, counters.num_outvalued
        lend = boundary.kind != "system" and self._eligibility.may_lend(rows)
        num_bytes = costs.fixed() + (0 if lend else segment_bytes)
        if not self._memory.evict_for(num_bytes, base, None if pinned else key, boundary.kind, session.row.id):
            if counters.num_outvalued == num_outvalued:  # no memory, and later ones are larger
                session.todo.clear()
            return
        snapshot = self._runner.snapshot(rows, base.segment if base is not None else None, lend, boundary.num_tokens)
        if snapshot is None:
            broken = "the state of %s at its %s boundary contains NaN or inf"
            log.warning(broken, session.row.id, boundary.kind, extra=named(rows))
            counters.num_rejected += 1
            session.todo.clear()
            return
        entry = self._store(key, boundary.kind, session.row, pinned, snapshot, base, session.base_digest)
        if entry is None or entry.node is None:
            session.todo.clear()  # later ones are larger
            return
        if lend:
            self._loans.add(session.row.id, entry.node, segment_bytes)
        session.stored.append(entry)
        if base is not None:
            self._cache.tree.release(base)
        session.go_on_after(entry, self._cache.tree.hold(entry))

    def _keep_or_log(self, row: Request, is_awaited: bool) -> CacheEntry | None:
        """Store the state of a decoding row after its longest cached prefix in memory; return None if it is not stored.

        is_awaited: whether the row will continue from it.
        """
        key = self._eligibility.key_of(row)
        parent = self._cache.index.match(key, len(key), in_memory=True)
        base = None if parent is None else parent.node
        with self._cache.tree.holding(base):
            try:
                return self._keep(row, key, base, is_awaited)
            except Exception:
                log.exception("the snapshot of %s after its last token failed", row.id, extra=named([row]))
                self._cache.counters.num_rejected += 1
                return None

    def _keep(self, row: Request, key: PromptKey, base: SnapshotNode | None, is_awaited: bool) -> CacheEntry | None:
        """Store a decoding row's state; return None if it is not stored.

        Its keys and values stay in the row's cache until the row, which is about to be dropped, returns them.
        """
        costs, spec = self._runner.costs, row.spec
        num_new = len(key) + 1 - (0 if base is None else base.entry.num_tokens)
        segment_bytes = num_new * costs.token_bytes
        if num_new < self._min_tokens:
            return None
        lend = self._loans.may_add(row.id, base)
        num_bytes = costs.fixed() + (0 if lend else segment_bytes)
        if not self._memory.evict_for(num_bytes, base, None if is_awaited else key, "answer", row.id):
            return None
        taken = self._runner.snapshot_row(row.id, None if base is None else base.segment, lend=lend)
        num_given = len(row.output_token_ids) - is_awaited  # a preempted row's last token is not computed yet
        if taken is None or not np.array_equal(taken.token_ids[:num_given], row.output_token_ids[:num_given]):
            return None
        whole = self._eligibility.key(spec, np.concatenate([spec.token_ids, taken.token_ids]).astype(np.int32))
        digest = None if base is None else base.entry.digest
        entry = self._store(whole, "answer", row, False, taken.snapshot, base, digest)
        if entry is None or entry.node is None:
            return None
        entry.is_resume_point = is_awaited
        if lend:
            self._loans.add(row.id, entry.node, segment_bytes)
        return entry

    def _store(
        self,
        key: PromptKey,
        kind: SnapshotKind,
        row: Request,
        pinned: bool,
        snapshot: Snapshot,
        base: SnapshotNode | None,
        base_digest: str | None,
    ) -> CacheEntry | None:
        """Store a snapshot of all tokens of the key after `base`; return None if it is rejected or already stored."""
        digest, now = key.digest(), self._cache.clock()
        entry = self._cache.index.get(digest)  # exists if it is on disk and could not be read back
        if entry is not None and entry.node is not None:
            return None
        if entry is not None:
            entry.pinned |= pinned
            entry.parent = base_digest
        else:
            entry = CacheEntry(digest, key, kind, base_digest, row.spec.origin, pinned, now, now)
        if not self._memory.store(entry, snapshot, base, row.id):
            return None
        if self._disk is not None:
            self._disk.save(entry)
        return entry
