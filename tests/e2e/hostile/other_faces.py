"""Rows: the routes beside chat completions, with bodies that are no JSON and fields that are wrong."""

from typing import Any

from tests.e2e.hostile.faces import Case, Face, malformed, wrong_fields
from tests.e2e.hostile.rows import DROP, Http, Refused, Row, Status

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HELLO = {"role": "user", "content": "Hello!"}
MANY = 10**9

MESSAGES = Face("/v1/messages", {"model": "demo", "max_tokens": 4, "messages": [HELLO]})
COUNT_TOKENS = Face("/v1/messages/count_tokens", {"model": "demo", "messages": [HELLO]})
RESPONSES = Face("/v1/responses", {"model": "demo", "input": "Hello!", "max_output_tokens": 4, "store": False})
COMPLETIONS = Face("/v1/completions", {"model": "demo", "prompt": "Hello!", "max_tokens": 4})
EMBEDDINGS = Face("/v1/embeddings", {"model": "demo", "input": "Hello!"})
RERANK = Face("/v1/rerank", {"model": "demo", "query": "Hello!", "documents": ["Hi!", "Bye!"]})
SCORE = Face("/v1/score", {"model": "demo", "text_1": "Hello!", "text_2": ["Hi!", "Bye!"]})
TOKENIZE = Face("/tokenize", {"model": "demo", "prompt": "Hello!"})
DETOKENIZE = Face("/detokenize", {"model": "demo", "tokens": [72]})
FACES = (MESSAGES, COUNT_TOKENS, RESPONSES, COMPLETIONS, EMBEDDINGS, RERANK, SCORE, TOKENIZE, DETOKENIZE)


def _user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def _image(**source: Any) -> dict[str, Any]:
    return _user({"type": "image", "source": source})


MESSAGES_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"max_tokens": DROP}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"messages": DROP}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello!"}, "messages"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (_user({"type": "smell"}), "messages.0.content.0"),
    (_user({"type": "text", "text": 5}), "messages.0.content.0.text"),
    (_user({"type": "tool_result", "content": "x"}), "messages.0.content.0.tool_use_id"),
    (_image(type="file", file_id="../x"), "messages.0.content.0.source"),
    (_image(type="base64", media_type="image/png", data="?"), "messages.0.content.0"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
    ({"temperature": 5}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"stream": "yes"}, "stream"),
    ({"thinking": {"type": "sometimes"}}, "thinking"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools.0.name"),
    ({"tools": [{"name": "a"}]}, "tools.0"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tool_choice": {"type": "tool", "name": "absent"}}, "tool_choice"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"safeguards": [{"type": "dangerous_tool_use"}]}, "safeguards: Extra inputs are not permitted"),
    ({"container": "c"}, "container: Extra inputs are not permitted"),
)

COUNT_TOKENS_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"system": {"text": "x"}}, "system"),
    ({"tools": "all"}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": True}, "thinking"),
)


def _input(*items: Any) -> dict[str, Any]:
    return {"input": list(items)}


RESPONSES_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"input": 5}, "input"),
    (_input(None), "input[0]"),
    (_input({"type": "smell"}), "input[0].type"),
    (_input({"role": "root", "content": "x"}), "input[0].role"),
    (_input({"role": "user", "content": [{"type": "input_smell"}]}), "input[0].content[0].type"),
    (_input({"role": "user", "content": [{"type": "input_file", "file_id": "../x"}]}), "input[0].content[0].type"),
    (_input({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
    (_input({"type": "function_call", "call_id": "a", "arguments": "{}"}), "input[0].name"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "10"}, "max_output_tokens"),
    ({"temperature": 5}, "temperature"),
    ({"top_p": "0.5"}, "top_p"),
    ({"stream": "yes"}, "stream"),
    ({"store": "yes"}, "store"),
    ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"metadata": {"a": 5}}, "metadata.a"),
)

COMPLETIONS_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"prompt": DROP}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [{}]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [4096]}, "", "4096"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 3000}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 5}, "best_of"),
    ({"echo": "yes"}, "echo"),
    ({"logprobs": 50}, "logprobs"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"temperature": 5}, "temperature"),
    ({"stop": 5}, "stop"),
    ({"stream": 1}, "stream"),
)

EMBEDDINGS_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"input": DROP}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": {"text": "x"}}, "input"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [-1]}, "input[0]"),
    ({"input": [4096]}, "", "4096"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": "4 2 1 7 9 " * 7000}, "input", "32768"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": MANY}, "dimensions"),
    ({"user": 5}, "user"),
)

RERANK_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"query": DROP}, "query"),
    ({"query": 5}, "query"),
    ({"query": {"title": "x"}}, "query.text"),
    ({"documents": DROP}, "documents"),
    ({"documents": []}, "documents"),
    ({"documents": "Hi!"}, "documents"),
    ({"documents": ["a", 5]}, "documents[1]"),
    ({"documents": ["a", {"text": "a", "image": "data:,"}]}, "documents[1].image"),
    ({"documents": ["a"] * 2049}, "documents", "2048"),
    ({"top_n": -1}, "top_n"),
    ({"top_n": MANY * 10}, "top_n"),
    ({"return_documents": "yes"}, "return_documents"),
    ({"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
    ({"instruction": ""}, "instruction"),
    ({"user": 5}, "user"),
    ({"documents": ["The demo model has no scores."]}, "model", "generates text"),
)

SCORE_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"text_1": DROP}, "text_1"),
    ({"text_2": 5}, "text_2"),
    ({"text_2": []}, "text_2"),
    ({"text_2": ["a", [5]]}, "text_2[1]"),
    ({"text_2": ["a"] * 2049}, "text_2", "2048"),
    ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ({"use_activation": "no"}, "use_activation"),
    ({"queries": ["a"]}, "queries"),
)

TOKENIZE_CASES: tuple[Case, ...] = (
    ({"prompt": DROP}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"messages": [HELLO]}, "prompt"),
    ({"prompt": DROP, "messages": []}, "messages"),
    ({"prompt": DROP, "messages": [5]}, "messages[0]"),
    ({"prompt": DROP, "messages": [HELLO], "tools": "all"}, "tools"),
    ({"return_token_strs": "yes"}, "return_token_strs"),
    ({"add_special_tokens": "no"}, "add_special_tokens"),
)

DETOKENIZE_CASES: tuple[Case, ...] = (
    ({"tokens": DROP}, "tokens"),
    ({"tokens": "1"}, "tokens"),
    ({"tokens": ["a"]}, "tokens[0]"),
    ({"tokens": [-1]}, "tokens[0]"),
    ({"tokens": [4096]}, "tokens", "4096"),
    ({"tokens": [2**40]}, "tokens[0]"),
)

UNKNOWN_IDS = (
    Row("/v1/responses: an unknown response goes on",
        RESPONSES.post(RESPONSES.encode(previous_response_id="resp_" + "x" * 500)), "the store of responses",
        Refused((404,), "previous_response_id")),
    *(Row(f"{method} of {name}", Http(method, path), "the store of responses", Status((404, 405)))
      for method, path, name in (
          ("GET", "/v1/responses/resp_none", "an unknown response"),
          ("DELETE", "/v1/responses/resp_none", "an unknown response"),
          ("POST", "/v1/responses/resp_none/cancel", "an unknown response's cancel"),
          ("GET", "/v1/responses/..%2f..%2fetc%2fpasswd", "a response outside"),
          ("GET", "/v1/responses/" + "x" * 10_000, "a response with an id of 10 kB"),
          ("POST", "/v1/messages/msg_none/cancel", "an unknown message's cancel"),
      )),
)  # fmt: skip

ROWS = (
    *(row for face in FACES for row in malformed(face)),
    *wrong_fields(MESSAGES, *MESSAGES_CASES),
    *wrong_fields(COUNT_TOKENS, *COUNT_TOKENS_CASES),
    *wrong_fields(RESPONSES, *RESPONSES_CASES),
    *wrong_fields(COMPLETIONS, *COMPLETIONS_CASES),
    *wrong_fields(EMBEDDINGS, *EMBEDDINGS_CASES),
    *wrong_fields(RERANK, *RERANK_CASES),
    *wrong_fields(SCORE, *SCORE_CASES),
    *wrong_fields(TOKENIZE, *TOKENIZE_CASES),
    *wrong_fields(DETOKENIZE, *DETOKENIZE_CASES),
    *UNKNOWN_IDS,
)
