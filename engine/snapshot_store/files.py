"""The disk tier's thread, which reads and writes snapshots so that no other thread waits for the disk.

Requests are queued; loads and removals run before writes, and pending uses are recorded between them.
`SnapshotDirectory` belongs to the thread; other threads read the index that is published after each job.
"""

import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.config import DiskCacheConfig
from engine.snapshot_store.directory import (
    SnapshotDirectory,
    SnapshotLost,
    Standing,
    StoredFile,
    path_to,
    spared,
    with_descendants,
)
from engine.snapshot_store.format import RESERVED_NAMES, SnapshotMeta
from engine.snapshot_store.wire import FetchFailure

__all__ = ["SnapshotFiles", "SnapshotLost", "SnapshotMeta", "Standing", "StoredFile"]

log = logging.getLogger("orchard.engine")

MAX_QUEUED_BYTES = 1 << 30
"""Limit of the arrays queued for writing, which may keep device memory alive. A larger snapshot is queued only
alone."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Write:
    meta: SnapshotMeta
    arrays: dict[str, np.ndarray]
    num_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], Any]
    done: Future[Any]
    removes: bool = False


class SnapshotFiles:
    """Snapshots of one model, in a directory that other processes and models may share (see SnapshotDirectory).

    Only the constructor, `wait`, `flush` and `close` wait for the disk. Errors after construction are counted, and the
    first of each kind is logged.

    Args:
        config: Path and limit.
        fingerprint: Digest of everything but the tokens that the arrays depend on; files with another one are never
            loaded.

    Raises:
        EngineFailed: The directory cannot be created, read or written.
    """

    def __init__(self, config: DiskCacheConfig, fingerprint: str):
        path = Path(config.path).expanduser().absolute()
        self._directory = SnapshotDirectory(path, fingerprint, int(config.max_gb * 2**30))
        self._changed = threading.Condition()  # guards all following attributes
        self._jobs: deque[_Job] = deque()
        self._touched: dict[str, StoredFile] = {}
        self._queued: dict[str, _Write] = {}
        self._queued_bytes = 0  # without the one that is being written
        self._writing: _Write | None = None
        self._num_dropped = 0
        self._num_removals = 0
        self._last_ns = 0
        self._busy = False
        self._closing = False
        self._index: dict[str, StoredFile] = {}
        self._status: dict[str, int] = {}
        self._publish()
        self._thread = threading.Thread(target=self._run, name="snapshot-files", daemon=True)
        self._thread.start()

    def entries(self) -> list[SnapshotMeta]:
        """Return all loadable snapshots, the most recently used first; the parent of each is included."""
        with self._changed:
            files = sorted(self._index.values(), key=lambda file: file.last_used_ns, reverse=True)
        return [file.meta for file in files if file.meta is not None]

    def __contains__(self, digest: str) -> bool:
        """Return whether `load` would find the snapshot: on disk, or queued for writing."""
        with self._changed:
            return digest in self._index or self._on_its_way(digest) is not None

    def meta_of(self, digest: str) -> SnapshotMeta | None:
        """Return the metadata of a snapshot that `load` would find; None without one."""
        with self._changed:
            file, write = self._index.get(digest), self._on_its_way(digest)
            if file is not None and file.meta is not None:
                return file.meta
            return write.meta if write is not None else None

    @property
    def max_bytes(self) -> int:
        """Limit of the bytes of all files."""
        return self.status()["max_bytes"]

    def room(self, standing: Standing | None) -> int:
        """Return the bytes that a snapshot from another node may take at most, with those that are evicted for it."""
        if standing is None:
            return self.max_bytes
        with self._changed:
            index, status = self._index, self._status
        kept = spared(index, standing.spares)
        evictable = sum(file.num_bytes for digest, file in index.items() if digest not in kept)
        return max(0, status["max_bytes"] - status["num_bytes"] + evictable)

    def chain_of(self, digest: str) -> list[StoredFile]:
        """Return the file of a snapshot after those of its ancestors, the first ancestor first; [] if it has none."""
        with self._changed:
            return [self._index[each] for each in path_to(self._index, digest)]

    def open(self, digest: str) -> io.FileIO:
        """Open the file of a snapshot for reading. Raises OSError."""
        return self._directory.open(digest)

    def wait_written(self, digest: str, timeout_s: float) -> None:
        """Wait for at most `timeout_s` seconds until a snapshot is no longer queued for writing."""
        with self._changed:
            self._changed.wait_for(lambda: self._on_its_way(digest) is None, timeout_s)

    def temporary(self, digest: str) -> AbstractContextManager[io.FileIO]:
        """Create a file to receive a snapshot, for `adopt`; it is removed at the end unless it was adopted.

        Raises OSError.
        """
        return self._directory.temporary(digest)

    def adopt(self, digest: str, file: io.FileIO, standing: Standing | None = None) -> "Future[FetchFailure | None]":
        """Take over a file from another node.

        Args:
            digest: Digest of the snapshot, whose parent must be on disk.
            file: A complete file, see `temporary`; it must stay open until the future is done.
            standing: See SnapshotDirectory.adopt.

        Returns:
            The future of why it is not taken over, see SnapshotDirectory.adopt. It raises SnapshotLost if the disk tier
                is closed.
        """
        with self._changed:
            return self._submit(partial(self._directory.adopt, digest, file, standing))

    def save(self, meta: SnapshotMeta, arrays: dict[str, np.ndarray]) -> bool:
        """Queue a snapshot for writing.

        Its parent must be on disk or queued before it, else it is dropped (num_orphans).

        Args:
            meta: The metadata.
            arrays: Must not change afterwards; dtypes of format.DTYPES. They are released on the thread.

        Returns:
            False if the queue is full or closed (num_dropped).
        """
        assert not RESERVED_NAMES & arrays.keys(), f"array names {sorted(arrays)}"
        num_bytes = sum(array.nbytes for array in arrays.values())
        with self._changed:
            if self._on_its_way(meta.digest) is not None:
                return True
            if meta.digest in self._index:
                self._touch(meta.digest)
            elif self._closing or (self._queued_bytes and self._queued_bytes + num_bytes > MAX_QUEUED_BYTES):
                self._num_dropped += 1
                return False
            else:
                self._queued[meta.digest] = _Write(meta, dict(arrays), num_bytes, self._now_ns())
                self._queued_bytes += num_bytes
            self._changed.notify_all()
            return True

    def load(self, digest: str, prefix: str = "") -> Future[dict[str, np.ndarray]]:
        """Load the arrays whose names begin with the prefix. Counts as a use.

        Returns:
            A future that raises SnapshotLost if the snapshot cannot be read; it is removed then. Snapshots that are not
                written yet give the saved arrays. Callbacks may run on the thread.
        """
        answer: Future[dict[str, np.ndarray]] = Future()
        with self._changed:
            file, write = self._index.get(digest), self._on_its_way(digest)
            if file is not None and file.meta is not None:
                self._touch(digest)
                return self._submit(partial(self._directory.read, file.meta, prefix))
        if write is not None:
            answer.set_result({name: array for name, array in write.arrays.items() if name.startswith(prefix)})
        else:
            answer.set_exception(SnapshotLost(f"snapshot {digest} does not exist"))
        return answer

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> bool:
        """Wait for loads for at most `timeout_s` seconds; return whether all are done."""
        return not wait(futures, timeout_s).not_done

    def touch(self, digest: str) -> None:
        """Record a use of a snapshot and its ancestors. Unknown digests are ignored."""
        with self._changed:
            self._touch(digest)
            self._changed.notify_all()

    def discard(self, digest: str) -> Future[int]:
        """Remove a snapshot and its descendants from the index now.

        Returns the future of the number of removed files.
        """
        with self._changed:
            removed = {digest, *with_descendants(self._index, digest)}
            self._give_up(removed)
            self._index = {each: file for each, file in self._index.items() if each not in removed}
            return self._submit(partial(self._directory.remove, digest), removes=True)

    def clear(self) -> Future[int]:
        """Remove all snapshots of this model, also queued ones. Returns as `discard`."""
        with self._changed:
            self._give_up({write.meta.digest for write in self._waiting})
            self._index = {}
            return self._submit(self._directory.clear, removes=True)

    def flush(self) -> None:
        """Wait until everything queued is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or not self._thread.is_alive())

    def close(self, timeout_s: float) -> None:
        """Reject new work and wait for queued writes; those not written within `timeout_s` are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._num_dropped += len(self._queued)
            self._give_up(set(self._queued))
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(SnapshotLost("the disk tier is closed"))

    def status(self) -> dict[str, int]:
        """Return current files and bytes, and counters since the start; see SnapshotDirectory.status."""
        with self._changed:
            return {**self._status, "num_dropped": self._status["num_dropped"] + self._num_dropped}

    # With the condition held:

    @property
    def _idle(self) -> bool:
        return not (self._jobs or self._touched or self._queued or self._busy)

    def _submit(self, run: Callable[[], T], removes: bool = False) -> Future[T]:
        job = _Job(run, Future(), removes)
        if self._closing:
            job.done.set_exception(SnapshotLost("the disk tier is closed"))
        else:
            self._num_removals += removes
            self._jobs.append(job)
            self._changed.notify_all()
        return job.done

    def _touch(self, digest: str) -> None:
        for each in path_to(self._index, digest):
            self._touched[each] = self._index[each]
            self._index[each].used_ns = self._now_ns()

    @property
    def _waiting(self) -> list[_Write]:
        """Queued writes, the one in progress first."""
        return [*([self._writing] if self._writing is not None else []), *self._queued.values()]

    def _give_up(self, digests: set[str]) -> None:
        """Cancel queued writes of these snapshots and their descendants. A file being written is removed afterwards."""
        cancelled = set(digests)
        for write in self._waiting:  # parents come before their children
            if write.meta.digest in cancelled or write.meta.parent in cancelled:
                cancelled.add(write.meta.digest)
                if write is self._writing:
                    self._writing = None
                else:
                    del self._queued[write.meta.digest]
                    self._queued_bytes -= write.num_bytes

    def _on_its_way(self, digest: str) -> _Write | None:
        if self._writing is not None and self._writing.meta.digest == digest:
            return self._writing
        return self._queued.get(digest)

    def _now_ns(self) -> int:
        """Return a strictly rising time, so that a restart restores the same order."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    # On the thread:

    def _run(self) -> None:
        while (step := self._next()) is not None:
            step()
            del step  # keeps the arrays alive

    def _next(self) -> Callable[[], None] | None:
        """Return the next job, waiting for one; None after `close`."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or not self._idle)
            self._busy = True
            if self._jobs:
                return partial(self._answer, self._jobs.popleft())
            if self._touched:
                touched, self._touched = self._touched, {}
                return partial(self._mark_used, touched)
            if self._queued:
                self._writing = self._queued.pop(next(iter(self._queued)))
                self._queued_bytes -= self._writing.num_bytes
                return partial(self._write, self._writing)
            self._busy = False
            return None

    def _answer(self, job: _Job) -> None:
        if not job.done.set_running_or_notify_cancel() and not job.removes:
            return
        result, error = None, None
        try:
            result = job.run()
        except SnapshotLost as lost:
            error = SnapshotLost(lost.message)  # without the frames, which keep the buffer alive
        except Exception as unexpected:
            log.exception("a job of the disk tier failed")
            self._directory.complain("handle", unexpected)
            error = SnapshotLost(f"the disk tier failed: {unexpected}")
        with self._changed:
            self._num_removals -= job.removes
        self._publish()
        if job.done.cancelled():
            return
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)

    def _mark_used(self, touched: dict[str, StoredFile]) -> None:
        for file in touched.values():
            self._directory.mark_used(file)

    def _write(self, write: _Write) -> None:
        try:
            self._directory.write(write.meta, write.arrays, write.used_ns)
        except Exception as error:  # numpy's errors included
            self._directory.complain("write", error)
        self._publish()  # before _writing is cleared, so that it stays loadable
        with self._changed:
            self._writing = None

    def _publish(self) -> None:
        index = {file.digest: file for file in self._directory.files.values() if file.meta is not None}
        status = self._directory.status()
        with self._changed:
            self._status = status
            if not self._num_removals:  # pending removals must not reappear
                self._index = index
