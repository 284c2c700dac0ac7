"""The directory of the disk tier: its files, their models, and their eviction. Used by one thread at a time.

`<digest>.safetensors` are snapshots, and `<digest>.<random>.tmp` are being written; anything else is foreign and is
neither read nor removed. A snapshot is written under its temporary name, flushed to disk and renamed, so that a crash
leaves no file or a complete one. The writer holds a lock (flock) on the temporary file; one without a lock was left by
a crash and is removed at the next start. (A start between creating and locking a file fails that one write.)

Several processes may share a directory. Each scans it before it writes, adopts files that others of the same model have
written, and counts all snapshots against its own limit; the least recently used is evicted first, whatever its model.
Processes do not wait for one another: a file may vanish or be replaced at any time. It is lost then, but never mistaken
for another, because every file names its snapshot, its parent and its model. Two processes that write at the same time
may exceed the limit by what they write.
"""

import contextlib
import errno
import fcntl
import heapq
import io
import logging
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import EngineFailed, OrchardError
from engine.snapshot_store.format import (
    DIGEST,
    ForeignFile,
    SnapshotMeta,
    TornFile,
    open_snapshot,
    read_arrays,
    read_head,
    snapshot_bytes,
    write_snapshot,
)
from engine.snapshot_store.wire import FetchFailure

log = logging.getLogger("orchard.engine")

SNAPSHOT = re.compile(rf"({DIGEST.pattern})\.safetensors")
TEMPORARY = re.compile(rf"{DIGEST.pattern}\.[0-9a-f]{{16}}\.tmp")


class SnapshotLost(OrchardError):
    """A snapshot cannot be read any more: its file was removed or is damaged."""


@dataclass(slots=True)
class StoredFile:
    """A file with a snapshot's name."""

    digest: str  # From its name.
    parent: str  # Digest of its parent, '' without one.
    meta: SnapshotMeta | None  # None for a file of another model or version.
    num_bytes: int  # Size of the file.
    inode: int  # Inode of the file.
    mtime_ns: int  # Its last use by any process, at the last scan.
    used_ns: int = 0  # Its last use by this process.

    @property
    def last_used_ns(self) -> int:
        return max(self.mtime_ns, self.used_ns)


@dataclass(frozen=True)
class Standing:
    """How a snapshot that another node hands over ranks among the files here."""

    used_ns: int
    """Its last use at the other node."""
    spares: Callable[[StoredFile], bool]
    """Whether a file here must not be evicted for it; called on several threads."""


class SnapshotDirectory:
    """The snapshots in a directory, by digest in `files`, where every file with metadata has its parent as well.

    Raises:
        EngineFailed: The directory cannot be created, read or written.
    """

    def __init__(self, path: Path, fingerprint: str, max_bytes: int):
        self.files: dict[str, StoredFile] = {}
        self._path = path
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._foreign: set[str] = set()
        self._complaints: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()
        try:
            self._make()
            self._remove_stale()
            self.scan()
        except OSError as error:
            raise EngineFailed(f"prefix_cache.disk.path: {path} cannot be used ({error})") from None
        self._evict(0, "")

    def scan(self) -> None:
        """Scan the directory: adopt new files, drop removed ones, and remove torn files and orphans."""
        files: dict[str, StoredFile] = {}
        foreign: set[str] = set()
        for name, status in _listing(self._path):
            match = SNAPSHOT.fullmatch(name)
            if match is None or not stat.S_ISREG(status.st_mode):
                if not TEMPORARY.fullmatch(name):
                    foreign.add(name)
                continue
            file = self._known(match[1], status) or self._inspect(match[1], status)
            if file is not None:
                files[file.digest] = file
        self.files, self._foreign = files, foreign
        self._remove_orphans()

    def write(self, meta: SnapshotMeta, arrays: dict[str, np.ndarray], used_ns: int) -> None:
        """Write a snapshot, unless it exists, its parent is missing, or it does not fit. Raises OSError."""
        self.scan()
        known = self.files.get(meta.digest)
        if known is not None and known.meta is not None:
            known.used_ns = max(known.used_ns, used_ns)
            self.mark_used(known)
        elif not self._joins(meta):
            self._counts["num_orphans"] += 1
        else:
            if known is not None and self._unlink(known):
                self._counts["num_evicted"] += 1
            if self._evict(snapshot_bytes(meta, self._fingerprint, arrays), meta.parent):
                self._write(meta, arrays, used_ns)
            else:
                self._counts["num_dropped"] += 1

    def adopt(self, digest: str, file: io.FileIO, standing: Standing | None = None) -> FetchFailure | None:
        """Take over a complete file from another node, unless the snapshot exists.

        It is not flushed to disk, which would take longer than its transfer: a file that a crash has torn is found by
        its checksums.

        Args:
            digest: Digest of the snapshot.
            file: The file, see `temporary`.
            standing: Its rank; None: it is used now, and any other file may be evicted for it.

        Returns:
            Why it is not taken over; None if the snapshot exists now.
        """
        try:
            self.scan()
            file.seek(0)
            known, head, num_bytes = self.files.get(digest), read_head(file), os.fstat(file.fileno()).st_size
            if known is not None and known.meta is not None:
                return None
            if head.meta.digest != digest or head.fingerprint != self._fingerprint:
                return "mismatch"
            if not self._joins(head.meta):
                self._counts["num_orphans"] += 1
                return "gone"
            if known is not None and self._unlink(known):
                self._counts["num_evicted"] += 1
            if not self._evict(num_bytes, head.meta.parent, None if standing is None else standing.spares):
                self._counts["num_dropped"] += 1
                return "room"
            self._put(head.meta, file, time.time_ns() if standing is None else standing.used_ns)
            return None
        except (TornFile, ForeignFile):
            self._counts["num_torn"] += 1
            return "damaged"
        except OSError as error:
            self.complain("adopt", error)
            return "disk"

    def open(self, digest: str) -> io.FileIO:
        """Open the file of a snapshot for reading, on any thread. Raises OSError."""
        return open_snapshot(self._path_of(digest))

    @contextlib.contextmanager
    def temporary(self, digest: str) -> Iterator[io.FileIO]:
        """Create a new file, locked while it is open, and remove it unless it was renamed. May run on any thread."""
        path = self._path / f"{digest}.{secrets.token_hex(8)}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with io.FileIO(str(path), "w+", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
                with contextlib.suppress(OSError):  # without locks no other process removes it, either
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def read(self, meta: SnapshotMeta, prefix: str = "") -> dict[str, np.ndarray]:
        """Read the arrays of a file whose names begin with the prefix.

        Raises:
            SnapshotLost: The file cannot be read. It is removed with its descendants, unless it belongs to another
                snapshot.
        """
        began_s = time.monotonic()
        try:
            with open_snapshot(self._path_of(meta.digest)) as file:
                head = read_head(file)
                if head.fingerprint != self._fingerprint or not head.meta.says_the_same_as(meta):
                    raise ForeignFile("another snapshot has replaced it")
                arrays = read_arrays(file, head, prefix)
            self._counts["num_read"] += 1
            self._counts["read_bytes"] += sum(array.nbytes for array in arrays.values())
            self._counts["read_us"] += int(1e6 * (time.monotonic() - began_s))
            return arrays
        except (OSError, MemoryError, TornFile, ForeignFile) as error:
            self._lose(meta.digest, error)
            raise SnapshotLost(f"snapshot {meta.digest} is lost: {error}") from None

    def remove(self, digest: str) -> int:
        """Remove a file and its descendants; return how many were removed."""
        removed = [self.files[each] for each in reversed(with_descendants(self.files, digest))]
        return sum(self._unlink(file) for file in removed if file.meta is not None)

    def clear(self) -> int:
        """Remove all snapshots of this model; return how many were removed."""
        self.rescan()
        return sum(self._unlink(file) for file in reversed(self._own()))

    def mark_used(self, file: StoredFile) -> None:
        """Write a file's last use to its modification time."""
        try:
            os.utime(self._path_of(file.digest), ns=(file.used_ns, file.used_ns), follow_symlinks=False)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.complain("mark as used", error)

    def rescan(self) -> None:
        """Scan the directory; errors are counted instead of raised."""
        try:
            self.scan()
        except OSError as error:
            self.complain("list", error)

    def complain(self, what: str, error: Exception) -> None:
        """Count an error, and log the first of its kind."""
        code = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        kind = (what, f"{type(error).__name__} {code}")
        self._counts["num_errors"] += 1
        if kind not in self._complaints:
            self._complaints.add(kind)
            log.warning("%s: cannot %s snapshots (%s); further such errors are only counted", self._path, what, error)

    def status(self) -> dict[str, int]:
        """Return gauges and counters.

        num_files counts this model's files; num_bytes counts all models' and is limited by max_bytes.
        """
        own = len(self._own())
        counted = ("written", "read", "dropped", "torn", "missing", "orphans", "evicted", "errors")
        return {
            "num_files": own,
            "num_bytes": self._num_bytes,
            "max_bytes": self._max_bytes,
            "num_foreign": len(self._foreign) + len(self.files) - own,
            "read_bytes": self._counts["read_bytes"],
            "read_us": self._counts["read_us"],
            **{f"num_{name}": self._counts[f"num_{name}"] for name in counted},
        }

    def _own(self) -> list[StoredFile]:
        """Return the files of this model, parents before their children."""
        own = [(file.meta.num_tokens, file.digest) for file in self.files.values() if file.meta is not None]
        return [self.files[digest] for _, digest in sorted(own)]

    @property
    def _num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def _path_of(self, digest: str) -> Path:
        return self._path / f"{digest}.safetensors"

    def _make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(self._path.stat().st_mode)
        if mode & 0o022:
            log.warning("%s has mode %o: every user with write permission can change answers", self._path, mode)
        with self.temporary("0" * 32):
            pass

    def _remove_stale(self) -> None:
        for name, status in _listing(self._path):
            if TEMPORARY.fullmatch(name) and stat.S_ISREG(status.st_mode):
                with contextlib.suppress(OSError), open_snapshot(self._path / name) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(self._path / name)

    def _known(self, digest: str, status: os.stat_result) -> StoredFile | None:
        """Return a file that looks unchanged; its content is checked when it is read."""
        file = self.files.get(digest)
        if file is None or (file.inode, file.num_bytes) != (status.st_ino, status.st_size):
            return None
        file.mtime_ns = status.st_mtime_ns
        return file

    def _inspect(self, digest: str, status: os.stat_result) -> StoredFile | None:
        """Read the metadata of a new file; None if it is torn (and removed), has vanished, or cannot be read."""
        file = StoredFile(digest, "", None, status.st_size, status.st_ino, status.st_mtime_ns)
        try:
            with open_snapshot(self._path_of(digest)) as opened:
                head = read_head(opened)
            if head.meta.digest != digest:
                raise TornFile(f"its header names snapshot {head.meta.digest}")
        except (ForeignFile, PermissionError):
            return file
        except TornFile:
            self._counts["num_torn"] += 1
            self._unlink(file)
            return None
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.complain("inspect", error)
            return None
        file.parent = head.meta.parent
        file.meta = head.meta if head.fingerprint == self._fingerprint else None
        return file

    def _joins(self, meta: SnapshotMeta) -> bool:
        """Return whether its parent exists, or it needs none."""
        parent = self.files.get(meta.parent)
        if parent is None or parent.meta is None:
            return not meta.parent
        return (parent.meta.num_tokens, parent.meta.tenant) == (meta.parent_tokens, meta.tenant)

    def _remove_orphans(self) -> None:
        for file in self._own():
            if file.meta is None or self._joins(file.meta):
                continue
            # A parent that was written during the scan is found by the next one, with its children.
            if file.parent not in self.files and os.path.lexists(self._path_of(file.parent)):
                del self.files[file.digest]
            else:
                self._counts["num_orphans"] += self._unlink(file)
                file.meta = None  # even if the file cannot be removed

    def _evict(self, num_bytes: int, parent: str, spares: Callable[[StoredFile], bool] | None = None) -> bool:
        """Evict files for `num_bytes` after `parent`; return False if they cannot fit.

        Files without children are evicted, the least recently used first, except spared ones.
        """
        kept = {*path_to(self.files, parent), *spared(self.files, spares)}
        if num_bytes + sum(self.files[digest].num_bytes for digest in kept) > self._max_bytes:
            return False
        num_children = Counter(file.parent for file in self.files.values())
        leaves = [(f.last_used_ns, f.digest) for f in self.files.values() if not num_children[f.digest]]
        heapq.heapify(leaves)
        excess = self._num_bytes + num_bytes - self._max_bytes
        while excess > 0 and leaves:
            file = self.files[heapq.heappop(leaves)[1]]
            if file.digest in kept or not self._unlink(file):
                continue
            self._counts["num_evicted"] += 1
            excess -= file.num_bytes
            num_children[file.parent] -= 1
            parent_file = self.files.get(file.parent)
            if parent_file is not None and not num_children[file.parent]:
                heapq.heappush(leaves, (parent_file.last_used_ns, parent_file.digest))
        return excess <= 0

    def _write(self, meta: SnapshotMeta, arrays: dict[str, np.ndarray], used_ns: int) -> None:
        with self.temporary(meta.digest) as file:
            write_snapshot(file, meta, self._fingerprint, arrays)
            os.fsync(file.fileno())
            self._put(meta, file, used_ns)
        self._counts["num_written"] += 1

    def _put(self, meta: SnapshotMeta, file: io.FileIO, used_ns: int) -> None:
        """Rename a complete temporary file."""
        path = self._path_of(meta.digest)
        if path.name in self._foreign:
            raise FileExistsError(errno.EEXIST, "its name is used by something other than a regular file", str(path))
        os.utime(file.fileno(), ns=(used_ns, used_ns))
        status = os.fstat(file.fileno())
        os.replace(str(file.name), path)
        stored = StoredFile(meta.digest, meta.parent, meta, status.st_size, status.st_ino, used_ns, used_ns)
        self.files[meta.digest] = stored

    def _lose(self, digest: str, error: Exception) -> None:
        match error:
            case FileNotFoundError():
                self._counts["num_missing"] += 1
            case TornFile():
                self._counts["num_torn"] += 1
            case OSError() | MemoryError():
                self.complain("read", error)
        file = self.files.get(digest)
        if file is not None and isinstance(error, (OSError, TornFile)):
            self._unlink(file)
        self.files.pop(digest, None)
        self.rescan()

    def _unlink(self, file: StoredFile) -> bool:
        """Remove a file; return False if it has vanished or cannot be removed."""
        try:
            os.unlink(self._path_of(file.digest))
        except FileNotFoundError:
            self.files.pop(file.digest, None)
            return False
        except OSError as error:
            self.complain("remove", error)
            return False
        self.files.pop(file.digest, None)
        return True


def with_descendants(files: Mapping[str, StoredFile], digest: str) -> list[str]:
    """Return a file and its descendants, parents before children; [] if it does not exist."""
    children: dict[str, list[str]] = {}
    for file in files.values():
        children.setdefault(file.parent, []).append(file.digest)
    found = [digest] if digest in files else []
    for each in found:
        found.extend(children.get(each, ()))
    return found


def spared(files: Mapping[str, StoredFile], spares: Callable[[StoredFile], bool] | None) -> set[str]:
    """Return the digests of the files that `spares` is true of, and of their ancestors; none if it is None."""
    if spares is None:
        return set()
    return {each for digest, file in files.items() if spares(file) for each in path_to(files, digest)}


def path_to(files: Mapping[str, StoredFile], digest: str) -> list[str]:
    """Return a file and its ancestors, the root first; [] if it does not exist."""
    path: list[str] = []
    while digest in files:
        path.append(digest)
        digest = files[digest].parent
    return path[::-1]


def _listing(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of each directory entry, without following symlinks. Raises OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False)
