import pytest

from deployments.http.classify import classify, find_media, reject_unsupported_media
from deployments.protocol import MEDIA_KINDS, Route
from engine.protocol import InvalidRequest

TEXT = {"type": "text", "text": "a"}


def test_strings_and_lists_of_text_go_to_the_text_planner():
    messages = [
        {"role": "system", "content": "image_url"},
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": None},
    ]
    assert classify(messages) is Route.TEXT
    assert classify([]) is Route.TEXT


@pytest.mark.parametrize("part_type", MEDIA_KINDS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_media_in_any_turn_goes_to_the_media_planner(part_type, role):
    messages = [
        {"role": "user", "content": "a"},
        {"role": role, "content": [TEXT, {"type": part_type}]},
        {"role": "user", "content": "b"},
    ]
    assert classify(messages) is Route.MLLM
    assert list(find_media(messages)) == [(MEDIA_KINDS[part_type], "messages[1].content[1]")]


def test_media_within_a_tool_result_block_goes_to_the_media_planner():
    messages = [{"role": "user", "content": [{"type": "tool_result", "content": [TEXT, {"type": "image"}]}]}]
    assert classify(messages) is Route.MLLM
    assert list(find_media(messages)) == [("image", "messages[0].content[0].content[1]")]


def test_media_kind_supported_by_the_model_is_accepted():
    reject_unsupported_media([{"role": "user", "content": [{"type": "image_url"}]}], frozenset({"image"}))


@pytest.mark.parametrize(("kinds", "accepted"), [(frozenset(), "text."), (frozenset({"image"}), "text, image.")])
def test_media_kind_unsupported_by_the_model_is_refused_by_kind_and_path(kinds, accepted):
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": [TEXT, {"type": "input_audio"}]}]
    with pytest.raises(InvalidRequest) as caught:
        reject_unsupported_media(messages, kinds)
    assert caught.value.field == "messages[1].content[1]"
    assert "audio" in caught.value.message
    assert caught.value.message.endswith(accepted)
