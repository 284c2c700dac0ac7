from engine.processing.message import ImageSource, image_part, image_sources, text_part


def test_images_of_all_turns_and_of_tool_results_are_found_in_order():
    messages = [
        {"role": "user", "content": [image_part("a"), text_part("What is it?")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "content": [text_part("seen"), image_part("b", has_low_detail=True)]},
        {"role": "user", "content": [image_part("c", field="messages.4.content.0")]},
        {"role": "assistant", "content": None},
    ]
    assert list(image_sources(messages)) == [
        ImageSource("messages[0].content[0].image_url.url", "a"),
        ImageSource("messages[2].content[1].image_url.url", "b", has_low_detail=True),
        ImageSource("messages.4.content.0", "c"),
    ]
