"""The committed record of the programs: programs.json, and the tables of README.md that are made from it."""

import json
from pathlib import Path
from typing import Any

from tests.e2e.programs.catalogue import CASES, LAUNCHED
from tests.e2e.programs.outcome import ending, refusals, unusual
from tests.e2e.programs.run import Run

FOLDER = Path(__file__).parent
RECORD, README = FOLDER / "programs.json", FOLDER / "README.md"
BEGIN = "<!-- made from programs.json -->"
MODELS = {"demo": "demo", "smollm2": "SmolLM2-135M-Instruct"}
COLUMNS = {"tools": "reads a file with its tool", **MODELS}
"""Part of the command -> head of its column."""


def read() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def note(run: Run, part: str, found: str) -> None:
    """Write the outcome of a run, of a part of the command, into both files."""
    record = read()
    row = record.setdefault(run.case.name, {"outcomes": {}, "refusals": {}})
    sent = unusual(run) or row.get("sends", "")
    row |= {"version": run.version, "sends": sent}
    row["outcomes"][part] = {"outcome": found, "seconds": round(run.seconds), "refusals": refusals(run)}
    write(record)


def note_refusal(run: Run, what: str) -> None:
    """Write what a program did after a refusal that the recorder gave it."""
    record = read()
    row = record.setdefault(run.case.name, {"outcomes": {}, "refusals": {}})
    row |= {"version": run.version, "sends": unusual(run) or row.get("sends", "")}
    row["refusals"][what] = {"version": run.version, "steps": refusals(run), "ending": ending(run)}
    write(record)


def write(record: dict[str, Any]) -> None:
    order = [case.name for case in (*CASES, *LAUNCHED)]
    record = dict(sorted(record.items(), key=lambda row: order.index(row[0])))
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    text = README.read_text().partition(BEGIN)[0]
    README.write_text(f"{text}{BEGIN}\n\n{tables(record)}")


def tables(record: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    launched = {case.name for case in LAUNCHED}
    lines = ["| program | version | sends, besides what all send | " + " | ".join(COLUMNS.values()) + " |"]
    lines.append("|---" * (3 + len(COLUMNS)) + "|")
    for name, row in record.items():
        if name in launched:
            continue
        cells = [_outcome(row["outcomes"].get(part)) for part in COLUMNS]
        lines.append(f"| {' | '.join(map(_cell, (name, row.get('version', ''), row.get('sends', ''), *cells)))} |")
    lines += [
        "",
        "| program | refused | the server's words, and the program's next step | in the end |",
        "|---|---|---|---|",
    ]
    for name, row in record.items():
        alike: dict[Any, list[str]] = {}
        for what, done in row["refusals"].items():
            steps = "; ".join(done["steps"]).replace(what, "FIELD")
            alike.setdefault((done["version"], steps, done["ending"].replace(what, "FIELD")), []).append(what)
        for (version, steps, end), what in alike.items():
            lines.append(f"| {' | '.join(map(_cell, (f'{name}, {version}', ', '.join(what), steps, end)))} |")
    lines += ["", "| program | version | edits a file with its tools |", "|---|---|---|"]
    for name, row in record.items():
        if name in launched:
            lines.append(f"| {' | '.join(map(_cell, (name, row['version'], _outcome(row['outcomes']['edits']))))} |")
    return "\n".join(lines) + "\n"


def _outcome(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    return "; ".join([f"{found['outcome']} ({found['seconds']} s)", *found["refusals"]])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
