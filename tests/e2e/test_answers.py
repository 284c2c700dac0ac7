"""Answers of a server that was started as the README says."""

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.pictures import about, image_part, shape

pytestmark = pytest.mark.server


def ask(client: openai.OpenAI, messages: Any, **options) -> str:
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, **options)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def question(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_a_sum_is_right(client: openai.OpenAI):
    assert "42" in ask(client, question("What is 12 + 30?"))


def test_a_stream_is_the_same_answer_in_pieces_with_usage(client: openai.OpenAI):
    whole = client.chat.completions.create(model="demo", messages=question("Tell me a story."), temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=question("Tell me a story."),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 20
    assert whole.usage is not None and whole.usage.completion_tokens > 20
    assert chunks[-1].usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):  # how many were drafted may differ
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)


def test_earlier_turns_are_remembered(client: openai.OpenAI):
    turns = [
        {"role": "user", "content": "My favorite color is blue."},
        {"role": "assistant", "content": "Blue is a nice color."},
        {"role": "user", "content": "What is my favorite color?"},
    ]
    assert "blue" in ask(client, turns)


def test_stop_string_ends_the_answer_and_is_left_out_of_the_text(client: openai.OpenAI):
    answer = ask(client, question("Count from 1 to 9."), stop=[" 5"])
    assert answer == "1, 2, 3, 4,"


def test_max_tokens_ends_the_answer_with_length(client: openai.OpenAI):
    answer = client.chat.completions.create(model="demo", messages=question("Tell me a story."), max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 5


@pytest.mark.parametrize("encoding", ["png", "jpeg", "webp"])
def test_image_is_recognised_in_every_encoding(client: openai.OpenAI, encoding: str):
    part = image_part(shape("red", "circle"), encoding)
    answer = ask(client, about("What is in the image?", part))
    assert "red circle" in answer


def test_answer_changes_with_the_image(client: openai.OpenAI):
    answers = [
        ask(client, about("What is in the image?", image_part(shape(color, kind))))
        for color, kind in (("blue", "square"), ("green", "circle"), ("blue", "square"))
    ]
    assert "blue square" in answers[0]
    assert "green circle" in answers[1]
    assert answers[0] == answers[2]


def test_two_images_are_described_in_their_order(client: openai.OpenAI):
    circle, square = image_part(shape("red", "circle")), image_part(shape("blue", "square"))
    answer = ask(client, about("What is in each image?", circle, square))
    assert answer.index("red circle") < answer.index("blue square")
    answer = ask(client, about("What is in each image?", square, circle))
    assert answer.index("blue square") < answer.index("red circle")


def test_max_tokens_beyond_the_context_is_a_ceiling(client: openai.OpenAI):
    answer = client.chat.completions.create(model="demo", messages=question("What is 12 + 30?"), max_tokens=40000)
    assert answer.choices[0].message.content == "12 + 30 = 42"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match=r"length is 32768 tokens.*and 1 for the answer") as refused:
        client.chat.completions.create(model="demo", messages=question("apple " * 40_000))
    assert refused.value.code == "context_length_exceeded"


def test_broken_image_is_refused_by_its_path(client: openai.OpenAI):
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="could not be decoded") as refused:
        ask(client, about("What is it?", broken))
    assert refused.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("kind", ["video", "audio", "file"])
def test_unsupported_media_are_refused_by_their_kind(http: httpx.Client, kind: str):
    part = {"type": "file", "file": {}} if kind == "file" else {"type": f"{kind}_url", f"{kind}_url": {"url": "x"}}
    answer = http.post("/v1/chat/completions", json={"model": "demo", "messages": about("What is it?", part)})
    assert answer.status_code == 400
    assert kind in answer.json()["error"]["message"]
