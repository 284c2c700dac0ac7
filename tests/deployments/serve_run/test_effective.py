"""The text that an operator reads at the start."""

from typing import Any

import pytest

from deployments.args import AppArgs
from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.effective import describe, describe_args, url_of

KEY = f"sha256:{'0f' * 32}"


def config(http: dict | None = None, application: dict | None = None, **args: Any) -> OrchardConfig:
    options = {"host": "127.0.0.1", **(http or {})}
    return OrchardConfig({"http_options": options}, application or {}, AppArgs.model_validate(args))


@pytest.mark.parametrize(
    ("http", "application", "url"),
    [
        ({}, {}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 9}, {"route_prefix": "/a"}, "http://127.0.0.1:9/a"),
        ({"host": "10.0.0.1"}, {}, "http://10.0.0.1:8000"),
        ({"host": "::1", "port": 9}, {}, "http://[::1]:9"),
        ({"host": "::"}, {"route_prefix": "/"}, "http://[::1]:8000"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k"}, {}, "https://127.0.0.1:8000"),
    ],
)
def test_url_is_that_of_the_configured_host_port_and_route_prefix(
    http: dict[str, Any], application: dict[str, Any], url: str
):
    assert url_of(config(http, application)) == url


@pytest.mark.parametrize(
    ("http", "args", "line"),
    [
        ({}, {}, "127.0.0.1:8000, this machine only, no keys"),
        ({}, {"open": True}, "127.0.0.1:8000, this machine only, no keys; http.open has no effect here"),
        ({"host": "0.0.0.0"}, {"open": True}, "0.0.0.0:8000, reachable from other machines, no keys (http.open)"),
        ({"host": "0.0.0.0"}, {"api_keys": [KEY]}, "0.0.0.0:8000, reachable from other machines, 1 keys"),
        (
            {},
            {"api_keys": [KEY], "api_keys_file": "/k.yaml", "api_keys_env": "KEYS"},
            "127.0.0.1:8000, this machine only, 1 keys, keys of /k.yaml, keys of $KEYS",
        ),
    ],
)
def test_description_shows_from_where_the_server_is_reachable(http: dict[str, Any], args: dict[str, Any], line: str):
    served = OrchardConfig({"http_options": {"host": "127.0.0.1", **http}}, {}, AppArgs.model_validate({"http": args}))
    assert f"  http          {line}\n" in describe(served, [])


def test_description_shows_non_default_options_without_pinned_prompts():
    shown = describe(
        config(
            engine={
                "model": "org/model",
                "max_running": 3,
                "mtp": {"max_draft_tokens": 2},
                "prefix_cache": {"pinned": [{"system": "secret"}], "disk": {"path": "/x"}},
            },
            served_model_name="mine",
        ),
        ["RAY_x=1 is not in effect: all is slow"],
    )
    for line in (
        "model         org/model, served as 'mine'; device auto, dtype auto",
        "spec_prefill  off: spec_prefill.enabled is false",
        "prefix_cache  all memory that rows and prefills do not need, 20 GiB in /x, 1 pinned prompts",
        "stopping      running requests get up to 25 s to finish",
        "environment   RAY_x=1 is not in effect: all is slow",
    ):
        assert f"  {line}" in shown.splitlines()
    for option in ("engine.max_running=3", "engine.mtp={'max_draft_tokens': 2", "served_model_name='mine'"):
        assert option in shown
    assert "secret" not in shown and "engine.prefix_cache.pinned=(1 of them)" in shown


def test_description_of_bare_arguments_says_that_http_is_not_checked():
    shown = describe_args(AppArgs.model_validate({"spec_prefill": {"enabled": True}}), [])
    assert "http          not checked" in shown
    assert "spec_prefill  on: draft_model demo, prompts with at least 8192 uncached tokens" in shown
