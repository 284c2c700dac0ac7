"""The table of engine/README.md: every drafter of mlx-vlm, and whether it drafts here.

python -m tests.support.drafter_table --write
"""

import pkgutil
import sys
from importlib.metadata import version
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx_vlm.speculative.drafters as drafters  # isort: skip

from engine.worker import head_loader
from engine.worker.heads.refused_drafters import REFUSED

DOCUMENT = Path(__file__).resolve().parents[2] / "engine/README.md"
DFLASH = "qwen3_dflash"
"""The library's module of the drafters whose model_type is that of their layers."""


def modules() -> list[str]:
    """Return the names of all drafters of the library."""
    return sorted(one.name for one in pkgutil.iter_modules(drafters.__path__) if one.ispkg)


def served() -> dict[str, list[str]]:
    """Return the families for which each drafter drafts, by the name of the library's module; empty for several."""
    found: dict[str, list[str]] = {
        name: [] for each in head_loader.OWN_FORMATS.values() for name in each.split_types or (DFLASH,)
    }
    for family, each in head_loader.FORMATS.items():
        for name in each.split_types:
            found.setdefault(name, []).append(family)
    return found


def table() -> str:
    """Return the table."""
    families = served()
    rows = [
        f"| drafter of mlx-vlm {version('mlx-vlm')} | here | `model_type` of the model, or the reason |",
        "|---|---|---|",
    ]
    for name in modules():
        if name in families:
            targets = ", ".join(f"`{family}`" for family in families[name]) or "several, see above"
            rows.append(f"| `{name}` | served | {targets} |")
        else:
            rows.append(f"| `{name}` | refused | {REFUSED[name]} |")
    return "\n".join(rows)


def written(text: str) -> str:
    """Return a document with its table brought up to date."""
    lines, new = text.split("\n"), table().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("| drafter of mlx-vlm"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:start], *new, *lines[end:]])


if __name__ == "__main__" and "--write" in sys.argv:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
