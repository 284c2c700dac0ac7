"""The table of engine/FAST_PATHS.md: which fast paths each family of the zoo has, read off the code's own flags.

python -m tests.support.fast_paths --write
"""

import sys
from dataclasses import asdict
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX
from engine.worker import patches
from engine.worker.burst import EQUAL_LENGTHS, BurstPrefill
from engine.worker.fast_paths import FastPaths
from engine.worker.language_model import LanguageModel
from tests.support.families import FAMILIES
from tests.support.zoo import new_module

DOCUMENT = Path(__file__).resolve().parents[2] / "engine/FAST_PATHS.md"
COLUMNS = {
    "bursts": "bursts",
    "prefix_snapshots": "snapshots within a chunk",
    "compiled_step": "compiled step",
    "prompt_lookup": "prompt lookup",
    "draft_model": "draft model",
    "mtp": "MTP head",
    "sparse_prefill": "sparse prefill",
}
NO_HEAD = "MTP heads of this family are not supported"
TEXT = """# Fast paths by family

The state of a prompt can be kept after any of its tokens and restored there in every family, so prompts that come
together with a common beginning compute it once. The columns:

* *bursts*: several waiting prompts in one forward, beside any of the other paths and with grammars
* *snapshots within a chunk*: a chunk may run on past the place of a snapshot, unless an MTP head or a draft model reads
  it too
* *compiled step*: the decode step as a compiled graph (`compile`, on CUDA by default)
* *prompt lookup*, *draft model*, *MTP head*: drafts by these proposers, the last if the checkpoint has a head;
  an EAGLE-3 head drafts wherever prompt lookup does, a DFlash drafter for the families that engine/README.md names;
  the head of Gemma 4 is its assistant
* *sparse prefill*: the family executes plans that leave tokens of a prompt out

A number stands for the reason below the table. Quantized weights change none of them.

"""


def document() -> str:
    """Return the text of engine/FAST_PATHS.md."""
    patches.install(decodes=True)
    reasons: dict[str, int] = {}
    rows = [f"| family | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, family in FAMILIES.items():
        if family.quantization is not None:
            continue
        language_model = LanguageModel(new_module(family.config).language_model)
        paths = FastPaths.of(language_model, family.config["model_type"])
        reasons_of = asdict(paths) | dict(paths.drafts)
        found = {column: reasons_of[column] for column in COLUMNS}
        if found["mtp"] is not None:
            found["mtp"] = NO_HEAD
        if found["bursts"] is None and not BurstPrefill(language_model, None).skips_padding:
            found["bursts"] = EQUAL_LENGTHS
        cells = ["yes" if reason is None else _numbered(reason, reasons) for reason in found.values()]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return TEXT + "\n".join([*rows, "", *notes]) + "\n"


def _numbered(reason: str, reasons: dict[str, int]) -> str:
    number = reasons.setdefault(reason, len(reasons) + 1)
    return f"yes ({number})" if reason == EQUAL_LENGTHS else f"no ({number})"


if __name__ == "__main__" and "--write" in sys.argv:
    DOCUMENT.write_text(document(), encoding="utf-8")
