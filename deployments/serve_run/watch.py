"""Watches the application as long as the command runs: says when it is ready, and ends the command when it is gone."""

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

CHILDREN_LISTED_EVERY_S = 5.0

NO_ANSWER_S = 45.0
"""So long Serve's controller may be silent: it is restarted within 10 to 20 s. Ray's own client gives up after 60 s."""

NOT_RUNNING_S = 300.0
"""So long an application that was running may be anything but running, or being deployed."""

SHUTDOWN_S = 20.0
"""So long Ray gets to end its processes."""

KILL_S = 3.0

IN_ORDER = ("RUNNING", "DEPLOYING")

StatusOf = Callable[[], Any]
"""The application's status in serve.status(), None if there is no such application. May raise, and may hang."""


class Watch:
    """Judges what is seen of one application; now: seconds of a monotonic clock."""

    def __init__(self, name: str, now: float):
        self._name = name
        self._answered_at: float | None = None
        self._in_order_at = now
        self.has_run = False

    def see(self, application: Any | None, asked_at: float) -> str | None:
        """application: what Serve answered to a question of this moment. Returns why to give up, None to go on."""
        self._answered_at = asked_at
        status = application.status if application is not None else None
        if status == "RUNNING":
            self.has_run = True
        if status in IN_ORDER or not self.has_run:
            self._in_order_at = asked_at
        if status == "DEPLOY_FAILED" and not self.has_run:
            return f"Application '{self._name}' could not be started:\n{reasons_of(application)}"
        if asked_at - self._in_order_at <= NOT_RUNNING_S:
            return None
        state = "is not there any more" if application is None else f"is {status}:\n{reasons_of(application)}"
        return f"Application '{self._name}' has not been running for {NOT_RUNNING_S:.0f} s and {state}"

    def hear_nothing(self, now: float) -> str | None:
        """Serve has not answered until now. Before its first answer it is starting, and that takes its time."""
        if self._answered_at is None or now - self._answered_at <= NO_ANSWER_S:
            return None
        return f"Serve has not answered for {NO_ANSWER_S:.0f} s: its controller, or Ray's head, is gone."


class Watcher:
    """Two threads: one asks Serve, and may hang there for ever; the other has the clock and the last word."""

    def __init__(
        self,
        config: OrchardConfig,
        on_running: Callable[[], None],
        owns_cluster: bool,
        status_of: StatusOf | None = None,
    ):
        """on_running: called once, when the application runs. owns_cluster: this process has started Ray."""
        self._config = config
        self._on_running = on_running
        self._owns_cluster = owns_cluster
        self._status_of = status_of or (lambda: application_status(config.name))
        self._watch = Watch(config.name, time.monotonic())
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._started: set[psutil.Process] = set()

    def start(self) -> None:
        for target, name in ((self._ask, "ask-serve"), (self._judge, "watch-serve")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _ask(self) -> None:
        while True:
            asked_at = time.monotonic()
            with contextlib.suppress(Exception):  # Serve is not up yet, restarts, or is going down
                application = self._status_of()
                self._hear(application, asked_at)
            time.sleep(POLL_S)

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
        """The main thread sleeps, or waits for Ray, and takes no exception from another thread."""
        say(reason)
        try:
            end_ray(self._started if self._owns_cluster else set())
        finally:
            os._exit(1)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def end_ray(processes: set[psutil.Process]) -> None:
    """Disconnect, which ends a cluster that this process has started; then end those of its processes that are left."""
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
    """What Serve says about an application, None if it knows none of this name. One that runs behind no healthy HTTP
    proxy counts as unhealthy.

    Raises RuntimeError as long as this process is not connected to Ray.
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
    reasons = [reason_in(application.message)]
    for deployment, overview in application.deployments.items():
        if overview.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons.append(f"{deployment}: {reason_in(overview.message)}")
    return "\n".join(reasons)


def reason_in(message: str) -> str:
    """The error at the end of a traceback without the frames that lead to it; any other text as it is."""
    lines = message.strip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    error = re.compile(r"[A-Za-z_][\w.]*(:|\()")
    start = next((i for i in range(last_frame + 1, len(lines)) if error.match(lines[i])), last_frame + 1)
    return "\n".join(lines[start:] if last_frame >= 0 and start < len(lines) else lines)
