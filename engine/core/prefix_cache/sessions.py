"""PrefixCacheSessions: restores prompts from the prefix cache and stores snapshots at their boundaries.

Each prompt is looked up when its first chunk is due. If another prompt in progress is computing its prefix, `source_of`
names that one, so that the scheduler advances it to the boundary instead of computing the prefix twice. A snapshot is
stored as soon as a successful chunk ends at its boundary and its state is finite, so that a client that aborts and
retries finds the finished part. If a later chunk of the prompt fails, all snapshots that it stored are discarded.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.config import PrefixCacheConfig, SnapshotKind
from engine.core.batch import ModelRunner
from engine.core.cost_model import CostModel
from engine.core.prefix_cache.cache import CacheEntry, PrefixCache, Snapshot, SnapshotNode
from engine.core.prefix_cache.disk_tier import DiskTier, Reading
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.miss import explain
from engine.core.prefix_cache.node import KVSegment
from engine.core.prefix_cache.prompt_key import PromptKey
from engine.core.prefix_cache.status import cache_status
from engine.core.request import Request
from engine.core.stats import Stats
from engine.protocol import Boundary, CacheCleared, CacheStatus, EngineRequest, InvalidRequest
from engine.snapshot_store.files import SnapshotFiles

log = logging.getLogger("orchard.engine")

MIN_TOKENS_FROM_DISK = 64
"""A snapshot is read from disk only if it saves at least this many tokens over the best one in memory."""

READ_PATIENCE = 4.0
"""A prompt waits for the disk for at most this many times the predicted seconds of reading, and no longer than
computing takes."""

MAX_UNUSED, PROBE_EVERY = 64, 16
"""After MAX_UNUSED stored answers without any reuse only every PROBE_EVERY-th is stored, until one is reused."""

KIND_ORDER = ("system", "turn", "prompt")


@dataclass(slots=True, eq=False)
class PrefixCacheSession:
    """A prompt in progress and its use of the prefix cache."""

    row: Request
    """The first of the rows that share the prompt."""
    key: PromptKey
    max_tokens: int
    """Longest prefix to restore: longer ones failed, or would leave nothing to compute."""
    todo: list[Boundary] = field(default_factory=list)
    """Boundaries left to compute, the next one first."""
    base: SnapshotNode | None = None
    """The node of the snapshot that it was restored from or stored last."""
    base_digest: str | None = None
    base_tokens: int = 0
    stored: list[CacheEntry] = field(default_factory=list)
    """Entries that it has stored."""
    reading: Reading | None = None
    """The snapshot on disk that it waits for; None if it waits for none."""
    in_memory: bool = False
    """Whether to use only snapshots in memory, because reading from disk failed or is not worth it."""

    @property
    def is_computing(self) -> bool:
        """Whether the lookup of its prefix is complete."""
        return self.reading is None


class AnswerStatistics:
    """Decides whether answers are stored, by whether earlier ones were reused.

    Answers are never reused if the template renders them differently in the next turn.
    """

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._num_offered = 0
        self._num_unused = 0

    @property
    def are_kept(self) -> bool:
        """Whether to store the next answer: every one while some are reused, else every PROBE_EVERY-th."""
        self._num_offered += 1
        return self._enabled and (self._num_unused < MAX_UNUSED or self._num_offered % PROBE_EVERY == 0)

    def stored(self) -> None:
        """Record that an answer was stored."""
        self._num_unused += 1

    def used(self, kind: SnapshotKind) -> None:
        """Record that a prompt continues from a snapshot of this kind."""
        if kind == "answer":
            self._num_unused = 0


class PrefixCacheSessions:
    """Connects prompts in progress to the prefix cache.

    Args:
        config: Options of the prefix cache.
        runner: Takes and restores snapshots.
        stats: Counters to update.
        files: Files of the disk tier; None without one.
        clock: Returns monotonic seconds.
        costs: Learns the rate of reading from disk.

    Attributes:
        off: Why nothing is cached, None if snapshots are cached.
        cache: The prefix cache.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        runner: ModelRunner,
        stats: Stats,
        files: SnapshotFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
        costs: CostModel | None = None,
    ):
        self._config = config
        self._runner = runner
        self._stats = stats
        self._clock = clock
        self._sessions: dict[str, PrefixCacheSession] = {}  # by the id of the first row
        self._next_check_s = 0.0
        self._answers = AnswerStatistics(config.answers)
        self.off_reason = runner.no_snapshots if config.enabled else "prefix_cache.enabled is false"
        max_bytes = runner.memory_limit_bytes if config.max_gb is None else config.max_gb * 2**30
        self.cache = PrefixCache(int(max_bytes), clock)
        self._loans = Loans(self.cache, runner)
        self._disk: DiskTier | None = None
        if files is not None and self.off_reason is None:
            self._disk = DiskTier(files, self.cache, self._loans, runner, clock, costs or CostModel())

    def begin(self, rows: Sequence[Request], wait_s: float = 0.0, copy_s: float = 0.0) -> bool:
        """Restore the longest stored prefix of a prompt that has not begun.

        Args:
            rows: The rows that share the prompt.
            wait_s: How long to wait for the disk, in seconds.
            copy_s: How long to copy layers read from disk to the device, in seconds; at least one layer is copied.

        Returns:
            False while the prefix is still being read from disk: call again in the next step.
        """
        row = rows[0]
        if self.off_reason is not None or row.spec.pooling is not None:
            return True
        current = self._sessions.get(row.id)
        if current is None:
            key = self._key_of(row)
            current = self._sessions[row.id] = PrefixCacheSession(row, key, self._max_tokens(row, key))
        elif current.is_computing:
            return True
        while (entry := self._find(rows, current, wait_s, copy_s)) is not None and not self._restore(
            rows, current, entry
        ):
            pass
        if current.reading is not None:
            return False
        num_cached = row.num_prefilled
        if not num_cached:
            self._loans.break_promise(row.id)
        if not row.output_token_ids:  # a preempted row was recorded before
            self._record(rows, current.key, num_cached)
        current.todo = self._boundaries(row, current.key, num_cached)
        return True

    def peek(self, spec: EngineRequest) -> int:
        """Return how many tokens of a prompt are cached.

        They count as used, so that a plan based on them still finds them.
        """
        if self.off_reason is not None:
            return 0
        runner = self._runner
        key = PromptKey.of(runner.fingerprint, spec.tenant, spec.token_ids, spec.images, runner.image_token_id)
        entry = self.cache.match(key, len(key) - 1)
        if entry is None:
            return 0
        self.cache.touch(entry)
        return entry.num_tokens

    def num_cached(self, row: Request) -> int:
        """Return how many tokens of a row's prompt are cached now; does not count as a use."""
        if self.off_reason is not None or row.spec.pooling is not None:
            return 0
        key, counters = self._key_of(row), self.cache.counters
        version = (len(key), counters.num_stored, counters.num_evicted, len(self.cache))
        if row.cached_hint is None or row.cached_hint[0] != version:
            entry = self.cache.match(key, self._max_tokens(row, key))
            row.cached_hint = version, 0 if entry is None else entry.num_tokens
        return row.cached_hint[1]

    def promise(self, rows: Sequence[Request]) -> bool:
        """Count the keys and values that a request will take over from the cache as the request's memory; see loans.py.

        Returns whether there are any.
        """
        row = rows[0]
        if not self._may_lend(rows) or self.num_cached(row) == 0:
            return False
        key = self._key_of(row)
        entry = self.cache.match(key, self._max_tokens(row, key), in_memory=True)
        return entry is not None and self._loans.promise(row.id, entry)

    def cancel(self, rows: Sequence[Request]) -> None:
        """Revoke `promise` for a request that is not admitted."""
        self._loans.cancel(rows[0].id)

    def _may_lend(self, rows: Sequence[Request]) -> bool:
        spec = rows[0].spec
        return (
            self.off_reason is None
            and len(rows) == spec.num_choices == 1
            and spec.sparse is None
            and spec.pooling is None
        )

    def source_of(self, row: Request) -> Request | None:
        """Return the first row of the prompt in progress that will store the longest prefix of this row's prompt.

        None if a prefix as long is cached already, or no prompt in progress shares one.
        """
        others = [one for one in self._sessions.values() if one.row is not row and one.is_computing and one.todo]
        if not others or self.off_reason is not None or row.spec.pooling is not None or row.id in self._sessions:
            return None
        key = self._key_of(row)
        longest, source = self.num_cached(row), None
        for other in others:
            if other.key.tenant != key.tenant:
                continue
            num_common = min(key.num_common(other.key), self._max_tokens(row, key))
            reached = max((b.num_tokens for b in other.todo if b.num_tokens <= num_common), default=0)
            if reached >= longest + self._config.min_tokens:
                longest, source = reached, other.row
        return source

    def _key_of(self, row: Request) -> PromptKey:
        """Return the key of a row's prompt, cached on the row until its prompt grows."""
        key = row.prompt_key
        if key is None or len(key) != row.num_prompt_tokens + row.num_skipped:
            runner, spec = self._runner, row.spec
            key = row.prompt_key = PromptKey.of(
                runner.fingerprint, spec.tenant, row.prompt_token_ids, spec.images, runner.image_token_id
            )
        return key

    @staticmethod
    def _max_tokens(row: Request, key: PromptKey) -> int:
        """Return the length in tokens of the longest prefix to restore.

        The last token must be computed for its logits, and a sparse plan has gaps after its dense tokens.
        """
        most = len(key) if row.spec.sparse is None else row.num_dense_tokens
        return min(most, len(key) - 1)

    def clip(self, rows: Sequence[Request], max_tokens: int) -> int:
        """Return the size of a chunk of at most `max_tokens` that ends no later than the next boundary."""
        current = self._sessions.get(rows[0].id)
        if current is None or not current.todo:
            return max_tokens
        return min(max_tokens, current.todo[0].num_tokens - rows[0].num_prefilled)

    def snapshot_boundary(self, rows: Sequence[Request]) -> None:
        """Take a snapshot if the last chunk ended at a boundary. Never raises: the answer does not depend on it."""
        current = self._sessions.get(rows[0].id)
        if current is None or not current.todo or current.todo[0].num_tokens != rows[0].num_prefilled:
            return
        self._take_or_log(rows, current, current.todo.pop(0))

    def _take_or_log(self, rows: Sequence[Request], current: PrefixCacheSession, boundary: Boundary) -> None:
        try:
            self._take(rows, current, boundary)
        except Exception:
            log.exception("the snapshot of %s at its %s boundary failed", current.row.id, boundary.kind)
            self.cache.counters.num_rejected += 1
            current.todo.clear()

    def keep_answer(self, row: Request) -> None:
        """Store the state after a complete answer, whose row the runner still has. Never raises."""
        is_long = len(row.output_token_ids) >= self._config.min_tokens
        if is_long and self._may_keep(row) and self._answers.are_kept and self._store_row_or_log(row, is_awaited=False):
            self._answers.stored()

    def keep_row(self, row: Request) -> None:
        """Store the state of a preempted decoding row, which the runner still has. Never raises."""
        if self._may_keep(row):
            self._store_row_or_log(row, is_awaited=True)

    def keep_prompt(self, rows: Sequence[Request], num_tokens: int) -> None:
        """Store the state of a preempted prompt after its first `num_tokens` tokens. Never raises."""
        current = self._sessions.get(rows[0].id)
        if current is None or not current.is_computing or rows[0].spec.sparse is not None:
            return
        start = current.base_tokens if current.base is not None else 0
        if num_tokens - start >= self._config.min_tokens and current.key.can_split_at(num_tokens):
            self._take_or_log(rows, current, Boundary("prompt", num_tokens))
            if current.base is not None and current.base_tokens == num_tokens:
                current.base.entry.is_resume_point = True

    def _may_keep(self, row: Request) -> bool:
        spec = row.spec
        is_plain = spec.num_choices == 1 and spec.sparse is None and spec.pooling is None
        return self.off_reason is None and is_plain and not spec.pinned

    def _store_row_or_log(self, row: Request, is_awaited: bool) -> bool:
        """Store the state of a decoding row after its longest cached prefix in memory; return whether it was stored."""
        key = self._key_of(row)
        parent = self.cache.match(key, len(key), in_memory=True)
        base = None if parent is None else self.cache.hold(parent)
        try:
            return self._store_row(row, key, base, is_awaited)
        except Exception:
            log.exception("the snapshot of %s after its last token failed", row.id)
            self.cache.counters.num_rejected += 1
            return False
        finally:
            if base is not None:
                self.cache.release(base)

    def _store_row(self, row: Request, key: PromptKey, base: SnapshotNode | None, is_awaited: bool) -> bool:
        """Store a decoding row's state; return whether it was stored.

        Its keys and values stay in the row's cache until the row, which is about to be dropped, returns them.
        """
        costs, spec, runner = self._runner.costs, row.spec, self._runner
        num_new = len(key) + 1 - (0 if base is None else base.entry.num_tokens)
        segment_bytes = num_new * costs.token_bytes
        if num_new < self._config.min_tokens:
            return False
        lend = self._loans.may_add(row.id, base)
        num_bytes = costs.fixed() + (0 if lend else segment_bytes)
        if not self.cache.evict_for(num_bytes, base, None if is_awaited else key, "answer", row.id):
            return False
        taken = runner.snapshot_row(row.id, None if base is None else base.segment, lend=lend)
        num_given = len(row.output_token_ids) - is_awaited  # a preempted row's last token is not computed yet
        if taken is None or not np.array_equal(taken.token_ids[:num_given], row.output_token_ids[:num_given]):
            return False
        ids = np.concatenate([spec.token_ids, taken.token_ids]).astype(np.int32)
        whole = PromptKey.of(runner.fingerprint, spec.tenant, ids, spec.images, runner.image_token_id)
        entry = self.cache.get(whole.digest())
        if entry is not None and entry.node is not None:
            return False  # stored before by an identical prompt and answer
        digest = None if base is None else base.entry.digest
        entry = self._store(whole, "answer", row, False, taken.snapshot, base, digest)
        if entry is None or entry.node is None:
            return False
        entry.is_resume_point = is_awaited
        if lend:
            self._loans.add(row.id, entry.node, segment_bytes)
        return True

    def end(self, row_ids: Iterable[str], failed: bool = False) -> None:
        """End the sessions of these prompts. failed: discard the snapshots that they have stored."""
        for row_id in row_ids:
            if (session := self._sessions.pop(row_id, None)) is not None:
                self._end(session, failed)

    def returning(self, row_ids: Iterable[str]) -> dict[str, Sequence[KVSegment]]:
        """Return the KV segments lent to rows that are about to be dropped, by row id; `settle` must follow."""
        if self._disk is None:
            return self._loans.returning(row_ids)
        return self._loans.returning(row_ids, self._disk.lacks)

    def settle(self, row_ids: Iterable[str]) -> None:
        """End the loans of rows that the runner has dropped or lost."""
        self._loans.settle(row_ids)
        if self._disk is not None:
            self._loans.take_leaving(self._disk.save)
            self._disk.save_waiting()
        self.cache.fit()  # segments read from disk for a row may not fit into the cache

    def write_behind(self) -> None:
        """Retry postponed writes to disk."""
        if self._disk is not None:
            self._disk.save_waiting()

    def _end(self, session: PrefixCacheSession, failed: bool) -> None:
        if failed:
            for entry in session.stored:
                if self.cache.get(entry.digest) is entry:
                    self._forget(entry)
            self._loans.settle([session.row.id])
        if session.base is not None:
            self.cache.release(session.base)
        if session.reading is not None and self._disk is not None:
            self._disk.close(session.reading)

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
        disk = self._disk.status() if self._disk is not None else None
        return cache_status(self.cache, self.off_reason, self._clock(), disk)

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for pending writes, then release all snapshots on the device thread."""
        self.end(list(self._sessions))
        if self._disk is not None:
            self._write_lent()
            self._disk.shut_down(timeout_s)
        self.cache.reset()

    def _write_lent(self) -> None:
        """Copy lent KV segments back from decoding rows so that they are written to disk."""
        try:
            lent = self.returning(self._loans.row_ids)
            self._runner.drop(list(lent), lent)
            self.settle(lent)
        except Exception:
            log.exception("the keys and values of running rows could not be copied back for the disk tier")

    def _find(
        self, rows: Sequence[Request], current: PrefixCacheSession, wait_s: float, copy_s: float
    ) -> CacheEntry | None:
        """Return the longest stored prefix in memory; None without one, or while it is still being read from disk."""
        while True:
            if current.reading is not None and not self._advance_reading(current, current.reading, wait_s, copy_s):
                return None
            entry = self.cache.match(current.key, current.max_tokens, current.in_memory)
            if entry is None:
                return None
            if entry.node is not None:
                if self._copy_back(entry):
                    return entry
                current.max_tokens = entry.num_tokens - 1
                continue
            assert self._disk is not None
            here = self.cache.match(current.key, current.max_tokens, in_memory=True)
            start, end, costs = 0 if here is None else here.num_tokens, entry.num_tokens, self._runner.costs
            computed_s = self.cache.seconds(start, end)
            num_bytes, row_id = (end - start) * costs.token_bytes + costs.fixed(), None
            if self._may_lend(rows) and not rows[0].spec.pinned:
                row_id = current.row.id
            elif not self.cache.can_hold(num_bytes):
                current.max_tokens = end - 1
                continue
            read_s = self._disk.read_s(num_bytes)
            if (here is not None and end - start < MIN_TOKENS_FROM_DISK) or read_s >= computed_s:
                current.in_memory = True
                continue
            current.reading = self._disk.read(entry, row_id, min(computed_s, READ_PATIENCE * read_s))

    def _copy_back(self, entry: CacheEntry) -> bool:
        """Copy an entry's lent keys and values back from rows; return False if that is impossible."""
        if not any(node.segment.is_lent for node in self.cache.chain(entry)):
            return True
        try:
            has_come_back = self._loans.copy_back(entry)
        except Exception:
            log.exception("the keys and values of %d tokens could not be copied back from a row", entry.num_tokens)
            self.cache.counters.num_unusable += 1
            return False
        if has_come_back and self._disk is not None and entry.node is not None and entry.node.snapshot is not None:
            self._disk.save(entry)
        return has_come_back

    def _advance_reading(self, current: PrefixCacheSession, reading: Reading, wait_s: float, copy_s: float) -> bool:
        """Return whether a reading is over, complete or not; False while it is worth waiting for."""
        assert self._disk is not None
        is_complete = self._disk.advance(reading, wait_s, copy_s)
        if is_complete is None and self._clock() < reading.until_s:
            return False
        if is_complete is None:
            log.warning("reading a snapshot from disk takes too long: %s is prefilled without it", current.row.id)
            self.cache.counters.num_unusable += 1
        current.in_memory = not is_complete
        self._disk.close(reading)
        current.reading = None
        return True

    def _restore(self, rows: Sequence[Request], current: PrefixCacheSession, entry: CacheEntry) -> bool:
        """Restore an entry; return False if that fails, in which case the prompt continues without it.

        Raises:
            InvalidRequest: The request is at fault, not the snapshot.
        """
        assert entry.node is not None and entry.node.snapshot is not None
        if rows[0].spec.pinned and Boundary("system", entry.num_tokens) in rows[0].spec.boundaries:
            self.cache.pin(entry)  # pinned entries are never lent
        try:
            lent = self._loans.lend(rows[0].id, entry) if self._may_lend(rows) else []
            self._runner.restore(rows, entry.node.snapshot, lent)
        except InvalidRequest:
            self.settle([rows[0].id])
            raise
        except Exception:
            self.settle([rows[0].id])
            log.exception("a snapshot of %d tokens could not be restored", entry.num_tokens)
            self.cache.counters.num_unusable += 1
            current.max_tokens = entry.num_tokens - 1
            self._runner.drop([row.id for row in rows])  # a partly restored prompt
            return False
        current.base, current.base_digest, current.base_tokens = self.cache.use(entry), entry.digest, entry.num_tokens
        self.cache.fit()  # segments read for this row only may not fit into the cache
        self._answers.used(entry.kind)
        for row in rows:
            row.num_prefilled = entry.num_tokens
        if self._disk is not None:
            self._disk.touch(entry)
        return True

    def _forget(self, entry: CacheEntry) -> None:
        if self._disk is not None:
            self._disk.forget(entry)
        else:
            self.cache.forget(entry)

    def _record(self, rows: Sequence[Request], key: PromptKey, num_cached: int) -> None:
        spec, counters = rows[0].spec, self.cache.counters
        for row in rows:
            row.num_cached = num_cached
        if spec.sparse is not None and not num_cached and not spec.sparse.num_dense:
            return  # nothing could have been cached
        self._stats.num_cached_tokens += num_cached
        counters.num_cached_tokens += num_cached
        counters.num_hits += num_cached > 0
        counters.num_misses += num_cached == 0
        if spec.sparse is not None and num_cached >= spec.sparse.num_dense:
            return  # as much as its plan allows
        miss = explain(self.cache, spec.request_id, key, spec.origin, num_cached, self._config.min_tokens)
        if miss is not None:
            self.cache.recent_misses.appendleft(miss)
            if not num_cached:
                counters.misses[miss.reason] += 1

    def _boundaries(self, row: Request, key: PromptKey, start: int) -> list[Boundary]:
        """Return where to take snapshots: at least min_tokens apart, and never within an image.

        The end of the prompt is skipped if it is less than min_tokens after the end of its turn: templates may render
        the tokens between them differently in the next prompt.
        """
        wanted, dense = [*row.spec.boundaries, Boundary("prompt", len(row.spec.token_ids) - 1)], row.num_dense_tokens
        wanted = [b for b in wanted if b.num_tokens <= dense]  # later states depend on the plan
        wanted = [b for b in wanted if b.kind in self._config.boundaries or (row.spec.pinned and b.kind == "system")]
        turn = max((b.num_tokens for b in wanted if b.kind == "turn"), default=0)
        boundaries, last = [], start
        for boundary in sorted(wanted, key=lambda b: (b.num_tokens, KIND_ORDER.index(b.kind))):
            is_pinned = row.spec.pinned and boundary.kind == "system" and boundary.num_tokens > last
            behind = max(last, turn) if boundary.kind == "prompt" else last
            far_enough = boundary.num_tokens - behind >= self._config.min_tokens or is_pinned
            if far_enough and boundary.num_tokens < len(key) and key.can_split_at(boundary.num_tokens):
                boundaries.append(boundary)
                last = boundary.num_tokens
        return boundaries

    def _take(self, rows: Sequence[Request], current: PrefixCacheSession, boundary: Boundary) -> None:
        base, costs = current.base, self._runner.costs
        spec, key = current.row.spec, current.key.prefix(boundary.num_tokens)
        entry = self.cache.get(key.digest())
        if entry is not None and entry.node is not None:  # stored meanwhile by another prompt
            if spec.pinned and boundary.kind == "system" and self._copy_back(entry):
                self.cache.pin(entry)
            return
        num_new = boundary.num_tokens - (current.base_tokens if base is not None else 0)
        pinned, segment_bytes = spec.pinned and boundary.kind == "system", num_new * costs.token_bytes
        lend = self._may_lend(rows) and boundary.kind != "system"
        num_bytes = costs.fixed() + (0 if lend else segment_bytes)
        num_outvalued = self.cache.counters.num_outvalued
        if not self.cache.evict_for(num_bytes, base, None if pinned else key, boundary.kind, current.row.id):
            if self.cache.counters.num_outvalued == num_outvalued:  # no memory, and later ones are larger
                current.todo.clear()
            return
        snapshot = self._runner.snapshot(rows, base.segment if base is not None else None, lend)
        if snapshot is None:
            log.warning("the state of %s at its %s boundary contains NaN or inf", current.row.id, boundary.kind)
            self.cache.counters.num_rejected += 1
            current.todo.clear()
            return
        entry = self._store(key, boundary.kind, current.row, pinned, snapshot, base, current.base_digest)
        if entry is None:
            current.todo.clear()  # later ones are larger
            return
        if lend and entry.node is not None:
            self._loans.add(current.row.id, entry.node, segment_bytes)
        current.stored.append(entry)
        if base is not None:
            self.cache.release(base)
        current.base, current.base_digest, current.base_tokens = self.cache.hold(entry), entry.digest, entry.num_tokens

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
        digest, now = key.digest(), self._clock()
        entry = self.cache.get(digest)  # exists if it is on disk and could not be read back
        if entry is not None and entry.node is not None:
            return None
        if entry is not None:
            entry.pinned |= pinned
            entry.parent = base_digest
        else:
            entry = CacheEntry(digest, key, kind, base_digest, row.spec.origin, pinned, now, now)
        if not self.cache.store(entry, snapshot, base, row.id):
            return None
        if self._disk is not None:
            self._disk.save(entry)
        return entry
