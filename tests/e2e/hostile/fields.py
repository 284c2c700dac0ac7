"""Rows: every field of a chat completion with the wrong type, beyond its range, or against another field."""

from typing import Any

from tests.e2e.hostile.rows import DROP, OK, Refused, Row, Status, bad, chat

MANY = 10**9
JSON_OBJECT = {"response_format": {"type": "json_object"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def _schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **fields}}}


def _named(fields: dict[str, Any]) -> str:
    text = ", ".join(f"{name} {value!r}" for name, value in fields.items() if value is not DROP)
    text = text or f"no {', '.join(fields)}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


Case = tuple[dict[str, Any], str, tuple[str, ...]]
"""Fields, the path that the error names, and what its message says."""

TYPES: tuple[Case, ...] = (
    ({"model": DROP}, "model", ("required",)),
    ({"model": None}, "model", ("string",)),
    ({"model": 5}, "model", ("5",)),
    ({"model": ["demo"]}, "model", ("array",)),
    ({"messages": DROP}, "messages", ("required",)),
    ({"messages": None}, "messages", ("array",)),
    ({"messages": "Hello!"}, "messages", ("array",)),
    ({"messages": {"role": "user", "content": "x"}}, "messages", ("array",)),
    ({"stream": "true"}, "stream", ("true",)),
    ({"stream": 1}, "stream", ("1",)),
    ({"stream": True, "stream_options": True}, "stream_options", ("object",)),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", ("yes",)),
    ({"stream": True, "stream_options": {"chunk_size": 1}}, "stream_options.chunk_size", ("not supported",)),
    ({"n": "1"}, "n", ("integer",)),
    ({"n": 1.5}, "n", ("1.5",)),
    ({"n": True}, "n", ("integer",)),
    ({"temperature": "hot"}, "temperature", ("hot", "number")),
    ({"temperature": [0.5]}, "temperature", ("array",)),
    ({"top_p": "0.5"}, "top_p", ("number",)),
    ({"top_k": 1.5}, "top_k", ("1.5",)),
    ({"min_p": {}}, "min_p", ("object",)),
    ({"seed": "1"}, "seed", ("integer",)),
    ({"presence_penalty": "a"}, "presence_penalty", ("number",)),
    ({"frequency_penalty": []}, "frequency_penalty", ("number",)),
    ({"repetition_penalty": "a"}, "repetition_penalty", ("number",)),
    ({"logit_bias": [1]}, "logit_bias", ("object",)),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", ("number",)),
    ({"logprobs": 5}, "logprobs", ("5",)),
    ({"logprobs": True, "top_logprobs": "5"}, "top_logprobs", ("integer",)),
    ({"stop": 5}, "stop", ("5",)),
    ({"stop": [5]}, "stop[0]", ("string",)),
    ({"stop": {"a": "b"}}, "stop", ("object",)),
    ({"stop_token_ids": 5}, "stop_token_ids", ("array",)),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]", ("integer",)),
    ({"min_tokens": "1"}, "min_tokens", ("integer",)),
    ({"max_tokens": "10"}, "max_tokens", ("integer",)),
    ({"max_tokens": 10.5}, "max_tokens", ("10.5",)),
    ({"max_completion_tokens": []}, "max_completion_tokens", ("integer",)),
    ({"response_format": "json"}, "response_format", ()),
    ({"response_format": {}}, "response_format.type", ("required",)),
    ({"response_format": {"type": 5}}, "response_format.type", ("5",)),
    ({"response_format": {"type": "xml"}}, "response_format.type", ("xml", "json_schema")),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ("required",)),
    (_schema(schema=[]), "response_format.json_schema.schema", ("object",)),
    (_schema(name=5), "response_format.json_schema.name", ("5",)),
    (_schema(strict="yes"), "response_format.json_schema.strict", ("yes",)),
    ({"structured_outputs": "a+"}, "structured_outputs", ("object",)),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", ("string",)),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "structured_outputs.grammar", ("not supported",)),
    ({"priority": "high"}, "priority", ("integer",)),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", ("object",)),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking", ("1",)),
    ({"chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs.tools", ("not supported",)),
    ({"cache_salt": 5}, "cache_salt", ("string",)),
    ({"specprefill": "yes"}, "specprefill", ("yes",)),
    ({"specprefill_keep_pct": "0.5"}, "specprefill_keep_pct", ("number",)),
    ({"user": {"id": 1}}, "user", ("string",)),
)

RANGES: tuple[Case, ...] = (
    ({"messages": []}, "messages", ("0",)),
    ({"n": 0}, "n", ("0", "1")),
    ({"n": -1}, "n", ("-1", "1")),
    ({"n": 33}, "n", ("33", "32")),
    ({"n": 129}, "n", ("129", "128")),
    ({"n": MANY}, "n", (str(MANY), "128")),
    ({"temperature": -0.1}, "temperature", ("-0.1", "0")),
    ({"temperature": 2.1}, "temperature", ("2.1", "2")),
    ({"temperature": 1e308}, "temperature", ("1e+308", "2")),
    ({"top_p": -0.01}, "top_p", ("-0.01", "0")),
    ({"top_p": 1.01}, "top_p", ("1.01", "1")),
    ({"top_k": -2}, "top_k", ("-2", "-1")),
    ({"top_k": 2**31}, "top_k", (str(2**31), str(2**31 - 1))),
    ({"min_p": -0.01}, "min_p", ("-0.01", "0")),
    ({"min_p": 1.01}, "min_p", ("1.01", "1")),
    ({"seed": 2**63}, "seed", (str(2**63), str(2**63 - 1))),
    ({"seed": -(2**63) - 1}, "seed", (str(-(2**63) - 1),)),
    ({"seed": 10**4000}, "seed", ("1000",)),
    ({"presence_penalty": 2.01}, "presence_penalty", ("2.01", "2")),
    ({"frequency_penalty": -2.01}, "frequency_penalty", ("-2.01", "-2")),
    ({"repetition_penalty": 0}, "repetition_penalty", ("0", "0.01")),
    ({"repetition_penalty": 101}, "repetition_penalty", ("101", "100")),
    ({"logit_bias": {"1": 100.5}}, "logit_bias.1", ("100.5", "100")),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ("1024",)),
    ({"logit_bias": {"4096": 1}}, "logit_bias", ("4096", "4095")),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ("-1",)),
    ({"logit_bias": {"007": 1}}, "logit_bias", ("007",)),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ("999", "ten digits")),
    ({"logit_bias": {"٣": 1}}, "logit_bias", ("٣",)),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("21", "20")),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", ("-1", "0")),
    ({"stop": [""]}, "stop[0]", ()),
    ({"stop": ["a"] * 17}, "stop", ("16",)),
    ({"stop": ["a"] * 100_000}, "stop", ("16",)),
    ({"stop": "s" * 257}, "stop", ("256",)),
    ({"stop": "s" * 2**20}, "stop", ("256",)),
    ({"stop_token_ids": [4096]}, "stop_token_ids[0]", ("4096", "4095")),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ("-1", "0")),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]", (str(2**31),)),
    ({"stop_token_ids": [5] * 65}, "stop_token_ids", ("64",)),
    ({"min_tokens": -1}, "min_tokens", ("-1", "0")),
    ({"min_tokens": 5}, "min_tokens", ("5", "4")),
    ({"max_tokens": 0}, "max_tokens", ("0", "1")),
    ({"max_tokens": -2}, "max_tokens", ("-2",)),
    ({"max_tokens": 2**31}, "max_tokens", (str(2**31), str(2**31 - 1))),
    ({"max_completion_tokens": 0, "max_tokens": DROP}, "max_completion_tokens", ("0", "1")),
    (_schema(name="n" * 513), "response_format.json_schema.name", ("512",)),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ()),
    ({"priority": 1}, "priority", ("1", "fifo")),
    ({"priority": 2**31}, "priority", (str(2**31),)),
    ({"cache_salt": ""}, "cache_salt", ()),
    ({"cache_salt": "s" * 129}, "cache_salt", ("128",)),
    ({"cache_salt": "a\nb"}, "cache_salt", ("printable",)),
    ({"specprefill_keep_pct": 0.05}, "specprefill_keep_pct", ("0.05", "0.1")),
    ({"specprefill_keep_pct": 1.5}, "specprefill_keep_pct", ("1.5", "1")),
    ({"user": "u" * 1025}, "user", ("1024",)),
    ({"user": "u" * 2**20}, "user", ("1024",)),
)

CONTRADICTIONS: tuple[Case, ...] = (
    ({"stream_options": {"include_usage": True}}, "stream_options", ("stream",)),
    ({"stream": False, "stream_options": {}}, "stream_options", ("stream",)),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", ("3", "4")),
    ({"top_logprobs": 3}, "top_logprobs", ("3", "logprobs")),
    ({"specprefill": False, "specprefill_keep_pct": 0.5}, "specprefill_keep_pct", ("0.5",)),
    ({"structured_outputs": {}}, "structured_outputs", ("json", "regex")),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", ("json", "regex")),
    ({**JSON_OBJECT, "structured_outputs": {"regex": "a"}}, "structured_outputs", ("response_format",)),
    ({**JSON_OBJECT, "min_tokens": 2}, "min_tokens", ("2", "response_format")),
    ({"response_format": SCHEMA, "stop_token_ids": [5]}, "stop_token_ids", ("response_format",)),
)

NOT_HONOURED: tuple[Case, ...] = (
    ({"tools": {"__len__": 0}}, "tools", ("array",)),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name", ("required",)),
    ({"tool_choice": "required"}, "tool_choice", ("no tools",)),
    ({"modalities": ["text", "audio"]}, "modalities", ("not supported",)),
    ({"audio": {"voice": "alloy"}}, "audio", ("not supported",)),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", ("not supported",)),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", ("extreme",)),
    ({"web_search_options": {}}, "web_search_options", ("not supported",)),
    ({"store": True}, "store", ("true",)),
    ({"best_of": 2}, "best_of", ("not supported",)),
    ({"suffix": "x"}, "suffix", ("not supported",)),
    ({"logits_processors": ["os.system"]}, "logits_processors", ("not supported",)),
)
"""Fields that would change the answer."""

HONOURED: tuple[dict[str, Any], ...] = (
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"functions": [{"name": "f"}]},
    {"reasoning_effort": "high"},
    {**JSON_OBJECT, "chat_template_kwargs": {"enable_thinking": True}},
    {"guided_json": {}},
    {"temprature": 0.5},
    {"logits_bias": {"a": "b"}, "": 1, "__proto__": {"model": "x"}},
)
"""Accepted, or unknown and ignored."""

EXTREMES: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-300},
    {"temperature": 1e-45, "seed": 1},
    {"temperature": 2, "top_p": 1e-300, "seed": 1},
    {"temperature": 2, "top_p": 0, "seed": 1},
    {"temperature": 2, "min_p": 1, "seed": 1},
    {"temperature": 2, "top_k": 2**31 - 1, "seed": -(2**63)},
    {"temperature": 2, "top_k": 1, "seed": 2**63 - 1},
    {"repetition_penalty": 0.01, "max_tokens": 16},
    {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 16},
    {"repetition_penalty": 0.01, "frequency_penalty": -2, "temperature": 2, "seed": 1, "max_tokens": 16},
    {"logit_bias": {str(i): -100 for i in range(1024)}},
    {"logit_bias": {str(i): 100 for i in range(1024)}, "temperature": 2, "seed": 1},
    {"logit_bias": {"0": 100, "2": 100}, "min_tokens": 4},
    {"logprobs": True, "top_logprobs": 20},
    {"n": 32, "max_tokens": 1},
    {"stop": ["s" * 256] * 16},
    {"stop": ["😀", "\0", "\n", " "]},
    {"stop_token_ids": list(range(64)), "max_tokens": 1},
    {"stop_token_ids": list(range(8, 72)), "min_tokens": 4},
    {"cache_salt": "s" * 128, "user": "\u202e\0" * 512},
    {"max_tokens": None, "max_completion_tokens": 1, "tools": None, "stop": None, "seed": None},
    {"specprefill": True, "specprefill_keep_pct": 0.1},
)

UNKNOWN_MODEL = tuple(
    Row(f"model {name}", chat(model=model), "served_model_name", Refused((404,), "model", "model_not_found", says))
    for name, model, says in (
        ("''", "", ("demo",)),
        ("of 10 kB", "m" * 10_000, ("mmm", "demo")),
        ("../../etc/passwd", "../../etc/passwd", ("demo",)),
        ("in capitals", "DEMO", ("DEMO", "demo")),
        ("with a NUL", "demo\0", ("demo",)),
        ("as a template", "{{ 7 * 7 }}", ("{{ 7 * 7 }}",)),
    )
)

CEILINGS = tuple(
    Row(f"{name} {value}", chat(**{"max_tokens": DROP, name: value}), "the context", OK)
    for name, value in (
        ("max_tokens", MANY),
        ("max_completion_tokens", 2**31 - 1),
        ("max_tokens", 32768),
        ("max_tokens", -1),
    )
)
"""max_tokens is a ceiling: beyond the context it is clamped."""


ROWS = (
    *(Row(f"type: {_named(fields)}", chat(**fields), "field types", bad(path, *says)) for fields, path, says in TYPES),
    *(
        Row(f"range: {_named(fields)}", chat(**fields), "field ranges", bad(path, *says))
        for fields, path, says in RANGES
    ),
    *(
        Row(f"together: {_named(fields)}", chat(**fields), "fields that exclude each other", bad(path, *says))
        for fields, path, says in CONTRADICTIONS
    ),
    *(
        Row(f"not honoured: {_named(fields)}", chat(**fields), "unknown fields", bad(path, *says))
        for fields, path, says in NOT_HONOURED
    ),
    *(Row(f"extreme: {_named(fields)}", chat(**fields), "field ranges", OK) for fields in EXTREMES),
    *UNKNOWN_MODEL,
    *(Row(f"honoured: {_named(fields)}", chat(**fields), "fields", Status((200,))) for fields in HONOURED),
    *CEILINGS,
)
