"""Refusals before the start: the SDKs wait as long as Retry-After says, and are answered in the end."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import OrchardError, Overloaded, QueueTimeout, Unavailable
from tests.e2e.clients.questions import CAPITAL, CAPITAL_QUESTION, MODEL

SDKS = ("openai", "anthropic")

QUESTION: Any = [{"role": "user", "content": CAPITAL_QUESTION}]
BUSY, LOST = Overloaded("The queue is full.", 36.2), Unavailable("A replica is lost.", 5.0)
EXPIRED = QueueTimeout("The request waited for too long.", 70.0)

Waits = list[float]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Seconds that the SDKs would sleep between their attempts; here they do not sleep."""
    waits: Waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


def ask_openai(base_url: str, max_retries: int = 5) -> tuple[str, int]:
    """Return the answer and the number of retries."""
    import openai

    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=max_retries) as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION)
    return raw.parse().choices[0].message.content or "", raw.retries_taken


def ask_responses(base_url: str) -> tuple[str, int]:
    import openai

    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=5) as client:
        raw = client.responses.with_raw_response.create(model=MODEL, input=CAPITAL_QUESTION)
    return raw.parse().output_text, raw.retries_taken


def ask_anthropic(base_url: str, max_retries: int = 5) -> tuple[str, int]:
    import anthropic

    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=max_retries) as client:
        raw = client.messages.with_raw_response.create(model=MODEL, max_tokens=50, messages=QUESTION)
    return getattr(raw.parse().content[0], "text", ""), raw.retries_taken


@pytest.mark.parametrize("ask", [ask_openai, ask_responses, ask_anthropic], ids=["chat", "responses", "messages"])
def test_a_retry_waits_as_long_as_the_server_says(
    base_url: str, backend, waits: Waits, ask: Callable[[str], tuple[str, int]]
):
    backend.refusals += [BUSY, LOST, EXPIRED]
    assert ask(base_url) == (CAPITAL, 3)
    assert waits == [37, 5, 60]


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(BUSY, 429, "overloaded"), (LOST, 503, "unavailable"), (EXPIRED, 503, "queue_timeout")],
    ids=["busy", "lost", "expired"],
)
def test_openai_without_retries_raises_the_refusal(
    base_url: str, backend, refusal: OrchardError, status: int, code: str
):
    import openai

    backend.refusals.append(refusal)
    with pytest.raises(openai.RateLimitError if status == 429 else openai.InternalServerError) as caught:
        ask_openai(base_url, max_retries=0)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert refusal.message in caught.value.message


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [(BUSY, 429, "rate_limit_error"), (LOST, 503, "overloaded_error")],
    ids=["busy", "lost"],
)
def test_anthropic_without_retries_raises_the_refusal(
    base_url: str, backend, refusal: OrchardError, status: int, kind: str
):
    import anthropic

    backend.refusals.append(refusal)
    with pytest.raises(anthropic.RateLimitError if status == 429 else anthropic.InternalServerError) as caught:
        ask_anthropic(base_url, max_retries=0)
    body: Any = caught.value.body
    assert (caught.value.status_code, body["error"]["type"]) == (status, kind)
    assert body["error"]["message"] == refusal.message
