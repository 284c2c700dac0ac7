"""LangChain's chat models of all three APIs ("faces"): chat completions, responses and messages."""

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any

from tests.e2e.clients import questions
from tests.e2e.clients.questions import MODEL

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.tools import BaseTool


def chat_model(base_url: str, face: str, **options: Any) -> "BaseChatModel":
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    common: dict[str, Any] = {"model": MODEL, "api_key": "none", "max_retries": 0, **options}
    if face == "messages":
        return ChatAnthropic(base_url=base_url, **common)
    options = {"use_responses_api": True} if face == "responses" else {"stream_usage": True}
    return ChatOpenAI(base_url=f"{base_url}/v1", **{**common, **options})


def weather_tool() -> "BaseTool":
    from langchain_core.tools import tool

    return tool(questions.get_weather)


def invoke(model: Any, messages: "list[BaseMessage]", streamed: bool) -> "AIMessage":
    """Return the message, whichever way it came."""
    if not streamed:
        return model.invoke(messages)
    return reduce(operator.add, model.stream(messages))
