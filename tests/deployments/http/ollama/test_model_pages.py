"""Tags, ps, show, version, and the refusal of whatever would write models."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from deployments.http.app import create_app
from deployments.http.config import HttpConfig
from deployments.http.context import IGNORED_HEADER
from deployments.http.model_facts import ModelFacts
from deployments.http.ollama.model_names import listed_name
from deployments.http.ollama.model_pages import WRITES
from deployments.http.parsed_request import ModelDefaults

FACTS = ModelFacts("qwen3", False, True, True, "Q4", 1000, 64 * "a", {"embedding_length": 64, "block_count": 2})


@pytest.fixture
def app(backend: Any) -> Any:
    model = ModelDefaults(frozenset(), 0.7, 0.8, FACTS)
    return create_app(backend, HttpConfig(served_model_names=("gpt-5",)), frozenset({"image"}), model=model)


def test_the_model_is_listed_under_all_its_names(send, app):
    models = send("GET", "/api/tags", app=app).json()["models"]
    assert [model["name"] for model in models] == ["org/demo:latest", "gpt-5:latest"]
    for model in models:
        assert model["name"] == model["model"] and (model["size"], model["digest"]) == (1000, 64 * "a")
        assert model["capabilities"] == ["completion", "tools", "vision", "thinking"]
        assert (model["details"]["family"], model["details"]["quantization_level"]) == ("qwen3", "Q4")
        assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None


def test_every_listed_name_is_accepted(send, app, ask):
    for model in send("GET", "/api/tags", app=app).json()["models"]:
        assert ask("/api/chat", app=app, model=model["name"], stream=False).json()["model"] == model["name"]
        assert ask("/api/show", app=app, model=model["name"]).status_code == 200
        body = {"model": model["name"], "messages": [{"role": "user", "content": "Hi"}]}
        assert send("POST", "/v1/chat/completions", app=app, json=body).status_code == 200
        assert send("GET", f"/v1/models/{model['name']}", app=app).status_code == 200


@pytest.mark.parametrize(
    ("name", "listed"), [("a", "a:latest"), ("a:7b", "a:7b"), ("hf.co:80/a", "hf.co:80/a:latest"), ("a/b:c", "a/b:c")]
)
def test_a_listed_name_has_a_tag(name: str, listed: str):
    assert listed_name(name) == listed


def test_a_model_that_is_ready_is_loaded(send, app, backend):
    [model, _] = send("GET", "/api/ps", app=app).json()["models"]
    assert (model["name"], model["context_length"], model["size_vram"]) == ("org/demo:latest", 4096, 1000)
    assert datetime.fromisoformat(model["expires_at"]).year == 9999
    backend.unready = "The model is being loaded."
    assert send("GET", "/api/ps", app=app).json() == {"models": []}


def test_show_describes_the_model(ask, app):
    response = ask("/api/show", app=app, verbose=True, foo=1)
    found = response.json()
    assert response.headers[IGNORED_HEADER] == "foo"
    assert found["capabilities"] == ["completion", "tools", "vision", "thinking"]
    assert found["model_info"] == {
        "general.architecture": "qwen3",
        "general.basename": "org/demo",
        "qwen3.context_length": 4096,
        "qwen3.embedding_length": 64,
        "qwen3.block_count": 2,
    }
    assert found["parameters"] == "temperature 0.7\ntop_p 0.8"


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (0, ""),
        (999, "999"),
        (12_345, "12K"),
        (134_515_008, "134.52M"),
        (10_000_000, "10M"),
        (8_190_735_360, "8.2B"),
        (7 * 10**9, "7B"),
    ],
)
def test_a_number_of_parameters_is_written_as_ollama_does(backend, send, ask, number: int, written: str):
    model = ModelDefaults(frozenset(), 0.7, 0.8, replace(FACTS, num_parameters=number))
    app = create_app(backend, HttpConfig(), frozenset(), model=model)
    [listed] = send("GET", "/api/tags", app=app).json()["models"]
    shown = ask("/api/show", app=app).json()
    assert listed["details"]["parameter_size"] == shown["details"]["parameter_size"] == written
    assert shown["model_info"].get("general.parameter_count", 0) == number


def test_older_clients_show_a_name(send, app):
    assert send("POST", "/api/show", app=app, json={"name": "org/demo"}).status_code == 200
    assert "`model` is required" in send("POST", "/api/show", app=app, json={}).json()["error"]
    assert "not found" in send("POST", "/api/show", app=app, json={"model": "other"}).json()["error"]
    assert "`model`" in send("POST", "/api/show", app=app, json={"model": 7}).json()["error"]


@pytest.mark.parametrize(
    ("facts", "media", "capabilities"),
    [
        (replace(FACTS, is_embedding_model=True), frozenset({"image"}), ["embedding"]),
        (replace(FACTS, is_reranker=True), frozenset(), []),
        (replace(FACTS, has_tools=False, has_thinking=False), frozenset(), ["completion"]),
        (replace(FACTS, has_thinking=False), frozenset({"image", "video"}), ["completion", "tools", "vision"]),
    ],
)
def test_capabilities_are_those_of_the_model(ask, backend, facts: ModelFacts, media: Any, capabilities: list[str]):
    app = create_app(backend, HttpConfig(), media, model=ModelDefaults(facts=facts))
    assert ask("/api/show", app=app).json()["capabilities"] == capabilities


def test_the_version_is_one_that_clients_accept(send):
    version = send("GET", "/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 20, 0]


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_no_model_is_written_over_http(send, backend, method: str, path: str):
    path = path.replace("{digest}", "sha256:" + 64 * "0")
    refused = send(method, path, content=b'{"model": "llama3.2"}')
    assert refused.status_code == 403 and refused.json().keys() == {"error"}
    assert f"{method} {path}" in refused.json()["error"] and "orchard pull" in refused.json()["error"]
    assert backend.figures.responses == {("ollama_pages", 403): 1}


def test_pages_need_a_key_where_the_server_has_keys(send, make_app):
    app = make_app(api_keys=["sha256:" + "0" * 64])
    for method, path in (
        ("GET", "/api/tags"),
        ("GET", "/api/version"),
        ("POST", "/api/show"),
        ("DELETE", "/api/delete"),
    ):
        assert send(method, path, app=app).status_code == 401
