"""ANTHROPIC: Anthropic's Messages and their token counts."""

from deployments.http.anthropic.error_form import ERRORS, limit_headers
from deployments.http.anthropic.messages import PATH, Messages
from deployments.http.anthropic.messages_wire import parse_count_tokens, parse_messages
from deployments.http.dialect import Dialect

ANTHROPIC = Dialect(
    name="anthropic",
    prefixes=(PATH,),
    errors=ERRORS,
    limit_headers=limit_headers,
    bodies={"messages": parse_messages, "count_tokens": parse_count_tokens},
    endpoints=(Messages,),
    apis={PATH: "messages"},
    answer_ids=("msg_",),
    id_headers=("request-id",),
    x_api_key_decides=True,
)
