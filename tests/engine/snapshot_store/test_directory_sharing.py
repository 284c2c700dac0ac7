"""Eviction from a full directory, and a directory shared by several processes and models."""

from pathlib import Path

import pytest

from engine.snapshot_store.directory import SnapshotDirectory, SnapshotLost
from engine.snapshot_store.format import FORMAT
from tests.engine.snapshot_store.snapshots import (
    MODEL,
    OTHER_MODEL,
    ROOMY,
    SIZE,
    TICKS,
    arrays_of,
    assert_same_arrays,
    digests,
    loadable,
    meta_of,
    path_of,
    room_for,
    use,
    write,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_files_of_other_models_and_versions_are_counted_and_not_loaded(path: Path, monkeypatch) -> None:
    write(SnapshotDirectory(path, OTHER_MODEL, ROOMY), "other")
    with monkeypatch.context() as patched:
        patched.setattr("engine.snapshot_store.format.FORMAT", FORMAT[:-1] + "9")
        write(SnapshotDirectory(path, MODEL, ROOMY), "newer")
    (path / f"{'0' * 64}.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")

    directory = SnapshotDirectory(path, MODEL, ROOMY)
    assert (directory.status()["num_foreign"], directory.status()["num_files"]) == (3, 0)
    assert directory.status()["num_bytes"] > 2 * SIZE
    assert directory.clear() == 0
    assert loadable(SnapshotDirectory(path, OTHER_MODEL, ROOMY)) == digests("other")


def test_a_snapshot_replaces_one_of_another_model_with_the_same_name(path: Path) -> None:
    other = SnapshotDirectory(path, OTHER_MODEL, ROOMY)
    others = write(other, "root")
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    write(directory, "root")

    assert loadable(directory) == digests("root") and directory.status()["num_evicted"] == 1
    with pytest.raises(SnapshotLost, match="another snapshot has replaced it"):
        other.read(others)
    assert loadable(other) == set() and other.status()["num_torn"] == 0
    assert loadable(SnapshotDirectory(path, MODEL, ROOMY)) == digests("root")


def test_the_least_recently_used_snapshots_are_evicted_first(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, room_for(3))
    for name in ("a", "b", "c"):
        write(directory, name)
    use(directory, "a")
    write(directory, "d")
    assert loadable(directory) == digests("a", "c", "d")

    directory = SnapshotDirectory(path, MODEL, room_for(2))
    assert loadable(directory) == digests("a", "d")
    assert {"num_evicted": 1, "max_bytes": room_for(2)}.items() <= directory.status().items()
    assert sum(file.stat().st_size for file in path.iterdir()) == directory.status()["num_bytes"] <= room_for(2)


def test_children_are_evicted_before_their_parents_even_if_the_parents_are_older(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, room_for(4))
    root = write(directory, "root")
    write(directory, "left", root)
    write(directory, "rightmost", write(directory, "right", root))
    write(directory, "other")
    assert loadable(directory) == digests("root", "right", "rightmost", "other")

    for count, left in ((3, ("root", "right", "other")), (2, ("root", "other")), (1, ("other",))):
        assert loadable(SnapshotDirectory(path, MODEL, room_for(count))) == digests(*left)


def test_parents_are_evicted_when_all_their_children_are(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(directory, "root")
    write(directory, "left", root)
    write(directory, "rightmost", write(directory, "right", root))
    write(directory, "other")

    assert loadable(SnapshotDirectory(path, MODEL, room_for(1))) == digests("other")


def test_the_path_to_a_new_snapshot_is_not_evicted_for_it(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, room_for(3))
    child = write(directory, "child", write(directory, "root"))
    write(directory, "other")
    write(directory, "grandchild", child)

    assert loadable(directory) == digests("root", "child", "grandchild")


def test_a_snapshot_that_never_fits_is_dropped_without_eviction(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, room_for(3))
    grandchild = write(directory, "grandchild", write(directory, "child", write(directory, "root")))
    before = loadable(directory)
    write(directory, "one more", grandchild)
    assert loadable(directory) == before
    directory.write(meta_of("large"), arrays_of("large", 4 * SIZE), next(TICKS))
    assert loadable(directory) == before

    directory.remove(grandchild.digest)
    write(directory, "other")
    behind = meta_of("large one", meta_of("child", meta_of("root")))
    directory.write(behind, arrays_of("large one", 2 * SIZE), next(TICKS))
    assert loadable(directory) == digests("root", "child", "other")
    assert {"num_dropped": 3, "num_evicted": 0}.items() <= directory.status().items()


def test_models_in_one_directory_share_its_limit_by_last_use(path: Path) -> None:
    ours, others = SnapshotDirectory(path, MODEL, room_for(3)), SnapshotDirectory(path, OTHER_MODEL, room_for(3))
    parent = write(others, "parent")
    write(ours, "mine")
    write(others, "leaf", parent)
    use(others, "leaf")
    write(ours, "mine too")

    assert loadable(ours) == digests("mine too")
    others.scan()
    assert loadable(others) == digests("parent", "leaf")


def test_a_snapshot_written_by_another_process_is_found_and_not_written_again(path: Path) -> None:
    one, two = SnapshotDirectory(path, MODEL, ROOMY), SnapshotDirectory(path, MODEL, ROOMY)
    root = write(one, "root")
    write(two, "root")
    write(two, "child", root)

    assert loadable(two) == digests("root", "child") and two.status()["num_written"] == 1
    assert path_of(path, "root").stat().st_mtime_ns == two.files[root.digest].used_ns > one.files[root.digest].used_ns
    assert_same_arrays(two.read(root), arrays_of("root", SIZE))


def test_a_snapshot_removed_by_another_process_is_dropped_with_its_children(path: Path) -> None:
    one, two = SnapshotDirectory(path, MODEL, ROOMY), SnapshotDirectory(path, MODEL, ROOMY)
    root = write(one, "root")
    write(two, "child", root)
    assert one.remove(root.digest) == 1

    write(two, "other")
    assert loadable(two) == digests("other") and not path_of(path, "child").exists()


def test_a_snapshot_used_by_another_process_is_evicted_later(path: Path) -> None:
    one, two = SnapshotDirectory(path, MODEL, room_for(2)), SnapshotDirectory(path, MODEL, room_for(2))
    write(one, "a")
    write(one, "b")
    two.scan()
    use(one, "a")
    write(two, "c")

    assert loadable(two) == digests("a", "c")


def test_a_file_replaced_by_another_process_is_read_again(path: Path) -> None:
    one, two = SnapshotDirectory(path, MODEL, ROOMY), SnapshotDirectory(path, MODEL, ROOMY)
    root = write(one, "root")
    path_of(path, "root").unlink()
    two.write(meta_of("root", kind="system"), arrays_of("root", 2 * SIZE), next(TICKS))
    one.scan()

    found = one.files[root.digest]
    assert found.meta is not None and found.meta.kind == "system"
    assert found.num_bytes == path_of(path, "root").stat().st_size


def test_a_file_with_another_kv_segment_is_not_taken_for_the_known_one(path: Path) -> None:
    one = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(one, "root")
    known = write(one, "child", root)
    path_of(path, "child").unlink()
    whole = meta_of("child", digest=known.digest, token_ids=known.token_ids)
    SnapshotDirectory(path, MODEL, ROOMY).write(whole, arrays_of("all of it", SIZE), next(TICKS))

    with pytest.raises(SnapshotLost, match="another snapshot has replaced it"):
        one.read(known)
    assert_same_arrays(one.read(whole), arrays_of("all of it", SIZE))
