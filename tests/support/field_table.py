"""The table of engine/CONFIG_FIELDS.md: which fields of config.json each family reads, and which must have a value.

python -m tests.support.field_table --write
"""

import sys
import textwrap
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.processing.context import WINDOWS_IGNORED, library_config
from engine.processing.reference_config import arithmetic_reference, text_section
from engine.worker.config_fields import ARITHMETIC, COMPUTED, NEUTRAL, computed_values, is_read
from engine.worker.language_model import config_of
from engine.worker.patches import families
from engine.worker.windows import found_reaches
from tests.support.families import FAMILIES
from tests.support.zoo import new_module

DOCUMENT = Path(__file__).resolve().parents[2] / "engine/CONFIG_FIELDS.md"
TEXT = """# Fields of config.json by family

Fields that change the answers but no shape of a weight: what changes a shape, a bias or the number of heads, fails when
the weights are loaded.

* *read*: the library's module computes with the value. Left out, both the library and transformers must have the same
  default, or the checkpoint is refused
* *only with*: the module does not read the field, and computes with this value: another is refused by its name
* *window*: *applied* from `sliding_window` and the pattern of the layers as transformers resolves it; *limits the
  context* where the module ignores it; –: the family has none

{neutral}

Fields that neither transformers nor the library reads for a family change nothing and may have any value.

| family | read | only with | window |
|---|---|---|---|
"""


def document() -> str:
    """Return the text of engine/CONFIG_FIELDS.md."""
    families.correct()
    values = ", ".join(f"`{name}` {_values(NEUTRAL[name])}" for name in ARITHMETIC if NEUTRAL[name])
    neutral = textwrap.fill(
        "A family with * is unknown to transformers: another field of this list that it does not read must be absent "
        f"or have its neutral value: {values}.",
        width=120,
        break_long_words=False,
        break_on_hyphens=False,
    )
    rows: dict[str, str] = {}
    for checkpoint in FAMILIES.values():
        config = library_config(EngineConfig(), checkpoint.config)
        section = text_section(config)
        family = section.get("model_type", config["model_type"])
        if checkpoint.quantization is None:
            rows.setdefault(f"{family} {config['model_type']}", _row(family, config))
    return TEXT.format(neutral=neutral) + "\n".join(row for _, row in sorted(rows.items())) + "\n"


def _row(family: str, config: dict[str, Any]) -> str:
    language_model = new_module(config).language_model
    args, reference = config_of(language_model), arithmetic_reference(config)
    known = [name for name in ARITHMETIC if reference is None or hasattr(type(reference)(), name)]
    read = [name for name in known if is_read(family, name, args)]
    unread = [name for name in known if name not in read]
    only = [name for name in unread if reference is not None or (family, name) in COMPUTED]
    values = [f"`{name}` {_values(computed_values(family, name, reference))}" for name in only]
    name = f"`{family}`" + (f" in `{config['model_type']}`" if family != config["model_type"] else "")
    star = " *" if reference is None else ""
    has_windows = any(isinstance(reach, int) for reach in found_reaches(language_model))
    window = "applied" if has_windows else "limits the context" if family in WINDOWS_IGNORED else "–"
    return f"| {name}{star} | {', '.join(f'`{one}`' for one in read) or '–'} | {', '.join(values) or '–'} | {window} |"


def _values(values: tuple[Any, ...]) -> str:
    return " or ".join(str(value) for value in values)


if __name__ == "__main__" and "--write" in sys.argv:
    DOCUMENT.write_text(document(), encoding="utf-8")
