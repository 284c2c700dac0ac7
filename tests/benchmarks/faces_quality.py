"""How often tool calls and JSON are right through each dialect: exact match on held-out tasks of the demo model.

    uv run python -m tests.benchmarks.faces_quality --samples 40

Starts its own server, unless --url names one. Samples come from the generators that the demo model was trained on, with
seeds of our own. A tool sample is right when all calls have the right names and arguments; a JSON sample when the
object is the right one, whatever the order of its keys. Every dialect gets the same samples, through its own SDK,
streamed and not, with thinking off and on. `named` has only the samples with one call.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai

from tests.benchmarks.measure import heading, provenance, table
from tests.demo_model.tasks import sample as demo
from tests.demo_model.tasks.json_objects import json_object
from tests.demo_model.tasks.tool_calls import tool_calls
from tests.demo_model.world.draws import Draws
from tests.e2e.server import serve_run

MODEL = "demo"
MAX_TOKENS = 512
TYPES = {bool: "boolean", int: "integer", list: "array", str: "string"}


@dataclass(frozen=True)
class Sample:
    system: str | None
    turns: tuple[dict[str, Any], ...]
    """As chat completions have them, with the arguments of calls as objects."""
    tools: tuple[dict[str, Any], ...]
    """Name, description and JSON schema of each."""
    expected: Any
    """The calls as pairs of name and arguments, or the object."""


@dataclass(frozen=True)
class Case:
    choice: str
    """auto, required, named; json_schema has a schema in place of tools."""
    thinking: bool
    streamed: bool

    def __str__(self) -> str:
        return (
            f"{self.choice}, {'thinking' if self.thinking else 'at once'}, {'streamed' if self.streamed else 'whole'}"
        )


def tool_samples(count: int) -> list[Sample]:
    draws, found = Draws("held out, faces, tools"), []
    while len(found) < count:
        sample = tool_calls(draws)
        if sample.task in ("tool_call", "tool_parallel"):
            calls = [call["function"] for call in sample.messages[-1]["tool_calls"]]
            tools = tuple(tool["function"] for tool in sample.tools or ())
            found.append(_sample(sample, tools, [(call["name"], call["arguments"]) for call in calls]))
    return found


def json_samples(count: int) -> list[Sample]:
    draws = Draws("held out, faces, JSON")
    samples = [json_object(draws) for _ in range(count)]
    return [_sample(sample, (), json.loads(sample.answer)) for sample in samples]


def _sample(sample: demo.Sample, tools: tuple[dict[str, Any], ...], expected: Any) -> Sample:
    turns = sample.messages[:-1]
    system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
    return Sample(system, tuple(_with_ids(turns)), tools, expected)


def _with_ids(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The generator's calls have no ids: the results follow in their order."""
    number, waiting = 0, []
    for turn in turns:
        if calls := turn.get("tool_calls"):
            waiting = [f"call_{number + i}" for i in range(len(calls))]
            number += len(calls)
            turn = {**turn, "tool_calls": [{**call, "id": id_} for call, id_ in zip(calls, waiting, strict=True)]}
        elif turn["role"] == "tool":
            turn = {**turn, "tool_call_id": waiting.pop(0)}
        yield turn


def schema_of(expected: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {name: {"type": TYPES[type(value)]} for name, value in expected.items()}
    for field in properties.values():
        field |= {"items": {"type": "string"}} if field["type"] == "array" else {}
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# Chat completions


def ask_chat(client: openai.OpenAI, sample: Sample, case: Case) -> Any:
    messages = [{"role": "system", "content": sample.system}] if sample.system is not None else []
    fields: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "messages": [*messages, *map(_chat_turn, sample.turns)],
        "reasoning_effort": "high" if case.thinking else "none",
    }
    if case.choice == "json_schema":
        schema = {"name": "answer", "strict": True, "schema": schema_of(sample.expected)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        fields["tools"] = [{"type": "function", "function": tool} for tool in sample.tools]
        named = {"type": "function", "function": {"name": sample.expected[0][0]}}
        fields["tool_choice"] = named if case.choice == "named" else case.choice
    if case.streamed:
        with client.chat.completions.stream(**fields) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**fields).choices[0].message
    if case.choice == "json_schema":
        return json.loads(message.content)
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def _chat_turn(turn: dict[str, Any]) -> dict[str, Any]:
    if not turn.get("tool_calls"):
        return turn
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in turn["tool_calls"]
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


# Responses


def ask_responses(client: openai.OpenAI, sample: Sample, case: Case) -> Any:
    fields: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_output_tokens": MAX_TOKENS,
        "store": False,
        "input": [item for turn in sample.turns for item in _items(turn)],
        "reasoning": {"effort": "high" if case.thinking else "none"},
    }
    if sample.system is not None:
        fields["instructions"] = sample.system
    if case.choice == "json_schema":
        schema = {"type": "json_schema", "name": "answer", "strict": True, "schema": schema_of(sample.expected)}
        fields["text"] = {"format": schema}
    else:
        fields["tools"] = [{"type": "function", "strict": False, **tool} for tool in sample.tools]
        named = {"type": "function", "name": sample.expected[0][0]}
        fields["tool_choice"] = named if case.choice == "named" else case.choice
    if case.streamed:
        with client.responses.stream(**fields) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**fields)
    if case.choice == "json_schema":
        return json.loads(response.output_text)
    calls = [item for item in response.output if item.type == "function_call"]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _items(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if turn["role"] == "tool":
        yield {"type": "function_call_output", "call_id": turn["tool_call_id"], "output": turn["content"]}
    elif turn.get("tool_calls"):
        for call in turn["tool_calls"]:
            function = call["function"]
            arguments = json.dumps(function["arguments"])
            yield {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": arguments}
    else:
        yield {"role": turn["role"], "content": turn["content"]}


# Messages


def ask_messages(client: anthropic.Anthropic, sample: Sample, case: Case) -> Any:
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": MAX_TOKENS,
        "messages": _merged([_blocks(turn) for turn in sample.turns]),
        "thinking": {"type": "adaptive" if case.thinking else "disabled"},
    }
    if sample.system is not None:
        fields["system"] = sample.system
    if case.choice == "json_schema":
        fields["output_config"] = {"format": {"type": "json_schema", "schema": schema_of(sample.expected)}}
    else:
        fields["tools"] = [_anthropic_tool(**tool) for tool in sample.tools]
        choices = {"auto": {"type": "auto"}, "required": {"type": "any"}}
        fields["tool_choice"] = choices.get(case.choice) or {"type": "tool", "name": sample.expected[0][0]}
    if case.streamed:
        with client.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    if case.choice == "json_schema":
        return json.loads("".join(block.text for block in message.content if block.type == "text"))
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def _anthropic_tool(name: str, parameters: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"name": name, **described, "input_schema": parameters}


def _blocks(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": turn["content"]}
        return {"role": "user", "content": [block]}
    if turn.get("tool_calls"):
        calls = [(call["id"], call["function"]) for call in turn["tool_calls"]]
        uses = [{"type": "tool_use", "id": i, "name": f["name"], "input": f["arguments"]} for i, f in calls]
        return {"role": "assistant", "content": uses}
    return {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of one turn in one message."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] += message["content"]
        else:
            merged.append(message)
    return merged


# The measurement


def is_right(ask: Callable[[Sample, Case], Any], sample: Sample, case: Case) -> bool:
    try:
        return ask(sample, case) == sample.expected
    except (json.JSONDecodeError, openai.APIStatusError, anthropic.APIStatusError) as error:
        print(f"{case}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return False


def measure(base: str, num_samples: int, num_clients: int) -> list[dict[str, Any]]:
    """base: without /v1."""
    tools, objects = tool_samples(num_samples), json_samples(num_samples)
    single = [sample for sample in tools if len(sample.expected) == 1]
    samples = {"auto": tools, "required": tools, "named": single, "json_schema": objects}
    cases = [
        Case(choice, thinking, streamed)
        for choice in samples
        for thinking in (False, True)
        for streamed in (False, True)
    ]
    rows = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(num_clients) as pool:
        of_openai = stack.enter_context(openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=600))
        of_anthropic = stack.enter_context(anthropic.Anthropic(base_url=base, api_key="none", timeout=600))
        dialects: dict[str, Callable[[Sample, Case], Any]] = {
            "chat": lambda sample, case: ask_chat(of_openai, sample, case),
            "responses": lambda sample, case: ask_responses(of_openai, sample, case),
            "messages": lambda sample, case: ask_messages(of_anthropic, sample, case),
        }
        for case in cases:
            asked = samples[case.choice]
            right = {
                dialect: sum(pool.map(lambda sample, ask=ask, case=case: is_right(ask, sample, case), asked))
                for dialect, ask in dialects.items()
            }
            rows.append({"case": str(case), "samples": len(asked), **right})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server, without /v1; default: one of its own")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--clients", type=int, default=8, help="requests at the same time")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        base = args.url
        if base is None:
            server = stack.enter_context(serve_run())
            server.wait_complete()
            stack.callback(server.stop)
            base = server.base_url
        rows = measure(base, args.samples, args.clients)
    print(heading(f"faces_quality --samples {args.samples}: exact answers of the demo model, by dialect"))
    columns = ("case", "samples", "chat", "responses", "messages")
    print(table(columns, [[str(row[column]) for column in columns] for row in rows]))
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
