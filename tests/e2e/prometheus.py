"""Prometheus on a loopback port, with its data in a directory of the test: Debian's package, not a service."""

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import free_port

START_S = 60.0
STOP_S = 20.0

ANY = ".*"
RECENT = "5m"


class Prometheus:
    """A running Prometheus."""

    def __init__(self, config: Path, directory: Path):
        self.base_url = f"http://127.0.0.1:{free_port()}"
        self._http = httpx.Client(base_url=self.base_url, timeout=30, trust_env=False)
        self._log = directory / "prometheus.log"
        command = [
            find("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={self.base_url.removeprefix('http://')}",
            "--log.level=warn",
        ]
        with self._log.open("w") as log:
            env = {**os.environ, "GOMAXPROCS": "1"}  # one core is left to the server
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=directory, env=env)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Evaluate an instant query; return its samples that are numbers."""
        found = self._http.post("/api/v1/query", data={"query": expr}).json()
        assert found["status"] == "success", f"{expr}: {found}"
        return [one for one in found["data"]["result"] if not math.isnan(float(one["value"][1]))]

    def value(self, expr: str) -> float:
        """Evaluate a query with exactly one sample."""
        (one,) = self.query(expr)
        return float(one["value"][1])

    def targets(self) -> dict[str, list[dict[str, Any]]]:
        """Return what is scraped by job."""
        jobs: dict[str, list[dict[str, Any]]] = {}
        for target in self._http.get("/api/v1/targets").json()["data"]["activeTargets"]:
            jobs.setdefault(target["labels"]["job"], []).append(target)
        return jobs

    def scrapes(self) -> list[str]:
        """Tell how the last scrape of each address ended."""
        return [
            f"{target['scrapeUrl']} {target['health']} after {target['lastScrapeDuration']} s {target['lastError']}"
            for targets in self.targets().values()
            for target in targets
        ]

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(STOP_S)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/-/ready").status_code == 200
        return False


@contextlib.contextmanager
def prometheus(config: Path, directory: Path) -> Iterator[Prometheus]:
    """Run Prometheus with a configuration file. Its data goes to `directory`."""
    running = Prometheus(config, directory)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def find(program: str) -> str:
    """Return the path of `prometheus` or `promtool`, or skip the test."""
    if (path := shutil.which(program)) is not None:
        return path
    reason = f"there is no {program}; it is in Debian's package prometheus"
    if os.environ.get("ORCHARD_PROMETHEUS") == "required":
        pytest.fail(reason)
    pytest.skip(f"{reason}, and ORCHARD_PROMETHEUS is not `required`")


def as_grafana_asks(expr: str) -> str:
    """Replace the variables of Ray's and Orchard's dashboards by five minutes, and by all values."""
    for name in ("$__rate_interval", "$interval"):
        expr = expr.replace(name, RECENT)
    expr = expr.replace("$__range", "10m").replace(":1m]", ":15s]")  # subqueries have values at whole steps only
    for name in ("$model", "$node", "$vllm_model_name", "$workerid", "$deployment", "$Cluster"):
        expr = expr.replace(name, ANY)
    assert "$" not in expr, expr
    return expr
