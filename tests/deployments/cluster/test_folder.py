from pathlib import Path

import pytest

from deployments.cluster.folder import ClusterFolder, FolderError


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder(tmp_path / "home" / "cluster")
    made.make()
    return made


def test_the_token_is_made_once_and_readable_by_its_owner_alone(folder: ClusterFolder):
    token = folder.token()
    assert len(token) == 64 and folder.token() == token
    assert folder.token_file.stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_token_that_others_can_read_is_refused(folder: ClusterFolder):
    folder.token()
    folder.token_file.chmod(0o644)
    with pytest.raises(FolderError, match=r"has mode 644.*chmod 600"):
        folder.token()


def test_an_empty_token_is_refused(folder: ClusterFolder):
    folder.write_token("")
    with pytest.raises(FolderError, match="is empty"):
        folder.token()


def test_there_is_something_to_continue_only_with_a_log(folder: ClusterFolder):
    folder.note_started({"address": "192.168.1.10"})
    assert folder.started() == {}
    folder.store_log.write_bytes(b"")
    assert folder.started() == {"address": "192.168.1.10"}
    token = folder.token()
    folder.forget_cluster()
    assert folder.started() == {} and not folder.store_log.exists() and folder.token() == token


def test_the_copy_of_the_heads_log_is_forgotten(folder: ClusterFolder):
    for file in (folder.log_copy, folder.shared):
        file.write_bytes(b"")
    folder.forget_copy()
    folder.forget_copy()
    assert list(folder.path.iterdir()) == []
