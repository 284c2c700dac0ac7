"""The id of a request: the client's own, or a new one."""

import pytest


def test_valid_request_id_of_the_client_is_returned(send):
    for request_id in ("req-1", "x" * 128):
        assert send("GET", "/health/live", headers={"X-Request-Id": request_id}).headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "a\tb", "é"])
def test_malformed_request_id_of_the_client_is_replaced(send, request_id):
    headers = {"X-Request-Id": request_id.encode("latin-1")}
    first, second = (send("GET", "/nope", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first.startswith("req_")
    assert first != second
