"""Snapshots that are on disk: written behind those in memory, read back when a prompt needs them."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from engine.core.batch import ModelRunner
from engine.core.prefix_cache.cache import Entry, PrefixCache, Snapshot
from engine.core.prefix_cache.prompt_key import Media, PromptKey
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost, SnapshotMeta

log = logging.getLogger("orchard.engine")

READ_TIMEOUT_S = 5.0
"""A disk that takes longer hangs, or is slower than the device."""
PRUNE_EVERY = 64


@dataclass(slots=True, eq=False)
class Reading:
    """A snapshot on its way from disk, with those in front of it that are on disk alone, too; the first one first.

    until_s: it is not waited for any longer.
    """

    pending: list[tuple[Entry, Future[dict[str, np.ndarray]]]]
    until_s: float

    def is_done(self, wait_s: float) -> bool:
        return not wait([future for _, future in self.pending], wait_s).not_done


class DiskTier:
    """`clock`: of the entries' times, monotonic seconds. Nothing here waits for the disk but `Reading.is_done`."""

    def __init__(self, files: SnapshotFiles, cache: PrefixCache, runner: ModelRunner, clock: Callable[[], float]):
        self._files = files
        self._cache = cache
        self._runner = runner
        self._clock = clock
        self._num_saved = 0
        cache.file_parent = self._file_parent
        for meta in reversed(files.entries()):
            cache.add(self._entry(meta))

    def save(self, entry: Entry, snapshot: Snapshot) -> None:
        """Behind those in front of it, which may not have been written. Never raises: memory has it."""
        self._num_saved += 1
        if self._num_saved % PRUNE_EVERY == 0:
            self._cache.prune()
        try:
            for one in reversed(self._cache.path(entry)[1:]):
                if one.held is not None and one.held.snapshot is not None and one.digest not in self._files:
                    self._save(one, one.held.snapshot)
            self._save(entry, snapshot)
        except Exception:
            log.exception("a snapshot of %d tokens is not written", entry.num_tokens)

    def touch(self, entry: Entry) -> None:
        self._files.touch(entry.digest)

    def read(self, entry: Entry) -> Reading | None:
        """Begins to read an entry that is on disk alone. None, and it is gone, if something in front is missing."""
        missing = []
        at: Entry | None = entry
        while at is not None and at.held is None:
            missing.append(at)
            at = self._in_front_of(at)
        if at is None and missing[-1].parent is not None:
            self._cache.forget(entry)
            return None
        pending = [(one, self._files.load(one.digest)) for one in reversed(missing)]
        return Reading(pending, self._clock() + READ_TIMEOUT_S)

    def finish(self, reading: Reading) -> bool:
        """Takes into memory what has been read; False when some of it was lost or there was no room for it.

        Of those in between only the stretch is kept: their states may be read again if they are needed.
        """
        for i, (entry, future) in enumerate(reading.pending):
            parent = self._cache.get(entry.parent)
            held = parent.held if parent is not None else None
            if self._cache.get(entry.digest) is not entry or (entry.parent is not None and held is None):
                return False  # cleared, or what is in front of it has left memory since
            try:
                arrays = future.result()
                snapshot = self._runner.import_snapshot(
                    arrays, entry.num_tokens, held.stretch if held is not None else None
                )
            except Exception as error:  # what is read back saves time, and an answer does not need it
                log.warning("a snapshot of %d tokens could not be read back: %s", entry.num_tokens, error)
                self._cache.counters.num_unusable += 1
                if isinstance(error, SnapshotLost | ValueError):
                    self.forget(entry)
                return False
            if not self._cache.store(entry, snapshot, held):
                return False
            if i > 1:
                self._cache.let_go(reading.pending[i - 1][0])
        return True

    def forget(self, entry: Entry) -> None:
        """Neither in memory nor on disk any more, nor what is behind it on disk alone."""
        self._cache.forget(entry)
        self._files.discard(entry.digest)
        self._cache.prune()

    def clear(self) -> Future[int]:
        """All files, also of what is pinned: that is taken in again at the next start. The future has their number."""
        future = self._files.clear()
        self._cache.prune()
        return future

    def status(self) -> dict[str, int]:
        return self._files.status()

    def close(self, timeout_s: float) -> None:
        self._files.close(timeout_s)

    def _file_parent(self, digest: str) -> str | None:
        meta = self._files.meta_of(digest)
        return meta.parent if meta is not None else None

    def _in_front_of(self, entry: Entry) -> Entry | None:
        """None if nothing is, or if it is gone; another process may have written it."""
        if entry.parent is None:
            return None
        parent = self._cache.get(entry.parent)
        if parent is None and (meta := self._files.meta_of(entry.parent)) is not None:
            parent = self._entry(meta)
            self._cache.add(parent)
        return parent

    def _save(self, entry: Entry, snapshot: Snapshot) -> None:
        if snapshot.stretch.is_lent:
            return  # it is written when it comes back
        key, parent = entry.key, self._cache.get(entry.parent)
        if entry.parent is not None and parent is None:
            return  # what is in front of it has left: nobody could read it back
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
        self._files.save(meta, dict(arrays))

    def _entry(self, meta: SnapshotMeta) -> Entry:
        key = PromptKey(
            self._runner.fingerprint, meta.tenant, meta.token_ids, tuple(Media(*media) for media in meta.media)
        )
        now, age_s = self._clock(), max(0.0, time.time() - meta.created_s)
        return Entry(meta.digest, key, meta.kind, meta.parent or None, meta.origin, False, now - age_s, now)
