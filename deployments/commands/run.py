"""Ask the model of the running server, or chat with it; without a server, a model in this process."""

import argparse
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.commands import connection
from deployments.commands.connection import Connection, Unreachable
from deployments.commands.image_part import image_part
from deployments.commands.output import CommandError, UsageError, say, show_json

STDIN_NOTE_S = 2.0
DIM, PLAIN = "\033[2m", "\033[0m"
HELP = "Ctrl-D ends the chat, Ctrl-C an answer. /image FILE adds an image to the next message, /clear forgets all."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "model",
        nargs="?",
        help="name of the served model or, without a server, 'demo', a directory or a hub repository; "
        "default: the served model, without a server 'demo'",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the question, which may stand alone if it has spaces; piped input is added to it. Without both, a chat",
    )
    connection.add_arguments(parser)
    parser.set_defaults(url=None)
    parser.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="image of the question")
    parser.add_argument("--local", action="store_true", help="ask no server, but run the model in this process")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the model's own; 0 is greedy")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--think", action="store_true", help="enable thinking if the model supports it")
    parser.add_argument("--verbose", action="store_true", help="print tokens and speed behind each answer")
    parser.add_argument("--json", action="store_true", help="print one answer as JSON, with its tokens and seconds")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    _place_single(options)
    prompt = _prompt(options)
    if options.json and prompt is None:
        raise UsageError("--json needs a PROMPT")
    images = [image_part(path) for path in options.image]
    if options.local:
        if options.url is not None:
            raise UsageError("--local asks no server: it cannot be combined with --url")
        return _run_here(options, prompt)
    has_url = options.url is not None
    options.url = options.url or connection.DEFAULT_URL
    server = connection.connection_of(options)
    try:
        names = [one["id"] for one in server.get("/v1/models")["data"]]
    except Unreachable as error:
        if has_url:
            raise
        say(f"No server answers at {server.url}: running {options.model or 'demo'} in this process.")
        if options.json:
            raise CommandError("--json needs a server") from error
        return _run_here(options, prompt)
    if options.model is not None and options.model not in names:
        hint = "" if options.prompt else " A question of one word stands behind the model's name."
        raise CommandError(
            f"the server at {server.url} serves {', '.join(names)}, not {options.model!r}. `orchard run --local` runs "
            f"a model in this process.{hint}"
        )
    chat = Chat(server, options.model or names[0], options)
    if prompt is None:
        return chat.talk(images)
    answer = chat.ask(prompt, images, is_shown=not options.json)
    if options.json:
        show_json(answer.described())
    return 0


def _place_single(options: argparse.Namespace) -> None:
    """Take a single argument with spaces as the question, unless it is a directory."""
    only = options.model
    if only is not None and options.prompt is None and any(map(str.isspace, only)) and not Path(only).is_dir():
        options.model, options.prompt = None, only


def _prompt(options: argparse.Namespace) -> str | None:
    """Return the question of the arguments and of piped input; None for a chat."""
    piped = _piped(waits_silently=options.prompt is None)
    if piped is None or (not piped.strip() and options.prompt is not None):
        return options.prompt
    if not piped.strip():
        raise UsageError("the standard input is empty, and there is no PROMPT")
    return piped if options.prompt is None else f"{options.prompt}\n\n{piped}"


def _piped(waits_silently: bool) -> str | None:
    """Return what is piped into this process; None without a pipe or file there."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not waits_silently and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None  # such as /dev/null, or a socket of ssh that never ends
    note = threading.Timer(STDIN_NOTE_S, say, ["Reading the standard input until its end; `</dev/null` for none."])
    note.daemon = True
    note.start()
    try:
        return sys.stdin.buffer.read().decode(errors="replace")
    finally:
        note.cancel()


def _run_here(options: argparse.Namespace, prompt: str | None) -> int:
    """Run the engine's own command, in a process of its own since it loads MLX."""
    if options.json:
        raise UsageError("--json cannot be combined with --local")
    command = [sys.executable, "-m", "engine", "--model", options.model or "demo"]
    for name in ("system", "max_tokens", "temperature", "seed"):
        if (value := getattr(options, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    command += [f"--image={path}" for path in options.image]
    command += [f"--{name}" for name in ("think", "verbose") if getattr(options, name)]
    if prompt is None:
        return subprocess.run(command).returncode
    return subprocess.run([*command, "-"], input=prompt.encode()).returncode


@dataclass
class Answer:
    """One answer, as far as it has come."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None
    seconds: float = 0.0

    def described(self) -> dict[str, Any]:
        """Return it for JSON."""
        return vars(self) | {"tokens_per_s": self.tokens_per_s}

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens behind the first per second."""
        num, first_s = self.usage.get("completion_tokens", 0), self.first_token_s
        if num < 2 or first_s is None or self.seconds <= first_s:
            return None
        return (num - 1) / (self.seconds - first_s)

    @property
    def figures(self) -> str:
        """A line of figures."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        first = "" if self.first_token_s is None else f", first token after {self.first_token_s:.2f} s"
        num_prompt, num = self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)
        return f"{num_prompt} prompt tokens ({cached} cached), {num} generated{first}{speed}"


class Chat:
    """A conversation with the served model.

    Args:
        server: The server.
        model: A name that it serves.
        options: Of the command line.
    """

    def __init__(self, server: Connection, model: str, options: argparse.Namespace):
        self._server = server
        self._model = model
        self._options = options
        self._messages: list[dict[str, Any]] = []
        self._forget()

    def _forget(self) -> None:
        self._messages = [{"role": "system", "content": self._options.system}] if self._options.system else []

    def talk(self, images: list[dict[str, Any]]) -> int:
        """Ask what is typed, until the input ends; return the exit status."""
        import readline  # noqa: F401  # gives input() a history and keys to edit with

        say(f"{self._model} at {self._server.url}. {HELP}")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                sys.stdout.write("\n")
                return 0
            try:
                images = self._do(line, images)
            except KeyboardInterrupt:
                say("\n(stopped)")
            except CommandError as error:
                say(f"error: {error}")

    def _do(self, line: str, images: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Do what a line of the chat says; return the images of the next message."""
        word, _, rest = line.partition(" ")
        if not line:
            return images
        if word == "/clear":
            self._forget()
            return []
        if word == "/image":
            return [*images, image_part(Path(rest.strip()).expanduser())]
        if word in ("/help", "/?"):
            say(HELP)
            return images
        self.ask(line, images)
        return []

    def ask(self, text: str, images: list[dict[str, Any]], is_shown: bool = True) -> Answer:
        """Ask, and keep the answer in the conversation, also one that was stopped. Raises CommandError."""
        content = [*images, {"type": "text", "text": text}] if images else text
        self._messages.append({"role": "user", "content": content})
        answer, began = Answer(), time.monotonic()
        screen = Screen() if is_shown else None
        try:
            with closing(self._server.stream("/v1/chat/completions", self._body())) as events:
                for kind, piece in _pieces(events, answer):
                    if answer.first_token_s is None:
                        answer.first_token_s = time.monotonic() - began
                    if screen is not None:
                        screen.show(kind, piece)
        finally:
            answer.seconds = time.monotonic() - began
            if screen is not None:
                screen.end(bool(answer.text))
            if answer.text:
                self._messages.append({"role": "assistant", "content": answer.text})
            else:
                self._messages.pop()
        if answer.finish_reason == "length":
            say("(cut off: the answer has reached its limit of tokens)")
        if self._options.verbose:
            say(answer.figures)
        return answer

    def _body(self) -> dict[str, Any]:
        given = {name: getattr(self._options, name) for name in ("max_tokens", "temperature", "seed")}
        if self._options.think:
            given["enable_thinking"] = True
        return {
            "model": self._model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value is not None},
        }


def _pieces(events: Iterator[dict[str, Any]], answer: Answer) -> Iterator[tuple[str, str]]:
    """Add the events to the answer; yield its pieces, as `reasoning` or `text`."""
    for event in events:
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            delta = choice.get("delta", {})
            if piece := delta.get("reasoning_content"):
                answer.reasoning += piece
                yield "reasoning", piece
            if piece := delta.get("content"):
                answer.text += piece
                yield "text", piece


class Screen:
    """Prints an answer as it comes: thoughts in grey and only on a terminal, and no escape sequences of a model."""

    def __init__(self):
        self._is_terminal = sys.stdout.isatty()
        self._kind = "text"

    def show(self, kind: str, piece: str) -> None:
        """Print a piece of the answer."""
        if not self._is_terminal:
            if kind == "text":
                self._write(piece)
            return
        if kind != self._kind:
            self._write(DIM if kind == "reasoning" else f"{PLAIN}\n\n")
            self._kind = kind
        self._write("".join(char if char.isprintable() or char in "\n\t" else "�" for char in piece))

    def end(self, has_text: bool) -> None:
        """End the last line."""
        if self._kind == "reasoning":
            self._write(PLAIN)
        if has_text:
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
