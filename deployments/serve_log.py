"""Serve's log in this process: its handlers also write the lines of Orchard's loggers.

Serve configures only its own logger, `ray.serve`, with handlers for its log file and stderr, in the format and level of
`logging_config`, and replaces them when that changes. Its lines have the replica, and the id of the request that the
current task belongs to; a line of another thread names it by `extra={"request_id": ...}`.
"""

import logging

from engine.errors import Cancelled, InvalidRequest, Overloaded, ScoringTooSlow, Unavailable

PROBES = ("/health", "/health/live", "/health/ready", "/ping")
"""Routes that load balancers ask every few seconds."""

QUESTIONS = ("status", "status_here", "figures", "/v1/status", "/v1/status/stream", "/metrics")
"""Methods of replicas that the status, `/metrics` and the probes call, as Serve's access log names them."""

PAGE_FILES = "/page/"
"""Start of the paths of the page's files, which a browser asks for all at once."""

SCALING = ("Upscaling ", "Downscaling ", "Instantiating class-callable autoscaling policy")
"""Begin of lines about autoscaling in the controller that `autoscaling_state.py` does not log."""


def join_serve_log() -> None:
    """Make Serve's handlers write the lines of all Orchard loggers of this process, and shorten Serve's own lines.

    A refused request is one line at INFO, and not a traceback; a probe is a line at DEBUG.
    """
    serve = logging.getLogger("ray.serve")
    logging.getLogger("orchard").parent = serve  # also follows handlers and levels that Serve sets later
    serve.addFilter(_one_line)
    serve.addFilter(_probe_at_debug)


def quiet_controller() -> None:
    """Lower the controller's lines about autoscaling to DEBUG. Serve calls this in its controller (environment.py).

    Each deployment has a policy that follows the nodes and ignores the load. `Adding 1 replica to ...` tells what it
    has done.
    """
    logging.getLogger("ray.serve").addFilter(_scaling_at_debug)


def is_probe(path: str) -> bool:
    """Return whether the path is one that load balancers ask."""
    return path in PROBES


def _one_line(record: logging.LogRecord) -> bool:
    """Shorten the record of a refused request: Serve logs every exception of a replica with its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, InvalidRequest | Overloaded | ScoringTooSlow | Unavailable | Cancelled):
        record.msg, record.args, record.exc_info = "Request refused: %s", (error,), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def _probe_at_debug(record: logging.LogRecord) -> bool:
    """Lower an access line of a probe, `GET /health/ready 503 1.2ms` or `CALL status OK 0.4ms`, to DEBUG."""
    if not getattr(record, "serve_access_log", False):
        return True
    method, _, rest = record.getMessage().partition(" ")
    asked = rest.partition(" ")[0]
    is_quiet = asked in QUESTIONS if method == "CALL" else is_probe(asked) or asked.startswith(PAGE_FILES)
    if not is_quiet:
        return True
    return _at_debug(record)


def _scaling_at_debug(record: logging.LogRecord) -> bool:
    is_scaling = record.filename == "autoscaling_state.py" or record.getMessage().startswith(SCALING)
    return _at_debug(record) if is_scaling and record.levelno == logging.INFO else True


def _at_debug(record: logging.LogRecord) -> bool:
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger("ray.serve").isEnabledFor(logging.DEBUG)
