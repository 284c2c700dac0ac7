from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from engine.config import EngineConfig, MTPConfig


def read(text: str) -> dict[str, Any]:
    """Return the options of an engine written in YAML, other than the defaults."""
    config = EngineConfig.model_validate(yaml.safe_load(text))
    return config.model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mtp: off", {"mtp": "off"}),
        ("mtp_exact: on", {"mtp_exact": "on"}),
        ("mtp_exact: off", {"mtp_exact": "off"}),
        ("compile: on", {"compile": "on"}),
        ("compile: off", {"compile": "off"}),
        ("scheduler: {fairness: off}", {"scheduler": {"fairness": "off"}}),
    ],
)
def test_on_and_off_need_no_quotes_in_yaml(text: str, expected: dict[str, Any]):
    assert read(text) == expected
    quoted = text.replace(" on", " 'on'").replace(" off", " 'off'")
    assert read(quoted) == expected


@pytest.mark.parametrize(
    "text",
    [
        "mtp: on",
        "scheduler: {fairness: on}",
        "scheduler: {policy: off}",
        "device: on",
        "dtype: off",
        "embedding: {pooling: off}",
    ],
)
def test_a_boolean_is_rejected_where_its_word_is_not_a_choice(text: str):
    with pytest.raises(ValidationError, match="Input should be"):
        read(text)


def test_the_other_values_of_options_with_on_or_off_are_unchanged():
    assert read("{mtp: auto, mtp_exact: auto, compile: auto, scheduler: {fairness: client}}") == {}
    assert EngineConfig.model_validate({"mtp": {"max_rows": 2}}).mtp == MTPConfig(max_rows=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{prefix_cache: {fetch: on}}", "fetch is on, but prefix_cache.disk"),
        ("{prefix_cache: {fetch_port: 7000}}", "fetch_port 7000 would have no effect"),
        ("{prefix_cache: {disk: {path: x}, fetch: off, fetch_port: 7000}}", "fetch_port 7000 would have no effect"),
        ("{prefix_cache: {replicate: true}}", "replicate would have no effect"),
        ("{prefix_cache: {disk: {path: x}, fetch: off, replicate: true}}", "replicate would have no effect"),
    ],
)
def test_fetching_needs_the_disk_tier(text: str, reason: str):
    with pytest.raises(ValidationError, match=reason):
        read(text)
    assert read("{prefix_cache: {disk: {path: x}, fetch: on, fetch_port: 7000, replicate: true}}")


@pytest.mark.parametrize("value", [1, 0, "yes", "no", None])
def test_numbers_other_words_and_null_are_not_taken_for_on_or_off(value: Any):
    with pytest.raises(ValidationError, match="Input should be 'auto', 'on' or 'off'"):
        EngineConfig.model_validate({"compile": value})


def test_checkpoints_of_heads_and_draft_models_are_named_with_their_revisions():
    assert EngineConfig().draft_checkpoints == []
    assert EngineConfig(mtp_head="org/head").draft_checkpoints == [("org/head", None)]
    both = {"mtp_head": "org/head", "draft_model": {"model": "org/draft", "revision": "v2"}}
    assert EngineConfig.model_validate(both).draft_checkpoints == [("org/head", None), ("org/draft", "v2")]
