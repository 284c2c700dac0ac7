"""/api/embed and /api/embeddings over HTTP."""

from typing import Any

import pytest

from deployments.http.context import IGNORED_HEADER
from engine.errors import InvalidRequest


def test_texts_have_one_embedding_each(ask, backend):
    response = ask("/api/embed", model="org/demo:latest", input=["Hi", "there"], dimensions=3)
    found = response.json()
    assert found["embeddings"] == [[0, 1, 0], [1, 1, 0]]
    assert (found["model"], found["prompt_eval_count"]) == ("org/demo:latest", 7)
    assert 0 <= found["load_duration"] <= found["total_duration"]
    [wanted] = backend.embeds
    assert (wanted.prompts, wanted.fields, wanted.num_dimensions) == (("Hi", "there"), ("input[0]", "input[1]"), 3)
    assert wanted.request_id.startswith("ollama-")


def test_one_text_is_a_list_of_one(ask, backend):
    assert ask("/api/embed", input="Hi").json()["embeddings"] == [[0, 1, 0]]
    assert backend.embeds[0].fields == ("input",)


def test_older_clients_send_a_prompt(ask, backend):
    assert ask("/api/embeddings").json() == {"embedding": [0, 1, 0]}
    assert (backend.embeds[0].prompts, backend.embeds[0].fields) == (("Hi",), ("prompt",))


def test_what_has_no_effect_on_an_embedding_is_named(ask):
    response = ask("/api/embed", truncate=True, keep_alive="5m", options={"temperature": 0, "num_ctx": 512}, foo=1)
    assert response.headers[IGNORED_HEADER] == "truncate, foo, options.temperature, options.num_ctx"
    assert IGNORED_HEADER not in ask("/api/embed", truncate=False).headers


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/embed", {"input": []}, "input"),
        ("/api/embed", {"input": 7}, "input"),
        ("/api/embed", {"input": ["a", 1]}, "input[1]"),
        ("/api/embed", {"input": ["a"] * 2049}, "input"),
        ("/api/embed", {"dimensions": 0}, "dimensions"),
        ("/api/embed", {"truncate": "yes"}, "truncate"),
        ("/api/embed", {"options": {"top_p": 3}}, "options.top_p"),
        ("/api/embeddings", {"prompt": ["Hi"]}, "prompt"),
    ],
)
def test_a_wrong_field_is_refused_by_name(ask, backend, path: str, fields: dict[str, Any], named: str):
    response = ask(path, **fields)
    assert response.status_code == 400 and f"`{named}`" in response.json()["error"], response.text
    assert backend.embeds == []


def test_an_error_of_the_engine_is_a_sentence(ask, backend):
    backend.start_script = [InvalidRequest("`input` is empty.", "input")]
    response = ask("/api/embed", input="")
    assert (response.status_code, response.json()) == (400, {"error": "`input` is empty."})
    assert ask("/api/embed", model="other").status_code == 404
