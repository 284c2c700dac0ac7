"""The disk tier of the prefix cache: one thread that writes and reads snapshots, so that nobody else waits for a disk.

What others ask for goes into queues; loads and removals go in front of writes, and what was used is noted in between.
`SnapshotDirectory` belongs to the thread; all others see the index that it publishes behind each of its jobs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.config import DiskCacheConfig
from engine.snapshot_store.directory import (
    SnapshotDirectory,
    SnapshotLost,
    StoredFile,
    path_to,
    with_descendants,
)
from engine.snapshot_store.format import RESERVED_NAMES, SnapshotMeta

__all__ = ["SnapshotFiles", "SnapshotLost", "SnapshotMeta"]

log = logging.getLogger("orchard.engine")

MAX_QUEUED_BYTES = 1 << 30
"""Limit of the arrays that wait to be written and may hold device memory. A larger snapshot waits alone."""

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
    """Snapshots of one model in a directory that other processes and models may share (see SnapshotDirectory).

    fingerprint: of all that the arrays depend on beside the tokens; files with another one are never loaded. Nothing
    here waits for the disk but the constructor, `flush` and `close`. Raises EngineFailed when the directory cannot be
    made, read or written; later errors are counted, and the first of each kind is logged.
    """

    def __init__(self, config: DiskCacheConfig, fingerprint: str):
        path = Path(config.path).expanduser().absolute()
        self._directory = SnapshotDirectory(path, fingerprint, int(config.max_gb * 2**30))
        self._changed = threading.Condition()  # over all that follows
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
        """All that can be loaded, the most recently used first; the parent of each is among them."""
        with self._changed:
            files = sorted(self._index.values(), key=lambda file: file.last_used_ns, reverse=True)
        return [file.meta for file in files if file.meta is not None]

    def __contains__(self, digest: str) -> bool:
        """Whether `load` would find it: on disk, or on its way there."""
        with self._changed:
            return digest in self._index or self._on_its_way(digest) is not None

    def meta_of(self, digest: str) -> SnapshotMeta | None:
        """Of a snapshot that `load` would find."""
        with self._changed:
            file, write = self._index.get(digest), self._on_its_way(digest)
            if file is not None and file.meta is not None:
                return file.meta
            return write.meta if write is not None else None

    def save(self, meta: SnapshotMeta, arrays: dict[str, np.ndarray]) -> bool:
        """Queues a snapshot, behind its parent. The arrays must not change any more; they are let go on the thread.

        False if it is not written because the queue is full (counted in num_dropped). When its parent is not there by
        then it is not written, either (num_orphans). dtypes: those of snapshot_format.DTYPES.
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
        """The arrays whose names begin with the prefix; those given to `save` while they are not yet on disk.

        The future raises SnapshotLost; then the entry is gone. Counts as a use. Its callbacks may run on the thread.
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
            answer.set_exception(SnapshotLost(f"snapshot {digest} is not there"))
        return answer

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> bool:
        """Wait for loads at most so many seconds; return whether all are done."""
        return not wait(futures, timeout_s).not_done

    def touch(self, digest: str) -> None:
        """Notes a use of a snapshot and of those in front of it. Unknown ones are ignored."""
        with self._changed:
            self._touch(digest)
            self._changed.notify_all()

    def discard(self, digest: str) -> Future[int]:
        """Removes a snapshot and all behind it. They are gone at once; the future has the number of files."""
        with self._changed:
            gone = {digest, *with_descendants(self._index, digest)}
            self._give_up(gone)
            self._index = {each: file for each, file in self._index.items() if each not in gone}
            return self._submit(partial(self._directory.remove, digest), removes=True)

    def clear(self) -> Future[int]:
        """Removes all snapshots of this model, also those in the queue. As `discard`."""
        with self._changed:
            self._give_up({write.meta.digest for write in self._waiting})
            self._index = {}
            return self._submit(self._directory.clear, removes=True)

    def flush(self) -> None:
        """Waits until all is done that was asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or not self._thread.is_alive())

    def close(self, timeout_s: float) -> None:
        """Takes no more, and waits for what is queued. What is not written in time is dropped."""
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
        """Files and bytes now, counters since the start; see SnapshotDirectory.status. num_dropped: queue was full."""
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
        """The one that is being written first."""
        return [*([self._writing] if self._writing is not None else []), *self._queued.values()]

    def _give_up(self, digests: set[str]) -> None:
        """What waits to be written of these, and behind them. A file that is being written is removed afterwards."""
        gone = set(digests)
        for write in self._waiting:  # parents come before their children
            if write.meta.digest in gone or write.meta.parent in gone:
                gone.add(write.meta.digest)
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
        """Never the same twice, so that a restart finds the same order."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    # On the thread:

    def _run(self) -> None:
        while (step := self._next()) is not None:
            step()
            del step  # it holds on to the arrays

    def _next(self) -> Callable[[], None] | None:
        """What to do next; sleeps while there is nothing. None at the end."""
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
            error = SnapshotLost(lost.message)  # without the frames, which hold on to the buffer
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
        except Exception as error:  # also what numpy says of arrays that cannot be written
            self._directory.complain("write", error)
        self._publish()  # first, so that it can be loaded all the time
        with self._changed:
            self._writing = None

    def _publish(self) -> None:
        index = {file.digest: file for file in self._directory.files.values() if file.meta is not None}
        status = self._directory.status()
        with self._changed:
            self._status = status
            if not self._num_removals:  # else they would come back for a moment
                self._index = index
