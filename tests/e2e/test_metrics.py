"""GET /metrics of a real server: its counters agree with what clients count, and a scrape costs next to nothing."""

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.status.node_replicas import SHARED_S
from tests.e2e.pictures import about, image_part, shape
from tests.e2e.test_serving import wait_until_idle

pytestmark = pytest.mark.server

NUM_SCRAPES = 20
MAX_CPU_S = 0.03
"""Limit of the CPU time of the ingress per scrape with a call to the engine. On idle cores it is 8 ms, 2 to 3 of them
for HTTP."""

Counts = Counter[tuple[str, ...]]


def scrape(http: httpx.Client) -> Counts:
    """Return all samples by name and values of labels, without the model, when no answer is older than the requests."""
    wait_until_idle(http, 60)
    time.sleep(SHARED_S)
    response = http.get("/metrics")
    assert response.status_code == 200, response.text
    found: Counts = Counter()
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            values = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found[(sample.name, *values)] = sample.value  # pyright: ignore[reportArgumentType]
    return found


def ask(http: httpx.Client, path: str, **body: Any) -> Counts:
    """Send a request, and return what its answer adds to the counters."""
    response = http.post(path, json={"model": "demo", **body})
    counts: Counts = Counter()
    api = path.split("/")[2]
    counts["orchard:http_responses_total", api, str(response.status_code)] += 1
    if response.status_code != 200:
        error = response.json()["error"]
        code = error["code"] or error["type"]
        counts["orchard:http_errors_total", str(response.status_code), code] += 1
        return counts
    counts["orchard:key_answers_total", "none"] += 1
    counts.update(_tokens(_last_usage(response)))
    return counts


def _last_usage(response: httpx.Response) -> dict[str, Any]:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["usage"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return next(
        sent["usage"] for line in reversed(lines) if line != "[DONE]" and (sent := json.loads(line)).get("usage")
    )


def _tokens(usage: dict[str, Any]) -> Counts:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    kinds = {"prompt": usage["prompt_tokens"], "cached": cached, "completion": usage.get("completion_tokens", 0)}
    return Counter({("orchard:key_tokens_total", "none", kind): num for kind, num in kinds.items()})


def requests() -> list[tuple[str, dict[str, Any]]]:
    chat, usage = "/v1/chat/completions", {"include_usage": True}
    question = [{"role": "user", "content": "What is 12 + 30?"}]
    story = [{"role": "user", "content": "Tell me a story about a fox."}]
    return [
        (chat, {"messages": question}),
        (chat, {"messages": question, "stream": True, "stream_options": usage}),
        (chat, {"messages": story, "max_tokens": 40}),
        (chat, {"messages": story, "max_tokens": 30, "stream": True, "stream_options": usage}),
        (chat, {"messages": about("What is in the image?", image_part(shape("red", "circle")))}),
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12}),
        (chat, {"messages": question, "temperature": "hot"}),
        (chat, {"messages": [{"role": "user", "content": "apple " * 200_000}]}),
    ]


def test_counters_are_those_of_the_clients(http: httpx.Client):
    before = scrape(http)
    expected: Counts = Counter()
    with ThreadPoolExecutor(6) as pool:
        for counts in pool.map(lambda request: ask(http, request[0], **request[1]), requests() * 2):
            expected.update(counts)
    after = scrape(http)
    new = {key: after[key] - before[key] for key in after if after[key] != before[key]}
    names = {name for name, *_ in expected}
    counted = {key: num for key, num in new.items() if key[0] in names and key[1] != "status"}  # /v1/status is asked
    assert counted == {key: num for key, num in expected.items() if num}
    prompt, cached, completion = (
        expected["orchard:key_tokens_total", "none", kind] for kind in ("prompt", "cached", "completion")
    )
    assert new["vllm:prompt_tokens_total",] == new["vllm:prefix_cache_queries_total",] == prompt
    assert new["vllm:prompt_tokens_cached_total",] == new["vllm:prefix_cache_hits_total",] == cached
    assert new["vllm:generation_tokens_total",] == completion
    num_answers = expected["orchard:key_answers_total", "none"]
    assert sum(new.get(("vllm:request_success_total", reason), 0) for reason in ("stop", "length")) == num_answers
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert new[f"vllm:{name}_count",] == num_answers
    assert new["vllm:request_prompt_tokens_sum",] == prompt
    assert new["vllm:request_generation_tokens_sum",] == completion


def test_a_scrape_costs_little_and_does_not_count_itself(http: httpx.Client):
    before = scrape(http)
    ingress = psutil.Process(http.get("/v1/status").json()["ingress"][0]["pid"])
    times = [_cpu_s(ingress)]
    for _ in range(NUM_SCRAPES):
        http.get("/metrics")
    times.append(_cpu_s(ingress))
    for _ in range(NUM_SCRAPES // 4):
        time.sleep(SHARED_S)
        http.get("/metrics")
    times.append(_cpu_s(ingress))
    time.sleep(NUM_SCRAPES // 4 * SHARED_S)
    idle_s = _cpu_s(ingress) - times[2]
    shared_s, asked_s = (times[1] - times[0]) / NUM_SCRAPES, (times[2] - times[1] - idle_s) / (NUM_SCRAPES // 4)
    assert max(shared_s, asked_s) < MAX_CPU_S, (shared_s, asked_s)
    after = scrape(http)
    changed = {key for key in after if after[key] != before[key] and key[0].startswith("orchard:http_")}
    assert changed <= {("orchard:http_responses_total", "status", "200")}, "only /v1/status was asked"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
