"""The ollama SDK on chat, generate, embed and the pages about the model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from deployments.requests import Route
from engine.errors import EngineFailed, Overloaded
from engine.processing.message import image_sources
from tests.deployments.http.clients.scripted import RAW_TEXT
from tests.e2e.clients.questions import (
    CAPITAL,
    CAPITAL_QUESTION,
    CAPITAL_THOUGHT,
    EMMA,
    MODEL,
    PERSON_QUESTION,
    SHAPE,
    SHAPE_QUESTION,
    TOOL_NAME,
    TWO_CITIES,
    TWO_CITIES_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    Person,
)
from tests.support.sdks.ollama_chat import TOOLS, calls_of, chat, results, user

if TYPE_CHECKING:
    import ollama

SDKS = ("ollama",)

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def client(base_url: str) -> "Iterator[ollama.Client]":
    import ollama

    with ollama.Client(host=base_url, timeout=60) as client:
        yield client


@STREAMED
def test_a_question_is_answered_with_figures(client, streamed: bool):
    answer = chat(client, [user(CAPITAL_QUESTION)], streamed, think=False)
    assert (answer.message.content, answer.message.thinking, answer.done_reason) == (CAPITAL, None, "stop")
    assert (answer.model, answer.prompt_eval_count) == (MODEL, 7) and answer.eval_count > 1
    assert 0 < answer.eval_duration <= answer.total_duration


@STREAMED
@pytest.mark.parametrize("think", [None, True, "low"])
def test_a_thought_has_its_own_field(client, streamed: bool, think: Any):
    message = chat(client, [user(CAPITAL_QUESTION)], streamed, think=think).message
    assert (message.thinking, message.content) == (CAPITAL_THOUGHT, CAPITAL)


@STREAMED
def test_a_tool_call_and_its_result_lead_to_an_answer(client, backend, streamed: bool):
    conversation: list[Any] = [user(WEATHER_QUESTION)]
    message = chat(client, conversation, streamed, tools=TOOLS).message
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})] and not message.content
    conversation += [message, *results(message)]
    answer = chat(client, conversation, streamed, tools=TOOLS)
    assert (answer.message.content, answer.done_reason) == (WEATHER, "stop")
    assert backend.asked[1].messages[-1]["content"] == WEATHER_RESULT
    [tool] = backend.asked[1].tools
    assert (tool.name, tool.parameters["required"]) == (TOOL_NAME, ["city"])


@STREAMED
def test_two_calls_find_their_results(client, streamed: bool):
    conversation: list[Any] = [user(TWO_CITIES_QUESTION)]
    message = chat(client, conversation, streamed, tools=TOOLS).message
    assert calls_of(message) == [(TOOL_NAME, {"city": city}) for city in TWO_CITIES]
    answer = chat(client, [*conversation, message, *results(message)], streamed, tools=TOOLS)
    assert all(city in answer.message.content for city in TWO_CITIES)


def test_a_python_function_is_a_tool(client):
    def get_weather(city: str) -> str:
        """Get the weather for a city.

        Args:
            city: Its name.
        """
        return WEATHER_RESULT

    message = chat(client, [user(WEATHER_QUESTION)], tools=[get_weather]).message
    assert calls_of(message) == [(TOOL_NAME, {"city": "Paris"})]


def test_an_image_is_sent_as_bytes(client, backend, red_circle_png: bytes):
    answer = chat(client, [user(SHAPE_QUESTION, images=[red_circle_png])])
    assert answer.message.content == SHAPE
    [(request, route)] = backend.requests
    assert route is Route.MLLM and len(list(image_sources(request.messages))) == 1
    assert client.generate(MODEL, SHAPE_QUESTION, images=[red_circle_png]).response == SHAPE


def test_a_schema_is_enforced(client, backend):
    answer = chat(client, [user(PERSON_QUESTION)], format=Person.model_json_schema(), think=False)
    assert Person.model_validate_json(answer.message.content) == EMMA
    assert backend.asked[0].grammar.kind == "json_schema"
    chat(client, [user(PERSON_QUESTION)], format="json", think=False)
    assert backend.asked[1].grammar.kind == "json_object"


def test_options_reach_the_engine(client, backend):
    import ollama

    options = ollama.Options(num_predict=3, seed=7, stop=["Paris"], top_k=5, num_ctx=4096, num_gpu=1)
    answer = chat(client, [user(CAPITAL_QUESTION)], options=options, think=False)
    assert (answer.done_reason, answer.eval_count) == ("length", 3)
    [request] = backend.asked
    assert (request.max_tokens, request.seed, request.stop, request.top_k) == (3, 7, ("Paris",), 5)


@STREAMED
def test_a_prompt_is_continued(client, backend, streamed: bool):
    fields: dict[str, Any] = {"model": MODEL, "prompt": CAPITAL_QUESTION, "system": "Be brief.", "think": False}
    found = client.generate(**fields, stream=True) if streamed else [client.generate(**fields)]
    assert "".join(part.response for part in found) == CAPITAL
    assert backend.asked[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert client.generate(MODEL, "Once upon a time", raw=True).response == RAW_TEXT
    assert backend.asked[1].raw_prompt == "Once upon a time"


def test_texts_are_embedded(client):
    assert client.embed(MODEL, ["a", "b"]).embeddings == [[0, 1, 0], [1, 1, 0]]
    assert client.embed(MODEL, "a", dimensions=3).embeddings == [[0, 1, 0]]
    assert client.embeddings(MODEL, "a").embedding == [0, 1, 0]


def test_pages_about_the_model(client):
    [model] = client.list().models
    assert model.model == f"{MODEL}:latest"
    [running] = client.ps().models
    assert running.model == model.model and running.context_length == 4096
    shown = client.show(model.model)
    assert "completion" in shown.capabilities and shown.modelinfo["unknown.context_length"] == 4096
    assert chat(client, [user("Hi")], model=model.model).model == model.model


def test_an_empty_prompt_loads_the_model(client, backend):
    assert client.generate(MODEL, keep_alive="10m").done_reason == "load"
    assert client.chat(MODEL, keep_alive=0).done_reason == "load"
    assert backend.asked == []


def test_errors_have_status_and_sentence(client, backend):
    import ollama

    def refused(ask: Any) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as caught:
            ask()
        return caught.value.status_code, caught.value.error

    assert refused(lambda: client.chat("llama3.2", [user("Hi")]))[0] == 404
    assert "not found" in refused(lambda: list(client.chat("llama3.2", [user("Hi")], stream=True)))[1]
    assert "options.top_p" in refused(lambda: chat(client, [user("Hi")], options={"top_p": 3}))[1]
    for write in (
        lambda: client.pull("llama3.2"),
        lambda: list(client.pull("llama3.2", stream=True)),
        lambda: client.push("a/b"),
        lambda: client.create("mine", from_="llama3.2"),
        lambda: client.copy("a", "b"),
        lambda: client.delete("a"),
        lambda: client.create_blob(__file__),
    ):
        status, sentence = refused(write)
        assert status == 403 and "orchard pull" in sentence
    backend.refusals.append(Overloaded("256 requests are waiting.", 1.2))
    assert refused(lambda: chat(client, [user("Hi")])) == (429, "256 requests are waiting.")


def test_a_stream_that_fails_raises_its_error(client, backend):
    import ollama

    backend.failure = EngineFailed("0x7f42")
    said = []
    with pytest.raises(ollama.ResponseError, match="The engine failed"):
        for part in client.chat(MODEL, [user(CAPITAL_QUESTION)], stream=True, think=False):
            said.append(part.message.content)
    assert CAPITAL.startswith("".join(said)) and said
