"""Runs one case of a program against a server and keeps what both have said."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tests.e2e.programs.catalogue import NOTES, NOTES_TEXT, QUESTION, Case
from tests.e2e.programs.install import Installed
from tests.e2e.programs.loopback import Loopback
from tests.e2e.programs.recorder import Exchange, Recorder, Refuse
from tests.e2e.programs.terminal import Terminal
from tests.support.sdks.offline import OFFLINE

LIMIT_S = 300.0
"""Time limit of a run, after which the program is killed."""
END_LIMIT_S = 30.0
ORCHARD = str(Path(sys.executable).parent / "orchard")
TERM = {"TERM": "xterm-256color", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Run:
    """The record of a program in one case."""

    case: Case
    version: str
    exit_code: int | None
    """None: it did not end by itself."""
    output: str
    """stdout and stderr, or what the screen showed."""
    exchanges: list[Exchange]
    seconds: float
    notes: str = ""
    """Text of the file in the program's folder at the end."""


@dataclass(frozen=True)
class Site:
    """Where programs run.

    Attributes:
        folder: Each run gets a home folder below it.
        server: URL of the server without a path.
    """

    folder: Path
    server: str
    loopback: Loopback

    def run(
        self,
        case: Case,
        installed: Installed,
        refuse: Refuse | None = None,
        limit_s: float = LIMIT_S,
        question: str = QUESTION,
    ) -> Run:
        recorder = Recorder(self.server, self.loopback.listen(), refuse)
        recorder.start()
        home = self.folder / f"{time.monotonic_ns()}"
        (home / "work").mkdir(parents=True)
        (home / "work" / NOTES).write_text(f"{NOTES_TEXT}\n")
        values = {"url": recorder.base_url, "model": case.model, "home": str(home)}
        values["question"] = Template(question).substitute(values)

        def filled(text: str) -> str:
            return Template(text).substitute(values)

        for path, text in case.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(text))
        own = {name: filled(value) for name, value in case.env.items()}
        env = {"HOME": str(home), "PATH": installed.path, **TERM, **OFFLINE, **installed.program.env, **own}
        program = [str(installed.executable)]
        if case.launched_as is not None:
            program = [ORCHARD, "launch", case.launched_as, "--url", recorder.base_url, "--"]
            env["PATH"] = f"{installed.executable.parent}{os.pathsep}{installed.path}"
        command = self.loopback.inside([*program, *map(filled, case.arguments)])
        began = time.monotonic()
        process = command, env, home / "work", began + limit_s
        if case.is_screen:
            code, output = _on_screen(*process, recorder, values["question"])
        else:
            code, output = _headless(*process)
        seconds = time.monotonic() - began
        self.loopback.end_processes()
        recorder.stop()
        notes = (home / "work" / NOTES).read_text()
        return Run(case, installed.version, code, output, recorder.exchanges, seconds, notes)


def _headless(command: list[str], env: dict[str, str], folder: Path, deadline: float) -> tuple[int | None, str]:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return None, process.communicate()[0]
    return process.returncode, output


def _on_screen(
    command: list[str], env: dict[str, str], folder: Path, deadline: float, recorder: Recorder, question: str
) -> tuple[int | None, str]:
    """Type the question when the screen waits for it, read the answer, and leave."""
    terminal = Terminal(command, env, folder)

    def is_answered() -> bool:
        ended = [one.has_ended for one in recorder.exchanges if one.is_generation]
        return bool(ended) and all(ended)

    terminal.wait(lambda: bool(terminal.text.strip()), deadline)
    terminal.type(question)
    terminal.wait(lambda: True, deadline)
    terminal.type("\r")
    terminal.wait(is_answered, deadline)
    terminal.type("/exit")
    terminal.wait(lambda: True, deadline)
    terminal.type("\r")
    return terminal.exit_code(time.monotonic() + END_LIMIT_S), terminal.text
