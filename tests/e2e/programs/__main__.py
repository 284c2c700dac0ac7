"""Installs the newest programs, runs them and renews the record.

uv run python -m tests.e2e.programs                          # all parts; .ci/nightly programs
uv run python -m tests.e2e.programs demo --only "Codex"      # one model, and the cases whose names contain this
uv run python -m tests.e2e.programs refusals --tools DIR     # keeps the installed programs in DIR
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.programs import record
from tests.e2e.programs.catalogue import CASES, EDIT_QUESTION, LAUNCHED, NOTES_QUESTION, PROGRAMS, QUESTION, Case
from tests.e2e.programs.edits import EditsBackend
from tests.e2e.programs.install import Installed, Tools
from tests.e2e.programs.loopback import Loopback
from tests.e2e.programs.notes import NotesBackend
from tests.e2e.programs.outcome import outcome, outcome_of_edit, outcome_of_tool
from tests.e2e.programs.refusing import refused_runs
from tests.e2e.programs.run import Site
from tests.e2e.programs.servers import model_server, scripted_server

PARTS = (*record.COLUMNS, "refusals", "edits")

JUDGED = {"tools": (NOTES_QUESTION, outcome_of_tool), "edits": (EDIT_QUESTION, outcome_of_edit)}
"""Part -> its question, and how its runs are judged, where these are not the usual ones."""


def main() -> int:
    """Returns 1 if a program cannot be installed or does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS])
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--tools", type=Path, help="folder of the programs; they are installed anew without it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers and the network end, too
    cases, launched = ([case for case in some if options.only in case.name] for some in (CASES, LAUNCHED))
    loopback = Loopback()
    if loopback.why_open is not None:
        _say(f"the programs could reach other networks: {loopback.why_open}")
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="orc-programs-", dir="/tmp") as folder:
        try:
            tools = Tools(options.tools or Path(folder) / "tools")
            installed = _install(tools, {case.program for case in (*cases, *launched)}, problems)
            cases, launched = ([case for case in some if case.program in installed] for some in (cases, launched))
            if "tools" in options.parts:
                with scripted_server(NotesBackend()) as url:
                    problems += _run(Site(Path(folder), url, loopback), "tools", cases, installed)
            if "edits" in options.parts:
                with scripted_server(EditsBackend()) as url:
                    problems += _run(Site(Path(folder), url, loopback), "edits", launched, installed)
            for model in (part for part in options.parts if part in record.MODELS):
                with model_server(model, Path(folder)) as url:
                    problems += _run(Site(Path(folder), url, loopback), model, cases, installed)
            if "refusals" in options.parts:
                with scripted_server() as url:
                    site = Site(Path(folder), url, loopback)
                    for case in cases:
                        for what, run in refused_runs(site, case, installed[case.program]):
                            record.note_refusal(run, what)
                            _say(f"{case.name}, {what}: {outcome(run)} ({run.seconds:.0f} s)")
        finally:
            loopback.close()
    _say("\n".join(["", f"{len(problems)} problems", *problems]))
    return 1 if problems else 0


def _install(tools: Tools, names: set[str], problems: list[str]) -> dict[str, Installed]:
    installed = {}
    for name in sorted(names):
        try:
            installed[name] = tools.install(PROGRAMS[name])
            _say(f"{name} {installed[name].version}")
        except subprocess.CalledProcessError as error:
            problems.append(f"{name} cannot be installed: {error.stderr[-500:]}")
    return installed


def _run(site: Site, part: str, cases: list[Case], installed: Mapping[str, Installed]) -> list[str]:
    """Run the cases and note their outcomes. Returns the failed ones."""
    problems = []
    for case in cases:
        question, judge = JUDGED.get(part, (QUESTION, outcome))
        run = site.run(case, installed[case.program], question=question)
        found = judge(run)
        record.note(run, part, found)
        _say(f"{case.name}, {part}: {found} ({run.seconds:.0f} s)")
        problems += [f"{case.name}, {part}: {found}"] if found.startswith("failed") else []
    return problems


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
