"""SnapshotTaker: takes the states of prompts at their boundaries, of complete answers, and of preempted rows.

A snapshot is stored as soon as a successful chunk ends at its boundary and its state is finite, so that a client that
aborts and retries finds the finished part. Nothing here raises: answers do not depend on snapshots.
"""

import logging
from typing import TYPE_CHECKING

import numpy as np

from engine.config import SnapshotKind
from engine.core.prefix_cache.disk_tier import DiskTier
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.node import Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import PromptKey, key_of, key_of_tokens
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.row import Row, named
from engine.core.runner import ModelRunner
from engine.protocol import Boundary

if TYPE_CHECKING:
    from engine.core.prefix_cache.restorer import PrefixCacheSession

log = logging.getLogger("orchard.engine")

MAX_UNUSED, PROBE_EVERY = 64, 16
"""After MAX_UNUSED stored answers without any reuse only every PROBE_EVERY-th is stored, until one is reused: none
is if the template renders answers differently in the next turn."""


class SnapshotTaker:
    """Takes snapshots where memory is worth it, and adds them to the store.

    Args:
        runner: Takes snapshots.
        memory: Adds them.
        loans: Knows which KV segments rows own.
        disk: The disk tier; None without one.
        stores_answers: Whether the states after complete answers are stored.
        min_tokens: Fewest tokens between a snapshot and the one before it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        memory: SnapshotMemory,
        loans: Loans,
        disk: DiskTier | None,
        stores_answers: bool,
        min_tokens: int,
    ):
        self._runner = runner
        self._memory = memory
        self._store = memory.store
        self._loans = loans
        self._disk = disk
        self._stores_answers = stores_answers
        self._num_answers = 0  # complete ones
        self._num_unused = 0  # stored since a prompt last continued from one
        self._min_tokens = min_tokens

    def take_at_boundaries(self, session: "PrefixCacheSession") -> None:
        """Take the snapshots at the boundaries that the last chunk of a prompt has reached or passed."""
        while session.todo and session.todo[0].num_tokens <= session.prompt.num_prefilled:
            self._take_or_log(session, session.todo.pop(0))

    def take_prompt(self, session: "PrefixCacheSession") -> None:
        """Take the state of a preempted prompt after the tokens that it has computed."""
        num_tokens = session.prompt.num_prefilled
        if not session.has_restored or session.prompt.row.spec.sparse is not None:
            return
        if num_tokens - session.base_tokens >= self._min_tokens and session.key.can_split_at(num_tokens):
            self._take_or_log(session, Boundary("prompt", num_tokens))
            if session.base is not None and session.base_tokens == num_tokens:
                session.base.is_resume_point = True

    def take_answer(self, row: Row) -> SnapshotNode | None:
        """Take the state after a complete answer, whose row the runner still has; return None if it is not stored."""
        if not self._stores_answers or len(row.output_token_ids) < self._min_tokens or not _may_keep(row):
            return None
        self._num_answers += 1
        if self._num_unused >= MAX_UNUSED and self._num_answers % PROBE_EVERY:
            return None
        node = self._take_row_or_log(row, is_awaited=False)
        self._num_unused += node is not None
        return node

    def answer_used(self) -> None:
        """Note that a prompt continues from the state after an answer: further ones are stored."""
        self._num_unused = 0

    def take_row(self, row: Row) -> None:
        """Take the state of a preempted decoding row, which the runner still has."""
        if _may_keep(row):
            self._take_row_or_log(row, is_awaited=True)

    def _take_or_log(self, session: "PrefixCacheSession", boundary: Boundary) -> None:
        try:
            is_worthwhile = self._take(session, boundary)
        except Exception:
            failed = "the snapshot of %s at its %s boundary failed"
            log.exception(failed, session.prompt.row.id, boundary.kind, extra=named(session.prompt.rows))
            self._store.counters.num_rejected += 1
            is_worthwhile = False
        if not is_worthwhile:
            session.todo.clear()

    def _take(self, session: "PrefixCacheSession", boundary: Boundary) -> bool:
        """Take a snapshot of a prompt; return whether the later ones, which are larger, may be taken, too."""
        rows, row = session.prompt.rows, session.prompt.row
        base, costs, counters = session.base, self._runner.costs, self._store.counters
        key, pinned = session.key.prefix(boundary.num_tokens), row.spec.pinned and boundary.kind == "system"
        node = self._new_node(key, boundary.kind, row, base, pinned)
        known = self._store.get(node.digest)
        if known is not None and known.snapshot is not None:  # stored meanwhile by another prompt
            if pinned and self._loans.copy_back(known):
                self._store.pin(known)
            return True
        segment_bytes = (boundary.num_tokens - session.base_tokens) * costs.token_bytes
        num_outvalued, lend = counters.num_outvalued, boundary.kind != "system" and session.prompt.may_lend
        num_bytes = costs.fixed() + (0 if lend else segment_bytes)
        if not self._memory.evict_for(num_bytes, base, None if pinned else node, row.id):
            return counters.num_outvalued > num_outvalued
        snapshot = self._runner.snapshot(rows, base.segment if base is not None else None, lend, boundary.num_tokens)
        if snapshot is None:
            broken = "the state of %s at its %s boundary contains NaN or inf"
            log.warning(broken, row.id, boundary.kind, extra=named(rows))
            counters.num_rejected += 1
            return False
        added = self._add(node, snapshot, base, row)
        if added is None:
            return False
        if lend:
            self._store.assign(added, row.id, segment_bytes)
        session.stored.append(added.digest)
        if base is not None:
            self._store.release(base)
        self._store.hold(added)
        session.base = added
        return True

    def _take_row_or_log(self, row: Row, is_awaited: bool) -> SnapshotNode | None:
        """Take the state of a decoding row after its longest cached prefix in memory; return None if it is not stored.

        is_awaited: whether the row will continue from it.
        """
        key = key_of(row, self._runner)
        base = self._store.match(key, len(key), in_memory=True)
        with self._store.holding(base):
            try:
                return self._take_row(row, key, base, is_awaited)
            except Exception:
                log.exception("the snapshot of %s after its last token failed", row.id, extra=named([row]))
                self._store.counters.num_rejected += 1
                return None

    def _take_row(self, row: Row, key: PromptKey, base: SnapshotNode | None, is_awaited: bool) -> SnapshotNode | None:
        """Take a decoding row's state; return None if it is not stored.

        Its keys and values stay in the row's cache until the row, which is about to be dropped, returns them.
        """
        costs, spec = self._runner.costs, row.spec
        num_new = len(key) + 1 - (0 if base is None else base.num_tokens)
        segment_bytes = num_new * costs.token_bytes
        if num_new < self._min_tokens:
            return None
        lend = self._loans.may_extend(row.id, base)
        num_bytes = costs.fixed() + (0 if lend else segment_bytes)
        new = None if is_awaited else self._new_node(key, "answer", row, base)
        if not self._memory.evict_for(num_bytes, base, new, row.id):
            return None
        taken = self._runner.snapshot_row(row.id, None if base is None else base.segment, lend=lend)
        num_given = len(row.output_token_ids) - is_awaited  # a preempted row's last token is not computed yet
        if taken is None or not np.array_equal(taken.token_ids[:num_given], row.output_token_ids[:num_given]):
            return None
        token_ids = np.concatenate([spec.token_ids, taken.token_ids]).astype(np.int32)
        whole = key_of_tokens(spec, token_ids, self._runner)
        node = self._add(self._new_node(whole, "answer", row, base), taken.snapshot, base, row)
        if node is None:
            return None
        node.is_resume_point = is_awaited
        if lend:
            self._store.assign(node, row.id, segment_bytes)
        return node

    def _new_node(
        self, key: PromptKey, kind: SnapshotKind, row: Row, base: SnapshotNode | None, pinned: bool = False
    ) -> SnapshotNode:
        now, parent = self._store.clock(), None if base is None else base.digest
        return SnapshotNode(key.digest(), key, kind, parent, row.spec.origin, pinned, now, now)

    def _add(self, node: SnapshotNode, snapshot: Snapshot, base: SnapshotNode | None, row: Row) -> SnapshotNode | None:
        """Add a snapshot of all tokens of a node after `base`; return None if it is rejected or already stored."""
        known = self._store.get(node.digest)
        if known is not None:
            if known.snapshot is not None:
                return None
            known.pinned |= node.pinned  # it is on disk and could not be read back
            known.parent_digest = node.parent_digest
            node = known
        added = self._memory.add(node, snapshot, base, row.id)
        if added is not None and self._disk is not None:
            self._disk.write(added)
        return added


def _may_keep(row: Row) -> bool:
    """Return whether the state after a row's last token may be stored."""
    spec = row.spec
    return spec.pooling is None and spec.num_choices == 1 and spec.sparse is None and not spec.pinned
