"""Compares Orchard with its peers over HTTP, on the same weights, one server at a time.

    uv run --with matplotlib python -m tests.benchmarks.peers OUT_DIR [--rounds 3] [--checkpoints demo smollm2]
    uv run --with matplotlib python -m tests.benchmarks.peers OUT_DIR --only-figures

Arms take turns in each round, which begins with another one each time. OUT_DIR gets the records and logs of each run,
a table in Markdown and a plot as PNG per checkpoint. A round takes three to five minutes per arm and checkpoint on two
cores; nothing else may run beside it. The first run installs the peers from PyPI.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.benchmarks.measure import ROOT, heading
from tests.benchmarks.peers.arms import ARMS, CHECKPOINTS, Arm, Checkpoint
from tests.benchmarks.peers.figures import load, markdown, plot, rows
from tests.support.smollm2 import CACHE

PORT = 8100


def run(arm: Arm, checkpoint: Checkpoint, out: Path) -> None:
    """Serve a checkpoint with one arm, run all scenarios, and write their figures."""
    out.mkdir(parents=True, exist_ok=True)
    with arm.serving(CACHE, checkpoint, PORT, out) as base:
        served = httpx.get(f"{base}/v1/models", timeout=30).json()["data"][0]["id"] if not arm.packages else None
        command = [sys.executable, "-m", "tests.benchmarks.peers.load", base, served or str(checkpoint.path)]
        command += ["--images"] if arm.reads_images and checkpoint.reads_images else []
        command += ["--tools"] if checkpoint.has_tools else []
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process, (out / "figures.jsonl").open("w") as record:
            for line in process.stdout:
                record.write(line)
                one = json.loads(line)
                rate, first = one["tokens/s"], one["first token p50, ms"]
                print(f"  {one['scenario']:28} {rate:8.1f} tokens/s, first {first:.0f} ms", *one["errors"], flush=True)
    if process.returncode:
        raise RuntimeError(f"the client ended with status {process.returncode}")


def show(out: Path, name: str, arms: Sequence[str]) -> None:
    """Print and write the table and the plot of one checkpoint."""
    records = load(out / name)
    shown = [arm for arm in arms if arm in records]
    found = list(rows(records))
    text = markdown(found, shown)
    (out / f"{name}.md").write_text(text + "\n")
    plot(found, shown, f"{name}: {heading('')}", out / f"{name}.png")
    print(f"\n{name}\n\n{text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--checkpoints", nargs="+", choices=CHECKPOINTS, default=["demo", "smollm2"])
    parser.add_argument("--only-figures", action="store_true", help="of the records that are there")
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    for round in range(0 if args.only_figures else args.rounds):
        for name in args.checkpoints:
            checkpoint = CHECKPOINTS[name](CACHE)
            turned = args.arms[round % len(args.arms) :] + args.arms[: round % len(args.arms)]
            for arm in turned:
                print(f"{arm}, {checkpoint.name}, round {round + 1}", flush=True)
                try:
                    run(ARMS[arm], checkpoint, args.out / name / arm / str(round + 1))
                except (RuntimeError, subprocess.SubprocessError) as error:
                    print(f"  failed: {error}")
    for name in args.checkpoints:
        show(args.out, name, args.arms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
