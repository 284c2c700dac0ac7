"""Runs the judges against a real server with each model, keeps what they print, and ends with 1 if one finds a fault.

uv run python -m tests.e2e.judges OUT                                 # .ci/nightly judges
uv run python -m tests.e2e.judges OUT --models demo --only llmprobe
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.demo import DEMO_MODEL
from tests.e2e.judges.catalogue import JUDGES, Judge, Judged, Served
from tests.e2e.programs.catalogue import SERVED_NAMES
from tests.e2e.programs.servers import model_server
from tests.support import smollm2

TIMEOUT_S = 1800.0


def main() -> int:
    """Return 1 if a judge finds a fault or cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for what the judges print and write")
    parser.add_argument("--models", nargs="+", default=["demo", "smollm2"], choices=["demo", "smollm2"])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of judges")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends, too
    out = options.out.absolute()
    verdicts: dict[str, dict[str, str]] = {}
    is_fine = True
    for model in options.models:
        checkpoint = DEMO_MODEL if model == "demo" else smollm2.make(out)
        with model_server(model, out) as url:
            served = Served(url, SERVED_NAMES[0], checkpoint)  # the first name of the server, whatever its model
            for judge in JUDGES:
                if any(part in judge.name for part in options.only) and model in judge.models:
                    began_s = time.monotonic()
                    passes, found = _run(judge, served, out / f"{judge.name} {model}".replace(" ", "-"))
                    is_fine = is_fine and passes
                    word = "passes" if passes else "finds a fault"
                    verdicts.setdefault(judge.name, {})[model] = f"{word}: {found}"
                    _say(
                        f"{judge.name} ({judge.package}), {model}, {time.monotonic() - began_s:.0f} s: {word}: {found}"
                    )
    (out / "verdicts.json").write_text(json.dumps(verdicts, indent=1))
    return 0 if is_fine else 1


def _run(judge: Judge, served: Served, folder: Path) -> tuple[bool, str]:
    """Run one judge in an empty home folder; keep its output in the folder."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    home = Path.home()
    caches = {"npm_config_cache": str(home / ".npm"), "UV_CACHE_DIR": str(home / ".cache" / "uv")}
    env = {**caches, **os.environ, "HOME": str(folder / "home")}
    with (folder / "output.txt").open("w+b") as output:
        try:
            status = subprocess.run(
                judge.command(served, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                timeout=TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            return False, f"no end within {TIMEOUT_S:.0f} s"
        output.seek(0)
        return judge.verdict(Judged(status, output.read().decode(errors="replace"), folder))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
