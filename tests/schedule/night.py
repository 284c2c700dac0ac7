"""The last run of each part of the night, in tests/night.json, which README links.

uv run python -m tests.schedule.night record PART SECONDS   # after a part; .ci/nightly does
uv run python -m tests.schedule.night age                   # warns when a part is missing or too old; .ci/run does
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.schedule.durations import LAST_RUN, ROOT

RECORD = ROOT / "tests" / "night.json"
PARTS = ("tests", "servers", "clusters", "families", "weights", "schedules", "snapshots", "programs")
"""Those of .ci/nightly."""
MAX_AGE = 50
"""Commits after which the gate asks for another night."""


def by_folder(seconds: Mapping[str, float]) -> dict[str, int]:
    """Add up the seconds of tests by the folder below tests/."""
    folders: dict[str, float] = defaultdict(float)
    for node_id, s in seconds.items():
        folders[node_id.split("/")[1].partition("::")[0]] += s
    return {folder: round(s) for folder, s in sorted(folders.items(), key=lambda pair: -pair[1])}


def entry(run: Mapping[str, Any], wall_s: float, commit: str) -> dict[str, Any]:
    """Return what is recorded of a part: when and where it ran, its outcomes, and seconds by folder."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "seconds": round(wall_s),
        "outcomes": run["outcomes"],
        "seconds_of_tests": by_folder(run["seconds"]),
    }


def warnings(record: Mapping[str, Any], num_commits_since: Mapping[str, int | None]) -> list[str]:
    """Say which parts are missing, failed, or older than MAX_AGE commits; None is a commit that is not known here."""
    lines = []
    for part in PARTS:
        if part not in record:
            lines.append(f"part `{part}` of the night has never run: .ci/nightly {part}")
            continue
        if failed := record[part]["outcomes"].get("failed", 0):
            lines.append(f"part `{part}` of the night of {record[part]['date']} has {failed} failed tests")
        age = num_commits_since[part]
        if age is None or age > MAX_AGE:
            since = (
                "is of a commit that is unknown here"
                if age is None
                else f"is {age} commits old, the limit is {MAX_AGE}"
            )
            lines.append(f"part `{part}` of the night {since}: .ci/nightly {part}")
    return lines


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _num_commits_since(commit: str) -> int | None:
    try:
        return int(_git("rev-list", "--count", f"{commit}..HEAD"))
    except subprocess.CalledProcessError:
        return None


def _read() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def main(arguments: Sequence[str] | None = None, run: Path = LAST_RUN) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("age")
    recording = commands.add_parser("record")
    recording.add_argument("part", choices=PARTS)
    recording.add_argument("seconds", type=float, help="of wall time")
    options, record = parser.parse_args(arguments), _read()
    if options.command == "record":
        record[options.part] = entry(json.loads(run.read_text()), options.seconds, _git("rev-parse", "--short", "HEAD"))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    else:
        ages = {part: _num_commits_since(one["commit"]) for part, one in record.items()}
        sys.stdout.write("".join(f"WARNING: {line}\n" for line in warnings(record, ages)))


if __name__ == "__main__":
    main()
