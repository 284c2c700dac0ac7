import pytest

from deployments.http.classify import classify
from deployments.requests import Route
from engine.processing.message import image_part, text_part

TEXT = text_part("a")


def test_strings_and_lists_of_text_go_to_the_text_planner():
    messages = [
        {"role": "system", "content": "image_url"},
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": None},
    ]
    assert classify(messages) is Route.TEXT
    assert classify([]) is Route.TEXT


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_an_image_in_any_turn_goes_to_the_media_planner(role):
    messages = [
        {"role": "user", "content": "a"},
        {"role": role, "content": [TEXT, image_part("data:")]},
        {"role": "user", "content": "b"},
    ]
    assert classify(messages) is Route.MLLM
