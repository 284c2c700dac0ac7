"""Files in the snapshot directory: own, torn, foreign and left over."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import EngineFailed
from engine.snapshot_store import directory as snapshot_directory
from engine.snapshot_store.directory import SnapshotDirectory, SnapshotLost
from tests.engine.snapshot_store.snapshots import (
    MODEL,
    OTHER_MODEL,
    ROOMY,
    SIZE,
    arrays_of,
    assert_same_arrays,
    assert_same_meta,
    digest_of,
    digests,
    loadable,
    meta_of,
    path_of,
    room_for,
    write,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def temporaries(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name.endswith(".tmp")]


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_snapshot_is_found_and_read_after_a_restart(path: Path) -> None:
    root = write(SnapshotDirectory(path, MODEL, ROOMY), "root")
    directory = SnapshotDirectory(path, MODEL, ROOMY)

    found = directory.files[root.digest]
    assert found.meta is not None
    assert_same_meta(found.meta, root)
    assert_same_arrays(directory.read(found.meta), arrays_of("root", SIZE))


def test_directory_and_files_are_for_their_owner_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        write(SnapshotDirectory(path / "deep", MODEL, ROOMY), "root")
    finally:
        os.umask(before)

    assert (path / "deep").stat().st_mode & 0o777 == 0o700
    assert path_of(path / "deep", "root").stat().st_mode & 0o777 == 0o600


def test_a_world_writable_directory_is_reported_in_the_log(path: Path, caplog) -> None:
    path.mkdir()
    path.chmod(0o755)
    SnapshotDirectory(path, MODEL, ROOMY)
    assert not caplog.records

    path.chmod(0o777)
    SnapshotDirectory(path, MODEL, ROOMY)
    assert "has mode 777: every user with write permission can change answers" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o777


def test_a_directory_that_cannot_be_made_is_refused(path: Path) -> None:
    path.touch()
    for place in (path, path / "below"):
        with pytest.raises(
            EngineFailed, match=rf"prefix_cache\.disk\.path: {place} cannot be used \(.*exist|directory"
        ):
            SnapshotDirectory(place, MODEL, ROOMY)


def test_a_directory_that_cannot_be_written_to_is_refused(path: Path, monkeypatch) -> None:
    real = os.open

    def refuse(name: str, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", name)
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(EngineFailed, match=rf"{path} cannot be used \(.*Read-only file system"):
        SnapshotDirectory(path, MODEL, ROOMY)


def test_a_file_of_another_model_or_another_snapshot_is_not_adopted(path: Path, tmp_path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    for place, model, wanted in (("foreign", OTHER_MODEL, "root"), ("own", MODEL, "other"), ("right", MODEL, "root")):
        write(SnapshotDirectory(tmp_path / place, model, ROOMY), "root")
        with directory.temporary(digest_of(wanted)) as file:
            file.write(path_of(tmp_path / place, "root").read_bytes())
            assert directory.adopt(digest_of(wanted), file) == (None if place == "right" else "mismatch")
        assert (digest_of("root") in directory.files) == (place == "right")
    assert not temporaries(path)


def test_foreign_files_are_counted_and_never_touched(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    write(SnapshotDirectory(tmp_path / "elsewhere", MODEL, ROOMY), "linked")
    path_of(path, "linked").symlink_to(path_of(tmp_path / "elsewhere", "linked"))
    os.mkfifo(path_of(path, "pipe"))
    path_of(path, "folder").mkdir()
    (path / "notes.txt").write_text("mine")
    (path / f"{digest_of('x').upper()}.safetensors").write_text("mine")
    (path / f"{digest_of('x')}.safetensors.bak").write_text("mine")
    (path / f"{digest_of('x')[:31]}.safetensors").write_text("mine")
    (path / f"{digest_of('x')}.tmp").write_text("mine")
    before = sorted(path.iterdir())

    directory = SnapshotDirectory(path, MODEL, room_for(1))
    assert directory.status()["num_foreign"] == 8
    assert loadable(directory) == set() and directory.status()["num_bytes"] == 0

    for name in ("one", "two"):
        write(directory, name)
    assert directory.clear() == 1
    assert sorted(path.iterdir()) == before


def test_a_snapshot_does_not_replace_a_symlink_of_its_name(path: Path, tmp_path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    (tmp_path / "target").write_text("mine")
    path_of(path, "x").symlink_to(tmp_path / "target")

    with pytest.raises(FileExistsError, match="something other than a regular file"):
        write(directory, "x")
    assert path_of(path, "x").is_symlink() and (tmp_path / "target").read_text() == "mine"


def test_torn_files_are_removed_at_the_start_and_counted(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    for name in ("whole", "cut", "empty"):
        write(directory, name)
    os.truncate(path_of(path, "cut"), 2000)
    os.truncate(path_of(path, "empty"), 0)
    shutil.copy(path_of(path, "whole"), path_of(path, "renamed"))

    directory = SnapshotDirectory(path, MODEL, ROOMY)
    assert loadable(directory) == digests("whole")
    assert directory.status()["num_torn"] == 3
    assert [file.name for file in path.iterdir()] == [path_of(path, "whole").name]


def test_a_torn_file_is_lost_with_its_descendants(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(directory, "root")
    write(directory, "grandchild", write(directory, "child", root))
    write(directory, "other")
    flip_last_byte(path_of(path, "root"))

    with pytest.raises(SnapshotLost, match=f"snapshot {root.digest} is lost: its tensor state is damaged"):
        directory.read(root)
    assert loadable(directory) == digests("other")
    assert [file.name for file in path.iterdir()] == [path_of(path, "other").name]
    assert {"num_torn": 1, "num_orphans": 2, "num_missing": 0}.items() <= directory.status().items()


def test_a_file_that_vanished_is_lost_and_counted_as_missing(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(directory, "root")
    path_of(path, "root").unlink()

    with pytest.raises(SnapshotLost, match="No such file"):
        directory.read(root)
    assert {"num_files": 0, "num_missing": 1, "num_torn": 0, "num_errors": 0}.items() <= directory.status().items()


def test_a_file_that_the_disk_cannot_read_is_lost_and_removed(path: Path, monkeypatch, caplog) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(directory, "root")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(snapshot_directory, "read_arrays", fail)
    with pytest.raises(SnapshotLost, match="Input/output error"):
        directory.read(root)
    assert not path_of(path, "root").exists() and "cannot read snapshots" in caplog.text
    assert {"num_files": 0, "num_errors": 1}.items() <= directory.status().items()


def test_a_file_that_cannot_be_read_for_lack_of_memory_stays(path: Path, monkeypatch) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(directory, "root")

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(snapshot_directory, "read_arrays", fail)
    with pytest.raises(SnapshotLost):
        directory.read(root)
    assert loadable(directory) == digests("root") and directory.status()["num_errors"] == 1


def test_children_without_their_parent_are_removed_at_the_start(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = last = write(directory, "root")
    for i in range(10):
        last = write(directory, f"child {i}", last)
    path_of(path, "root").unlink()

    directory = SnapshotDirectory(path, MODEL, ROOMY)
    assert loadable(directory) == set() and list(path.iterdir()) == []
    assert directory.status()["num_orphans"] == 10 and root.digest not in directory.files


@pytest.mark.parametrize("wrong", [{"num_tokens": 17}, {"tenant": "other"}])
def test_children_of_a_parent_that_does_not_fit_are_removed(path: Path, tmp_path: Path, wrong: dict) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    write(directory, "child", write(directory, "root"))
    write(SnapshotDirectory(tmp_path / "elsewhere", MODEL, ROOMY), "root", **wrong)
    os.replace(path_of(tmp_path / "elsewhere", "root"), path_of(path, "root"))

    assert loadable(SnapshotDirectory(path, MODEL, ROOMY)) == digests("root")


def test_children_of_another_models_file_are_removed(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    write(directory, "child", write(directory, "root"))
    write(SnapshotDirectory(path, OTHER_MODEL, ROOMY), "root")

    directory = SnapshotDirectory(path, MODEL, ROOMY)
    assert loadable(directory) == set() and not path_of(path, "child").exists()


def test_a_child_stays_when_its_parent_is_written_during_the_scan(path: Path, monkeypatch) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    write(directory, "child", write(directory, "root"))
    whole = snapshot_directory._listing

    with monkeypatch.context() as patched:
        patched.setattr(
            snapshot_directory, "_listing", lambda path: (i for i in whole(path) if digest_of("root") not in i[0])
        )
        late = SnapshotDirectory(path, MODEL, ROOMY)
        assert loadable(late) == set()
    late.scan()
    assert loadable(late) == digests("root", "child") and late.status()["num_orphans"] == 0


def test_orphans_that_cannot_be_removed_are_not_loadable(path: Path, monkeypatch) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    write(directory, "child", write(directory, "root"))
    path_of(path, "root").unlink()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    directory.scan()
    assert loadable(directory) == set() and path_of(path, "child").exists()
    assert {"num_orphans": 0, "num_errors": 1, "num_foreign": 1}.items() <= directory.status().items()


@pytest.mark.parametrize(
    ("code", "counted"),
    [(errno.EACCES, {"num_foreign": 1}), (errno.ENOENT, {"num_bytes": 0}), (errno.EIO, {"num_errors": 1})],
)
def test_a_file_that_cannot_be_opened_is_not_removed(path: Path, monkeypatch, code: int, counted: dict) -> None:
    write(SnapshotDirectory(path, MODEL, ROOMY), "root")

    def refuse(path: Path) -> None:
        raise OSError(code, "refused", str(path))

    monkeypatch.setattr(snapshot_directory, "open_snapshot", refuse)
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    assert loadable(directory) == set() and path_of(path, "root").exists()
    status = directory.status()
    assert {"num_foreign": 0, "num_errors": 0, "num_torn": 0, **counted}.items() <= status.items()
    assert bool(status["num_bytes"]) == bool(status["num_foreign"])


def test_a_snapshot_with_a_missing_parent_is_not_written(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    write(directory, "child", meta_of("root"))

    assert list(path.iterdir()) == [] and directory.status()["num_orphans"] == 1


def test_removing_and_clearing_return_the_number_of_removed_files(path: Path) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    root = write(directory, "root")
    write(directory, "grandchild", write(directory, "child", root))
    write(directory, "other")
    write(SnapshotDirectory(path, MODEL, ROOMY), "of another process")

    assert directory.remove(digest_of("child")) == 2
    assert directory.remove(digest_of("child")) == 0
    assert directory.clear() == 3
    assert list(path.iterdir()) == [] and directory.status()["num_bytes"] == 0


@pytest.mark.parametrize("operation", ["fsync", "replace", "utime"])
def test_a_failed_write_leaves_no_file(path: Path, monkeypatch, operation: str) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, operation, fail)
        with pytest.raises(OSError, match="No space left"):
            write(directory, "root")
    assert list(path.iterdir()) == [] and loadable(directory) == set()
    write(directory, "root")
    assert loadable(directory) == digests("root")


DIE = """
import os, signal, sys
from pathlib import Path
from engine.snapshot_store.directory import SnapshotDirectory
from tests.engine.snapshot_store.snapshots import MODEL, arrays_of, meta_of
directory = SnapshotDirectory(Path(sys.argv[1]), MODEL, 1 << 30)
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
directory.write(meta_of("root"), arrays_of("root"), 1)
"""


def test_temporary_files_of_dead_writers_are_removed_and_those_of_living_ones_kept(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIE, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL and len(temporaries(path)) == 1

    living = path / f"{digest_of('x')}.{'0' * 16}.tmp"
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory = SnapshotDirectory(path, MODEL, ROOMY)
        assert temporaries(path) == [living.name]
    assert (loadable(directory), directory.status()["num_foreign"]) == (set(), 0)


def test_a_temporary_file_is_not_removed_while_its_own_process_writes_it(path: Path, monkeypatch) -> None:
    directory = SnapshotDirectory(path, MODEL, ROOMY)
    seen: list[list[str]] = []
    real: Callable[[int], None] = os.fsync

    def look(fd: int) -> None:
        if not seen:
            seen.append(temporaries(path))
            SnapshotDirectory(path, MODEL, ROOMY)
            seen.append(temporaries(path))
        real(fd)

    monkeypatch.setattr(os, "fsync", look)
    write(directory, "root")
    assert len(seen[0]) == 1 and seen[0] == seen[1]
    assert loadable(SnapshotDirectory(path, MODEL, ROOMY)) == digests("root") and temporaries(path) == []
