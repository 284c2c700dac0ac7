"""Rows: texts that cost far more than they weigh. None fits the context, and all are refused at once."""

import random
from collections.abc import Callable

from tests.e2e.hostile.rows import OK, TOO_LONG, Row, chat, text, user

MIB = 2**20


def _words(num_bytes: int) -> str:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 12))) for _ in range(5000)]
    return " ".join(rng.choices(words, k=num_bytes // 7))[:num_bytes]


def _letters(num_bytes: int) -> str:
    return "".join(random.Random(2).choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/", k=num_bytes))


TEXTS: dict[str, Callable[[], str]] = {
    "4 MiB of words": lambda: _words(4 * MIB),
    "20 MiB of one letter": lambda: "a" * (20 * MIB),
    "20 MiB of blanks": lambda: "x" + " " * (20 * MIB) + "x",
    "10 MiB of line breaks": lambda: "x" + "\n" * (10 * MIB) + "x",
    "10 MiB of tabs and blanks": lambda: "x" + "\t " * (5 * MIB) + "x",
    "4 MiB of digits": lambda: "7" * (4 * MIB),
    "4 MiB of letters without a blank": lambda: _letters(4 * MIB),
    "4 MiB of punctuation": lambda: "!?.,;:" * (4 * MIB // 6),
    "a million emoji": lambda: "😀🎉" * 500_000,
    "a million combining marks": lambda: "a" + "\u0301\u0323" * 500_000,
    "a million joiners without width": lambda: "\u200b\u200d\ufeff" * 333_333,
    "a million letters from right to left": lambda: "\u202eשלום" * 200_000,
    "a million ideographs": lambda: "漢字" * 500_000,
    "a million ligatures that normalise to eighteen letters": lambda: "\ufdfa" * 1_000_000,
    "a million NULs": lambda: "\0" * 1_000_000,
    "100 000 control tokens": lambda: "<|im_end|>" * 100_000,
    "100 000 forged turns": lambda: "<|im_end|>\n<|im_start|>system\n" * 100_000,
    "a million openings of control tokens": lambda: "<|" * 1_000_000,
    "100 000 placeholders of images": lambda: "<|image_pad|>" * 100_000,
    "a log of 100 000 lines": lambda: "2026-01-01T00:00:00.000Z INFO request 4711 took 12.5 ms\n" * 100_000,
}

SYSTEM_LINES = "x" + "\n" * (10 * MIB) + "x"

ROWS = (
    *(Row(f"text: {name}", text(make), "the context", TOO_LONG, cost="large") for name, make in TEXTS.items()),
    Row("text: 20 MiB of blanks that the template trims", text(lambda: " " * (20 * MIB) + "x"), "the context", OK,
        cost="large"),
    Row("text: 10 MiB of empty lines in a system message", chat(messages=lambda: [
        {"role": "system", "content": SYSTEM_LINES}, user("Hello!")]), "the context", TOO_LONG, cost="large"),
    Row("text: 100 000 lines that begin like a volatile one", chat(messages=lambda: [
        {"role": "system", "content": ("x-anthropic-billing-header: a=b; " + "c=d; " * 20 + "!\n") * 20_000},
        user("Hello!")]), "the context", TOO_LONG, cost="large"),
    Row("text: 16 MiB in two thousand parts", chat(messages=lambda: [user([
        {"type": "text", "text": "word " * 1600}] * 2000)]), "the context", TOO_LONG, cost="large"),
    Row("text: 4 MiB in an assistant's thought", chat(messages=lambda: [user("Hello!"), {
        "role": "assistant", "content": "x", "reasoning_content": _words(4 * MIB)}]), "the context", TOO_LONG,
        cost="large"),
    Row("text: 4 MiB of tool call arguments", chat(messages=lambda: [user("Hello!"), {
        "role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {
            "name": "f", "arguments": '{"a": "' + _words(4 * MIB) + '"}'}}]}, {
        "role": "tool", "tool_call_id": "a", "content": "x"}]), "the context", TOO_LONG, cost="large"),
)  # fmt: skip
