"""The table of engine/FAMILIES.md: every model module of the two libraries, and whether its text is served.

python -m tests.support.family_table --write
"""

import inspect
import pkgutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx_lm.models  # isort: skip
import mlx_vlm.models  # isort: skip
from mlx_vlm.utils import MODEL_REMAPPING, get_model_and_args

from engine.worker.refused_families import REFUSED
from tests.support.families import FAMILIES
from tests.support.families.unserved import NOT_IN_MLX_VLM, NOT_TEXT, PARTS, REFUSED_BY_CACHE, UNTESTED

DOCUMENT = Path(__file__).resolve().parents[2] / "engine/FAMILIES.md"
TEXT = """# Model families

Every folder of mlx-vlm {mlx_vlm} and every module of mlx-lm {mlx_lm} under `models/`, {total} in all. *Served*: a
tiny random checkpoint gives the tokens of the library's own forward over the whole sequence, alone, in a batch that
rows join and leave, and after a cached prefix. *Refused*: the start ends with this reason, before a weight is read.

* served: {served} ({names} checkpoints in the tests, further layouts and quantizations among them)
* refused: {refused}
* not tested: {untested}
* no text model: {not_text}

| `model_type` | state | caches of the layers, or the reason |
|---|---|---|
"""


def modules() -> list[str]:
    """Return the names of all model modules of both libraries; one that both have is listed once."""
    found = {one.name for one in pkgutil.iter_modules(mlx_vlm.models.__path__) if one.ispkg}
    alone = {one.name for one in pkgutil.iter_modules(mlx_lm.models.__path__)} - PARTS
    return sorted(found | {name for name in alone if MODEL_REMAPPING.get(name, name).lower() not in found})


def state_of(name: str) -> tuple[str, str]:
    """Return whether the family's text is served, and its caches or why not."""
    served = [family for family in FAMILIES.values() if family.config["model_type"] == name]
    if served:
        return "served", "; ".join(dict.fromkeys(family.caches.replace("*", " × ") for family in served))
    if name in REFUSED:
        return "refused", REFUSED[name]
    if name in REFUSED_BY_CACHE:
        return "refused", REFUSED_BY_CACHE[name]
    if name in NOT_IN_MLX_VLM:
        return "refused", f"mlx-vlm {version('mlx-vlm')} does not implement it"
    if name in UNTESTED:
        return "not tested", UNTESTED[name]
    if name in NOT_TEXT:
        return "no text model", NOT_TEXT[name]
    return "no text model", _why_not_text(name)


def _why_not_text(name: str) -> str:
    try:
        arch: Any = get_model_and_args({"model_type": name})[0]
    except ImportError as error:
        return f"its module needs the package {error.name}"
    if not hasattr(arch, "Model") or not hasattr(arch, "ModelConfig"):
        return "a pipeline that generates images or video, without a language model of its own"
    assert "language_model" not in inspect.getsource(arch.Model), f"{name} has a language model: classify it"
    return "an encoder or a model of vision, without a language model"


def document() -> str:
    """Return the text of engine/FAMILIES.md."""
    rows = {name: state_of(name) for name in modules()}
    states = [state for state, _ in rows.values()]
    head = TEXT.format(
        mlx_vlm=version("mlx-vlm"),
        mlx_lm=version("mlx-lm"),
        total=len(rows),
        names=len(FAMILIES),
        served=states.count("served"),
        refused=states.count("refused"),
        untested=states.count("not tested"),
        not_text=states.count("no text model"),
    )
    return head + "".join(f"| `{name}` | {state} | {text} |\n" for name, (state, text) in rows.items())


if __name__ == "__main__" and "--write" in sys.argv:
    DOCUMENT.write_text(document(), encoding="utf-8")
