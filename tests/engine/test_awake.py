"""A program like macOS's `caffeinate` runs while the engine has work, and only then."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from engine import watchdog
from engine.awake import CAFFEINATE, Awake
from tests.engine.test_async_engine import CountingRunner, collect, request
from tests.support.fake_runner import run_engine, until

PROGRAM = """#!{python}
import sys, time
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    path = tmp_path / "caffeinate"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return [str(path), *CAFFEINATE[1:]]


def held(program: list[str]) -> list[list[str]]:
    """Arguments of the running programs."""
    found = []
    for child in psutil.Process().children():
        words = child.cmdline()
        if program[0] in words:
            found.append(words[words.index(program[0]) + 1 :])
    return found


def test_the_assertion_is_held_while_busy_and_belongs_to_this_process(program: list[str]):
    awake = Awake(program)
    for _ in range(2):
        awake.keep(is_busy=True)
    assert held(program) == [["-i", "-s", "-w", str(os.getpid())]]
    awake.keep(is_busy=False)
    assert held(program) == []
    awake.keep(is_busy=False)


def test_other_systems_start_no_program_and_a_missing_one_is_logged_once(caplog: pytest.LogCaptureFixture):
    Awake(None).keep(is_busy=True)
    awake = Awake(["/no/caffeinate"])
    for _ in range(2):
        awake.keep(is_busy=True)
    assert caplog.text.count("the machine may sleep while requests run") == 1


def test_the_engine_keeps_the_machine_awake_until_its_last_row_ends(
    program: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "WATCH_PERIOD_S", 0.01)
    monkeypatch.setattr(watchdog, "Awake", lambda: Awake(program))

    async def test(engine):
        assert held(program) == []
        runner.hold = 0.02
        answer = asyncio.ensure_future(collect(engine, request(max_tokens=900)))
        await until(lambda: len(held(program)) == 1)
        assert not answer.done()
        answer.cancel()
        await until(lambda: held(program) == [])
        answer = asyncio.ensure_future(collect(engine, request(max_tokens=900)))
        await until(lambda: len(held(program)) == 1)
        answer.cancel()

    runner = CountingRunner()
    run_engine(test, runner, {})
    assert held(program) == []
