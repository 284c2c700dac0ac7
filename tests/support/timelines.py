"""assert_sums: the phases of a timeline fill the time that the client measured."""

from typing import Any

import pytest


def assert_sums(told: dict[str, Any], seconds: float) -> None:
    """Compare GET /v1/requests/{id} with the seconds that the client measured; a busy machine takes a moment around."""
    total = sum(phase["seconds"] for phase in told["phases"])
    assert total == pytest.approx(told["seconds"], abs=1e-4)
    assert all(phase["seconds"] >= -1e-4 for phase in told["phases"]), told["phases"]
    assert told["seconds"] <= seconds
    assert seconds - told["seconds"] < 1 + seconds / 2
