"""python -m engine, as a person calls it."""

import asyncio
import itertools
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from PIL import Image, ImageDraw

import engine.__main__
from engine.__main__ import Chat, arguments
from engine.config import RopeScaling
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, FinishReason, TokenChunk


def ask(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *args], input=stdin, capture_output=True, text=True, timeout=120
    )


@pytest.mark.night("a process of its own; test_an_image_is_described starts the same")
def test_a_question_is_answered():
    result = ask("What is 12 + 30?")
    assert (result.stdout, result.stderr, result.returncode) == ("12 + 30 = 42\n", "", 0)


@pytest.mark.night("a process of its own; the prompt is answered as one of the command line")
def test_a_question_is_read_from_the_standard_input():
    assert ask("-", stdin="What is 12 + 30?").stdout == "12 + 30 = 42\n"


def test_reader_that_closes_the_output_ends_the_program_without_a_traceback(monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert engine.__main__.main(["--check"]) == 128 + signal.SIGPIPE
        output.write("flushed by the interpreter at its end")
    assert capfd.readouterr().err == ""


def test_an_image_is_described(tmp_path):
    image = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(image).ellipse((32, 32, 96, 96), fill="blue")
    image.save(tmp_path / "picture.png")
    result = ask("--image", str(tmp_path / "picture.png"), "What is in the image?")
    assert "blue circle" in result.stdout


@pytest.mark.night("a process of its own; the turns of a chat are tested within this one")
def test_a_chat_remembers_earlier_messages():
    result = ask(stdin="My name is Tom.\nWhat is my name?\n")
    assert result.stdout.count("Tom") == 2 and result.returncode == 0


def test_an_invalid_argument_ends_the_program_with_the_reason():
    result = ask("--model", "./nowhere", "Hi")
    assert result.returncode != 0 and "./nowhere" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--image", "/nowhere.png", "Hi"], "/nowhere.png"),
        (["--temperature", "9", "Hi"], "--temperature is 9.0; it must be between 0 and 2"),
    ],
)
def test_an_invalid_field_of_a_request_is_an_error_with_the_reason(args, reason, capsys):
    try:
        status = engine.__main__.main(args)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status in (1, 2) and reason in said and "Traceback" not in said


def test_ctrl_c_at_the_prompt_of_a_chat_ends_it():
    terminal, stdin = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-m", "engine"],
        stdin=stdin,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        assert chat.stdout is not None
        heard = b""
        while b"> " not in heard:
            heard += os.read(chat.stdout.fileno(), 100)
        chat.send_signal(signal.SIGINT)
        assert chat.wait(120) == 130
    finally:
        chat.kill()
        chat.communicate()
        os.close(terminal)
        os.close(stdin)


class Parrot:
    """An engine that always says the same and keeps what it was asked."""

    def __init__(self):
        self.asked: list[EngineRequest] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(max_context_tokens=32768)

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        self.asked.append(request)
        said = ChatTokenizer(DEMO_MODEL).encode_text("hm\n</think>\n\nYes.").tolist()
        yield TokenChunk(tuple(said), FinishReason.STOP)


@pytest.mark.parametrize("options", [[], ["--think"], ["--system", "Be brief."]])
def test_each_turn_of_a_chat_continues_the_one_before_up_to_its_turn_boundary(monkeypatch: pytest.MonkeyPatch, options):
    parrot = Parrot()
    monkeypatch.setattr(engine.__main__, "AsyncEngine", lambda config: parrot)
    chat = Chat(arguments(options))
    for text in ("Hi", "And?", "So?"):
        asyncio.run(chat.ask(text))
    for before, after in itertools.pairwise(parrot.asked):
        turn = before.boundaries[-1]
        assert turn.kind == "turn" and turn.num_tokens > len(before.token_ids) - 12
        assert after.token_ids[: turn.num_tokens].tolist() == before.token_ids[: turn.num_tokens].tolist()


def test_a_rope_scaling_of_the_command_line_is_that_of_the_settings(capsys):
    assert arguments(["--rope-scaling", "yarn:4"]).rope_scaling == RopeScaling(type="yarn", factor=4)
    with pytest.raises(SystemExit):
        arguments(["--rope-scaling", "dynamic:0.5"])
    assert "'dynamic:0.5': type: Input should be 'yarn'" in capsys.readouterr().err
