"""Builds the reference of all options of serve_config.yaml, deployments/OPTIONS.md, from the configuration models."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.args import AppArgs
from deployments.serve_run.serve_options import SERVE_SECTIONS, Option, Section

REFERENCE = Path(__file__).parent.parent / "OPTIONS.md"

COMMAND = "uv run python -m deployments.serve_run.options_reference"

INTRODUCTION = f"""\
# Options

All options of [serve_config.yaml](../serve_config.yaml), with the defaults that a file without them gets. Options of
Orchard are in the `args` of the application: `engine.memory.limit_gb` is written as

```yaml
applications:
  - import_path: deployments.app:build_app
    args:
      engine:
        memory:
          limit_gb: 24
```

Lists are written with `[]`: `engine.prefix_cache.pinned[].system` is the option `system` of an entry of `pinned`. Names
end with the unit: `_s` is seconds, `_mb` MiB and `_gb` GiB. Unknown keys and options that have no effect are errors;
`uv run orchard serve --check` reports them, and shows the options that differ from their defaults.

This file is generated from the descriptions in `engine/config.py`, `engine/media_config.py`,
`engine/spec_prefill_config.py`, `deployments/args.py`, `deployments/http/config.py` and
`deployments/serve_run/serve_options.py`. After a change there, run `{COMMAND} --write`.
"""

KINDS = {
    "boolean": "`true` or `false`",
    "null": "`null`",
    "object": "mapping",
    "regex": "regular expression",
    "string": "text",
}
"""Types and formats of JSON schema that have another name in the reference."""

Schema = dict[str, Any]
"""A JSON schema of pydantic."""


def reference() -> str:
    """Return the reference as Markdown."""
    return "\n".join([INTRODUCTION, *map(_as_markdown, [*sections_of_args(), *SERVE_SECTIONS])])


def sections_of_args() -> list[Section]:
    """Return a section for `args` and one for each model in it, with the options in the order of the fields."""
    schema = AppArgs.model_json_schema()
    return list(_Walk(schema["$defs"]).sections(schema, "", "args", "name of the model, and shutdown"))


@dataclass(frozen=True)
class _Walk:
    """Walks through a model's JSON schema, whose models are references to `models`."""

    models: dict[str, Schema]

    def sections(self, model: Schema, prefix: str, title: str, description: str) -> Iterator[Section]:
        fields = model["properties"].items()
        options = [
            option for name, field in fields if "$ref" not in field for option in self._options(model, name, prefix)
        ]
        yield Section(title, description, options)
        for name, field in fields:
            if "$ref" in field:
                path = f"{prefix}{name}"
                yield from self.sections(self._model(field), f"{path}.", path, field.get("description", ""))

    def _options(self, model: Schema, name: str, prefix: str) -> Iterator[Option]:
        """Yield the option of a field, and those of the models that its value may be or contain."""
        field, path = model["properties"][name], f"{prefix}{name}"
        default = "required" if name in model.get("required", ()) else f"`{json.dumps(field['default'])}`"
        yield Option(path, _values(field), default, field.get("description", ""))
        for alternative in [field.get("items", {}), *field.get("anyOf", ())]:
            if "$ref" in alternative:
                inner = self._model(alternative)
                start = f"{path}[]." if "items" in field else f"{path}."
                for inner_name in inner["properties"]:
                    yield from self._options(inner, inner_name, start)

    def _model(self, reference: Schema) -> Schema:
        return self.models[reference["$ref"].rpartition("/")[2]]


def _values(schema: Schema) -> str:
    """Describe the values that a schema accepts: its choices, or its type and bounds."""
    if "anyOf" in schema:
        return " or ".join(f"({text})" if "; " in text else text for text in map(_values, schema["anyOf"]))
    if "$ref" in schema:
        return "mapping"
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{choice}`" for choice in choices)
    if schema["type"] == "array":
        return f"{', '.join(['list', *_bounds(schema)])}; each entry: {_values(schema['items'])}"
    kind: str = schema["format"] if "format" in schema else schema["type"]
    return ", ".join([KINDS.get(kind, kind), *_bounds(schema)])


def _bounds(schema: Schema) -> Iterator[str]:
    for keyword, text in {
        "minimum": "≥ {}",
        "exclusiveMinimum": "> {}",
        "maximum": "≤ {}",
        "exclusiveMaximum": "< {}",
        "minLength": "length ≥ {}",
        "minItems": "entries ≥ {}",
        "maxLength": "length ≤ {}",
        "pattern": "matching `{}`",
    }.items():
        if keyword in schema:
            yield text.format(schema[keyword])


def _as_markdown(section: Section) -> str:
    rows = [(f"`{option.path}`", option.values, option.default, option.description) for option in section.options]
    table = [("option", "values", "default", "description"), ("---",) * 4, *rows]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in table]
    return "\n".join(
        [f"## {section.title}", "", f"{section.description[:1].upper()}{section.description[1:]}.", "", *lines, ""]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the reference, or write it to deployments/OPTIONS.md."""
    parser = argparse.ArgumentParser(COMMAND.removeprefix("uv run "), description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write it to {REFERENCE.name} instead of printing it")
    if parser.parse_args(argv).write:
        REFERENCE.write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())


if __name__ == "__main__":
    main()
