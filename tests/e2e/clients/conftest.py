"""Unmodified clients against the server of tests/e2e: none of them may look for another network than loopback."""

import base64
import os
from pathlib import Path

import pytest

from tests.e2e.pictures import image_part, shape

OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
os.environ.update(OFFLINE)  # the clients read it when they are imported


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without servers these files are not even imported: together the clients take half a minute of CPU time."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and "not server" in config.option.markexpr else None


@pytest.fixture(scope="session")
def red_circle() -> str:
    """A data: URL."""
    return image_part(shape("red", "circle"))["image_url"]["url"]


@pytest.fixture(scope="session")
def red_circle_png(red_circle: str) -> bytes:
    return base64.b64decode(red_circle.partition(",")[2])
