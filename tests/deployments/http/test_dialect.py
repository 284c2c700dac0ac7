"""The table of dialects, and a dialect that is added to it."""

from collections import Counter
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from deployments.http import app as http_app
from deployments.http import request_reader
from deployments.http.answer_response import AnswerResponse
from deployments.http.dialect import Dialect, DialectTable, ErrorForm
from deployments.http.dialects import DIALECTS
from deployments.http.job import PlainBody, PlainJob
from deployments.http.operation import Operation
from deployments.http.parsed_request import ParsedRequest, ReadingRules
from deployments.requests import ChatRequest, Route
from engine.errors import InvalidRequest

TELEGRAM_ERROR = {"type": "object", "required": ["stop"], "properties": {"stop": {"type": "string"}}}


def parse_telegram(raw: dict[str, Any], rules: ReadingRules) -> ParsedRequest:
    if not isinstance(raw.get("text"), str):
        raise InvalidRequest("`text` is required.", "text")
    return ParsedRequest(ChatRequest("", ()), Route.TEXT, False, raw["text"])


class Telegrams:
    """Sends each text back."""

    def __init__(self, context: Any):
        self._context = context

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (Operation("POST", "/telegram/send", self.send, "Send a telegram."),)

    async def send(self, request: Request) -> Response:
        return AnswerResponse(self._context, request.state.request_id, "telegram", "tg-", self._job)

    async def _job(self, parsed: ParsedRequest) -> PlainJob:
        async def work() -> PlainBody:
            return PlainBody({"sent": parsed.echo})

        return PlainJob(work)


TELEGRAM = Dialect(
    name="telegram",
    prefixes=("/telegram",),
    errors=ErrorForm(lambda failure, request_id: {"stop": failure.message}, "TelegramError", TELEGRAM_ERROR),
    bodies={"telegram": parse_telegram},
    endpoints=(Telegrams,),
    apis={"/telegram": "telegram"},
    answer_ids=("tg-",),
    id_headers=("telegram-id",),
)


@pytest.fixture
def telegram_app(make_app: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    table = DialectTable((*DIALECTS, TELEGRAM))
    monkeypatch.setattr(http_app, "DIALECTS", table)
    monkeypatch.setattr(request_reader, "DIALECTS", table)
    return make_app()


def test_a_dialect_in_the_table_is_served_described_and_counted(send, telegram_app, backend):
    sent = send("POST", "/telegram/send", app=telegram_app, json={"text": "Hi"}, headers={"x-request-id": "req-1"})
    assert (sent.status_code, sent.json(), sent.headers["telegram-id"]) == (200, {"sent": "Hi"}, "req-1")
    timeline = backend.timelines.find("req-1")
    assert timeline is not None and timeline.answer_id.startswith("tg-")
    assert backend.figures.responses == {("telegram", 200): 1}
    document = send("GET", "/openapi.json", app=telegram_app).json()
    refused = document["paths"]["/telegram/send"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert refused == {"$ref": "#/components/schemas/TelegramError"}
    assert document["components"]["schemas"]["TelegramError"] == TELEGRAM_ERROR


def test_its_errors_have_its_form_wherever_they_come_from(send, telegram_app):
    said = [
        send("POST", "/telegram/send", app=telegram_app, json={}),
        send("POST", "/telegram/send", app=telegram_app, content=b"{"),
        send("POST", "/telegram/send", app=telegram_app, content=b"{}", headers={"Content-Type": "text/plain"}),
        send("GET", "/telegram/send", app=telegram_app),
        send("GET", "/telegram/other", app=telegram_app),
        send("POST", "/telegram/send", app=telegram_app, content=b"{}", headers={"Host": "evil.example"}),
    ]
    assert [response.status_code for response in said] == [400, 400, 415, 405, 404, 403]
    assert all(response.json().keys() == {"stop"} for response in said)
    exposed = send("GET", "/v1/models", app=telegram_app, headers={"Origin": "http://127.0.0.1"}).headers
    assert "telegram-id" in exposed["access-control-expose-headers"].split(", ")


def test_other_dialects_stay_as_they_are(send, telegram_app):
    assert send("GET", "/v1/models/none", app=telegram_app).json()["error"]["code"] == "model_not_found"
    assert "telegram-id" not in send("GET", "/v1/models", app=telegram_app).headers


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "openai"),
        ("/tokenize", "openai"),
        ("/v1/responses/resp_1/cancel", "responses"),
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/api", "ollama"),
        ("/api/v1/chat/completions", "openai"),
        ("/api/tags", "ollama"),
        ("/apis", "openai"),
        ("/health", "openai"),
        ("/", "openai"),
        ("", "openai"),
    ],
)
def test_a_path_has_the_dialect_of_its_longest_prefix(path: str, name: str):
    assert DIALECTS.of(path).name == name


def test_nothing_has_the_same_name_twice():
    for names in (
        [dialect.name for dialect in DIALECTS],
        [kind for dialect in DIALECTS for kind in dialect.bodies],
        [prefix for dialect in DIALECTS for prefix in dialect.answer_ids],
        [prefix for dialect in DIALECTS for prefix in dialect.prefixes],
        [path for dialect in DIALECTS for path in dialect.apis],
    ):
        assert max(Counter(names).values()) == 1
