"""Lines of Orchard's loggers from Serve's handlers, in each kind of process, as text and as JSON."""

import asyncio
import json
import logging
import logging.handlers
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.serve import context
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from deployments.http.body_process import BodyProcess
from deployments.http_proxy.guard import middlewares
from deployments.serve_log import join_serve_log, quiet_controller
from engine.core.row import Row, named
from engine.errors import Cancelled, EngineFailed, InvalidRequest, Overloaded, QueueTimeout, ScoringTooSlow, Unavailable
from engine.media_config import MediaConfig
from engine.processing.image_file import ImageRefused
from engine.processing.image_worker import WorkerSettings
from engine.processing.worker_process import WorkerProcess
from engine.protocol import EngineRequest, SamplingParams
from tests.support.image_files import UNCHANGED

REQUEST_ID = "the-clients-id"
TEXT_LINE = re.compile(
    r"(?P<levelname>[A-Z]+) \S+ [\d:,]+ (?P<component>\S+) \S+ (?:(?P<request_id>\S+) )?-- (?P<message>.*)"
)


@pytest.fixture(autouse=True)
def serve_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Serve's logger, which is afterwards as it was."""
    logger, orchard = logging.getLogger("ray.serve"), logging.getLogger("orchard")
    handlers, filters, level, parent = list(logger.handlers), list(logger.filters), logger.level, orchard.parent
    monkeypatch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", None)  # the proxy replaces it
    yield logger
    close(set(logger.handlers) - set(handlers))
    logger.handlers[:], logger.filters[:], orchard.parent = handlers, filters, parent
    logger.setLevel(level)


def close(handlers: Iterable[logging.Handler]) -> None:
    """Close handlers for files, which Serve only forgets."""
    for handler in handlers:
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.target is not None:
            handler.target.close()
            handler.close()


@dataclass
class Log:
    """The file of a process that Serve has configured."""

    path: Path
    encoding: str

    def lines(self) -> list[dict[str, Any]]:
        """Return the fields of each line; what follows a line, as a traceback does, is part of its message."""
        written = self.path.read_text().splitlines()
        if self.encoding == "JSON":
            return [json.loads(line) for line in written]
        lines: list[dict[str, Any]] = []
        for line in written:
            if (found := TEXT_LINE.match(line)) is not None:
                lines.append(found.groupdict())
            else:
                lines[-1]["message"] += f"\n{line}"
        return lines


def configure(folder: Path, encoding: str, is_replica: bool = True, level: str = "INFO") -> Log:
    """Do what Serve does in a replica, or in a proxy."""
    close(logging.getLogger("ray.serve").handlers)
    configure_component_logger(
        component_name="orchard_Ingress" if is_replica else "proxy",
        component_id="abc",
        component_type=ServeComponentType.REPLICA if is_replica else None,
        logging_config=LoggingConfig(encoding=encoding, log_level=level, logs_dir=str(folder)),
        max_bytes=0,
        backup_count=0,
    )
    (path,) = folder.glob("*.log")
    return Log(path, encoding)


def in_request(act: Callable[[], Any]) -> None:
    """Call a function in the context of a request, as Serve calls a replica."""
    current: Any = context._serve_request_context
    token = current.set(context._RequestContext(route="/", request_id=REQUEST_ID))
    try:
        act()
    finally:
        current.reset(token)


def log_in_this_task() -> None:
    logging.getLogger("orchard.http").info("something")


def log_in_the_engines_thread() -> None:
    spec = EngineRequest("chatcmpl-1#0", np.zeros(3, np.int32), SamplingParams(5), (), http_request_id=REQUEST_ID)

    def fail() -> None:
        try:
            raise ZeroDivisionError("something")
        except ZeroDivisionError:
            logging.getLogger("orchard.engine").exception("a step failed", extra=named([Row(spec)]))

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def fail_in_a_body_process() -> None:
    """The process gets no rules, which is no fault of a client."""

    async def read() -> None:
        process = BodyProcess(None, 2**32)  # type: ignore[arg-type]
        try:
            await process.until_ready()
            with pytest.raises(EngineFailed):
                await process.read(b"{}", "chat")
        finally:
            process.kill()

    asyncio.run(read())


def fail_in_an_image_worker() -> None:
    """The worker gets a video, although it was told of no video grid."""
    worker = WorkerProcess(WorkerSettings.of(MediaConfig(), UNCHANGED))
    try:
        with pytest.raises(ImageRefused):
            worker.examine(lambda: b"", is_base64=False, is_video=True)
    finally:
        worker.kill()
        worker.reap()


LINES: dict[str, tuple[Callable[[], None], str, str]] = {
    "a task of a replica": (log_in_this_task, "INFO", "something"),
    "the device thread": (log_in_the_engines_thread, "ERROR", "ZeroDivisionError: something"),
    "a body process": (fail_in_a_body_process, "ERROR", "AttributeError"),
    "an image worker": (fail_in_an_image_worker, "ERROR", "AssertionError"),
}


@pytest.mark.parametrize("encoding", ["TEXT", "JSON"])
@pytest.mark.parametrize("where", LINES)
def test_a_line_has_its_level_its_replica_and_its_request(where: str, encoding: str, tmp_path: Path):
    act, level, text = LINES[where]
    log = configure(tmp_path, encoding)
    join_serve_log()
    in_request(act)
    (line,) = log.lines()
    assert (line["levelname"], line["request_id"]) == (level, REQUEST_ID)
    assert text in line["message"] + line.get("exc_text", "")
    assert line["deployment" if encoding == "JSON" else "component"] == "orchard_Ingress"


@pytest.mark.parametrize("encoding", ["TEXT", "JSON"])
def test_the_middleware_of_a_proxy_joins_its_log(encoding: str, tmp_path: Path):
    log = configure(tmp_path, encoding, is_replica=False)
    middlewares()
    logging.getLogger("orchard.http").warning("not yet", extra={"request_id": REQUEST_ID})
    (line,) = log.lines()
    assert (line["levelname"], line["request_id"], line["message"]) == ("WARNING", REQUEST_ID, "not yet")
    assert line["component_name" if encoding == "JSON" else "component"] == "proxy"


def test_levels_and_formats_that_serve_sets_later_are_followed(tmp_path: Path):
    join_serve_log()
    log = configure(tmp_path, "TEXT", level="WARNING")
    log_in_this_task()
    assert log.lines() == []
    log = configure(tmp_path, "JSON", level="DEBUG")
    logging.getLogger("orchard.engine").debug("a detail")
    (line,) = log.lines()
    assert (line["levelname"], line["message"]) == ("DEBUG", "a detail")


PROBES = ["GET /health/ready 503 3.1ms", "GET /ping 200 1.0ms", "CALL status OK 0.3ms", "CALL /v1/status OK 0.3ms"]
PROBES += ["CALL /v1/status/stream OK 0.3ms", "GET /page/main.js 200 1.0ms", "GET /page/{file:path} 304 1.0ms"]
REQUESTS = ["GET /v1/models 200 1.0ms", "POST /v1/chat/completions 503 9.9ms", "CALL generate OK 10.0ms"]


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_a_probe_is_a_line_at_debug(level: str, tmp_path: Path):
    log = configure(tmp_path, "TEXT", level=level)
    join_serve_log()
    for message in PROBES + REQUESTS:
        logging.getLogger("ray.serve").info(message, extra={"serve_access_log": True})
    logging.getLogger("ray.serve").info(PROBES[0])  # no line of the access log
    levels = {"DEBUG": PROBES, "INFO": [*REQUESTS, PROBES[0]]}
    expected = [(name, message) for name in (level, "INFO")[level == "INFO" :] for message in levels[name]]
    assert [(line["levelname"], line["message"]) for line in log.lines()] == expected


def test_lines_about_autoscaling_are_debug_in_the_controller(tmp_path: Path):
    log = configure(tmp_path, "TEXT", is_replica=False)
    quiet_controller()
    serve = logging.getLogger("ray.serve")
    for message in ("Upscaling Deployment(name='MLLM') from 0 to 1 replicas.", "Adding 1 replica to Deployment"):
        serve.info(message)
    serve.handle(serve.makeRecord("ray.serve", logging.INFO, "ray/autoscaling_state.py", 1, "Registering", (), None))
    serve.handle(serve.makeRecord("ray.serve", logging.ERROR, "ray/autoscaling_state.py", 1, "broken", (), None))
    assert [line["message"] for line in log.lines()] == ["Adding 1 replica to Deployment", "broken"]


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
    ScoringTooSlow("it would take 2 s"),
    Unavailable("gone", 1.0),
    Cancelled("cancelled"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_refused_request_is_logged_as_one_line_without_a_traceback(serve_logger: logging.Logger, error: Exception):
    join_serve_log()
    record = log_of(error, serve_logger)
    assert record.getMessage() == f"Request refused: {error}"
    assert record.exc_info is None and record.levelno == logging.INFO


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), EngineFailed("oops")])
def test_unexpected_error_is_logged_with_its_traceback(serve_logger: logging.Logger, error: Exception):
    join_serve_log()
    record = log_of(error, serve_logger)
    assert record.exc_info is not None and record.levelno == logging.ERROR
