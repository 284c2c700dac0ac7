"""The directory of the disk tier: which files are in it, whose they are, and which have to go. One thread at a time.

`<digest>.safetensors` are snapshots, `<digest>.<random>.tmp` are being written; anything else is foreign: neither read
nor removed. A snapshot is written under its temporary name, flushed to the disk and renamed, so a crash leaves nothing
or a whole file. Its writer holds a lock (flock) on the temporary file, so one without a lock was left by a crash, and
is removed at the next start. (A start in the instant between making and locking a file fails that one write.)

Several processes may share a directory. Each looks again before it writes, takes over what others of the same model
have written, and counts all snapshots against its own limit: the least recently used goes first, whichever model it is
of. Nobody waits for anybody: a file may vanish or be replaced at any time. Then it is lost, never mistaken for another,
as every file says which snapshot it is, which one precedes it, and of which model. Two that write at the same time
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.protocol import EngineFailed, OrchardError
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

log = logging.getLogger("orchard.engine")

SNAPSHOT = re.compile(rf"({DIGEST.pattern})\.safetensors")
TEMPORARY = re.compile(rf"{DIGEST.pattern}\.[0-9a-f]{{16}}\.tmp")


class SnapshotLost(OrchardError):
    """A snapshot cannot be read any more: its file is gone, or not what was written."""


@dataclass(slots=True)
class StoredFile:
    """A file with a snapshot's name. meta: None when it is of another model or version.

    mtime_ns: when it was last used, as of the last look at the directory. used_ns: as this process knows.
    """

    digest: str
    parent: str
    meta: SnapshotMeta | None
    num_bytes: int
    inode: int
    mtime_ns: int
    used_ns: int = 0

    @property
    def last_used_ns(self) -> int:
        return max(self.mtime_ns, self.used_ns)


class SnapshotDirectory:
    """files: by digest. Every file in it with a meta has its parent in it too.

    Raises EngineFailed when the directory cannot be made, read or written.
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
        """Looks what is there: takes over new files, forgets those that are gone, removes torn ones and orphans."""
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
        """Writes a snapshot, unless it is there, or its parent is not, or it does not fit. Raises OSError."""
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

    def read(self, meta: SnapshotMeta, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays of a file whose names begin with the prefix.

        Raises SnapshotLost; the file goes, and those that need it, unless it is not ours.
        """
        began_s = time.monotonic()
        try:
            with open_snapshot(self._path_of(meta.digest)) as file:
                head = read_head(file)
                if head.fingerprint != self._fingerprint or not head.meta.says_the_same_as(meta):
                    raise ForeignFile("another one has taken its place")
                arrays = read_arrays(file, head, prefix)
            self._counts["num_read"] += 1
            self._counts["read_bytes"] += sum(array.nbytes for array in arrays.values())
            self._counts["read_us"] += int(1e6 * (time.monotonic() - began_s))
            return arrays
        except (OSError, MemoryError, TornFile, ForeignFile) as error:
            self._lose(meta.digest, error)
            raise SnapshotLost(f"snapshot {meta.digest} is lost: {error}") from None

    def remove(self, digest: str) -> int:
        """Removes a file and all that need it. Returns how many were removed."""
        gone = [self.files[each] for each in reversed(with_descendants(self.files, digest))]
        return sum(self._unlink(file) for file in gone if file.meta is not None)

    def clear(self) -> int:
        """Removes all snapshots of this model. Returns how many."""
        self.rescan()
        return sum(self._unlink(file) for file in reversed(self._own()))

    def mark_used(self, file: StoredFile) -> None:
        try:
            os.utime(self._path_of(file.digest), ns=(file.used_ns, file.used_ns), follow_symlinks=False)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.complain("mark as used", error)

    def rescan(self) -> None:
        try:
            self.scan()
        except OSError as error:
            self.complain("list", error)

    def complain(self, what: str, error: Exception) -> None:
        """Counts an error, and logs it if it is the first of its kind."""
        code = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        kind = (what, f"{type(error).__name__} {code}")
        self._counts["num_errors"] += 1
        if kind not in self._complaints:
            self._complaints.add(kind)
            log.warning("%s: cannot %s snapshots (%s); counted from now on", self._path, what, error)

    def status(self) -> dict[str, int]:
        """Gauges and counters. num_files is of this model; num_bytes, of all models, is held against max_bytes."""
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
        """The files of this model, parents in front of their children."""
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
            log.warning("%s has mode %o: whoever may write there may change answers", self._path, mode)
        with self._temporary("0" * 32):
            pass

    def _remove_stale(self) -> None:
        for name, status in _listing(self._path):
            if TEMPORARY.fullmatch(name) and stat.S_ISREG(status.st_mode):
                with contextlib.suppress(OSError), open_snapshot(self._path / name) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(self._path / name)

    def _known(self, digest: str, status: os.stat_result) -> StoredFile | None:
        """A file that looks as before; whether it is the same is checked when it is read."""
        file = self.files.get(digest)
        if file is None or (file.inode, file.num_bytes) != (status.st_ino, status.st_size):
            return None
        file.mtime_ns = status.st_mtime_ns
        return file

    def _inspect(self, digest: str, status: os.stat_result) -> StoredFile | None:
        """A file that was not known; None if it is torn (then it is removed), gone, or cannot be read now."""
        file = StoredFile(digest, "", None, status.st_size, status.st_ino, status.st_mtime_ns)
        try:
            with open_snapshot(self._path_of(digest)) as opened:
                head = read_head(opened)
            if head.meta.digest != digest:
                raise TornFile(f"it says that it is {head.meta.digest}")
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
        """Whether what precedes it is there."""
        parent = self.files.get(meta.parent)
        if parent is None or parent.meta is None:
            return not meta.parent
        return (parent.meta.num_tokens, parent.meta.tenant) == (meta.parent_tokens, meta.tenant)

    def _remove_orphans(self) -> None:
        for file in self._own():
            if file.meta is None or self._joins(file.meta):
                continue
            # A parent that came while the directory was read is seen next time, and its children with it.
            if file.parent not in self.files and os.path.lexists(self._path_of(file.parent)):
                del self.files[file.digest]
            else:
                self._counts["num_orphans"] += self._unlink(file)
                file.meta = None  # also when it cannot be removed

    def _evict(self, num_bytes: int, parent: str) -> bool:
        """Makes room for so many bytes behind `parent`: leaves go, the least recently used first. False: no room."""
        kept = set(path_to(self.files, parent))
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
        path = self._path_of(meta.digest)
        if path.name in self._foreign:
            raise FileExistsError(errno.EEXIST, "something else than a file has its name", str(path))
        with self._temporary(meta.digest) as file:
            write_snapshot(file, meta, self._fingerprint, arrays)
            os.utime(file.fileno(), ns=(used_ns, used_ns))
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
            os.replace(str(file.name), path)
        self._counts["num_written"] += 1
        stored = StoredFile(meta.digest, meta.parent, meta, status.st_size, status.st_ino, used_ns, used_ns)
        self.files[meta.digest] = stored

    @contextlib.contextmanager
    def _temporary(self, digest: str) -> Iterator[io.FileIO]:
        """A new file, locked while it is open. It is removed unless it has got another name by then."""
        path = self._path / f"{digest}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with io.FileIO(str(path), "w", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
                with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it, either
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

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
        """False when the file was gone or cannot be removed."""
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
    """A file and all that need it, each behind the one that it needs; [] if it is not there."""
    children: dict[str, list[str]] = {}
    for file in files.values():
        children.setdefault(file.parent, []).append(file.digest)
    found = [digest] if digest in files else []
    for each in found:
        found.extend(children.get(each, ()))
    return found


def path_to(files: Mapping[str, StoredFile], digest: str) -> list[str]:
    """A file and all that it needs, the root first; [] if it is not there."""
    path: list[str] = []
    while digest in files:
        path.append(digest)
        digest = files[digest].parent
    return path[::-1]


def _listing(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names and status of what is in a directory; symlinks are not followed. Raises OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False)
