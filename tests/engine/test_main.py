"""python -m engine, as a person calls it."""

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
