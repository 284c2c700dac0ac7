"""PrefixRestorer: continues prompts from the longest prefix in memory, other rows' caches, on disk or at a peer."""

import logging
from dataclasses import dataclass, field

from engine.core.prefix_cache.disk_tier import DiskTier, Reading
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.node import SnapshotNode
from engine.core.prefix_cache.prefix_fetcher import Fetching, PrefixFetcher
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.prompt import Prompt
from engine.core.row import named
from engine.core.runner import ModelRunner
from engine.errors import InvalidRequest
from engine.placement import PrefixHolder
from engine.protocol import Boundary

log = logging.getLogger("orchard.engine")

MIN_TOKENS_FROM_DISK = 64
"""A snapshot is read from disk only if it saves at least this many tokens over the best one in memory."""

READ_TIMEOUT_FACTOR = 4.0
"""A prompt waits for the disk for at most this many times the predicted seconds of reading, and no longer than
computing takes."""


@dataclass(slots=True, eq=False)
class PrefixCacheSession:
    """A prompt's use of the prefix cache."""

    prompt: Prompt = field(repr=False)
    key: PromptKey
    max_tokens: int
    """Longest prefix to restore: longer ones failed, or would leave nothing to compute."""
    todo: list[Boundary] = field(default_factory=list)
    """Boundaries left to compute, the next one first."""
    base: SnapshotNode | None = None
    """The snapshot that it was restored from or stored last, whose KV segment it holds; None without one."""
    stored: list[str] = field(default_factory=list)
    """Digests of the snapshots that it has stored."""
    reading: Reading | None = None
    """The snapshot on disk that it waits for; None if it waits for none."""
    holder: PrefixHolder | None = None
    """The node from which its prefix may be fetched; None once that is decided."""
    fetching: Fetching | None = None
    """The fetch that it waits for; None if it waits for none."""
    skips_disk: bool = False
    """Whether to use only snapshots in memory, because reading from disk failed or is not worth it."""

    @property
    def has_restored(self) -> bool:
        """Whether the lookup of its prefix is complete."""
        return self.reading is None and self.fetching is None

    @property
    def is_storing(self) -> bool:
        """Whether it will still store snapshots."""
        return self.has_restored and bool(self.todo)

    @property
    def base_tokens(self) -> int:
        """Tokens before its last snapshot."""
        return 0 if self.base is None else self.base.num_tokens


class PrefixRestorer:
    """Restores prefixes into the caches of rows.

    Args:
        runner: Restores snapshots.
        memory: The cache's memory.
        loans: Moves KV segments to rows, and copies those of other rows back.
        disk: The disk tier; None without one.
        fetcher: Fetches prefixes from other nodes; None without any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        memory: SnapshotMemory,
        loans: Loans,
        disk: DiskTier | None,
        fetcher: PrefixFetcher | None,
    ):
        self._runner = runner
        self._memory = memory
        self._store = memory.store
        self._loans = loans
        self._disk = disk
        self._fetcher = fetcher

    def restore(self, session: PrefixCacheSession, wait_s: float, copy_s: float) -> bool:
        """Restore the longest stored prefix of a prompt, if there is one.

        Args:
            session: The prompt's session.
            wait_s: How long to wait for the disk or another node, in seconds.
            copy_s: How long to copy layers read from disk to the device, in seconds; at least one layer is copied.

        Returns:
            False while the prefix is still being fetched or read from disk.

        Raises:
            InvalidRequest: The request is at fault, not the snapshot.
            MemoryTaken: The request must be admitted again.
        """
        while (node := self._find(session, wait_s, copy_s)) is not None and not self._restore(session, node):
            pass
        return session.has_restored

    def end(self, session: PrefixCacheSession) -> None:
        """Stop what a session that ends still waits for."""
        if session.reading is not None and self._disk is not None:
            self._disk.close(session.reading)
        if session.fetching is not None and self._fetcher is not None:
            self._fetcher.stop(session.fetching)

    def _find(self, session: PrefixCacheSession, wait_s: float, copy_s: float) -> SnapshotNode | None:
        """Return the longest stored prefix in memory; None without one, or while it is still on its way there."""
        while True:
            if session.fetching is not None:
                assert self._fetcher is not None
                if not self._fetcher.is_over(session.fetching, wait_s):
                    return None
                session.fetching = None
            if session.reading is not None and not self._advance(session, session.reading, wait_s, copy_s):
                return None
            node = self._store.match(session.key, session.max_tokens, session.skips_disk)
            if session.holder is not None and self._fetch(session, node):
                continue
            if node is None:
                return None
            if node.snapshot is None:
                self._read(session, node)
            elif self._loans.copy_back(node):
                return node
            else:
                session.max_tokens = node.num_tokens - 1

    def _fetch(self, session: PrefixCacheSession, here: SnapshotNode | None) -> bool:
        """Start to fetch the holder's prefix if that is worth it; return False if it is not.

        Args:
            session: The prompt's session, whose holder is asked once.
            here: The longest prefix in memory or on disk.
        """
        holder, session.holder = session.holder, None
        start, costs = 0 if here is None else here.num_tokens, self._runner.costs
        if self._fetcher is None or holder is None or holder.num_tokens > session.max_tokens:
            return False
        num_tokens = holder.num_tokens - start
        num_bytes = costs.snapshot(max(0, num_tokens))
        if num_tokens < (1 if here is None else MIN_TOKENS_FROM_DISK) or not self._has_room(session, num_bytes):
            return False
        session.fetching = self._fetcher.start(session.key, holder, start, num_bytes)
        return session.fetching is not None

    def _has_room(self, session: PrefixCacheSession, num_bytes: int) -> bool:
        """Return whether a prefix of `num_bytes` may be read into the row or into the cache."""
        return self._moves_into_row(session) or self._memory.can_hold(num_bytes)

    def _moves_into_row(self, session: PrefixCacheSession) -> bool:
        """Return whether keys and values that are read from disk count as the row's."""
        return session.prompt.may_lend and not session.prompt.row.spec.pinned

    def _read(self, session: PrefixCacheSession, node: SnapshotNode) -> None:
        """Start to read a snapshot from disk if that is worth it; else limit the session to others."""
        assert self._disk is not None
        here = self._store.match(session.key, session.max_tokens, in_memory=True)
        start, end, costs = 0 if here is None else here.num_tokens, node.num_tokens, self._runner.costs
        computed_s = self._memory.seconds(start, end)
        num_bytes = costs.snapshot(end - start)
        row_id = session.prompt.row.id if self._moves_into_row(session) else None
        if not self._has_room(session, num_bytes):
            session.max_tokens = end - 1
            return
        read_s = self._memory.read_seconds(num_bytes)
        if (here is not None and end - start < MIN_TOKENS_FROM_DISK) or read_s >= computed_s:
            session.skips_disk = True
            return
        session.reading = self._disk.read(node, row_id, min(computed_s, READ_TIMEOUT_FACTOR * read_s))

    def _advance(self, session: PrefixCacheSession, reading: Reading, wait_s: float, copy_s: float) -> bool:
        """Return whether a reading is over, complete or not; False while it is worth waiting for."""
        assert self._disk is not None
        if reading.base is not None and reading.base.is_lost:
            self._disk.close(reading)
            session.reading = None
            return True  # what is read would continue keys and values that are gone: look again
        state = self._disk.advance(reading, wait_s, copy_s)
        if state == "pending" and self._store.clock() < reading.until_s:
            return False
        if state == "pending":
            slow = "reading a snapshot from disk takes too long: %s is prefilled without it"
            log.warning(slow, session.prompt.row.id, extra=named([session.prompt.row]))
            self._store.counters.num_unusable += 1
        session.skips_disk = state != "done"
        self._disk.close(reading)
        session.reading = None
        return True

    def _restore(self, session: PrefixCacheSession, node: SnapshotNode) -> bool:
        """Restore a snapshot; return False if that fails, in which case the prompt continues without it."""
        assert node.snapshot is not None
        rows = session.prompt.rows
        if rows[0].spec.pinned and Boundary("system", node.num_tokens) in rows[0].spec.boundaries:
            self._store.pin(node)  # pinned snapshots are never lent
        lent = self._loans.move(rows[0].id, node) if session.prompt.may_lend else []
        try:
            self._runner.restore(rows, node.snapshot, lent)
        except InvalidRequest:
            self._loans.lost([rows[0].id])
            raise
        except Exception:
            self._loans.lost([rows[0].id])
            log.exception("a snapshot of %d tokens could not be restored", node.num_tokens, extra=named(rows))
            self._store.counters.num_unusable += 1
            session.max_tokens = node.num_tokens - 1
            self._runner.drop([row.id for row in rows])  # a partly restored prompt
            return False
        self._store.use(node)
        session.base = node
        self._memory.fit()  # segments read for this row only may not fit into the cache
        session.prompt.num_prefilled = node.num_tokens
        if self._disk is not None:
            self._disk.touch(node)
        return True
