"""Judges: programs of others that test a server, at pinned versions, and how each says what it has found."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Judged:
    """The end of a judge's command."""

    status: int
    output: str
    folder: Path
    """Folder of the files that it wrote."""


@dataclass(frozen=True)
class Judge:
    """A judge, or one of its commands."""

    name: str
    package: str
    """Package and version."""
    command: Callable[[str, str, Path], Sequence[str]]
    """Returns the command for a base URL without /v1, a model, and a folder for files."""
    verdict: Callable[[Judged], tuple[bool, str]]
    """Tells whether the server passes, and what was found in one line."""
    models: tuple[str, ...] = ("demo", "smollm2")
    """Models with which the judge means something."""


EXCUSED = ("mojibake",)
"""Ends of ids of failures that say nothing about the server: the demo's own tokens spell broken UTF-8."""

LLMPROBE, CACHE_PRESSURE, AGENTBLASTER = "llmprobe@0.6.12", "cache-pressure==0.6.3", "agentblaster==0.1.0"


def _uvx(package: str, program: str, *arguments: str) -> list[str]:
    return ["uvx", "--quiet", "--python", sys.executable, "--from", package, program, *arguments]


def _llmprobe(url: str, model: str, folder: Path) -> list[str]:
    return ["npx", "-y", LLMPROBE, url, "-m", model, "--no-bench", "--no-save", "--json"]


def _llmprobe_verdict(judged: Judged) -> tuple[bool, str]:
    start = judged.output.find("{")
    if start < 0:
        return False, f"no JSON; status {judged.status}"
    report = json.JSONDecoder().raw_decode(judged.output[start:])[0]  # npm may say something behind it
    broken = {
        f"{failure['id']}: {failure['message'][:120]}"
        for result in report["conformance"]["results"]
        for failure in result["failures"]
        if failure["severity"] == "MUST" and failure["id"].rpartition("-no-")[2] not in EXCUSED
    }
    tiers = {tier["tier"]: f"{tier['supported']}/{tier['total']}" for tier in report["coverage"]["byTier"]}
    counts = f"MUST {report['conformance']['passed']} of {report['conformance']['total']}, {tiers}"
    return not broken, "; ".join([counts, *sorted(broken)])


def _needles(url: str, model: str, folder: Path) -> list[str]:
    options = ["--lengths", "1000,4000", "--timeout", "600", "--output", str(folder / "needles.json")]
    return _uvx(CACHE_PRESSURE, "needle-test", "--base-url", f"{url}/v1", "--model", model, *options)


def _pressure(url: str, model: str, folder: Path) -> list[str]:
    options = ["--kv-size", "16000", "--context-tokens", "2000", "--timeout", "600", "--margin", "0"]
    output = ["--output", str(folder / "pressure.json")]
    return _uvx(CACHE_PRESSURE, "cache-pressure", "--base-url", f"{url}/v1", "--model", model, *options, *output)


def _contract(contract: str) -> Callable[[str, str, Path], Sequence[str]]:
    """Return the commands, as one of a shell: the provider has to be named before."""

    def command(url: str, model: str, folder: Path) -> list[str]:
        program = shlex.join(_uvx(AGENTBLASTER, "agentblaster", "providers"))
        base = f"{url}/v1" if contract == "openai" else url
        add = f"add --name here --contract {contract} --base-url {base}"
        check = f"contract-check --provider here --model {model} --execute --output-json contract.json"
        return ["sh", "-c", f"cd {shlex.quote(str(folder))} && {program} {add} && {program} {check}"]

    return command


def _by_status(judged: Judged) -> tuple[bool, str]:
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", judged.output).splitlines() if line.strip()]
    return judged.status == 0, " / ".join(lines[-3:])[:400]


JUDGES = (
    Judge("llmprobe", LLMPROBE, _llmprobe, _llmprobe_verdict),
    Judge("needles", CACHE_PRESSURE, _needles, _by_status),
    Judge("cache pressure", CACHE_PRESSURE, _pressure, _by_status),
    Judge("contract openai", AGENTBLASTER, _contract("openai"), _by_status),
    Judge("contract anthropic", AGENTBLASTER, _contract("anthropic"), _by_status),
)
