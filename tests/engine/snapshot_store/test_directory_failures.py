"""The disk tier when the disk, its files or its shutdown fail."""

import errno
import os
import random
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from engine.config import DiskCacheConfig
from engine.errors import EngineFailed
from engine.snapshot_store import directory as snapshot_directory
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost
from tests.engine.snapshot_store.snapshots import (
    MODEL,
    SIZE,
    WAIT_S,
    Stall,
    Tier,
    arrays_of,
    assert_same_arrays,
    counts,
    load,
    meta_of,
    names,
    path_of,
    save,
)


def test_a_torn_file_is_never_loaded_and_its_entry_is_removed_with_its_children(tier: Tier) -> None:
    files = tier.open()
    root = save(files, "root")
    save(files, "child", root)
    other = save(files, "other")
    files.flush()
    with path_of(tier.path, "root").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\0\0\0")

    error = files.load(root.digest).exception(WAIT_S)
    assert isinstance(error, SnapshotLost) and "damaged" in error.message
    assert error.__traceback__ is error.__context__ is None  # they would hold on to what was read
    assert names(files, "root", "child", "other") == ["other"]
    with pytest.raises(SnapshotLost, match="does not exist"):
        load(files, root)
    assert_same_arrays(load(files, other), arrays_of("other", SIZE))
    assert counts(files, "torn", "orphans", "files") == (1, 1, 1)


def test_a_full_disk_is_counted_and_logged_once_and_the_tier_goes_on(tier: Tier, monkeypatch, caplog) -> None:
    files = tier.open()
    real, left = os.fsync, [5]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC if left[0] else errno.EDQUOT, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    parent = save(files, "s0")
    save(files, "child", parent)
    for i in range(1, 6):
        save(files, f"s{i}")
    files.flush()

    assert names(files, "s5") == ["s5"] and counts(files, "errors", "orphans", "written") == (5, 1, 1)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all("cannot write snapshots" in message for message in messages)
    assert [path.name for path in tier.path.iterdir()] == [path_of(tier.path, "s5").name]


def test_arrays_that_cannot_be_written_are_counted_and_the_tier_goes_on(tier: Tier, caplog) -> None:
    files = tier.open()
    files.save(meta_of("complex"), {"x": np.ones(3, np.complex128)})
    files.save(meta_of("object"), {"x": np.array([{}])})
    save(files, "root")
    files.flush()

    assert names(files, "root") == ["root"] and counts(files, "errors", "written") == (2, 1)


def test_a_directory_that_vanishes_is_counted_and_its_snapshots_are_lost(tier: Tier) -> None:
    files = tier.open()
    meta = save(files, "root")
    files.flush()
    moved = tier.path.rename(tier.path.with_name("moved"))

    with pytest.raises(SnapshotLost):
        load(files, meta)
    save(files, "more")
    files.flush()
    assert files.entries() == [] and counts(files, "missing", "errors") == (1, 2)
    moved.rename(tier.path)
    save(files, "more")
    files.flush()
    assert set(names(files, "root", "more")) == {"root", "more"}


def test_a_job_with_an_unexpected_error_is_answered_and_the_tier_continues(tier: Tier, monkeypatch, caplog) -> None:
    files = tier.open()
    meta = save(files, "root")
    files.flush()
    with monkeypatch.context() as patched:
        patched.setattr(snapshot_directory, "read_head", lambda _: 1 / 0)
        with pytest.raises(SnapshotLost, match="division by zero"):
            load(files, meta)

    assert_same_arrays(load(files, meta), arrays_of("root", SIZE))
    assert counts(files, "errors") == (1,) and "a job of the disk tier failed" in caplog.text


def test_a_load_that_was_cancelled_does_not_stop_the_thread(tier: Tier, stall: Stall) -> None:
    files = tier.open()
    meta = save(files, "root")
    files.flush()
    stall.begin()
    save(files, "other")
    stall.wait()
    assert files.load(meta.digest).cancel() and files.discard(meta.digest).cancel()
    stall.end()
    files.flush()

    assert names(files, "other") == ["other"] and counts(files, "read") == (0,)


def test_closing_writes_the_queued_snapshots(tier: Tier) -> None:
    files = tier.open()
    for i in range(20):
        save(files, f"s{i}")
    files.close(WAIT_S)
    files.flush()

    assert counts(files, "written", "dropped") == (20, 0)


def test_closing_waits_no_longer_than_its_timeout_and_answers_all_jobs(tier: Tier, stall: Stall) -> None:
    files = tier.open()
    root = save(files, "root")
    files.flush()
    stall.begin()
    save(files, "being written")
    save(files, "waits")
    stall.wait()
    asked: list[Future] = [files.load(root.digest), files.discard(root.digest)]
    asked[1].cancel()
    began = time.monotonic()
    files.close(0.1)

    assert time.monotonic() - began < 5
    assert isinstance(asked[0].exception(WAIT_S), SnapshotLost) and asked[1].cancelled()
    save(files, "too late")
    with pytest.raises(SnapshotLost, match="closed"):
        files.clear().result(WAIT_S)
    stall.end()
    files.close(WAIT_S)
    assert path_of(tier.path, "being written").exists() and not path_of(tier.path, "waits").exists()
    assert counts(files, "dropped") == (2,)


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineFailed, match="file cannot be used"):
        SnapshotFiles(DiskCacheConfig(path=str(tmp_path / "file")), MODEL)


def test_a_process_exits_although_the_tier_was_not_closed(tier: Tier) -> None:
    leave = """
import sys
from engine.config import DiskCacheConfig
from engine.snapshot_store.files import SnapshotFiles
SnapshotFiles(DiskCacheConfig(path=sys.argv[1]), "model")
"""
    assert subprocess.run([sys.executable, "-c", leave, str(tier.path)], timeout=60).returncode == 0


USE = """
import random, sys
from engine.config import DiskCacheConfig
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost
from tests.engine.snapshot_store.snapshots import MODEL, arrays_of, assert_same_arrays, meta_of

rng = random.Random(int(sys.argv[2]))
files = SnapshotFiles(DiskCacheConfig(path=sys.argv[1], max_gb=300_000 / 2**30), MODEL)
for _ in range(200):
    root = rng.randrange(6)
    behind = meta_of(f"root {root}")
    name = rng.choice([f"root {root}", f"child {root}"])
    meta = meta_of(name, behind if name.startswith("child") else None)
    match rng.randrange(8):
        case 0:
            files.discard(meta.digest)
        case 1:
            files.touch(meta.digest)
        case 2 | 3 | 4:
            files.save(behind, arrays_of(f"root {root}", 1 << 15))
            files.save(meta, arrays_of(name, 1 << 15))
            files.flush()
        case _:
            try:
                assert_same_arrays(files.load(meta.digest).result(60), arrays_of(name, 1 << 15))
            except SnapshotLost:
                pass
files.close(30)
status = files.status()
assert status["num_torn"] == status["num_errors"] == status["num_foreign"] == 0
assert status["num_read"] > 0 and status["num_written"] > 0
"""


def test_processes_that_share_a_directory_never_load_a_wrong_snapshot(tier: Tier) -> None:
    tier.path.mkdir(mode=0o700)
    users = [subprocess.Popen([sys.executable, "-c", USE, str(tier.path), str(seed)]) for seed in range(2)]
    rng = random.Random(0)
    while any(user.poll() is None for user in users):
        for path in list(tier.path.glob("*.safetensors")):
            if rng.random() < 0.05:
                path.unlink(missing_ok=True)
        time.sleep(0.01)

    assert [user.wait(WAIT_S) for user in users] == [0, 0]
    files = tier.open()
    held = {meta.digest for meta in files.entries()}
    assert all(not meta.parent or meta.parent in held for meta in files.entries())
    assert counts(files, "torn", "foreign") == (0, 0)
    for meta in files.entries():
        load(files, meta)
