"""Judges: programs of others that test a server, at pinned versions, and how each says what it has found."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Served:
    """A server, and the model behind it."""

    url: str
    """Without /v1."""
    name: str
    """Name of the model in requests."""
    checkpoint: Path
    """Directory with the model's tokenizer."""


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
    command: Callable[[Served, Path], Sequence[str]]
    """Returns the command for a server and a folder for files."""
    verdict: Callable[[Judged], tuple[bool, str]]
    """Tells whether the server passes, and what was found in one line."""
    models: tuple[str, ...] = ("demo", "smollm2")
    """Models with which the judge means something."""


EXCUSED = ("mojibake",)
"""Ends of ids of failures that say nothing about the server: the demo's own tokens spell broken UTF-8."""

LLMPROBE, CACHE_PRESSURE, AGENTBLASTER = "llmprobe@0.6.12", "cache-pressure==0.6.3", "agentblaster==0.1.0"
LLAMA_BENCHY, AGENTIC_BENCH = "llama-benchy==0.4.0", "agentic-bench==0.2.0"

BOOK = Path(__file__).parents[3] / "deployments" / "README.md"
"""Text of llama-benchy's prompts; its own is fetched from the internet."""
BOOK_PORT = 8497


def _uvx(package: str, program: str, *arguments: str, python: str = sys.executable) -> list[str]:
    return ["uvx", "--quiet", "--python", python, "--from", package, program, *arguments]


def _llmprobe(served: Served, folder: Path) -> list[str]:
    return ["npx", "-y", LLMPROBE, served.url, "-m", served.name, "--no-bench", "--no-save", "--json"]


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


def _needles(served: Served, folder: Path) -> list[str]:
    options = ["--lengths", "1000,4000", "--timeout", "600", "--output", str(folder / "needles.json")]
    return _uvx(CACHE_PRESSURE, "needle-test", "--base-url", f"{served.url}/v1", "--model", served.name, *options)


def _pressure(served: Served, folder: Path) -> list[str]:
    options = ["--kv-size", "16000", "--context-tokens", "2000", "--timeout", "600", "--margin", "0"]
    output = ["--output", str(folder / "pressure.json")]
    return _uvx(
        CACHE_PRESSURE, "cache-pressure", "--base-url", f"{served.url}/v1", "--model", served.name, *options, *output
    )


def _agents(served: Served, folder: Path) -> list[str]:
    sizes = ["--sessions", "3", "--main-tokens", "1500", "--sub-tokens", "600", "--sub-windows", "2"]
    steps = ["--step-tokens", "200", "--finalize-tokens", "100", "--max-tokens", "64", "--timeout", "600", "--no-viz"]
    asked = ["--base-url", f"{served.url}/v1", "--model", served.name, "--output", str(folder / "agents.json")]
    return _uvx(CACHE_PRESSURE, "agent-sim", *asked, *sizes, *steps, python="3.12")


def _aborts(served: Served, folder: Path) -> list[str]:
    sizes = ["--context-tokens", "2000", "--thinking-tokens", "60", "--max-tokens", "1000", "--timeout", "600"]
    asked = ["--base-url", f"{served.url}/v1", "--model", served.name, "--output", str(folder / "aborts.json")]
    return _uvx(CACHE_PRESSURE, "abort-sim", *asked, *sizes, python="3.12")


def _benchy(served: Served, folder: Path) -> list[str]:
    """Return the commands, as one of a shell: the book has to be served meanwhile."""
    loads = ["--pp", "256", "--tg", "32", "--depth", "0", "1024", "--concurrency", "1", "4", "--runs", "2"]
    ways = ["--enable-prefix-caching", "--exact-tg", "--skip-coherence", "--exit-on-first-fail", "--no-results-on-fail"]
    asked = ["--base-url", f"{served.url}/v1", "--model", served.name, "--tokenizer", str(served.checkpoint)]
    output = ["--book-url", f"http://127.0.0.1:{BOOK_PORT}/{BOOK.name}", "--format", "json"]
    output += ["--save-result", str(folder / "benchy.json")]
    shelf = [
        sys.executable,
        "-m",
        "http.server",
        str(BOOK_PORT),
        "--bind",
        "127.0.0.1",
        "--directory",
        str(BOOK.parent),
    ]
    program = shlex.join(_uvx(LLAMA_BENCHY, "llama-benchy", *asked, *loads, *ways, *output))
    return ["sh", "-c", f"{shlex.join(shelf)} & trap 'kill $!' EXIT; {program}"]


def _agentic(served: Served, folder: Path) -> list[str]:
    load = ["--dataset-name", "random", "--turns", "3", "--input-increment", "300", "--output-len", "32"]
    load += ["--max-concurrency", "4", "--num-sessions", "8", "--gap-policy", "zero"]
    asked = [
        "--base-url",
        served.url,
        "--backend",
        "openai",
        "--model",
        served.name,
        "--tokenizer",
        str(served.checkpoint),
    ]
    output = ["--output-file", str(folder / "agentic.jsonl")]
    return _uvx(AGENTIC_BENCH, "abench", "run", *asked, *load, *output)


def _contract(contract: str) -> Callable[[Served, Path], Sequence[str]]:
    """Return the commands, as one of a shell: the provider has to be named before."""

    def command(served: Served, folder: Path) -> list[str]:
        program = shlex.join(_uvx(AGENTBLASTER, "agentblaster", "providers"))
        base = f"{served.url}/v1" if contract == "openai" else served.url
        add = f"add --name here --contract {contract} --base-url {base}"
        check = f"contract-check --provider here --model {served.name} --execute --output-json contract.json"
        return ["sh", "-c", f"cd {shlex.quote(str(folder))} && {program} {add} && {program} {check}"]

    return command


def _by_status(judged: Judged) -> tuple[bool, str]:
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", judged.output).splitlines() if line.strip()]
    return judged.status == 0, " / ".join(lines[-3:])[:400]


JUDGES = (
    Judge("llmprobe", LLMPROBE, _llmprobe, _llmprobe_verdict),
    Judge("needles", CACHE_PRESSURE, _needles, _by_status),
    Judge("cache pressure", CACHE_PRESSURE, _pressure, _by_status),
    Judge("agents", CACHE_PRESSURE, _agents, _by_status),
    Judge("aborts", CACHE_PRESSURE, _aborts, _by_status),
    Judge("llama-benchy", LLAMA_BENCHY, _benchy, _by_status),
    Judge("agentic-bench", AGENTIC_BENCH, _agentic, _by_status),
    Judge("contract openai", AGENTBLASTER, _contract("openai"), _by_status),
    Judge("contract anthropic", AGENTBLASTER, _contract("anthropic"), _by_status),
)
