"""Requests of users of other servers that were answered wrongly here once, through the whole graph in one process.

cases.jsonl has one case a line: the request, and `expected`: the `status` that is right, and what must hold of the
answer: `content` (its parsed JSON), `text` (it), `arguments` (of the first call, parsed), `above` (its value of v is
larger). `or_status` is right, too, if the message contains `names`.
"""

import asyncio
import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.faulty_graph import Graph
from tests.field_cases.more_siblings import MORE_SIBLINGS
from tests.field_cases.siblings import SIBLINGS, Sibling
from tests.golden.one_process import BASE_URL, args

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in map(json.loads, (Path(__file__).parent / "cases.jsonl").read_text().splitlines())
}
RAW = {"http10-stream", "half-closed"}
"""Cases about connections, which tests/e2e/test_raw_requests.py sends to a real server."""

AT_ONCE = 12
"""Requests in flight, fewer than grammars may be queued for compilation: steps of so many rows take less time each."""

ALL_SIBLINGS = [*SIBLINGS, *MORE_SIBLINGS]


@cache
def answers() -> dict[str, httpx.Response]:
    """Send all cases and their siblings to one graph, a few at a time."""

    async def go() -> dict[str, httpx.Response]:
        with pytest.MonkeyPatch.context() as patch:
            graph, free = Graph(args(), patch), asyncio.Semaphore(AT_ONCE)
            await graph.start()
            try:
                transport = httpx.ASGITransport(graph.app)
                async with httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=120) as client:
                    model = (await client.get("/v1/models")).json()["data"][0]["id"]
                    requests = {name: case["request"] for name, case in CASES.items() if name not in RAW}
                    for one in ALL_SIBLINGS:
                        requests[one.name] = {"method": "POST", "path": one.path, "body": {"model": model, **one.body}}

                    async def send(request: dict[str, Any]) -> httpx.Response:
                        async with free:
                            return await client.send(_request(client, request, model))

                    found = await asyncio.gather(*map(send, requests.values()))
                    return dict(zip(requests, found, strict=True))
            finally:
                await graph.close()

    return asyncio.run(go())


def _request(client: httpx.AsyncClient, request: dict[str, Any], model: str) -> httpx.Request:
    body = json.dumps(request["body"]).replace('"$MODEL"', json.dumps(model)).encode() if "body" in request else b""
    if "body_base64" in request:
        body = base64.b64decode(request["body_base64"])
    headers = {"content-type": "application/json", **request.get("headers", {})}
    return client.build_request(request["method"], f"{BASE_URL}{request['path']}", content=body, headers=headers)


@pytest.mark.parametrize("name", [name for name in CASES if name not in RAW])
def test_the_request_of_a_user_is_answered(name: str):
    expected, response = CASES[name]["expected"], answers()[name]
    if response.status_code not in expected["status"]:
        allowed = expected.get("or_status", ())
        assert response.status_code in (allowed if isinstance(allowed, list) else [allowed]), response.text
        assert expected.get("names", "").lower() in response.text.lower()
        return
    assert '"error": {' not in response.text
    if "content" in expected or "above" in expected:
        content = json.loads(_text(response))
        assert content == expected.get("content", content)
        assert content["v"] > expected["above"] if "above" in expected else True
    if "text" in expected:
        assert _text(response) == expected["text"]
    if "arguments" in expected:
        call = response.json()["choices"][0]["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == expected["arguments"]


@pytest.mark.parametrize("sibling", ALL_SIBLINGS, ids=lambda sibling: sibling.name)
def test_a_request_of_the_same_class_is_answered(sibling: Sibling):
    response = answers()[sibling.name]
    assert response.status_code == sibling.status, response.text
    assert '"error": {' not in response.text or sibling.status >= 400
    assert sibling.check(response), response.text


def _text(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)
    return response.json()["choices"][0]["message"]["content"]
