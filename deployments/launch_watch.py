"""What `serve run <config>` lacks: it ends with the reason when the app cannot start, says when it is ready, and lets
answers that are running come to their end before it stops."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.launch import RAY_INIT_HOOK, serve_run_config
from deployments.launch_stop import GracefulStop, drain_applications, say

POLL_S = 0.5
CONNECT_S = 2.0
OUR_APP = "deployments.app:build_app"


def watch_serve_run(runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ray calls it in the main thread of `serve run`, with the config read and before any process is started."""
    os.environ.pop(RAY_INIT_HOOK, None)  # not for the processes that Ray starts from here
    path = serve_run_config(sys.argv)
    if path is not None:
        config = yaml.safe_load(Path(path).read_text())
        complaints = "\n".join(complaints_about(config))
        if complaints:
            say(f"{path} is wrong:\n{complaints}")
            raise SystemExit(1)
        if not os.environ.get("RAY_ADDRESS"):
            forget_dead_cluster()
        stop = GracefulStop(lambda: drain_applications(drain_timeouts_s(config)))
        if _ours(config):
            stop.install()
        threading.Thread(target=_watch, args=(config, stop.serving), name="watch-serve-run", daemon=True).start()
    return runtime_env


def forget_dead_cluster() -> None:
    """Ray joins the cluster that its last `ray start` here wrote down, and waits minutes for one that was killed.

    Where nobody listens at that address any more, the note goes, as a clean `ray stop` would have removed it.
    """
    from ray._common.utils import get_ray_address_file

    note = Path(get_ray_address_file(None))
    address = note.read_text().strip() if note.exists() else ""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        note.unlink(missing_ok=True)
        say(f"The Ray cluster at {address}, noted in {note}, is gone ({error}): starting without it.")


def complaints_about(config: dict[str, Any]) -> list[str]:
    """What is wrong with the `args` of our applications, one line per key."""
    from deployments.app import AppArgs

    lines = []
    for application in _ours(config):
        try:
            AppArgs.model_validate(application.get("args") or {})
        except ValidationError as error:
            for e in error.errors():
                key = ".".join(("args", *map(str, e["loc"])))
                what = "there is no such key" if e["type"] == "extra_forbidden" else f"{e['msg']}, not {e['input']!r}"
                lines.append(f"  {key}: {what}")
    return lines


def drain_timeouts_s(config: dict[str, Any]) -> dict[str, float]:
    """Of our applications, by name."""
    from deployments.app import AppArgs

    return {
        application.get("name", "default"): AppArgs.model_validate(application.get("args") or {}).drain_timeout_s
        for application in _ours(config)
    }


def _ours(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [a for a in config.get("applications", []) if a.get("import_path") == OUR_APP]


def reason_in(message: str) -> str:
    """The error at the end of a traceback without the frames that lead to it; any other text as it is."""
    lines = message.strip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    error = re.compile(r"[A-Za-z_][\w.]*(:|\()")
    start = next((i for i in range(last_frame + 1, len(lines)) if error.match(lines[i])), last_frame + 1)
    return "\n".join(lines[start:] if last_frame >= 0 and start < len(lines) else lines)


def _watch(config: dict[str, Any], on_running: Callable[[], None]) -> None:
    import ray
    from ray import serve

    waiting = {application.get("name", "default") for application in config.get("applications", [])}
    while waiting:
        time.sleep(POLL_S)
        try:
            applications = serve.status().applications if ray.is_initialized() else {}
        except Exception:
            continue  # Serve is not up yet, or is going down: the main thread will say so
        for name in waiting & set(applications):
            application = applications[name]
            if application.status == "DEPLOY_FAILED":
                _give_up(name, application)
            if application.status == "RUNNING":
                waiting.discard(name)
                on_running()
                say(_welcome(config, name))


def _give_up(name: str, application: Any) -> None:
    reasons = [reason_in(application.message)]
    for deployment, overview in application.deployments.items():
        if overview.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons.append(f"{deployment}: {reason_in(overview.message)}")
    import ray

    say(f"Application '{name}' could not be started:\n" + "\n".join(reasons))
    ray.shutdown()  # ends the cluster if this command started it, and leaves one that it joined
    os._exit(1)  # the main thread sleeps in `serve run` and takes no exception from another thread


def _welcome(config: dict[str, Any], name: str) -> str:
    http = config.get("http_options") or {}
    host = http.get("host", "127.0.0.1")
    application = next(a for a in config["applications"] if a.get("name", "default") == name)
    model = ((application.get("args") or {}).get("engine") or {}).get("model", "demo")
    prefix = (application.get("route_prefix") or "/").rstrip("/")
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{http.get('port', 8000)}{prefix}/v1"
    return f"Orchard is ready: {url} (model {model})"
