"""POST /v1/score: the scores of pairs, in vLLM's form."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.deployments.http.conftest import assert_refused


@pytest.fixture
def score(send) -> Callable[..., httpx.Response]:
    def post(path: str = "/v1/score", **fields: Any) -> httpx.Response:
        body = {"model": "org/demo", "text_1": "q", "text_2": ["abc", "a"], **fields}
        return send("POST", path, content=json.dumps(body))

    return post


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_is_scored_with_each_of_several_in_their_order(score, backend, path):
    body = score(path=path, user="u").json()
    assert body.pop("id").startswith("score-") and body.pop("created") > 0
    assert body == {
        "object": "list",
        "model": "org/demo",
        "data": [{"index": 0, "object": "score", "score": 0.3}, {"index": 1, "object": "score", "score": 0.1}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    [request] = backend.scores
    assert request.pairs == (("q", "abc"), ("q", "a"))
    assert (request.query_fields, request.document_fields) == (("text_1",), ("text_2[0]", "text_2[1]"))
    assert (request.client, request.is_search) == ("u", False)


@pytest.mark.parametrize(
    ("text_1", "text_2", "pairs"),
    [
        ("a", "b", (("a", "b"),)),
        (["a"], ["b", "c"], (("a", "b"), ("a", "c"))),
        (["a", "b"], ["c", {"text": "d"}], (("a", "c"), ("b", "d"))),
        ({"text": "a"}, ["b"], (("a", "b"),)),
    ],
)
def test_texts_pair_one_to_one_or_one_to_all(score, backend, text_1, text_2, pairs):
    assert len(score(text_1=text_1, text_2=text_2).json()["data"]) == len(pairs)
    assert backend.scores[0].pairs == pairs


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"text_1": 5}, "text_1", ["5"]),
        ({"text_1": []}, "text_1", ["at least 1"]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", ["2", "3"]),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", ["2", "1"]),
        ({"text_2": ["a"] * 2049}, "text_2", ["2048", "2049"]),
        ({"text_2": ["a", ["b"]]}, "text_2[1]", ["array"]),
        ({"text_2": [{"text": "a", "image_url": {}}]}, "text_2[0].image_url", ["null"]),
        ({"queries": ["a"]}, "queries", ["`text_1`"]),
        ({"documents": ["a"]}, "documents", ["`text_2`"]),
        ({"encoding_format": "base64"}, "encoding_format", ["float"]),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", ["-1"]),
        ({"use_activation": "no"}, "use_activation", ["no"]),
    ],
)
def test_invalid_or_unsupported_field_is_refused_by_name(score, backend, fields, param, named):
    assert_refused(score(**fields), backend, param, named)
    assert backend.scores == []
