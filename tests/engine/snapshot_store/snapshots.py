"""Small snapshots, and a disk tier to put them in, for its tests."""

import hashlib
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import DiskCacheConfig
from engine.protocol import PromptOrigin
from engine.snapshot_store.directory import SnapshotDirectory
from engine.snapshot_store.files import SnapshotFiles
from engine.snapshot_store.format import SnapshotMeta, snapshot_bytes

MODEL = "model-a"
OTHER_MODEL = "model-b"
ROOMY = 1 << 30
SIZE = 1 << 14
WAIT_S = 60
TICKS = itertools.count(10**18)


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def path_of(directory: Path, name: str) -> Path:
    return directory / f"{digest_of(name)}.safetensors"


def meta_of(name: str, behind: SnapshotMeta | None = None, num_tokens: int = 16, **changes: Any) -> SnapshotMeta:
    """behind: its parent. num_tokens: of its own segment."""
    before = np.array([], np.int32) if behind is None else behind.token_ids
    tail = np.frombuffer(name.encode().ljust(num_tokens, b"."), np.uint8)[:num_tokens].astype(np.int32)
    fields: dict[str, Any] = {
        "digest": digest_of(name),
        "parent": "" if behind is None else behind.digest,
        "parent_tokens": len(before),
        "kind": "turn",
        "tenant": "",
        "token_ids": np.concatenate([before, tail]),
        "media": (),
        "origin": PromptOrigin(),
        "created_s": 1.7e9,
    }
    return SnapshotMeta(**{**fields, **changes})


def arrays_of(name: str, num_bytes: int = 64) -> dict[str, np.ndarray]:
    seed = int(digest_of(name)[:8], 16)
    return {"state": np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)}


def assert_same_meta(one: SnapshotMeta, other: SnapshotMeta) -> None:
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    assert {**vars(one), "token_ids": None} == {**vars(other), "token_ids": None}


def assert_same_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].shape == other[name].shape
        assert one[name].dtype == other[name].dtype.newbyteorder("<")
        np.testing.assert_array_equal(one[name], other[name])


def write(directory: SnapshotDirectory, name: str, behind: SnapshotMeta | None = None, **changes) -> SnapshotMeta:
    meta = meta_of(name, behind, **changes)
    directory.write(meta, arrays_of(name, SIZE), next(TICKS))
    return meta


def use(directory: SnapshotDirectory, name: str) -> None:
    file = directory.files[digest_of(name)]
    file.used_ns = next(TICKS)
    directory.mark_used(file)


def loadable(directory: SnapshotDirectory) -> set[str]:
    return {digest for digest, file in directory.files.items() if file.meta is not None}


def digests(*names: str) -> set[str]:
    return {digest_of(name) for name in names}


def room_for(count: int) -> int:
    """Bytes for so many snapshots and half another."""
    return int((count + 0.5) * snapshot_bytes(meta_of("x"), MODEL, arrays_of("x", SIZE)))


class Tier:
    """Opens and closes the disk tier of one directory, as often as a test likes."""

    def __init__(self, path: Path):
        self.path = path
        self._opened: list[SnapshotFiles] = []

    def open(self, max_bytes: float = 2**30, fingerprint: str = MODEL) -> SnapshotFiles:
        config = DiskCacheConfig(path=str(self.path), max_gb=max_bytes / 2**30)
        self._opened.append(SnapshotFiles(config, fingerprint))
        return self._opened[-1]

    def close(self) -> None:
        for files in self._opened:
            files.close(WAIT_S)
            assert not files._thread.is_alive()
        assert not list(self.path.glob("*.tmp"))


class Stall:
    """Holds up the thread where it flushes a file to the disk, from `begin` to `end`."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    def begin(self) -> None:
        self._reached.clear()
        self._ended.clear()

    def wait(self) -> None:
        assert self._reached.wait(WAIT_S)

    def end(self) -> None:
        self._ended.set()

    def fsync(self, fd: int) -> None:
        self._reached.set()
        assert self._ended.wait(WAIT_S)


def save(files: SnapshotFiles, name: str, behind: SnapshotMeta | None = None, **changes) -> SnapshotMeta:
    meta = meta_of(name, behind, **changes)
    files.save(meta, arrays_of(name, SIZE))
    return meta


def load(files: SnapshotFiles, meta: SnapshotMeta) -> dict[str, np.ndarray]:
    return files.load(meta.digest).result(WAIT_S)


def names(files: SnapshotFiles, *known: str) -> list[str]:
    by_digest = {digest_of(name): name for name in known}
    return [by_digest[meta.digest] for meta in files.entries()]


def counts(files: SnapshotFiles, *fields: str) -> tuple[int, ...]:
    return tuple(files.status()[f"num_{field}"] for field in fields)
