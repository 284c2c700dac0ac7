"""Check this machine, its settings and the running server; tell the remedy of whatever is wrong."""

import argparse
import os
import sys
from dataclasses import asdict

from deployments.commands.connection import KEY_VARIABLE
from deployments.commands.doctor_checks import CHECKS, Finding
from deployments.commands.doctor_readings import take
from deployments.commands.output import console, printable, show_json
from deployments.serve_run.config_file import DEFAULT_CONFIG, chosen_file

SIGNS = {"green": "✓", "yellow": "!", "red": "✗", "none": "–"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--config", help=f"configuration of the server; default: {DEFAULT_CONFIG}, if there is one")
    parser.add_argument("--url", help="the server; default: the address in the configuration")
    parser.add_argument("--peer", metavar="HOST:PORT", help="another machine of the cluster, to test the way to it")
    parser.add_argument("--hub", action="store_true", help="also connect to the hub")
    parser.add_argument("--quick", action="store_true", help="do not check the model, which takes seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 1 if a check is red."""
    config = chosen_file(options.config)
    found = take(config, options.url, options.peer, options.hub, not options.quick, os.environ.get(KEY_VARIABLE))
    findings = {name: check(found) for name, check in CHECKS.items()}
    if options.json:
        show_json([{"check": name, **asdict(finding)} for name, finding in findings.items()])
    else:
        _show(findings)
    return 1 if any(finding.state == "red" for finding in findings.values()) else 0


def _show(findings: dict[str, Finding]) -> None:
    from rich.text import Text

    screen, width = console(), max(map(len, findings))
    for name, finding in findings.items():
        style = "dim" if finding.state == "none" else finding.state
        line = Text(f"{SIGNS[finding.state]} {name:<{width}}  ", style=style)
        line.append(
            "\n".join(map(printable, finding.text.splitlines())), style="dim" if finding.state == "none" else ""
        )
        screen.print(line, soft_wrap=not sys.stdout.isatty())
        if finding.remedy:
            screen.print(Text(f"  {'':<{width}}  → {finding.remedy}", style=style), soft_wrap=not sys.stdout.isatty())
