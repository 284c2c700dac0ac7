import logging
import logging.handlers
from collections.abc import Iterator

import pytest

from deployments.process import log_refusals_in_one_line
from engine.protocol import Cancelled, EngineFailed, InvalidRequest, Overloaded, QueueTimeout, Unavailable


@pytest.fixture
def serve_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("ray.serve")
    before = list(logger.filters)
    log_refusals_in_one_line()
    yield logger
    logger.filters = before


def log_of(error: Exception, logger: logging.Logger) -> logging.LogRecord:
    handler = logging.handlers.BufferingHandler(capacity=9)
    logger.addHandler(handler)
    try:
        raise error
    except Exception:
        logger.exception("Request failed.")
    finally:
        logger.removeHandler(handler)
    return handler.buffer[0]


REFUSALS = [
    InvalidRequest("no such role", "messages"),
    Overloaded("full", 1.0),
    QueueTimeout("waited", 1.0),
    Unavailable("gone", 1.0),
    Cancelled("cancelled"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_refused_request_is_logged_as_one_line_without_a_traceback(serve_logger: logging.Logger, error: Exception):
    record = log_of(error, serve_logger)
    assert record.getMessage() == f"Request refused: {error}"
    assert record.exc_info is None and record.levelno == logging.INFO


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), EngineFailed("oops")])
def test_unexpected_error_is_logged_with_its_traceback(serve_logger: logging.Logger, error: Exception):
    record = log_of(error, serve_logger)
    assert record.exc_info is not None and record.levelno == logging.ERROR
