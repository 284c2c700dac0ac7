"""Watcher: watches the application, reports when it is ready, and ends the command when it is lost."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.effective import url_of
from deployments.serve_run.stop import say

POLL_S = 0.5
RUNNING_POLL_S = 2.5
"""Once the application runs: each question costs this process and Serve's controller 20 ms."""

CHILDREN_LISTED_EVERY_S = 5.0

NO_ANSWER_S = 45.0
"""Longest silence of Serve's controller, whose restart takes 10 to 20 s. Ray's own client gives up after 60 s."""

NOT_RUNNING_S = 300.0
"""Longest time in which an application that was running may have a status outside IN_ORDER."""

SHUTDOWN_S = 20.0
"""Time for Ray to end its processes."""

KILL_S = 3.0

IN_ORDER = ("RUNNING", "DEPLOYING")

StatusOf = Callable[[], Any]
"""Returns the application's entry in serve.status(), None if there is none. It may raise or hang."""


class Watch:
    """Decides from an application's status when to give up. Times are monotonic seconds.

    Args:
        name: Of the application.
        now: The time.
        is_continued: Whether the application ran before this process did, as that of a head that has come back: its
            failures are those of the return, and count only if they last.
    """

    def __init__(self, name: str, now: float, is_continued: bool = False):
        self._name = name
        self._is_continued = is_continued
        self._answered_at: float | None = None
        self._in_order_at = now
        self.has_run = False

    def see(self, application: Any | None, asked_at: float) -> str | None:
        """Record a status. Returns the reason to give up; None to continue.

        Args:
            application: Serve's answer; None if there is no such application.
            asked_at: Time of the question.
        """
        self._answered_at = asked_at
        status = application.status if application is not None else None
        if status == "RUNNING":
            self.has_run = True
        may_last = self.has_run or self._is_continued
        if status in IN_ORDER or not may_last:
            self._in_order_at = asked_at
        if status == "DEPLOY_FAILED" and not may_last:
            return f"Application '{self._name}' could not be started:\n{reasons_of(application)}"
        if asked_at - self._in_order_at <= NOT_RUNNING_S:
            return None
        state = "no longer exists" if application is None else f"is {status}:\n{reasons_of(application)}"
        return f"Application '{self._name}' has not been running for {NOT_RUNNING_S:.0f} s and {state}"

    def hear_nothing(self, now: float) -> str | None:
        """Judge Serve's silence. Returns the reason to give up; None to continue, also before Serve's first answer."""
        if self._answered_at is None or now - self._answered_at <= NO_ANSWER_S:
            return None
        return f"Serve has not answered for {NO_ANSWER_S:.0f} s: its controller or Ray's head node was lost."


class Watcher:
    """Watches in two threads: one asks Serve and may hang, the other decides on time when to give up."""

    def __init__(
        self,
        config: OrchardConfig,
        on_running: Callable[[], None],
        owns_cluster: bool,
        status_of: StatusOf | None = None,
        is_continued: bool = False,
    ):
        """Store the settings.

        Args:
            config: The configuration file.
            on_running: Called once, when the application is running.
            owns_cluster: Whether this process started Ray.
            status_of: Returns the status; default: application_status.
            is_continued: See Watch.
        """
        self._config = config
        self._on_running = on_running
        self._owns_cluster = owns_cluster
        self._status_of = status_of or (lambda: application_status(config.name))
        self._watch = Watch(config.name, time.monotonic(), is_continued)
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._started: set[psutil.Process] = set()

    def start(self) -> None:
        """Start both threads."""
        for target, name in ((self._ask, "ask-serve"), (self._judge, "watch-serve")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _ask(self) -> None:
        while True:
            asked_at = time.monotonic()
            with contextlib.suppress(Exception):  # Serve is not up yet, restarts, or is going down
                application = self._status_of()
                self._hear(application, asked_at)
            time.sleep(RUNNING_POLL_S if self._watch.has_run else POLL_S)

    def _hear(self, application: Any | None, asked_at: float) -> None:
        with self._lock:
            had_run = self._watch.has_run
            self._reason = self._reason or self._watch.see(application, asked_at)
        if self._watch.has_run and not had_run:
            self._on_running()
            say(f"Orchard is ready: {url_of(self._config)}/v1 (model {self._config.args.model_name})")

    def _judge(self) -> None:
        listed_at = float("-inf")
        while True:
            time.sleep(POLL_S)
            if self._owns_cluster and time.monotonic() - listed_at > CHILDREN_LISTED_EVERY_S:
                listed_at = time.monotonic()
                self._started = {p for p in self._started if p.is_running()} | children()
            with self._lock:
                reason = self._reason or self._watch.hear_nothing(time.monotonic())
            if reason is not None:
                self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """End the process from this thread, as the main thread may be blocked in Ray."""
        say(reason)
        try:
            end_ray(self._started if self._owns_cluster else set())
        finally:
            os._exit(1)


def children() -> set[psutil.Process]:
    """Return all descendants of this process."""
    return set(psutil.Process().children(recursive=True))


def end_ray(processes: set[psutil.Process]) -> None:
    """Disconnect from Ray, which ends a cluster that this process started, then end its remaining processes."""
    thread = threading.Thread(target=_shut_down_ray, name="end-ray", daemon=True)
    thread.start()
    thread.join(SHUTDOWN_S)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        processes = {process for process in processes if process.is_running()}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        psutil.wait_procs(processes, KILL_S)


def _shut_down_ray() -> None:
    import ray

    ray.shutdown()


def application_status(name: str) -> Any | None:
    """Return Serve's status of an application; None if there is none of this name.

    A running application without a healthy HTTP proxy counts as unhealthy.

    Raises:
        RuntimeError: This process is not connected to Ray.
    """
    import ray
    from ray import serve

    if not ray.is_initialized():
        raise RuntimeError("not connected to Ray")
    status = serve.status()
    application = status.applications.get(name)
    if application is not None and application.status == "RUNNING" and "HEALTHY" not in status.proxies.values():
        return replace(application, status="UNHEALTHY", message="no HTTP proxy is healthy")
    return application


def reasons_of(application: Any) -> str:
    """Return the messages of an application and of its failed or unhealthy deployments, without tracebacks."""
    reasons = [reason_in(application.message)]
    for deployment, overview in application.deployments.items():
        if overview.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons.append(f"{deployment}: {reason_in(overview.message)}")
    return "\n".join(reasons)


def reason_in(message: str) -> str:
    """Return the error at the end of a traceback without its frames; any other text unchanged."""
    lines = message.strip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    error = re.compile(r"[A-Za-z_][\w.]*(:|\()")
    start = next((i for i in range(last_frame + 1, len(lines)) if error.match(lines[i])), last_frame + 1)
    return "\n".join(lines[start:] if last_frame >= 0 and start < len(lines) else lines)
