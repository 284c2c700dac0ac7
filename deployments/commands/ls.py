"""List the models on this machine: size, family, MTP head, and whether they can be served here."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.commands.models_on_disk import ModelOnDisk, models_on_disk
from deployments.commands.output import CommandError, say, show_json, show_table, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("directories", nargs="*", type=Path, help="more directories with models, or of models")
    parser.add_argument("--quick", action="store_true", help="do not check them, which takes seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    for directory in options.directories:
        if not directory.expanduser().is_dir():
            raise CommandError(f"{directory} is no directory")
    models = models_on_disk(options.directories)
    checked = {} if options.quick else _check([one for one in models if one.is_complete])
    rows = [_described(one, checked.get(str(one.path))) for one in models]
    if options.json:
        show_json(rows)
        return 0
    names = ("model", "family", "size", "bits", "mtp_head", "fits")
    columns = ("model", "family", "#size", "#bits", "MTP head", "can be served here")
    show_table(columns, [[row[name] if name != "size" else size(row["num_bytes"]) for name in names] for row in rows])
    if options.quick:
        say("Not checked (--quick).")
    return 0


def _check(models: Sequence[ModelOnDisk]) -> dict[str, dict[str, Any]]:
    """Return the engine's report on each model by its path."""
    command = [sys.executable, "-m", "engine", "--check-each"]
    names = "".join(f"{one.path}\n" for one in models if "\n" not in str(one.path))
    done = subprocess.run(command, input=names, capture_output=True, text=True)
    if done.returncode:
        say(f"The models could not be checked: {done.stderr.strip().rpartition(chr(10))[2]}")
    return {found["model"]: found for found in map(json.loads, done.stdout.splitlines())}


def _described(model: ModelOnDisk, report: dict[str, Any] | None) -> dict[str, Any]:
    lines = {} if report is None else report["lines"]
    head = lines.get("MTP head")
    return {
        "model": model.name,
        "path": str(model.path),
        "family": model.family,
        "num_bytes": model.num_bytes,
        "bits": model.bits,
        "mtp_head": None if head is None else "yes" if head.startswith("/") else "no",
        "fits": _fits(model, report),
        "longest_context": lines.get("longest context"),
    }


def _fits(model: ModelOnDisk, report: dict[str, Any] | None) -> str | None:
    """Return `yes` with the longest context, or why not; None if it was not checked."""
    if not model.is_complete:
        return "no: files are missing; `orchard pull` continues the download"
    if report is None:
        return None
    if report["reason"] is not None:
        return f"no: {report['reason']}"
    longest = report["lines"].get("longest context", "").partition(" ")[0]
    return f"yes, {longest} tokens" if longest else "yes"
