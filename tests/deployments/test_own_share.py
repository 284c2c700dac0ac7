"""Which number an engine takes on its node, among engines of this process: a lock is held by an open file."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments import own_share
from deployments.own_share import claim_share
from engine.errors import EngineFailed
from engine.node_share import NodeShare
from engine.process_lock import ProcessLock

Claim = Callable[[], tuple[NodeShare, ProcessLock | None]]


@pytest.fixture
def claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Claim:
    """Claim a share of a node with two engines."""
    monkeypatch.setattr(own_share.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(own_share, "node_id", lambda: "n")
    monkeypatch.setattr(own_share, "engines_by_node", lambda num: {"n": 2, "other": 1})
    monkeypatch.setattr(own_share.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(own_share, "WAIT_S", 0.0)
    return lambda: asyncio.run(claim_share(1))


def test_two_engines_have_the_numbers_0_and_1_and_a_third_is_refused_with_their_processes(claim: Claim):
    (first, lock), (second, other) = claim(), claim()
    assert (first, second) == (NodeShare(0, 2), NodeShare(1, 2))
    with pytest.raises(
        EngineFailed, match=rf"node n has had its 2 engines for 0 s: 0 in process {os.getpid()} .*; 1 in"
    ):
        claim()
    assert lock is not None and other is not None
    lock.release()
    other.release()


def test_the_number_of_an_engine_that_has_ended_is_taken_again(claim: Claim):
    (_, lock), (_, other) = claim(), claim()
    assert lock is not None and other is not None
    lock.release()
    again, lock = claim()
    assert again == NodeShare(0, 2) and lock is not None
    lock.release()
    other.release()


def test_the_only_engine_of_a_node_needs_no_number(claim: Claim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(own_share, "engines_by_node", lambda num: {"n": num})
    assert claim() == (NodeShare(), None) and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named(claim: Claim, tmp_path: Path):
    (tmp_path / "orchard-engine-n-0.lock").mkdir()
    with pytest.raises(EngineFailed, match=r"orchard-engine-n-0\.lock cannot be written .* writable"):
        claim()


def test_files_of_earlier_nodes_are_removed_unless_they_are_held_or_of_today(claim: Claim, tmp_path: Path):
    old, new, held = (tmp_path / f"orchard-engine-{name}-0.lock" for name in ("old", "new", "held"))
    lock = ProcessLock(held)
    for path in (old, new):
        path.touch()
    for path in (old, held):
        os.utime(path, (0, 0))
    _, own = claim()
    assert {path.name for path in tmp_path.iterdir()} == {new.name, held.name, "orchard-engine-n-0.lock"}
    assert own is not None
    own.release()
    lock.release()
