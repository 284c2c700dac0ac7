"""The disk tier of the prefix cache: writes snapshots in the background and reads them back for prompts."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from engine.core.batch import SEGMENT_ARRAYS, ModelRunner
from engine.core.cost_model import CostModel
from engine.core.prefix_cache.loans import Loans
from engine.core.prefix_cache.node import CacheEntry, Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import Media, PromptKey
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost, SnapshotMeta

log = logging.getLogger("orchard.engine")

READ_TIMEOUT_S = 5.0
"""Shortest time limit of a read, in seconds; a slower disk hangs or is not worth waiting for."""
PRUNE_EVERY = 64


@dataclass(slots=True, eq=False)
class Reading:
    """A snapshot being read from disk, with those of its ancestors that are only on disk, first ancestor first."""

    pending: list[tuple[CacheEntry, Future[dict[str, np.ndarray]]]]
    """Entries that are not in memory yet, with the futures of their arrays."""
    until_s: float
    """When waiting for it ends; monotonic seconds."""
    row_id: str | None
    """The row whose reservation covers the keys and values; None if the cache must have memory for them."""
    base: SnapshotNode | None = None
    """The node before the next entry; its KV segment is kept, even if it is evicted, until that entry is stored."""
    copying: Iterator[Snapshot | None] | None = None
    """The import of the next entry, layer by layer."""
    num_bytes: int = 0
    """Bytes copied to the device."""
    copied_s: float = 0.0
    """Seconds of copying."""


class DiskTier:
    """Connects the prefix cache to its files. Only `advance` waits for the disk.

    Args:
        files: The files.
        memory: Stores snapshots that were read; entries on disk are added to its cache.
        loans: Tracks lent KV segments.
        runner: Exports and imports snapshots.
        clock: Returns monotonic seconds; the clock of the entries' times.
        costs: Learns the rate of reading.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        memory: SnapshotMemory,
        loans: Loans,
        runner: ModelRunner,
        clock: Callable[[], float],
        costs: CostModel,
    ):
        self._files = files
        self._memory = memory
        self._cache = memory.cache
        self._loans = loans
        self._runner = runner
        self._clock = clock
        self._costs = costs
        self._read_us = 0  # the files' read_us at the last reading
        self._num_saved = 0
        self._waiting: dict[str, CacheEntry] = {}  # by digest, to be retried by save_waiting
        for meta in reversed(files.entries()):
            self._cache.add(self._entry(meta))

    def save(self, entry: CacheEntry) -> None:
        """Write an entry, and those of its ancestors that are not on disk.

        Never raises; after an error the snapshot is in memory only.
        """
        self._num_saved += 1
        if self._num_saved % PRUNE_EVERY == 0:
            self._cache.prune()
        self._waiting |= {one.digest: one for one in self._cache.index.path(entry) if one.digest not in self._files}
        self.save_waiting()

    def lacks(self, entry: CacheEntry) -> bool:
        """Return whether an entry has no file."""
        return entry.digest not in self._files

    def save_waiting(self) -> None:
        """Retry writes that were postponed because keys and values were lent or the write queue was full."""
        waiting, self._waiting = self._waiting, {}
        for entry in sorted(waiting.values(), key=lambda entry: entry.num_tokens):
            if entry.node is None or entry.node.snapshot is None or entry.digest in self._files:
                continue
            try:
                if not self._save(entry, entry.node.snapshot):
                    self._waiting[entry.digest] = entry
            except Exception:
                log.exception("a snapshot of %d tokens could not be written to disk", entry.num_tokens)

    def touch(self, entry: CacheEntry) -> None:
        """Record a use of an entry's file."""
        self._files.touch(entry.digest)

    def read_s(self, num_bytes: int) -> float:
        """Predict the seconds of reading `num_bytes` from disk."""
        return self._costs.read_s(num_bytes)

    def read(self, entry: CacheEntry, row_id: str | None, timeout_s: float) -> Reading | None:
        """Start to read an entry that is only on disk; `close` must follow.

        Only the KV segments of its ancestors are read: their states are not needed.

        Args:
            entry: The entry.
            row_id: See Reading.
            timeout_s: Time limit in seconds, if longer than READ_TIMEOUT_S.

        Returns:
            None if an ancestor is missing; the entry is removed then.
        """
        missing = []
        at: CacheEntry | None = entry
        while at is not None and at.node is None:
            missing.append(at)
            at = self._in_front_of(at)
        if at is None and missing[-1].parent is not None:
            self._cache.forget(entry)
            return None
        pending = [
            (one, self._files.load(one.digest, "" if one is entry else SEGMENT_ARRAYS)) for one in reversed(missing)
        ]
        base = None if at is None else self._cache.tree.hold(at)
        return Reading(pending, self._clock() + max(timeout_s, READ_TIMEOUT_S), row_id, base)

    def advance(self, reading: Reading, wait_s: float, copy_s: float) -> bool | None:
        """Import what has been read for about `copy_s` seconds, after waiting for the disk for at most `wait_s`.

        Returns:
            True when everything is in memory; None while more is pending; False if part of it was lost or did not fit.
        """
        until_s = self._clock() + copy_s
        while reading.pending:
            entry, future = reading.pending[0]
            if entry.node is not None:  # another prompt has read it meanwhile
                self._go_on_behind(reading, entry)
                continue
            if reading.copying is None and not self._files.wait([future], wait_s):
                return None
            if self._cache.index.get(entry.digest) is not entry or entry.parent != _digest_of(reading.base):
                return False  # cleared, or stored with another parent meanwhile
            try:
                snapshot = self._copied(reading, entry, future, until_s)
            except Exception as error:  # the prompt can be computed without the snapshot
                log.warning("a snapshot of %d tokens could not be read from disk: %s", entry.num_tokens, error)
                self._cache.counters.num_unusable += 1
                if isinstance(error, SnapshotLost | ValueError):
                    self.forget(entry)
                return False
            if snapshot is None:
                return None
            if not self._store(reading, entry, snapshot):
                return False
        self._record(reading)
        return True

    def _copied(
        self, reading: Reading, entry: CacheEntry, future: Future[dict[str, np.ndarray]], until_s: float
    ) -> Snapshot | None:
        """Import layers until `until_s`, at least one; return the snapshot once all are copied, None before."""
        began_s = self._clock()
        if reading.copying is None:
            arrays, base = future.result(), reading.base
            reading.num_bytes += sum(array.nbytes for array in arrays.values())
            reading.copying = self._runner.import_snapshot(
                arrays, entry.num_tokens, None if base is None else base.segment, len(reading.pending) == 1
            )
        snapshot = None
        for snapshot in reading.copying:
            if snapshot is not None or self._clock() >= until_s:
                break
        reading.copied_s += self._clock() - began_s
        return snapshot

    def _store(self, reading: Reading, entry: CacheEntry, snapshot: Snapshot) -> bool:
        """Store the next snapshot of a reading; return False if it does not fit."""
        is_last = len(reading.pending) == 1
        segment_bytes, row_id = snapshot.segment_bytes, reading.row_id
        if not self._memory.store(entry, snapshot, reading.base, is_for_row=row_id is not None):
            return False
        assert entry.node is not None
        if row_id is not None:
            self._loans.add(row_id, entry.node, segment_bytes)
        self._go_on_behind(reading, entry)
        if not is_last:
            self._cache.forget_memory(entry)
        return True

    def _go_on_behind(self, reading: Reading, entry: CacheEntry) -> None:
        """Continue a reading with the entry after this one, which is in memory."""
        before, reading.base = reading.base, self._cache.tree.hold(entry)
        if before is not None:
            self._cache.tree.release(before)
        reading.pending.pop(0)
        reading.copying = None

    def _record(self, reading: Reading) -> None:
        """Record the time of a complete reading in the cost model."""
        before_us, self._read_us = self._read_us, self._files.status()["read_us"]
        self._costs.record_read(reading.num_bytes, 1e-6 * (self._read_us - before_us) + reading.copied_s)

    def adopt(self, digest: str) -> None:
        """Add a snapshot whose file another node has sent, and its ancestors, to the cache."""
        for file in self._files.chain_of(digest):
            if file.meta is not None and self._cache.index.get(file.digest) is None:
                self._cache.add(self._entry(file.meta))

    def close(self, reading: Reading) -> None:
        """Release the resources of a reading, complete or not."""
        if reading.base is not None:
            self._cache.tree.release(reading.base)
            reading.base = None

    def forget(self, entry: CacheEntry) -> None:
        """Remove an entry from memory and disk, with its descendants on disk."""
        self._cache.forget(entry)
        self._files.discard(entry.digest)
        self._cache.prune()

    def clear(self) -> Future[int]:
        """Remove all files, also those of pinned prompts, which are prefilled again at the next start.

        Returns:
            The future of the number of removed files.
        """
        future = self._files.clear()
        self._cache.prune()
        return future

    def status(self) -> dict[str, int]:
        return self._files.status()

    def shut_down(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for pending writes."""
        self._files.close(timeout_s)

    def _in_front_of(self, entry: CacheEntry) -> CacheEntry | None:
        """Return an entry's parent, which another process may have written; None if it has none or it is missing."""
        if entry.parent is None:
            return None
        parent = self._cache.index.get(entry.parent)
        if parent is None and (meta := self._files.meta_of(entry.parent)) is not None:
            parent = self._entry(meta)
            self._cache.add(parent)
        return parent

    def _save(self, entry: CacheEntry, snapshot: Snapshot) -> bool:
        """Queue a snapshot for writing; return False if that is not possible now."""
        key, parent = entry.key, self._cache.index.get(entry.parent)
        if snapshot.segment.is_lent or (
            entry.parent is not None and (parent is None or entry.parent not in self._files)
        ):
            return False
        meta = SnapshotMeta(
            digest=entry.digest,
            parent=entry.parent or "",
            parent_tokens=parent.num_tokens if parent is not None else 0,
            kind=entry.kind,
            tenant=key.tenant,
            token_ids=key.token_ids,
            media=tuple((media.start, media.end, media.content_hash) for media in key.media),
            origin=entry.origin,
            created_s=time.time(),
        )
        arrays: Mapping[str, np.ndarray] = self._runner.export_snapshot(snapshot)
        return self._files.save(meta, dict(arrays))

    def _entry(self, meta: SnapshotMeta) -> CacheEntry:
        key = PromptKey(
            self._runner.fingerprint, meta.tenant, meta.token_ids, tuple(Media(*media) for media in meta.media)
        )
        now, age_s = self._clock(), max(0.0, time.time() - meta.created_s)
        return CacheEntry(meta.digest, key, meta.kind, meta.parent or None, meta.origin, False, now - age_s, now)


def _digest_of(node: SnapshotNode | None) -> str | None:
    return None if node is None else node.entry.digest
