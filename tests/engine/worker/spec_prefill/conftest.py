"""Drafts, loaded once for all tests of the scorer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.worker.spec_prefill.draft import Draft
from tests.engine.worker.spec_prefill.drafts import load, make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = make(tmp_path_factory.mktemp("drafts") / family, family)
        return made[family]

    return of


@pytest.fixture(scope="session")
def draft_of(checkpoint: Callable[[str], Path]) -> Callable[[str], Draft]:
    """draft_of(family): see drafts.FAMILIES; `demo` is the demo model's."""
    loaded: dict[str, Draft] = {}

    def of(family: str) -> Draft:
        if family not in loaded:
            loaded[family] = load("demo" if family == "demo" else checkpoint(family))
        return loaded[family]

    return of
