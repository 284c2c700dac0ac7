"""The effective configuration as text, printed at the start."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deployments.args import AppArgs
from deployments.http.config import HttpConfig
from deployments.serve_run.config_file import OrchardConfig, is_loopback
from engine.errors import EngineFailed

HIDDEN = ("api_keys", "pinned")
"""Fields shown as a number of entries: hashes of keys, and prompts."""


def describe(config: OrchardConfig, environment: list[str]) -> str:
    """Describe the effective configuration.

    Args:
        config: The configuration file.
        environment: Lines of environment.not_in_effect.
    """
    lines = [("file", config.path), ("http", _http_line(config))]
    return _as_text([*lines, *_lines_of_args(config.args), *_environment_lines(environment)])


def describe_args(args: AppArgs, environment: list[str]) -> str:
    """Describe the effective configuration if only `args` are known: in `serve deploy`, or without the hook."""
    http = (
        "not checked: only `orchard serve`, and `serve run` if orchard_launch.pth is in effect, read the configuration "
        "outside of `args`. Make sure that http_options.host is not reachable from other machines without API keys"
    )
    return _as_text([("http", http), *_lines_of_args(args), *_environment_lines(environment)])


def sparse_prefill_line(args: AppArgs) -> str:
    """Describe in one line whether sparse prefill is on, or why it is off."""
    if (reason := args.sparse_prefill_off) is not None:
        return f"off: {reason}"
    config = args.spec_prefill
    prompts = f"prompts with at least {config.threshold_tokens} uncached tokens"
    return f"on: draft_model {config.draft_model or 'demo'}, {prompts}"


def url_of(config: OrchardConfig) -> str:
    """Return the base URL without a trailing slash; a loopback one if the server listens on all addresses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    scheme = "https" if config.http.get("ssl_certfile") and config.http.get("ssl_keyfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}{config.route_prefix.rstrip('/')}"


def _http_line(config: OrchardConfig) -> str:
    http, host = config.args.http, config.host
    keys = _keys(http)
    if is_loopback(host):
        ineffective = "; http.open has no effect here" if http.open else ""
        return f"{host}:{config.port}, this machine only, {keys}{ineffective}"
    return f"{host}:{config.port}, reachable from other machines, {keys}{' (http.open)' if http.open else ''}"


def _keys(http: HttpConfig) -> str:
    found = [f"{len(http.api_keys)} keys"] if http.api_keys else []
    found += [f"keys of {http.api_keys_file}"] if http.api_keys_file else []
    found += [f"keys of ${http.api_keys_env}"] if http.api_keys_env else []
    return ", ".join(found) or "no keys"


def _lines_of_args(args: AppArgs) -> Iterator[tuple[str, str]]:
    engine = args.engine
    yield "model", f"{engine.model}, served as {args.model_name!r}; device {engine.device}, dtype {engine.dtype}"
    yield "engines", _engines_line(args)
    if engine.model == "demo":
        yield "", "a toy model for trying out; `orchard serve smollm2` serves a small real one"
    yield "spec_prefill", sparse_prefill_line(args)
    yield "prefix_cache", _prefix_cache_line(args)
    yield "stopping", f"running requests get up to {args.drain_timeout_s:g} s to finish"
    changed = [f"{name}={value}" for name, value in _changed(args) if name not in ("engine.model",)]
    yield "changed", ", ".join(changed) or "none: every other option has its default"


def _engines_line(args: AppArgs) -> str:
    try:
        num = args.engines_here()
    except EngineFailed as error:  # the start is refused with it later
        return str(error)
    return f"{num} on this machine{', one per GPU' if num > 1 and args.engines_per_node == 'all' else ''}"


def _prefix_cache_line(args: AppArgs) -> str:
    config = args.engine.prefix_cache
    if not config.enabled:
        return "off"
    size = "all memory that rows and prefills do not need" if config.max_gb is None else f"{config.max_gb:g} GiB"
    disk = f"{config.disk.max_gb:g} GiB in {config.disk.path}" if config.disk is not None else "no disk"
    return f"{size}, {disk}, {len(config.pinned)} pinned prompts"


def _changed(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in type(config).model_fields.items():
        value, default = getattr(config, name), field.get_default(call_default_factory=True)
        if value == default:
            continue
        if name in HIDDEN:
            yield f"{prefix}{name}", f"({len(value)} of them)"
        elif isinstance(value, BaseModel) and isinstance(default, BaseModel):
            yield from _changed(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value.model_dump(mode="json") if isinstance(value, BaseModel) else repr(value)


def _environment_lines(environment: list[str]) -> Iterator[tuple[str, str]]:
    for line in environment:
        yield "environment", line


def _as_text(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(["Effective configuration:", *(f"  {name:<{width}}{text}" for name, text in lines)])
