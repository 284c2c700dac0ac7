"""DIALECTS: the dialects of the HTTP API. A new one is a folder and a line here."""

import re

from deployments.http.answer_id import id_pattern
from deployments.http.anthropic.dialect import ANTHROPIC
from deployments.http.dialect import DialectTable
from deployments.http.ollama.dialect import OLLAMA
from deployments.http.openai.dialect import OPENAI
from deployments.http.responses.dialect import RESPONSES

DIALECTS = DialectTable((OPENAI, RESPONSES, ANTHROPIC, OLLAMA))

_ID = re.compile(id_pattern(DIALECTS.answer_ids))


def tag_in(answer_id: str) -> str | None:
    """Return the tag in an id; None for an id that this server does not make, such as a client's X-Request-Id."""
    made = _ID.fullmatch(answer_id)
    return None if made is None else made[1]
