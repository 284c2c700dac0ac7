"""python -m engine, as a person calls it."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from PIL import Image, ImageDraw


def ask(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *args], input=stdin, capture_output=True, text=True, timeout=120
    )


def test_a_question_is_answered():
    result = ask("What is 12 + 30?")
    assert (result.stdout, result.stderr, result.returncode) == ("12 + 30 = 42\n", "", 0)


def test_a_picture_is_seen(tmp_path):
    image = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(image).ellipse((32, 32, 96, 96), fill="blue")
    image.save(tmp_path / "picture.png")
    result = ask("--image", str(tmp_path / "picture.png"), "What is in the image?")
    assert "blue circle" in result.stdout


def test_a_chat_remembers_what_was_said():
    result = ask(stdin="My name is Tom.\nWhat is my name?\n")
    assert result.stdout.count("Tom") == 2 and result.returncode == 0


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--model", "./nowhere", "Hi"], "./nowhere"),
        (["--image", "/nowhere.png", "Hi"], "/nowhere.png"),
        (["--temperature", "9", "Hi"], "9.0 is not within 0 and 2"),
    ],
)
def test_what_cannot_be_done_ends_with_the_reason(args, reason):
    result = ask(*args)
    assert result.returncode != 0 and reason in result.stderr and "Traceback" not in result.stderr


def test_ctrl_c_at_the_prompt_of_a_chat_ends_it():
    terminal, stdin = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-m", "engine"], stdin=stdin, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert chat.stdout is not None
        heard = b""
        while b"> " not in heard:
            heard += os.read(chat.stdout.fileno(), 100)
        chat.send_signal(signal.SIGINT)
        assert chat.wait(30) == 130
    finally:
        chat.kill()
        chat.communicate()
        os.close(terminal)
        os.close(stdin)
