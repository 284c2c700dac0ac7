"""The disk tier of the prefix cache: writes snapshots in the background and reads them back for prompts."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.core.cost_model import CostModel
from engine.core.prefix_cache.node import Snapshot, SnapshotNode
from engine.core.prefix_cache.prompt_key import Media, PromptKey
from engine.core.prefix_cache.snapshot_memory import SnapshotMemory
from engine.core.runner import SEGMENT_ARRAYS, ModelRunner
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost, SnapshotMeta

log = logging.getLogger("orchard.engine")

READ_TIMEOUT_S = 5.0
"""Shortest time limit of a read, in seconds; a slower disk hangs or is not worth waiting for."""
PRUNE_EVERY = 64


ReadState = Literal["done", "pending", "lost"]
"""How far a reading is: everything is in memory, more is pending, or a part of it was lost or did not fit."""


@dataclass(slots=True, eq=False)
class Reading:
    """A snapshot being read from disk, with those of its ancestors that are only on disk, first ancestor first."""

    pending: list[tuple[str, Future[dict[str, np.ndarray]]]]
    """Digests of the snapshots that are not in memory yet, with the futures of their arrays."""
    until_s: float
    """When waiting for it ends; monotonic seconds."""
    row_id: str | None
    """The row whose reservation covers the keys and values; None if the cache must have memory for them."""
    base: SnapshotNode | None = None
    """The node before the next snapshot; its KV segment is kept, even if it is evicted, until that one is in memory."""
    copying: Iterator[Snapshot | None] | None = None
    """The import of the next snapshot, layer by layer."""
    num_bytes: int = 0
    """Bytes copied to the device."""
    copied_s: float = 0.0
    """Seconds of copying."""


class DiskTier:
    """Connects the prefix cache to its files. Only `advance` waits for the disk.

    Args:
        files: The files.
        memory: Adds snapshots that were read; those on disk are added to its store.
        runner: Exports and imports snapshots.
        clock: Returns monotonic seconds; the clock of the store's times.
        costs: Learns the rate of reading.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        memory: SnapshotMemory,
        runner: ModelRunner,
        clock: Callable[[], float],
        costs: CostModel,
    ):
        self._files = files
        self._memory = memory
        self._store = memory.store
        self._runner = runner
        self._clock = clock
        self._costs = costs
        self._read_us = 0  # the files' read_us at the last reading
        self._num_written = 0
        self._waiting: dict[str, SnapshotNode] = {}  # by digest, to be retried by write_waiting
        for meta in reversed(files.entries()):
            self._store.add_file(self._node(meta))

    def write(self, node: SnapshotNode) -> None:
        """Write a snapshot, and those of its ancestors that are not on disk.

        Never raises; after an error the snapshot is in memory only.
        """
        self._num_written += 1
        if self._num_written % PRUNE_EVERY == 0:
            self._store.prune()
        self._waiting |= {one.digest: one for one in self._store.path(node) if self.lacks(one)}
        self.write_waiting()

    def lacks(self, node: SnapshotNode) -> bool:
        """Return whether a snapshot has no file."""
        return node.digest not in self._files

    def write_waiting(self) -> None:
        """Retry writes that were postponed because keys and values were lent or the write queue was full."""
        waiting, self._waiting = self._waiting, {}
        for node in sorted(waiting.values(), key=lambda node: node.num_tokens):
            if node.snapshot is None or not self.lacks(node):
                continue
            try:
                if not self._write(node, node.snapshot):
                    self._waiting[node.digest] = node
            except Exception:
                log.exception("a snapshot of %d tokens could not be written to disk", node.num_tokens)

    def touch(self, node: SnapshotNode) -> None:
        """Record a use of a snapshot's file."""
        self._files.touch(node.digest)

    def read(self, node: SnapshotNode, row_id: str | None, timeout_s: float) -> Reading | None:
        """Start to read a snapshot that is only on disk; `close` must follow.

        Only the KV segments of its ancestors are read: their states are not needed.

        Args:
            node: The snapshot.
            row_id: See Reading.
            timeout_s: Time limit in seconds, if longer than READ_TIMEOUT_S.

        Returns:
            None if an ancestor is missing; the snapshot is removed then.
        """
        missing = []
        at: SnapshotNode | None = node
        while at is not None and at.snapshot is None:
            missing.append(at)
            at = self._parent_of(at)
        if at is None and missing[-1].parent_digest is not None:
            self._store.forget(node)
            return None
        pending = [
            (one.digest, self._files.load(one.digest, "" if one is node else SEGMENT_ARRAYS))
            for one in reversed(missing)
        ]
        if at is not None:
            self._store.hold(at)
        return Reading(pending, self._clock() + max(timeout_s, READ_TIMEOUT_S), row_id, at)

    def advance(self, reading: Reading, wait_s: float, copy_s: float) -> ReadState:
        """Import what has been read for about `copy_s` seconds, after waiting for the disk for at most `wait_s`.

        Returns:
            Whether everything is in memory, more is pending, or a part was lost or did not fit.
        """
        until_s = self._clock() + copy_s
        while reading.pending:
            digest, future = reading.pending[0]
            node = self._store.get(digest)
            if node is not None and node.snapshot is not None:  # another prompt has read it meanwhile
                self._continue_after(reading, node)
                continue
            if reading.copying is None and not self._files.wait([future], wait_s):
                return "pending"
            base_digest = None if reading.base is None else reading.base.digest
            if node is None or node.parent_digest != base_digest:
                return "lost"  # cleared, or stored with another parent meanwhile
            try:
                snapshot = self._copied(reading, node, future, until_s)
            except Exception as error:  # the prompt can be computed without the snapshot
                log.warning("a snapshot of %d tokens could not be read from disk: %s", node.num_tokens, error)
                self._store.counters.num_unusable += 1
                if isinstance(error, SnapshotLost | ValueError):
                    self.forget(node)
                return "lost"
            if snapshot is None:
                return "pending"
            if not self._add(reading, node, snapshot):
                return "lost"
        self._record(reading)
        return "done"

    def _copied(
        self, reading: Reading, node: SnapshotNode, future: Future[dict[str, np.ndarray]], until_s: float
    ) -> Snapshot | None:
        """Import layers until `until_s`, at least one; return the snapshot once all are copied, None before."""
        began_s = self._clock()
        if reading.copying is None:
            arrays, base = future.result(), reading.base
            reading.num_bytes += sum(array.nbytes for array in arrays.values())
            reading.copying = self._runner.import_snapshot(
                arrays, node.num_tokens, None if base is None else base.segment, len(reading.pending) == 1
            )
        snapshot = None
        for snapshot in reading.copying:
            if snapshot is not None or self._clock() >= until_s:
                break
        reading.copied_s += self._clock() - began_s
        return snapshot

    def _add(self, reading: Reading, node: SnapshotNode, snapshot: Snapshot) -> bool:
        """Add the next snapshot of a reading to memory; return False if it does not fit."""
        is_last = len(reading.pending) == 1
        segment_bytes, row_id = snapshot.segment_bytes, reading.row_id
        added = self._memory.add(node, snapshot, reading.base, is_for_row=row_id is not None)
        if added is None:
            return False
        if row_id is not None:
            self._store.assign(added, row_id, segment_bytes)
        self._continue_after(reading, added)
        if not is_last:
            self._store.forget_memory(added)
        return True

    def _continue_after(self, reading: Reading, node: SnapshotNode) -> None:
        """Continue a reading with the snapshot after this one, which is in memory."""
        self._store.hold(node)
        before, reading.base = reading.base, node
        if before is not None:
            self._store.release(before)
        reading.pending.pop(0)
        reading.copying = None

    def _record(self, reading: Reading) -> None:
        """Record the time of a complete reading in the cost model."""
        before_us, self._read_us = self._read_us, self._files.status()["read_us"]
        self._costs.record_read(reading.num_bytes, 1e-6 * (self._read_us - before_us) + reading.copied_s)

    def adopt(self, digest: str) -> None:
        """Add a snapshot whose file another node has sent, and its ancestors, to the cache."""
        for file in self._files.chain_of(digest):
            if file.meta is not None and self._store.get(file.digest) is None:
                self._store.add_file(self._node(file.meta))

    def close(self, reading: Reading) -> None:
        """Release the resources of a reading, complete or not."""
        if reading.base is not None:
            self._store.release(reading.base)
            reading.base = None

    def forget(self, node: SnapshotNode) -> None:
        """Remove a snapshot from memory and disk, with its descendants on disk."""
        self._store.forget(node)
        self._files.discard(node.digest)
        self._store.prune()

    def clear(self) -> Future[int]:
        """Remove all files, also those of pinned prompts, which are prefilled again at the next start.

        Returns:
            The future of the number of removed files.
        """
        future = self._files.clear()
        self._store.prune()
        return future

    def status(self) -> dict[str, int]:
        return self._files.status()

    def shut_down(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for pending writes."""
        self._files.close(timeout_s)

    def _parent_of(self, node: SnapshotNode) -> SnapshotNode | None:
        """Return a snapshot's parent, which another process may have written; None if it has none or it is missing."""
        if node.parent_digest is None:
            return None
        parent = self._store.get(node.parent_digest)
        if parent is None and (meta := self._files.meta_of(node.parent_digest)) is not None:
            parent = self._node(meta)
            self._store.add_file(parent)
        return parent

    def _write(self, node: SnapshotNode, snapshot: Snapshot) -> bool:
        """Queue a snapshot for writing; return False if that is not possible now."""
        key, parent = node.key, self._store.get(node.parent_digest)
        if snapshot.segment.is_lent or (node.parent_digest is not None and (parent is None or self.lacks(parent))):
            return False
        meta = SnapshotMeta(
            digest=node.digest,
            parent=node.parent_digest or "",
            parent_tokens=parent.num_tokens if parent is not None else 0,
            kind=node.kind,
            tenant=key.tenant,
            token_ids=key.token_ids,
            media=tuple((media.start, media.end, media.content_hash) for media in key.media),
            origin=node.origin,
            created_s=time.time(),
        )
        arrays: Mapping[str, np.ndarray] = self._runner.export_snapshot(snapshot)
        return self._files.save(meta, dict(arrays))

    def _node(self, meta: SnapshotMeta) -> SnapshotNode:
        key = PromptKey(
            self._runner.fingerprint, meta.tenant, meta.token_ids, tuple(Media(*media) for media in meta.media)
        )
        now, age_s = self._clock(), max(0.0, time.time() - meta.created_s)
        return SnapshotNode(meta.digest, key, meta.kind, meta.parent or None, meta.origin, False, now - age_s, now)
