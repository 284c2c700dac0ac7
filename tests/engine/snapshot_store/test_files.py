"""The disk tier from outside: nobody waits, nothing wrong is loaded, and a restart finds what was there."""

import gc
import random
import time
import weakref
from pathlib import Path

import pytest

from engine.config import DiskCacheConfig
from engine.snapshot_store import files as snapshot_files
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost, SnapshotMeta
from tests.engine.snapshot_store.snapshots import (
    MODEL,
    OTHER_MODEL,
    SIZE,
    WAIT_S,
    Stall,
    Tier,
    arrays_of,
    assert_same_arrays,
    assert_same_meta,
    counts,
    digest_of,
    load,
    meta_of,
    names,
    path_of,
    save,
)


def test_a_saved_snapshot_is_loaded_now_and_after_a_restart(tier: Tier) -> None:
    files = tier.open()
    meta = save(files, "root", tenant="salt", media=((2, 5, "ab"),))
    files.flush()
    assert_same_arrays(load(files, meta), arrays_of("root", SIZE))
    files.close(WAIT_S)

    files = tier.open()
    assert_same_meta(files.entries()[0], meta)
    assert_same_arrays(load(files, meta), arrays_of("root", SIZE))
    assert counts(files, "files", "read", "written", "errors") == (1, 1, 0, 0)


def test_a_restart_sees_the_same_entries_in_the_same_order(tier: Tier) -> None:
    files = tier.open()
    all_names = [f"snapshot {i}" for i in range(20)]
    for name in all_names:
        save(files, name)
    files.flush()
    used = all_names * 2
    random.Random(0).shuffle(used)
    for name in used[:25]:
        files.touch(digest_of(name))
    load(files, meta_of(used[0]))
    files.flush()
    order = names(files, *all_names)

    assert order[0] == used[0] and order != all_names[::-1]
    assert names(tier.open(), *all_names) == order


def test_a_use_refreshes_a_snapshot_and_all_its_ancestors(tier: Tier) -> None:
    files = tier.open()
    root = save(files, "root")
    save(files, "leaf", save(files, "child", root))
    save(files, "other")
    save(files, "second child", root)
    files.flush()
    files.touch(digest_of("leaf"))
    files.touch(digest_of("nobody"))

    order = ["leaf", "child", "root", "second child", "other"]
    assert names(files, *order) == order
    files.flush()
    assert names(tier.open(), *order) == order


def test_a_full_queue_drops_further_snapshots_without_blocking(tier: Tier, stall: Stall, monkeypatch) -> None:
    stall.begin()
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", 2 * SIZE)
    files = tier.open()
    save(files, "s0")
    stall.wait()
    began = time.monotonic()
    for i in range(1, 10):
        save(files, f"s{i}")
        files.touch(digest_of("s0"))
    assert (files.entries(), files.status()["num_dropped"]) == ([], 7)
    assert time.monotonic() - began < 1

    stall.end()
    files.flush()
    assert names(files, *(f"s{i}" for i in range(10))) == ["s2", "s1", "s0"]
    assert counts(files, "written", "dropped") == (3, 7)
    save(files, "s9")
    files.flush()
    assert digest_of("s9") in files


def test_discarded_and_cleared_snapshots_free_their_place_in_the_queue(tier: Tier, stall: Stall, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", 2 * SIZE)
    stall.begin()
    files = tier.open()
    save(files, "being written")
    stall.wait()
    for i in range(5):
        save(files, f"discarded {i}")
        files.discard(digest_of(f"discarded {i}"))
        save(files, f"a{i}")
        save(files, f"b{i}")
        files.clear()

    assert files.status()["num_dropped"] == 0
    save(files, "c0")
    save(files, "c1")
    save(files, "c2")
    assert files.status()["num_dropped"] == 1


def test_a_snapshot_larger_than_the_queue_is_written_when_the_queue_is_empty(tier: Tier, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", SIZE // 2)
    files = tier.open()
    save(files, "root")
    files.flush()

    assert counts(files, "written", "dropped") == (1, 0)


def test_the_same_snapshot_is_written_once_and_counts_as_used(tier: Tier, stall: Stall, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", 2 * SIZE)
    stall.begin()
    files = tier.open()
    for name in ("a", "a", "b", "b"):
        save(files, name)
    stall.wait()
    save(files, "a")
    stall.end()
    files.flush()
    assert names(files, "a", "b") == ["b", "a"] and counts(files, "written", "dropped") == (2, 0)

    stall.begin()
    for name in ("c", "d", "a"):
        save(files, name)
    assert names(files, "a", "b") == ["a", "b"] and counts(files, "written", "dropped") == (2, 0)


def test_loads_go_before_writes_that_wait(tier: Tier, stall: Stall, monkeypatch) -> None:
    files = tier.open()
    meta = save(files, "root")
    files.flush()
    stall.begin()
    for i in range(5):
        save(files, f"s{i}")
    stall.wait()
    seen: list[int] = []
    future = files.load(meta.digest)
    future.add_done_callback(lambda _: seen.append(files.status()["num_written"]))
    stall.end()
    files.flush()

    assert seen == [2]


def test_a_queued_snapshot_can_be_loaded_before_it_is_written(tier: Tier, stall: Stall, monkeypatch) -> None:
    stall.begin()
    files = tier.open()
    written, waits = save(files, "being written"), save(files, "waits")
    stall.wait()

    for meta in (written, waits):
        assert meta.digest in files
        assert_same_arrays(load(files, meta), arrays_of("waits" if meta is waits else "being written", SIZE))
    assert files.entries() == [] and digest_of("nobody") not in files

    seen: list[bool] = []
    publish = files._publish

    def look() -> None:
        seen.append(written.digest in files and waits.digest in files)
        publish()

    monkeypatch.setattr(files, "_publish", look)
    stall.end()
    files.flush()
    assert seen == [True, True] and written.digest in files and waits.digest in files


def test_a_snapshot_discarded_before_it_is_written_cannot_be_loaded(tier: Tier, stall: Stall) -> None:
    stall.begin()
    files = tier.open()
    root = save(files, "root")
    child = save(files, "child", root)
    grandchild = save(files, "grandchild", child)
    stall.wait()
    files.discard(root.digest)

    for meta in (root, child, grandchild):
        assert meta.digest not in files
        with pytest.raises(SnapshotLost, match="does not exist"):
            load(files, meta)
    save(files, "root")
    stall.end()
    files.flush()
    assert names(files, "root") == ["root"] and counts(files, "written", "orphans") == (2, 0)


def test_arrays_are_released_after_they_are_written(tier: Tier) -> None:
    files = tier.open()
    arrays = arrays_of("root", SIZE)
    written = weakref.ref(arrays["state"])
    files.save(meta_of("root"), arrays)
    files.flush()
    del arrays
    gc.collect()

    assert written() is None


def test_discarding_removes_a_snapshot_and_its_descendants_at_once(tier: Tier) -> None:
    files = tier.open()
    child = save(files, "child", save(files, "root"))
    save(files, "grandchild", child)
    save(files, "other")
    files.flush()
    done = files.discard(child.digest)

    assert set(names(files, "root", "other")) == {"root", "other"} and child.digest not in files
    assert done.result(WAIT_S) == 2
    assert len(list(tier.path.iterdir())) == 2
    assert files.discard(child.digest).result(WAIT_S) == 0


def test_a_snapshot_discarded_while_queued_or_written_does_not_come_back(tier: Tier, stall: Stall) -> None:
    stall.begin()
    files = tier.open()
    root = save(files, "root")
    save(files, "child", root)
    waits = save(files, "waits")
    stall.wait()
    done = [files.discard(root.digest), files.discard(waits.digest)]
    save(files, "later")
    stall.end()
    files.flush()

    assert [each.result(WAIT_S) for each in done] == [1, 0]
    assert names(files, "later") == ["later"] and len(list(tier.path.iterdir())) == 1


def test_clearing_removes_the_stored_and_queued_snapshots_of_this_model(tier: Tier, stall: Stall) -> None:
    others = tier.open(fingerprint=OTHER_MODEL)
    save(others, "theirs")
    others.flush()
    files = tier.open()
    save(files, "child", save(files, "root"))
    files.flush()
    stall.begin()
    save(files, "being written")
    save(files, "waits")
    stall.wait()
    done = files.clear()
    save(files, "later")
    published: list[int] = []
    done.add_done_callback(lambda _: published.append(len(files.entries())))

    assert files.entries() == [] and files.status()["num_files"] == 2
    stall.end()
    files.flush()
    assert done.result(WAIT_S) == 3 and published == [0]
    assert names(files, "later") == ["later"]
    assert path_of(tier.path, "theirs").exists() and len(list(tier.path.iterdir())) == 2


def test_a_snapshot_whose_removal_waits_is_no_longer_listed(tier: Tier, stall: Stall, monkeypatch) -> None:
    files = tier.open()
    root = save(files, "root")
    files.flush()
    stall.begin()
    save(files, "being written")
    stall.wait()
    files.discard(root.digest)
    seen: list[list[SnapshotMeta]] = []
    publish = files._publish

    def look() -> None:
        publish()
        seen.append(files.entries())

    monkeypatch.setattr(files, "_publish", look)
    stall.end()
    files.flush()
    assert [len(entries) for entries in seen] == [0, 1]


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    SnapshotFiles(DiskCacheConfig(path="~/snapshots"), MODEL).close(WAIT_S)

    assert (tmp_path / "snapshots").is_dir()
