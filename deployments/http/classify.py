"""Routes a conversation to its planner: to MLLM if it has images or videos anywhere, otherwise to the text planner."""

from collections.abc import Iterable

from deployments.requests import Route
from engine.processing.message import Message, image_sources


def classify(messages: Iterable[Message]) -> Route:
    """Return the route of a conversation. Images and videos count in every turn and in tool results."""
    return Route.TEXT if next(image_sources(messages), None) is None else Route.MLLM
