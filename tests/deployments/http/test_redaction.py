"""The status and cache pages with and without administrative access."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from deployments.http.cache import cache_body
from deployments.http.redaction import administrative_view, public_view
from engine.status import EngineStatus, QueuedRequest
from tests.deployments.http.test_cache import SPELL, STATUSES, answers, ids, miss

HASH = "sha256:" + "ab" * 32
STATUS: dict[str, Any] = {
    "model": "org/demo",
    "ready": True,
    "num_running": 3,
    "spec_prefill": None,
    "ingress": [{"node_id": "secret-node", "replica_id": "secret-replica", "pid": 7, "num_in_flight": 3}],
    "engines": [
        {
            "node_id": "secret-node",
            "engine": asdict(
                EngineStatus(
                    state="ready",
                    model="/home/secret/model",
                    load_progress=1.0,
                    memory={"active_bytes": 5},
                    queue=(QueuedRequest("chatcmpl-secret", 1, 1, 100, 0.5),),
                    capabilities={"media": ["image"], "device": "gpu", "head": "/home/secret/mtp"},
                    error="no file /home/secret",
                )
            ),
        }
    ],
    "config": {
        "engine": {"model": "/home/secret", "prefix_cache": {"pinned": [{"system": "secret prompt"}]}},
        "http": {"api_keys": [HASH], "max_body_bytes": 5},
    },
}


def test_the_public_status_shows_figures_and_the_models_name_alone():
    shown = public_view(STATUS)
    assert "secret" not in json.dumps(shown) and "config" not in shown
    assert (shown["model"], shown["ready"], shown["num_running"], shown["spec_prefill"]) == ("org/demo", True, 3, None)
    assert shown["ingress"] == [{"pid": 7, "num_in_flight": 3}]
    engine = shown["engines"][0]["engine"]
    assert (engine["state"], engine["memory"], engine["max_running"]) == ("ready", {"active_bytes": 5}, 0)
    assert "queue" not in engine and engine["capabilities"]["device"] == "gpu"


def test_the_public_cache_page_shows_figures_alone():
    found = miss("text", prompt_token_ids=ids("blue secret"), stored_token_ids=ids(" red secret"))
    page = cache_body(answers(STATUSES[0], STATUSES[1]), [], SPELL)
    page["engines"][0]["recent_misses"] = [{**asdict(found), "explanation": "'blue secret'"}]
    shown = public_view(page)
    assert shown["totals"] == page["totals"]
    assert shown["engines"][0] == {
        "off": None,
        "totals": page["engines"][0]["totals"],
        "disk": {"num_files": 2},
        "fetch": None,
    }


def test_administrative_status_shows_the_config_without_key_hashes():
    shown = administrative_view(STATUS)
    assert shown["config"]["http"] == {"api_keys": "1 configured", "max_body_bytes": 5}
    assert shown["config"]["engine"] == STATUS["config"]["engine"] and shown["engines"] == STATUS["engines"]
    assert STATUS["config"]["http"]["api_keys"] == [HASH], "the page itself is left as it is"
    assert HASH not in json.dumps(shown)


@pytest.mark.parametrize("path", ["/v1/status", "/v1/cache"])
@pytest.mark.parametrize("is_local", [True, False])
def test_the_pages_show_texts_to_administrators_alone(make_app: Any, backend: Any, path: str, is_local: bool):
    async def page() -> dict[str, Any]:
        return STATUS

    backend.status = backend.cache_status = page

    async def talk() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(), client=("127.0.0.1" if is_local else "10.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    text = asyncio.run(talk()).text
    assert ("secret" in text) == is_local
    assert HASH not in text
