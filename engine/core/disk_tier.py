"""Snapshots that are on disk: written behind those in memory, read back when a prompt needs them."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from engine.core.batch import ModelRunner
from engine.core.prefix_cache import Entry, Held, PrefixCache, Snapshot
from engine.core.prompt_key import Media, PromptKey
from engine.processing.snapshot_files import SnapshotFiles, SnapshotLost, SnapshotMeta

log = logging.getLogger("orchard.engine")


@dataclass(slots=True, eq=False)
class Reading:
    """A snapshot on its way from disk, with those in front of it that are on disk alone, too; the first one first."""

    pending: list[tuple[Entry, Future[dict[str, np.ndarray]]]]

    def is_done(self, wait_s: float) -> bool:
        return not wait([future for _, future in self.pending], wait_s).not_done


class DiskTier:
    """`clock`: of the entries' times, monotonic seconds. Nothing here waits for the disk but `Reading.is_done`."""

    def __init__(self, files: SnapshotFiles, cache: PrefixCache, runner: ModelRunner, clock: Callable[[], float]):
        self._files = files
        self._cache = cache
        self._runner = runner
        self._clock = clock
        for meta in reversed(files.entries()):
            self._cache.add(self._entry(meta))

    def save(self, entry: Entry, snapshot: Snapshot) -> None:
        """Behind those in front of it, which may not have been written. Never raises: memory has it."""
        try:
            for one in reversed(self._cache.path(entry)[1:]):
                if not one.on_disk and one.held is not None and one.held.snapshot is not None:
                    self._save(one, one.held.snapshot)
            self._save(entry, snapshot)
        except Exception:
            log.exception("a snapshot of %d tokens is not written", entry.num_tokens)

    def touch(self, entry: Entry) -> None:
        self._files.touch(entry.digest)

    def read(self, entry: Entry) -> Reading | None:
        """Begins to read an entry that is on disk alone. None, and it is gone, if something in front is missing."""
        missing = []
        for one in self._cache.path(entry):
            if one.held is not None:
                break
            missing.append(one)
        if self._cache.get(missing[-1].parent) is None and missing[-1].parent is not None:
            self.forget(entry)
            return None
        return Reading([(one, self._files.load(one.digest)) for one in reversed(missing)])

    def finish(self, reading: Reading) -> bool:
        """Takes into memory what has been read; False when some of it was lost or there was no room for it."""
        for entry, future in reading.pending:
            if self._cache.get(entry.digest) is not entry:
                return False
            try:
                arrays = future.result()
                parent = self._parent(entry)
                snapshot = self._runner.import_snapshot(
                    arrays, entry.num_tokens, parent.stretch if parent is not None else None
                )
            except (SnapshotLost, ValueError) as error:
                log.warning("a snapshot of %d tokens could not be read back: %s", entry.num_tokens, error)
                self.forget(entry)
                return False
            if not self._cache.store(entry, snapshot, parent):
                return False
        return True

    def forget(self, entry: Entry) -> None:
        """Neither in memory nor on disk any more."""
        self._cache.forget(entry)
        self._files.discard(entry.digest)

    def clear(self) -> Future[int]:
        """All files, also of what is pinned: that is taken in again at the next start. The future has their number."""
        for entry in self._cache.entries():
            entry.on_disk = False
        return self._files.clear()

    def status(self) -> dict[str, int]:
        return self._files.status()

    def close(self, timeout_s: float) -> None:
        self._files.close(timeout_s)

    def _parent(self, entry: Entry) -> Held | None:
        """Raises ValueError when the snapshot in front has left since the reading began."""
        if entry.parent is None:
            return None
        parent = self._cache.get(entry.parent)
        if parent is None or parent.held is None:
            raise ValueError("the snapshot in front of it is gone")
        return parent.held

    def _save(self, entry: Entry, snapshot: Snapshot) -> None:
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
        entry.on_disk = entry.digest in self._files

    def _entry(self, meta: SnapshotMeta) -> Entry:
        key = PromptKey(
            self._runner.fingerprint, meta.tenant, meta.token_ids, tuple(Media(*media) for media in meta.media)
        )
        now, age_s = self._clock(), max(0.0, time.time() - meta.created_s)
        return Entry(
            meta.digest, key, meta.kind, meta.parent or None, meta.origin, False, now - age_s, now, on_disk=True
        )
