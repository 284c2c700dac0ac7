"""assert_sums: the phases of a timeline fill the time that the client measured."""

from typing import Any

import pytest


def assert_sums(told: dict[str, Any], seconds: float) -> None:
    """Compare GET /v1/requests/{id} with the seconds that the client measured.

    On a busy machine, as after the start of a new engine, a client may wait a second until it runs again.
    """
    total = sum(phase["seconds"] for phase in told["phases"])
    assert total == pytest.approx(told["seconds"], abs=1e-4)
    assert all(phase["seconds"] >= -1e-4 for phase in told["phases"]), told["phases"]
    assert told["seconds"] <= seconds
    assert seconds - told["seconds"] < 1 + seconds / 10
