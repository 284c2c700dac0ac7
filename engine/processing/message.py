"""Message: the canonical form of a message, to which every dialect converts its own once, and the media in it."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A canonical message: `role` (system, user, assistant, tool), `content` (str, list of parts, or None), and where the
client sent them `tool_calls`, `tool_call_id`, `name` and `reasoning_content`. A part is made by `text_part`,
`image_part` or `video_part`; there are no others."""

Part = dict[str, Any]


class ImageSource(NamedTuple):
    """Source of an image or video of a request."""

    field: str
    """Path of the client's field, for errors."""
    url: str
    """A data:, http: or https: URL."""
    has_low_detail: bool = False
    """Whether OpenAI's `detail` is low, see ImageGrid.for_detail."""
    is_video: bool = False


def text_part(text: str) -> Part:
    """Return a content part of text."""
    return {"type": "text", "text": text}


def image_part(url: str, has_low_detail: bool = False, field: str | None = None) -> Part:
    """Return a content part with an image.

    Args:
        url: See ImageSource.
        has_low_detail: See ImageSource.
        field: Path of the client's field, for errors; None: the place of the part in the canonical conversation.
    """
    image = {"url": url, "detail": "low"} if has_low_detail else {"url": url}
    part: Part = {"type": "image_url", "image_url": image}
    return part if field is None else {**part, "field": field}


def video_part(url: str) -> Part:
    """Return a content part with a video. url: see ImageSource."""
    return {"type": "video_url", "video_url": {"url": url}}


def image_sources(messages: Iterable[Message]) -> Iterator[ImageSource]:
    """Yield the images and videos of a conversation in order, those in tool results included."""
    for i, message in enumerate(messages):
        content = message["content"]
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image_url":
                field = part.get("field") or f"messages[{i}].content[{j}].image_url.url"
                image = part["image_url"]
                yield ImageSource(field, image["url"], image.get("detail") == "low")
            elif part["type"] == "video_url":
                yield ImageSource(f"messages[{i}].content[{j}].video_url.url", part["video_url"]["url"], is_video=True)
