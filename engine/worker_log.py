"""The log lines of a worker process, which is no Ray actor: it collects them, and its parent writes them.

Records travel as JSON values with the worker's answers. A worker that decodes hostile bytes may send anything, so the
parent takes only short text and known levels.
"""

import logging
import logging.handlers
import queue
from collections.abc import Iterable, Mapping
from typing import Any

ROOT = "orchard"

MAX_RECORDS, MAX_CHARS = 16, 2000
"""Lines with one answer, and characters of each."""


class WorkerLog:
    """Collects what Orchard's loggers in this process log, on any level: the parent knows which level it writes."""

    def __init__(self) -> None:
        self._records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        root = logging.getLogger(ROOT)
        root.setLevel(logging.DEBUG)
        root.propagate = False
        root.addHandler(logging.handlers.QueueHandler(self._records))  # type: ignore[arg-type]

    def take(self) -> list[dict[str, Any]]:
        """Return the newest MAX_RECORDS lines since the last call; tracebacks are part of their text."""
        records = [self._records.get() for _ in range(self._records.qsize())][-MAX_RECORDS:]
        return [
            {"name": record.name, "levelno": record.levelno, "created": record.created, "msg": record.msg[-MAX_CHARS:]}
            for record in records
        ]


def write(records: Iterable[Mapping[str, Any]], pid: int) -> None:
    """Write the lines of a worker by the handlers and the level of this process.

    Args:
        records: Of WorkerLog.take.
        pid: Of the worker; shown in the line.
    """
    for sent, _ in zip(records, range(MAX_RECORDS), strict=False):
        name, level, text = str(sent["name"])[:MAX_CHARS], int(sent["levelno"]), str(sent["msg"])[-MAX_CHARS:]
        logger = logging.getLogger(name if name.startswith(f"{ROOT}.") else ROOT)
        if not (logging.DEBUG <= level <= logging.CRITICAL and logger.isEnabledFor(level)):
            continue
        record = logger.makeRecord(logger.name, level, "worker", 0, "process %d: %s", (pid, _printable(text)), None)
        record.created, record.process = float(sent["created"]), pid
        logger.handle(record)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
