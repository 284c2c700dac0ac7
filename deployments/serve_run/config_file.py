"""Reads and validates serve_config.yaml as a whole before anything starts.

Ray's schemas ignore unknown keys, and some of their defaults are surprising: with a misspelt `http_options` Serve binds
0.0.0.0. Here every unknown key is an error that names it.

The keys are those of config_keys.py, so that mistakes are found before Ray is imported. Ray itself validates the values
(`check_with_ray`).
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.args import AppArgs
from deployments.serve_run.config_keys import (
    APPLICATION_KEYS,
    DEPLOYMENT_KEYS,
    DEPLOYMENTS,
    HTTP_KEYS,
    LOGGING_KEYS,
    PLANNERS,
    TOP_KEYS,
    Reasons,
)
from engine.gpus import VISIBLE

APP = "deployments.app:build_app"
DEFAULT_HTTP_PORT = 8000
DEFAULT_CONFIG = "serve_config.yaml"
DEFAULTS = "the defaults"
"""Named in place of a file where there is none."""
KEY_OPTIONS = ("api_keys", "api_keys_file", "api_keys_env")


class ConfigError(Exception):
    """The configuration file is invalid.

    Args:
        path: The file.
        lines: One mistake per line, each starting with its key.
    """

    def __init__(self, path: str, lines: list[str]):
        super().__init__(path, lines)
        self.path = path
        self.lines = lines

    def __str__(self) -> str:
        return f"{self.path} is invalid:\n" + "\n".join(f"  {line}" for line in self.lines)


@dataclass(frozen=True)
class OrchardConfig:
    """A valid configuration file that contains Orchard's application."""

    raw: dict[str, Any]
    """The whole file."""
    application: dict[str, Any]
    """Orchard's entry in `applications`."""
    args: AppArgs
    path: str = DEFAULTS
    """The file."""

    @property
    def http(self) -> dict[str, Any]:
        return self.raw["http_options"]

    @property
    def host(self) -> str:
        return self.http["host"]

    @property
    def port(self) -> int:
        return int(self.http.get("port", DEFAULT_HTTP_PORT))

    @property
    def name(self) -> str:
        return self.application.get("name", "default")

    @property
    def route_prefix(self) -> str:
        return self.application.get("route_prefix", "/")

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Deployment name to the options that the file sets for it."""
        return {
            entry["name"]: {key: value for key, value in entry.items() if key != "name"}
            for entry in self.application.get("deployments", [])
        }


def chosen_file(given: str | None) -> str | None:
    """Return the file that was given, else DEFAULT_CONFIG of the current directory; None if there is none."""
    if given is not None:
        return given
    return DEFAULT_CONFIG if Path(DEFAULT_CONFIG).exists() else None


def read_config(path: str | Path, model: str | None = None, port: int | None = None) -> OrchardConfig | None:
    """Read and validate a file; return None if none of its applications is Orchard. Raises ConfigError.

    Args:
        path: The file.
        model: Replaces `engine.model` of Orchard's application.
        port: Replaces `http_options.port`.
    """
    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(str(path), [f"the file cannot be read: {error}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"the file is not valid YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(raw, dict):
        raise ConfigError(str(path), [f"expected keys such as `applications`, found {_kind(raw)}"])
    if not any(_is_ours(application) for application in _listed(raw)):
        mistakes = list(_why_none_is_ours(raw))
        if mistakes:
            raise ConfigError(str(path), mistakes)
        return None
    return _validated(raw, str(path), model, port)


def default_config(model: str | None = None, port: int | None = None) -> OrchardConfig:
    """Return the configuration of a server without a file: that of serve_config.yaml. Raises ConfigError.

    Args:
        model: `engine.model`; None: the demo model.
        port: `http_options.port`.
    """
    no_access_log = {"logging_config": {"enable_access_log": False}}  # the ingress logs each request
    application = {
        "name": "orchard",
        "route_prefix": "/",
        "import_path": APP,
        "args": {"spec_prefill": {"enabled": True}},
        "deployments": [{"name": name, **no_access_log} for name in (*PLANNERS, "ModelReplica")],
    }
    http = {"host": "127.0.0.1", "port": DEFAULT_HTTP_PORT}
    raw = {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}
    return _validated(raw, DEFAULTS, model, port)


def _validated(raw: dict[str, Any], path: str, model: str | None, port: int | None) -> OrchardConfig:
    if model is not None:
        _replace_model(raw, model)
    if port is not None and isinstance(raw.get("http_options"), dict):
        raw["http_options"]["port"] = port
    if mistakes := list(mistakes_in(raw)):
        raise ConfigError(path, mistakes)
    application = next(application for application in _listed(raw) if _is_ours(application))
    return OrchardConfig(raw, application, AppArgs.model_validate(application.get("args", {})), path)


def mistakes_in(raw: dict[str, Any]) -> Iterator[str]:
    """Yield the mistakes of a file that serves Orchard, one line each."""
    ours = [application for application in _listed(raw) if _is_ours(application)]
    only_ours = len(ours) == len(_listed(raw))
    top = TOP_KEYS if only_ours else {**TOP_KEYS, "grpc_options": None}
    yield from _key_mistakes(raw, top, "")
    yield from _logging_mistakes(raw, "")
    if raw.get("proxy_location") == "Disabled":
        yield "proxy_location: Disabled starts no HTTP proxy, which Orchard requires; use EveryNode or HeadOnly"
    if len(ours) > 1:
        names = ", ".join(str(application.get("name", "default")) for application in ours)
        yield f"applications: {len(ours)} entries are Orchard ({names}), but only one engine fits on a node"
    for i, application in enumerate(raw["applications"]):
        path = f"applications.{i}" if len(raw["applications"]) > 1 else "application"
        if not isinstance(application, dict):
            yield f"{path}: expected keys such as `import_path`, found {_kind(application)}"
        elif _is_ours(application):
            yield from _application_mistakes(application, path)
        else:
            yield from _key_mistakes(application, dict.fromkeys(APPLICATION_KEYS), path + ".")
    yield from _http_mistakes(raw, _keys_or_open(ours))


def _replace_model(raw: dict[str, Any], model: str) -> None:
    """Set `engine.model` of Orchard's applications; mistakes_in names what is no mapping on the way."""
    for application in _listed(raw):
        if _is_ours(application):
            place = application
            for key in ("args", "engine"):
                if place.get(key) is None:
                    place[key] = {}
                place = place[key]
                if not isinstance(place, dict):
                    break
            else:
                place["model"] = model


def check_with_ray(raw: dict[str, Any], path: str) -> None:
    """Validate the values of Ray's own keys with Ray's schemas. Imports ray.serve, which takes seconds.

    Raises ConfigError.
    """
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(path, list(_lines_of(error, ""))) from None


def is_loopback(host: str) -> bool:
    """Tell whether a host is `localhost` or a loopback IP address; other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _application_mistakes(application: dict[str, Any], path: str) -> Iterator[str]:
    yield from _key_mistakes(application, APPLICATION_KEYS, path + ".")
    yield from _logging_mistakes(application, path + ".")
    if "route_prefix" in application and not isinstance(application["route_prefix"], str):
        yield f"{path}.route_prefix: expected a path such as /, found {_kind(application['route_prefix'])}"
    yield from _gpu_mistakes(application.get("runtime_env"), path)
    args = application.get("args", {})
    if not isinstance(args, dict):
        yield f"args: expected keys such as `engine`, found {_kind(args)}"
        args = {}
    try:
        AppArgs.model_validate(args)
    except ValidationError as error:
        yield from _lines_of(error, "args")
    deployments = application.get("deployments", [])
    if not isinstance(deployments, list):
        yield f"{path}.deployments: expected a list, found {_kind(deployments)}"
        return
    seen = set()
    for deployment in deployments:
        yield from _deployment_mistakes(deployment, args)
        if isinstance(deployment, dict) and (name := deployment.get("name")) is not None:
            if name in seen:
                yield f"deployments.{name}: is listed twice"
            seen.add(name)


def _gpu_mistakes(runtime_env: Any, path: str) -> Iterator[str]:
    """Yield the mistake of GPUs that only the replicas would see, but not what counts and checks them at the start."""
    variables = runtime_env.get("env_vars") if isinstance(runtime_env, dict) else None
    if isinstance(variables, dict) and VISIBLE in variables:
        yield (
            f"{path}.runtime_env.env_vars.{VISIBLE}: may not be set: it is {variables[VISIBLE]!r}, but engines are "
            "counted, and their GPUs checked, by the environment of the server; set the variable there, and where "
            "`ray start` or `orchard join` runs on other nodes"
        )


def _deployment_mistakes(deployment: Any, args: dict[str, Any]) -> Iterator[str]:
    if not isinstance(deployment, dict) or not isinstance(deployment.get("name"), str):
        yield f"deployments: expected entries with a `name`, found {deployment!r}"
        return
    name = deployment["name"]
    if name not in DEPLOYMENTS:
        yield f"deployments.{name}: unknown deployment; the deployments are {', '.join(DEPLOYMENTS)}"
        return
    if name == "SpecPrefillScorer" and (reason := _sparse_prefill_off(args)) is not None:
        yield f"deployments.SpecPrefillScorer: does not exist, as {reason}"
    keys: Reasons = DEPLOYMENT_KEYS
    if name not in PLANNERS:
        unlimited = "is unlimited: max_running and max_queue in args decide how many requests there are"
        keys = {**DEPLOYMENT_KEYS, "max_ongoing_requests": unlimited}
    yield from _key_mistakes(deployment, keys, f"deployments.{name}.")
    yield from _logging_mistakes(deployment, f"deployments.{name}.")


def _sparse_prefill_off(args: dict[str, Any]) -> str | None:
    try:
        return AppArgs.model_validate(args).sparse_prefill_off
    except ValidationError:
        return None  # reported as a mistake of args


def _http_mistakes(raw: dict[str, Any], has_keys_or_is_open: bool) -> Iterator[str]:
    options = raw.get("http_options")
    if not isinstance(options, dict):
        found = "is missing" if options is None else f"expected keys such as `host`, found {_kind(options)}"
        yield f"http_options: {found}; without a host Ray would listen on all addresses (0.0.0.0): set host: 127.0.0.1"
        return
    yield from _key_mistakes(options, HTTP_KEYS, "http_options.")
    host = options.get("host")
    if not isinstance(host, str) or not host:
        found = "is missing" if host is None else f"expected an address, found {_kind(host)}"
        yield f"http_options.host: {found}; Ray would listen on all addresses (0.0.0.0): set host: 127.0.0.1"
    elif not is_loopback(host) and not has_keys_or_is_open:
        yield (
            f"http_options.host: {host} can be reached by other machines. Set args.http.api_keys (a list of "
            "'sha256:<hash of a key>'), api_keys_file or api_keys_env there, or args.http.open: true if every client "
            "that can reach the server may use it"
        )
    port = options.get("port", DEFAULT_HTTP_PORT)
    if isinstance(port, bool) or not str(port).isdigit() or not 1 <= int(port) <= 65535:
        yield f"http_options.port: expected a number from 1 to 65535, found {port!r}"


def _keys_or_open(ours: list[dict[str, Any]]) -> bool:
    for application in ours:
        args = application.get("args")
        http = args.get("http") if isinstance(args, dict) else None
        if not isinstance(http, dict) or not (any(map(http.get, KEY_OPTIONS)) or http.get("open") is True):
            return False
    return True


def _key_mistakes(values: dict[str, Any], keys: Reasons, prefix: str) -> Iterator[str]:
    for key in values:
        if key not in keys:
            yield f"{prefix}{key}: unknown key; the keys are {', '.join(k for k, why in keys.items() if not why)}"
        elif (reason := keys[key]) is not None:
            yield (
                f"{prefix}{key}: may not be set: it {reason}"
                if reason.startswith(("is ", "has "))
                else (f"{prefix}{key}: may not be set: {reason}")
            )


def _logging_mistakes(values: dict[str, Any], prefix: str) -> Iterator[str]:
    config = values.get("logging_config")
    if isinstance(config, dict):
        yield from _key_mistakes(config, LOGGING_KEYS, f"{prefix}logging_config.")
    elif config is not None:
        yield f"{prefix}logging_config: expected keys such as `log_level`, found {_kind(config)}"


def _lines_of(error: ValidationError, prefix: str) -> Iterator[str]:
    for e in error.errors():
        key = ".".join((*([prefix] if prefix else []), *map(str, e["loc"])))
        if e["type"] == "extra_forbidden":
            yield f"{key}: unknown key"
        elif e["type"] == "value_error":
            separator = ": " if e["loc"] else "."  # lines of AppArgs' own checks start with the key below args
            yield from (f"{key}{separator}{line}" for line in e["msg"].removeprefix("Value error, ").split("\n"))
        else:
            yield f"{key}: {e['msg']}, not {e['input']!r}"


def _listed(raw: dict[str, Any]) -> list[Any]:
    applications = raw.get("applications")
    return applications if isinstance(applications, list) else []


def _is_ours(application: Any) -> bool:
    return isinstance(application, dict) and str(application.get("import_path")).replace(":", ".") == APP.replace(
        ":", "."
    )


def _why_none_is_ours(raw: dict[str, Any]) -> Iterator[str]:
    """Yield mistakes of a file without Orchard's application that is probably meant for Orchard, else nothing."""
    if "applications" not in raw:
        yield "applications: is missing"
    elif not isinstance(raw["applications"], list):
        yield f"applications: expected a list, found {_kind(raw['applications'])}"
    for application in _listed(raw):
        path = application.get("import_path") if isinstance(application, dict) else None
        if path is None or str(path).startswith("deployments."):
            yield f"application.import_path: expected {APP}, found {path!r}"


def _kind(value: Any) -> str:
    return {dict: "keys", list: "a list", type(None): "nothing (null)"}.get(type(value), repr(value))


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys of a mapping, of which YAML would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key.__hash__ is None:
                raise yaml.constructor.ConstructorError(None, None, f"line {line}: a key must be a word, not {key!r}")
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} in line {line} is already in line {seen[key]}"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)
