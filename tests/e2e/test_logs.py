"""The log files of a real server: what the start, a failed step, the proxy and a client that leaves write there."""

import re
import time

import httpx
import pytest

from tests.e2e.failing_step.sitecustomize import FAILING_SEED
from tests.e2e.logs import read_logs
from tests.e2e.server import ServeRun

pytestmark = pytest.mark.server

HI = [{"role": "user", "content": "Hi"}]
FAILS, LEAVES, ASKS = "the-one-that-fails", "the-one-that-leaves", "the-one-that-asks"
WAIT_S = 60.0

PHASES = ("reading weights took", "compiling took", "measuring memory took")


def written(server: ServeRun, kind: str, pattern: str) -> re.Match[str]:
    """Return the text that a process of this kind has written to its own log file of Serve."""
    deadline = time.monotonic() + WAIT_S
    while True:
        logs = {name: text for name, text in read_logs(server, server.ray_dir).items() if name.startswith(kind)}
        for text in logs.values():
            if (found := re.search(pattern, text, re.MULTILINE)) is not None:
                return found
        assert time.monotonic() < deadline, (pattern, {name: text[-4000:] for name, text in logs.items()})
        time.sleep(0.2)


def line(level: str, component: str, message: str, request_id: str = "") -> str:
    """Return the pattern of a line with its time, its replica and its request; all but the level are patterns."""
    named = f"{request_id} " if request_id else ""
    return rf"^{level} [-\d]+ [:,\d]+ {component} \S+ {named}-- {message}"


def test_the_start_names_its_phases_with_seconds_and_the_weights_that_it_has_read(small_server: ServeRun):
    engine = "orchard_ModelReplica"
    for phase in PHASES:
        written(small_server, f"replica_{engine}", line("INFO", engine, rf"{phase} \d+\.\d s$"))
    written(small_server, f"replica_{engine}", line("INFO", engine, r"loaded \S+: \d+\.\d MB of weights, "))


def test_the_proxy_warns_of_requests_during_the_start(small_server: ServeRun):
    starting = r"request (?P=id): The server is starting: it accepts no requests yet\.$"
    written(small_server, "proxy_", line("WARNING", "proxy", starting, r"(?P<id>\S+)"))


def test_probes_and_the_policies_of_deployments_have_no_lines(small_server: ServeRun):
    with httpx.Client(base_url=small_server.base_url, timeout=120) as http:
        assert http.get("/health/ready").status_code in (200, 503)  # an engine may be replaced just now
        assert http.get("/v1/models", headers={"X-Request-ID": ASKS}).status_code == 200
    for kind, component in (("proxy_", "proxy"), ("replica_orchard_Ingress", "orchard_Ingress")):
        written(small_server, kind, line("INFO", component, "GET /v1/models 200 ", ASKS))
    for name, text in read_logs(small_server, small_server.ray_dir).items():
        if name.startswith(("proxy_", "replica_", "controller_")):
            assert "/health" not in re.sub("RoutePattern.*", "", text), name
            assert "autoscaling" not in text and "caling Deployment" not in text, name


def test_a_failed_step_leaves_its_traceback_with_the_id_of_the_request(small_server: ServeRun):
    body = {"model": "demo", "messages": HI, "max_tokens": 5, "seed": FAILING_SEED}
    with httpx.Client(base_url=small_server.base_url, timeout=120) as http:
        failed = http.post("/v1/chat/completions", json=body, headers={"X-Request-ID": FAILS})
        assert failed.status_code >= 500, failed.text
        assert http.post("/v1/chat/completions", json={**body, "seed": 1}).status_code == 200
    message = r"decode step failed with 1 rows\nTraceback \(most recent call last\):\n(?: .*\n)+RuntimeError: this step"
    written(small_server, "replica_orchard_ModelReplica", line("ERROR", "orchard_ModelReplica", message, FAILS))


def test_a_client_that_leaves_has_a_line_that_says_what_was_done(small_server: ServeRun):
    body = {"model": "demo", "messages": HI, "max_tokens": 3000, "min_tokens": 3000, "stream": True}
    headers = {"X-Request-ID": LEAVES}
    url = f"{small_server.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
        assert next(response.iter_lines())
    left = r"request \S+: disconnected 499 in .*; the client disconnected after \d+ tokens of its answer; the rest is "
    left += r"not generated$"
    written(small_server, "replica_orchard_Ingress", line("INFO", "orchard_Ingress", left, LEAVES))
