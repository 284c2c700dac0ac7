"""Log lines of a worker process, in its parent: a worker that decodes hostile bytes may send anything."""

import logging
from typing import Any

import pytest

from engine import worker_log
from engine.worker_log import MAX_CHARS, MAX_RECORDS


def sent(text: str = "a line", **changed: Any) -> dict[str, Any]:
    return {"name": "orchard.images", "levelno": logging.WARNING, "created": 7.0, "msg": text, **changed}


def test_a_line_keeps_its_logger_its_level_its_time_and_its_process(caplog: pytest.LogCaptureFixture):
    worker_log.write([sent()], 12)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.created, record.process) == ("orchard.images", logging.WARNING, 7.0, 12)
    assert record.getMessage() == "process 12: a line"


def test_the_parent_decides_which_levels_are_written(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR, "orchard.images")
    worker_log.write([sent(), sent("broken", levelno=logging.ERROR)], 12)
    assert caplog.messages == ["process 12: broken"]


@pytest.mark.parametrize("level", [-1, 0, 51, 10**9])
def test_a_level_that_python_does_not_know_is_dropped(level: int, caplog: pytest.LogCaptureFixture):
    worker_log.write([sent(levelno=level)], 12)
    assert not caplog.records


def test_a_worker_writes_only_to_loggers_of_orchard_and_only_short_printable_text(caplog: pytest.LogCaptureFixture):
    worker_log.write([sent("\x1b[2J%s\r\n" + MAX_CHARS * "x", name="ray.serve")] * 2 * MAX_RECORDS, 12)
    assert {record.name for record in caplog.records} == {"orchard"}
    assert len(caplog.records) == MAX_RECORDS
    worker_log.write([sent("\x1b[2J%s\r\nnext")], 12)
    assert caplog.messages[-1] == "process 12: \\x1b[2J%s\\r\nnext"
    assert max(map(len, caplog.messages)) < MAX_CHARS + 20
