"""The answers of a server that is not ready yet."""

from statistics import median

import pytest

from tests.e2e.server import ServeRun

pytestmark = pytest.mark.server


def test_requests_during_the_start_are_refused_quickly_with_a_retry_after(small_server: ServeRun):
    """From the first moment that the port is open: no 404 of Serve, which no client repeats, and nothing that waits."""
    statuses = [response.status_code for response in small_server.answers_while_starting]
    refused = [response for response in small_server.answers_while_starting if response.status_code != 200]
    assert len(refused) > 3, statuses
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert int(response.headers["retry-after"]) >= 1
    assert median(response.elapsed.total_seconds() for response in refused) < 5, "none waits for the start to end"
