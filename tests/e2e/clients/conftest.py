"""Unmodified clients against the server of tests/e2e: none of them may look for another network than loopback."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.pictures import image_part, shape
from tests.support.sdks.offline import OFFLINE

if TYPE_CHECKING:
    import anthropic

os.environ.update(OFFLINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no client for `pytest --night -m "not server"`: together these take ten seconds of CPU time."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and "not server" in config.option.markexpr else None


@pytest.fixture(scope="session")
def claude(base_url: str) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120) as claude:
        yield claude


@pytest.fixture(scope="session")
def red_circle() -> str:
    """A data: URL."""
    return image_part(shape("red", "circle"))["image_url"]["url"]


@pytest.fixture(scope="session")
def red_circle_png(red_circle: str) -> bytes:
    return base64.b64decode(red_circle.partition(",")[2])
