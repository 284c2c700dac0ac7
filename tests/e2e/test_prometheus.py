"""A real Prometheus scrapes a server under mixed load, as `orchard dashboards` says, and all dashboards have data."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.metrics.dashboard import queries
from deployments.serve_run.prometheus_config import ScrapeTarget, prometheus_config
from tests.e2e.pictures import about, image_part, shape
from tests.e2e.prometheus import Prometheus, as_grafana_asks, find, prometheus
from tests.e2e.server import ROOT, SHIPPED_CONFIG, Server
from tests.e2e.test_serving import LONG, wait_until_idle

pytestmark = pytest.mark.server

SOON_S = 60.0
RATES_S = 240.0
"""Limit for rounds of load until rates exist: on two busy cores a round lasts up to half a minute."""
RAY_EXPORT_S = 25.0
"""After which Ray's metrics ports have all values: each process reports every 10 s."""
SCRAPE_S = 2
"""Instead of 10 s, so that rates exist soon. It is also the limit of a scrape, which takes longer on busy cores."""

NO_DATA = {
    "orchard:disk_cache_": "the shipped configuration has no disk tier",
    "orchard:fetch": "there is no other node",
    "orchard:not_taken_over": "there is no other node",
    "orchard:served_": "there is no other node",
    "orchard:taken_over": "there is no other node",
    "orchard:expected_queue_time_seconds": "known only while requests are queued",
}
"""Beginnings of metrics of Orchard's dashboard that may have no data here, and why."""

NO_DATA_OF_RAY = {
    "ray_vllm_num_requests_swapped": "vLLM's name for rows that are moved to the CPU: preempted rows are queued here",
    "ray_vllm_nixl_": "transfer of keys and values between engines of vLLM",
    "ray_vllm_kv_offload_": "keys and values of vLLM in the memory of the CPU: a Mac has one memory",
    "ray_vllm_external_prefix_cache_": "prefix caches outside of the engine: that of Orchard is in it",
}
"""Beginnings of metrics that Ray's dashboard asks for and an engine of Orchard does not have, and why."""


class Load:
    """Rounds of requests of all kinds."""

    def __init__(self, http: httpx.Client, pool: ThreadPoolExecutor):
        self._http = http
        self._pool = pool
        self._num_rounds = 0

    def round(self) -> None:
        """Send one request of each kind, some at the same time, and wait for all answers."""
        self._num_rounds += 1
        number = self._num_rounds
        question = [{"role": "user", "content": f"What is 12 + {number % 40}?"}]
        cancelled: Future[httpx.Response] = self._pool.submit(self._cancelled, number)
        streamed: Future[int] = self._pool.submit(self._streamed, question)
        assert self._chat(question).status_code == 200
        picture = about("What is in the image?", image_part(shape("red", "circle")))
        assert self._chat(picture).status_code == 200
        grammar = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        assert self._chat(question, response_format=grammar, max_tokens=8).status_code == 200
        if number % 4 == 1:
            for text, sparse in (("apple pear " * 1200, True), ("plum " * 50, True)):
                message = [{"role": "user", "content": f"{number} {text}"}]
                assert self._chat(message, specprefill=sparse, max_tokens=4).status_code == 200
        assert self._chat([{"role": "user", "content": "apple " * 200_000}]).status_code == 400  # beyond the context
        assert streamed.result(SOON_S) > 0
        assert cancelled.result(SOON_S).status_code == 499

    def _chat(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": messages, "temperature": 0, **fields}
        return self._http.post("/v1/chat/completions", json=body)

    def _streamed(self, messages: list[dict[str, Any]]) -> int:
        body = {"model": "demo", "messages": messages, "temperature": 0, "stream": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            return sum(line.startswith("data: ") for line in response.iter_lines())

    def _cancelled(self, number: int) -> httpx.Response:
        request_id = f"scraped-{number}"
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": LONG}],
            "max_tokens": 2000,
            "min_tokens": 2000,
        }
        answer = self._pool.submit(
            self._http.post, "/v1/chat/completions", json=body, headers={"x-request-id": request_id}
        )
        time.sleep(0.5)
        until(lambda: self._http.post(f"/v1/chat/completions/{request_id}/cancel").status_code == 200)
        return answer.result(SOON_S)


def until(condition: Callable[[], bool], tell: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.5)


class Command:
    """`orchard dashboards` for a server of the tests."""

    def __init__(self, server: Server, directory: Path):
        config = yaml.safe_load(SHIPPED_CONFIG.read_text())
        config["http_options"]["port"] = int(server.base_url.rpartition(":")[2])
        self._config = directory / "serve_config.yaml"
        self._config.write_text(yaml.safe_dump(config))
        session = Path("ray") / "session_latest"
        self.session = next(
            path / session for path in (server.ray_dir, *server.ray_dir.parents) if (path / session).exists()
        )

    def run(self, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.run(
            [str(Path(sys.executable).parent / "orchard"), "dashboards", "--config", str(self._config), *options],
            env={**inherited, "RAY_TMPDIR": str(self.session.parent.parent), **environ},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )


class Scraped:
    """A server that Prometheus has scraped while it was under load."""

    def __init__(self, prometheus: Prometheus, command: Command):
        self.prometheus = prometheus
        self.command = command

    def dashboard(self, name: str) -> str:
        """Return a file of the folder that Ray's Grafana reads."""
        return (self.command.session / "metrics/grafana/dashboards" / f"{name}_grafana_dashboard.json").read_text()

    def without_data(self, name: str, exceptions: Collection[str]) -> list[str]:
        """Return the queries of a dashboard that have no data after a while, but those with a name in exceptions."""
        exprs = [as_grafana_asks(expr) for _, expr in queries(json.loads(self.dashboard(name)))]
        empty = [expr for expr in exprs if not any(exception in expr for exception in exceptions)]
        assert empty
        deadline = time.monotonic() + RAY_EXPORT_S
        while empty and time.monotonic() < deadline:
            empty = [expr for expr in empty if not self.prometheus.query(expr)]
        return empty


@pytest.fixture(scope="session", autouse=True)
def promtool() -> str:
    """Its absence skips all tests of this file before a server starts."""
    return find("promtool")


@pytest.fixture(scope="module")
def scraped(
    promtool: str, server: Server, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scraped]:
    directory = tmp_path_factory.mktemp("prometheus")
    command = Command(server, directory)
    done = command.run()
    assert done.returncode == 0, done.stderr
    config = directory / "prometheus.yml"
    config.write_text(re.sub(r"scrape_interval: \d+s", f"scrape_interval: {SCRAPE_S}s", done.stdout))
    with prometheus(config, directory) as running, ThreadPoolExecutor(4) as pool:
        load = Load(http, pool)
        deadline = time.monotonic() + RATES_S
        while not running.query("rate(ray_vllm_prompt_tokens_total[2m]) > 0"):  # Ray exports every 10 s
            load.round()
            assert time.monotonic() < deadline, running.scrapes()
        wait_until_idle(http, SOON_S)
        yield Scraped(running, command)


def test_promtool_accepts_the_text_and_complains_only_about_names_of_vllm(promtool: str, http: httpx.Client):
    response = http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=response.text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (0, 3), done.stderr  # 3: names against its rules
    complaints = [line for line in done.stderr.splitlines() if "should not contain ':'" not in line]
    assert complaints == [
        'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
    ]


def test_both_jobs_of_the_printed_configuration_are_scraped(scraped: Scraped):
    until(lambda: {"orchard", "ray"} <= set(scraped.prometheus.targets()), scraped.prometheus.targets)
    jobs = scraped.prometheus.targets()
    assert [target["health"] for target in jobs["orchard"]] == ["up"], jobs["orchard"]
    assert any(target["health"] == "up" for target in jobs["ray"]), jobs["ray"]


def test_each_query_of_orchards_dashboard_has_data(scraped: Scraped):
    assert scraped.without_data("orchard", NO_DATA) == []


def test_each_query_of_rays_dashboard_serve_llm_has_data(scraped: Scraped):
    assert scraped.without_data("serve_llm", NO_DATA_OF_RAY) == []


def test_the_engines_metrics_are_the_same_in_ray(scraped: Scraped):
    for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"):

        def figures(name: str = name) -> list[list[float]]:
            """Ours and Ray's; none before they are scraped."""
            found = (scraped.prometheus.query(f"sum({prefix}{name})") for prefix in ("vllm:", "ray_vllm_"))
            return [[float(sample["value"][1]) for sample in samples] for samples in found]

        def are_same() -> bool:
            ours, rays = figures()
            return len(ours) == 1 and ours == rays

        until(are_same, figures)


def test_the_command_finds_prometheus_and_misses_only_grafana(scraped: Scraped):
    named = {"RAY_PROMETHEUS_HOST": scraped.prometheus.base_url, "RAY_GRAFANA_HOST": "http://127.0.0.1:1"}
    until(lambda: bool(scraped.prometheus.query("ray_node_mem_total")))
    done = scraped.command.run("--check", **named)
    assert done.returncode == 1 and "Prometheus" not in done.stderr, done.stderr
    assert "No Grafana answers at http://127.0.0.1:1 (RAY_GRAFANA_HOST)" in done.stderr


def test_exceptions_are_names_that_the_dashboards_ask_for(scraped: Scraped):
    for file, names in (("orchard", NO_DATA), ("serve_llm", NO_DATA_OF_RAY)):
        assert not [name for name in names if name not in scraped.dashboard(file)]


def test_each_node_of_ray_is_scraped_once_where_the_server_listens_on_all_addresses(tmp_path: Path):
    """Ray's file has several ports of the head node; here nothing answers on them."""
    discovery = tmp_path / "discovery.json"
    discovery.write_text(
        '[{"labels": {"job": "ray"}, "targets": ["127.0.0.1:11", "127.0.0.1:12", "127.0.0.2:11", "[::1]:11"]}]'
    )
    target = ScrapeTarget("http", "127.0.0.1", 9, "/metrics", needs_key=False, is_on_all_nodes=True)
    config = tmp_path / "prometheus.yml"
    config.write_text(prometheus_config(target, tmp_path / "orchard.key", discovery))
    with prometheus(config, tmp_path) as running:
        until(lambda: bool(running.targets()))
        jobs = running.targets()
    urls = [target["scrapeUrl"] for target in jobs["orchard"]]
    assert sorted(urls) == [f"http://{host}:9/metrics" for host in ("127.0.0.1", "127.0.0.2", "[::1]")]
    assert len(jobs["ray"]) == 4
