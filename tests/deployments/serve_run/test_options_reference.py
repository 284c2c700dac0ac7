"""deployments/OPTIONS.md: complete, up to date, and right about the defaults."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel
from ray.serve.schema import HTTPOptionsSchema, LoggingConfig, ServeApplicationSchema, ServeDeploySchema

from deployments.app import build_app
from deployments.args import AppArgs
from deployments.serve_run import config_keys, options_reference
from deployments.serve_run.options_reference import REFERENCE, main, reference, sections_of_args
from deployments.serve_run.serve_options import SERVE_SECTIONS, Option
from engine.config import (
    DiskCacheConfig,
    DraftLimits,
    DraftModelConfig,
    MTPConfig,
    PinnedPrompt,
    PromptLookupConfig,
    RopeScaling,
)
from tests.deployments.test_app import deployments_of, scoring

OF_ARGS = {option.path: option for section in sections_of_args() for option in section.options}
OF_SERVE = {option.path: option for section in SERVE_SECTIONS for option in section.options}

NESTED = {
    "engine.mtp.": MTPConfig(),
    "engine.prompt_lookup.": PromptLookupConfig(),
    "engine.draft_model.": DraftModelConfig(model="demo"),
    "engine.draft_model.limits.": DraftLimits(),
    "engine.rope_scaling.": RopeScaling(type="yarn", factor=4),
    "spec_prefill.draft_rope_scaling.": RopeScaling(type="yarn", factor=4),
    "engine.prefix_cache.disk.": DiskCacheConfig(path="/cache"),
    "engine.prefix_cache.pinned[].": PinnedPrompt(system="You are helpful."),
}
"""Models that only exist when they are set, with no option set that has a default."""


def default_of(option: Option) -> Any:
    """Return the default as it would be written in the file, which is JSON and thereby YAML."""
    return json.loads(option.default.strip("`"))


def fields_of(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a model with their values."""
    for name, value in model:
        if isinstance(value, BaseModel):
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", model.model_dump(mode="json")[name]


def default_for(deployment: str, shown: str) -> float:
    """Return what a cell such as "`2` for ModelReplica, else `10`" says about a deployment."""
    parts = re.findall(r"`([\d.]+)`(?: for ([\w ]+))?", shown)
    return next(float(value) for value, names in parts if not names or deployment in names.split())


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_committed_options_reference_equals_the_generated_reference():
    assert REFERENCE.read_text(encoding="utf-8") == reference(), f"run {options_reference.COMMAND} --write"


def test_the_command_prints_and_writes_the_reference(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path):
    main([])
    assert capsys.readouterr().out == reference()
    monkeypatch.setattr(options_reference, "REFERENCE", tmp_path / "OPTIONS.md")
    main(["--write"])
    assert (tmp_path / "OPTIONS.md").read_text(encoding="utf-8") == reference()


def test_every_field_of_every_model_is_listed():
    expected = [
        *fields_of(AppArgs()),
        *(field for prefix, model in NESTED.items() for field in fields_of(model, prefix)),
    ]
    assert sorted(OF_ARGS) == sorted(path for path, _ in expected)
    assert set(AppArgs.model_json_schema()["$defs"]) >= {type(model).__name__ for model in NESTED.values()}


def test_no_cell_of_the_options_reference_is_empty():
    for section in [*sections_of_args(), *SERVE_SECTIONS]:
        assert section.description and section.options, section.title
        for option in section.options:
            assert all((option.path, option.values, option.default, option.description)), option
    assert not re.search(r"(?<!\\)\| *\|", reference())


@pytest.mark.parametrize("path", [path for path, _ in fields_of(AppArgs())])
def test_a_config_without_an_option_gets_the_default_that_is_shown(path: str):
    shown = default_of(OF_ARGS[path])
    assert dict(fields_of(AppArgs()))[path] == shown
    assert AppArgs.model_validate(nested(path, shown)) == AppArgs()


@pytest.mark.parametrize("prefix", NESTED)
def test_a_mapping_without_an_option_gets_the_default_that_is_shown(prefix: str):
    model = NESTED[prefix]
    for path, value in fields_of(model, prefix):
        if path.removeprefix(prefix) in model.model_fields_set:
            assert OF_ARGS[path].default in ("required", "`null`")  # of system and system_file one is set
        else:
            assert value == default_of(OF_ARGS[path])


@pytest.mark.parametrize(
    ("path", "value", "is_accepted"),
    [
        ("engine.max_running", 0, False),
        ("engine.max_running", 1, True),
        ("engine.max_running", 1024, True),
        ("engine.max_running", 1025, False),
        ("engine.mtp", "off", True),
        ("engine.mtp", "on", False),
    ],
)
def test_documented_values_are_accepted_and_undocumented_values_are_refused(path: str, value: Any, is_accepted: bool):
    assert OF_ARGS["engine.max_running"].values == "integer, ≥ 1, ≤ 1024"
    assert OF_ARGS["engine.mtp"].values == "`auto` or `off` or mapping"
    try:
        AppArgs.model_validate(nested(path, value))
    except ValueError:
        assert not is_accepted
    else:
        assert is_accepted


@pytest.mark.parametrize(
    ("prefix", "keys", "schema"),
    [
        ("", config_keys.TOP_KEYS, ServeDeploySchema),
        ("http_options.", config_keys.HTTP_KEYS, HTTPOptionsSchema),
        ("applications[].", config_keys.APPLICATION_KEYS, ServeApplicationSchema),
        ("applications[].deployments[].", config_keys.DEPLOYMENT_KEYS, None),
        ("logging_config.", config_keys.LOGGING_KEYS, LoggingConfig),
    ],
)
def test_the_options_of_serve_are_those_that_orchard_accepts_with_serves_defaults(
    prefix: str, keys: config_keys.Reasons, schema: type[BaseModel] | None
):
    listed = {path.removeprefix(prefix) for path in OF_SERVE if re.fullmatch(re.escape(prefix) + r"\w+", path)}
    assert listed == {key for key, reason in keys.items() if reason is None}
    for key, field in schema.model_fields.items() if schema is not None else ():
        if key in listed and (option := OF_SERVE[prefix + key]).default != "required":
            default = field.get_default(call_default_factory=True)
            assert default_of(option) == (default.value if isinstance(default, Enum) else default), option.path


@pytest.mark.parametrize(
    "key", ["max_ongoing_requests", "health_check_period_s", "health_check_timeout_s", "rolling_update_percentage"]
)
def test_the_defaults_of_deployments_are_those_of_the_graph(key: str):
    shown = OF_SERVE[f"applications[].deployments[].{key}"].default
    graph = deployments_of(build_app(scoring()))
    for name in config_keys.PLANNERS if key == "max_ongoing_requests" else config_keys.DEPLOYMENTS:
        assert default_for(name, shown) == getattr(graph[name]._deployment_config, key), name


def test_no_deployment_overrides_the_logging_config_of_the_file():
    graph = deployments_of(build_app(scoring()))
    configs = {name: deployment._deployment_config.logging_config for name, deployment in graph.items()}
    assert "SpecPrefillScorer" in configs and set(configs.values()) == {None}


def test_the_reference_is_generated_without_mlx_and_ray():
    code = "import sys; from deployments.serve_run.options_reference import reference; reference(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"mlx", "ray"} & {name.partition(".")[0] for name in done.stdout.split()}
