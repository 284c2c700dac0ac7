"""sketched: adds the sketch of its prompt to a request, by which the placement knows its conversation."""

from dataclasses import replace

from deployments.placement.conversation_keys import sketch_conversation, sketch_raw
from deployments.requests import ChatRequest


def sketched(request: ChatRequest) -> ChatRequest:
    """Return the request with the sketch of its prompt."""
    if request.raw_prompt is not None:
        return replace(request, sketch=sketch_raw(request.raw_prompt))
    tools = [tool.definition for tool in request.tools if not tool.is_deferred]
    return replace(request, sketch=sketch_conversation(request.messages, tools))
