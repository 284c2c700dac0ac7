"""POST /tokenize and /detokenize, and the names of the model."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deployments.requests import Route

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def post(send) -> Callable[..., httpx.Response]:
    def post_one(path: str, app: Any = None, **fields: Any) -> httpx.Response:
        return send("POST", path, app=app, content=json.dumps(fields))

    return post_one


@pytest.mark.parametrize("root", ["", "/v1"])
def test_text_is_tokenized_and_detokenized(post, root):
    tokens = {"count": 2, "max_model_len": 4096, "tokens": [72, 105], "token_strs": None}
    assert post(f"{root}/tokenize", model="org/demo", prompt="Hi").json() == tokens
    assert post(f"{root}/detokenize", model="org/demo", tokens=[72, 105]).json() == {"prompt": "Hi"}
    assert post(f"{root}/tokenize", prompt="Hi").json()["count"] == 2, "the model may be left out"
    assert post(f"{root}/detokenize", tokens=[]).json() == {"prompt": ""}


def test_token_strings_are_returned_on_request(post):
    assert post("/tokenize", prompt="Hi", return_token_strs=True).json()["token_strs"] == ["H", "i"]


def test_a_conversation_is_tokenized_as_a_chat_completion_would_be(post, backend):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [USER], "tools": [tool], "add_generation_prompt": True, "chat_template_kwargs": {}}
    assert post("/tokenize", **body, return_token_strs=False).json()["count"] == 2
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert post("/tokenize", messages=[{"role": "user", "content": [picture]}]).status_code == 200
    (chat, route), (_, with_picture) = backend.requests
    assert [tool.name for tool in chat.tools] == ["f"]
    assert (route, with_picture) == (Route.TEXT, Route.MLLM)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0x110000]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_invalid_or_unsupported_field_is_refused_by_name(post, path, fields, param):
    refused = post(path, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_unknown_model_is_not_found_and_an_alias_is_accepted(post, make_app):
    assert post("/tokenize", model="other", prompt="a").status_code == 404
    assert post("/detokenize", model="other", tokens=[1]).status_code == 404
    assert post("/tokenize", app=make_app(served_model_names=["other"]), model="other", prompt="a").status_code == 200


def test_the_model_is_listed_by_all_its_names(send, make_app):
    app = make_app(served_model_names=["gpt-5", "claude-x"])
    listed = send("GET", "/v1/models", app=app).json()
    assert [card["id"] for card in listed["data"]] == ["org/demo", "claude-x", "gpt-5"]
    assert {card["root"] for card in listed["data"]} == {"org/demo"}
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == ("org/demo", "gpt-5")
    card = send("GET", "/v1/models/gpt-5", app=app).json()
    assert card == listed["data"][2]
    assert (card["object"], card["type"], card["display_name"], card["max_model_len"]) == (
        *("model", "model", "gpt-5"),
        4096,
    )
    assert card["created_at"].endswith("Z") and card["created_at"].startswith("20")
    assert send("GET", "/v1/models/org/demo", app=app).json()["id"] == "org/demo"
    assert send("GET", "/v1/models/other", app=app).status_code == 404
