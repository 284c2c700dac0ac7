"""A disk tier for its tests, and a disk that stalls on demand."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.snapshot_store.snapshots import Stall, Tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    tier = Tier(tmp_path / "cache")
    yield tier
    tier.close()


@pytest.fixture
def stall(tier: Tier, monkeypatch) -> Iterator[Stall]:
    stall = Stall()
    monkeypatch.setattr(os, "fsync", stall.fsync)
    yield stall
    stall.end()
