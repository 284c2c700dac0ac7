"""A client that streams ordinary answers over and over while others attack, in a process of its own, so that the
attackers' work is not counted as the server's: `python -m tests.e2e.hostile.background http://127.0.0.1:8000`.

It ends when its standard input does, and writes what it saw as JSON.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from tests.e2e.server import ROOT
from tests.support.sse import Answer, answer, completions_url, exchange, post

QUESTIONS = {"What is 12 + 30?": "42", "Tell me a story.": ""}
"""And what must be in the answer, which is always the same one."""

ANSWER_TIMEOUT_S = 120.0
PAUSE_S = 0.5


@dataclass
class Seen:
    """texts: by question, how often each came. errors: in words. gaps_s: between two pieces of text of one answer.
    ttft_s: until the first."""

    texts: dict[str, Counter[str]] = field(default_factory=lambda: {question: Counter() for question in QUESTIONS})
    errors: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    def add(self, question: str, said: Answer) -> None:
        if said.error is not None or not said.pieces:
            self.errors.append(f"{question}: {said.error or 'no text'}")
            return
        self.texts[question]["".join(text for _, text in said.pieces)] += 1
        self.gaps_s += said.gaps_s
        self.ttft_s.append(said.ttft_s)

    @property
    def problems(self) -> list[str]:
        wrong = [
            f"{question}: {dict(texts)}"
            for question, texts in self.texts.items()
            if len(texts) != 1 or QUESTIONS[question] not in next(iter(texts))
        ]
        return self.errors + wrong

    def __str__(self) -> str:
        num_answers = {question: sum(texts.values()) for question, texts in self.texts.items()}
        gaps, ttft = sorted(self.gaps_s) or [0.0], sorted(self.ttft_s) or [0.0]
        return (
            f"{num_answers} answers; gaps between tokens: median {gaps[len(gaps) // 2] * 1e3:.0f} ms, "
            f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:.0f} ms, max {gaps[-1] * 1e3:.0f} ms; first token: median "
            f"{ttft[len(ttft) // 2] * 1e3:.0f} ms, max {ttft[-1] * 1e3:.0f} ms"
        )


class Background:
    """The process. `end` returns what it saw."""

    def __init__(self, base_url: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.hostile.background", base_url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self) -> Seen:
        output, _ = self._process.communicate(timeout=ANSWER_TIMEOUT_S + 30)
        seen: dict[str, Any] = json.loads(output)
        return Seen(**{**seen, "texts": {question: Counter(texts) for question, texts in seen["texts"].items()}})


async def _stream(url: SplitResult) -> Seen:
    seen = Seen()
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    while not over.done():
        for question in QUESTIONS:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": 200,
                "stream": True,
                "user": "background",
            }
            seen.add(question, answer(await exchange(url, post(url, body), ANSWER_TIMEOUT_S)))
        await asyncio.sleep(PAUSE_S)
    return seen


if __name__ == "__main__":
    seen = asyncio.run(_stream(completions_url(f"{sys.argv[1]}/v1")))
    json.dump(vars(seen), sys.stdout)
