"""serve_config.yaml as a whole: each mistake is named, and what is right is silent. No Ray is started."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from deployments.serve_run import config_keys
from deployments.serve_run.config_file import ConfigError, OrchardConfig, check_with_ray, read_config
from engine.demo import DEMO_MODEL
from tests.e2e.server import SHIPPED_CONFIG

KEY = f"sha256:{'0f' * 32}"


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], OrchardConfig | None]:
    def read(text: str) -> OrchardConfig | None:
        path = tmp_path / "serve_config.yaml"
        path.write_text(text)
        return read_config(path)

    return read


@pytest.fixture
def mistakes(read: Callable[[str], OrchardConfig | None]) -> Callable[[str], list[str]]:
    def mistakes(text: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text)
        return error.value.lines

    return mistakes


def text(app: str = "", top: str = "", http: str = "{host: 127.0.0.1}") -> str:
    """A file in which only the given lines are unusual."""
    return f"{top}\nhttp_options: {http}\napplications:\n- import_path: deployments.app:build_app\n{indent(app)}\n"


def indent(lines: str) -> str:
    return "\n".join(f"  {line}" for line in lines.splitlines())


def args(**sections: Any) -> str:
    return f"args: {yaml.safe_dump(sections, default_flow_style=True, width=10_000).strip()}"


def deployment(name: str, **options: Any) -> str:
    return "deployments: " + yaml.safe_dump([{"name": name, **options}], default_flow_style=True, width=10_000).strip()


BAD = {
    # Keys that nothing reads.
    "http_option": (
        "http_option: {host: 127.0.0.1}\napplications: [{import_path: 'deployments.app:build_app'}]",
        ["http_option: unknown key", "http_options: is missing; without a host Ray would listen on all"],
    ),
    "hosts": (
        text(http="{hosts: 127.0.0.1}"),
        ["http_options.hosts: unknown key; the keys are host, port", "http_options.host: is missing"],
    ),
    "prot": (text(http="{host: 127.0.0.1, prot: 1}"), ["http_options.prot: unknown key"]),
    "arg": (text("arg: {}"), ["application.arg: unknown key; the keys are name, route_prefix"]),
    "application key": (text("rute_prefix: /"), ["application.rute_prefix: unknown key"]),
    "top key": (text(top="proxy_locations: EveryNode"), ["proxy_locations: unknown key"]),
    "logging key": (text(top="logging_config: {level: INFO}"), ["logging_config.level: unknown key"]),
    "app logging key": (text("logging_config: {level: INFO}"), ["application.logging_config.level: unknown key"]),
    "deployment logging key": (
        text(deployment("MLLM", logging_config={"level": "INFO"})),
        ["deployments.MLLM.logging_config.level: unknown key"],
    ),
    "deployment key": (
        text(deployment("MLLM", max_ongoing_request=3)),
        ["deployments.MLLM.max_ongoing_request: unknown key"],
    ),
    "deployment name": (
        text(deployment("Ingres")),
        ["deployments.Ingres: unknown deployment; the deployments are Ingress, TextMTP"],
    ),
    "args key": (text(args(engin={})), ["args.engin: unknown key"]),
    "engine key": (text(args(engine={"modle": "x"})), ["args.engine.modle: unknown key"]),
    # Keys that Orchard derives.
    "num_replicas": (text(deployment("Ingress", num_replicas=2)), ["deployments.Ingress.num_replicas: may not be set"]),
    "autoscaling": (
        text(deployment("ModelReplica", autoscaling_config={"max_replicas": 2})),
        ["deployments.ModelReplica.autoscaling_config: may not be set: the number of replicas follows from"],
    ),
    "ingress limit": (
        text(deployment("Ingress", max_ongoing_requests=5)),
        ["deployments.Ingress.max_ongoing_requests: may not be set: it is unlimited: max_running"],
    ),
    "engine limit": (
        text(deployment("ModelReplica", max_ongoing_requests=5)),
        ["deployments.ModelReplica.max_ongoing_requests: may not be set"],
    ),
    "queue limit": (
        text(deployment("TextMTP", max_queued_requests=5)),
        ["deployments.TextMTP.max_queued_requests: may not be set: Serve must not refuse"],
    ),
    "shutdown timeout": (
        text(deployment("TextMTP", graceful_shutdown_timeout_s=5)),
        ["deployments.TextMTP.graceful_shutdown_timeout_s: may not be set: it is derived from args.drain_timeout_s"],
    ),
    "actor options": (
        text(deployment("ModelReplica", ray_actor_options={"num_gpus": 1})),
        ["deployments.ModelReplica.ray_actor_options: may not be set"],
    ),
    "user_config": (text(deployment("MLLM", user_config={})), ["deployments.MLLM.user_config: may not be set: it has"]),
    "request timeout": (
        text(http="{host: 127.0.0.1, request_timeout_s: 5}"),
        ["http_options.request_timeout_s: may not be set: it would also abort answers"],
    ),
    "app host": (text("host: 127.0.0.1"), ["application.host: may not be set: belongs to the section http_options"]),
    "visible GPUs": (
        text("runtime_env: {env_vars: {CUDA_VISIBLE_DEVICES: '1,2'}}"),
        ["application.runtime_env.env_vars.CUDA_VISIBLE_DEVICES: may not be set: it is '1,2', but engines are counted"],
    ),
    "autoscaling_policy": (text("autoscaling_policy: {}"), ["application.autoscaling_policy: may not be set"]),
    "target_capacity": (text(top="target_capacity: 50"), ["target_capacity: may not be set"]),
    "grpc_options": (text(top="grpc_options: {port: 1}"), ["grpc_options: may not be set: it has no effect"]),
    # Wrong kinds and values.
    "applications null": ("applications: null", ["applications: expected a list, found nothing (null)"]),
    "applications mapping": ("applications: {a: 1}", ["applications: expected a list, found keys"]),
    "no applications": ("http_options: {host: 127.0.0.1}", ["applications: is missing"]),
    "import path": (
        "applications: [{import_path: 'deployments.ap:build_app'}]",
        ["application.import_path: expected deployments.app:build_app, found 'deployments.ap:build_app'"],
    ),
    "no import path": ("applications: [{args: {}}]", ["application.import_path: expected deployments.app:build_app"]),
    "empty": ("", ["expected keys such as `applications`, found nothing (null)"]),
    "list": ("- 1", ["expected keys such as `applications`, found a list"]),
    "no yaml": ("a: [1", ["the file is not valid YAML"]),
    "tabs": ("a:\n\tb: 1", ["the file is not valid YAML"]),
    "python object": ("a: !!python/name:os.system", ["the file is not valid YAML"]),
    "duplicate key": (
        text(args() + "\n" + args()),
        ["the file is not valid YAML: the key 'args' in line 6 is already in line"],
    ),
    "duplicate section": (
        text("args:\n  engine: {model: a}\n  engine: {model: b}"),
        ["the file is not valid YAML: the key 'engine' in line 7 is already in line 6"],
    ),
    "null sections": (
        text("args:\ndeployments:"),
        [
            "args: expected keys such as `engine`, found nothing (null)",
            "application.deployments: expected a list, found nothing (null)",
        ],
    ),
    "args list": (text("args: [1]"), ["args: expected keys such as `engine`, found a list"]),
    "http_options null": (text(http="null"), ["http_options: is missing"]),
    "port": (text(http="{host: 127.0.0.1, port: 80000}"), ["http_options.port: expected a number from 1 to 65535"]),
    "port word": (text(http="{host: 127.0.0.1, port: http}"), ["http_options.port: expected a number"]),
    "no route": (text("route_prefix: null"), ["application.route_prefix: expected a path such as /, found nothing"]),
    "no proxies": (text(top="proxy_location: Disabled"), ["proxy_location: Disabled starts no HTTP proxy"]),
    "deployments": (text("deployments: {MLLM: 1}"), ["application.deployments: expected a list, found keys"]),
    "deployment without name": (text("deployments: [{x: 1}]"), ["deployments: expected entries with a `name`"]),
    "deployment twice": (text("deployments: [{name: MLLM}, {name: MLLM}]"), ["deployments.MLLM: is listed twice"]),
    "two Orchards": (
        "http_options: {host: 127.0.0.1}\napplications:\n"
        "- {name: a, route_prefix: /a, import_path: 'deployments.app:build_app'}\n"
        "- {name: b, route_prefix: /b, import_path: 'deployments.app:build_app'}",
        ["applications: 2 entries are Orchard (a, b), but only one engine fits on a node"],
    ),
    "value": (
        text(args(engine={"max_running": 0})),
        ["args.engine.max_running: Input should be greater than"],
    ),
    "model name": (text(args(served_model_name="")), ["args.served_model_name: String should have at least 1"]),
    "key hash": (text(args(http={"api_keys": ["secret"]})), ["args.http.api_keys.0: String should match pattern"]),
    "relative file of keys": (
        text(args(http={"api_keys_file": "keys.yaml"})),
        ["args.http.api_keys_file: String should match pattern"],
    ),
    # Exposure.
    "all addresses": (
        text(http="{host: 0.0.0.0}"),
        ["http_options.host: 0.0.0.0 can be reached by other machines. Set args.http.api_keys"],
    ),
    "an address": (text(http="{host: 192.168.1.2}"), ["http_options.host: 192.168.1.2 can be reached by other"]),
    "a name": (text(http="{host: my-mac.local}"), ["http_options.host: my-mac.local can be reached by other machines"]),
    "not open": (text(args(http={"open": False}), http="{host: '::'}"), ["http_options.host: :: can be reached"]),
    "no host": (text(http="{port: 8000}"), ["http_options.host: is missing; Ray would listen on all addresses"]),
    "empty host": (text(http="{host: ''}"), ["http_options.host: expected an address"]),
    # Options without an effect.
    "spec_prefill off": (
        text(args(spec_prefill={"enabled": False, "keep": 0.5, "lookahead": 8})),
        [
            "args.spec_prefill.keep: has no effect, as spec_prefill.enabled is false",
            "args.spec_prefill.lookahead: has no effect, as spec_prefill.enabled is false",
        ],
    ),
    "spec_prefill without draft": (
        text(args(engine={"model": "org/model"}, spec_prefill={"enabled": True, "keep": 0.5})),
        [
            "args.spec_prefill.keep: has no effect, as no draft_model is set for org/model "
            "(set spec_prefill.draft_model)"
        ],
    ),
    "the demo's draft": (
        text(args(engine={"model": "org/model"}, spec_prefill={"enabled": True, "draft_model": "demo"})),
        ["args.spec_prefill.draft_model: the demo's draft model does not have the tokenizer of 'org/model'"],
    ),
    "threshold": (
        text(args(spec_prefill={"enabled": True, "threshold_tokens": 9000, "max_tokens_scored": 100})),
        ["args.spec_prefill.threshold_tokens: 9000 has no effect"],
    ),
    "draft revision": (
        text(args(spec_prefill={"enabled": True, "draft_revision": "main"})),
        ["args.spec_prefill.draft_revision: has no effect"],
    ),
    "pinned tools": (
        text(args(engine={"prefix_cache": {"pinned": [{"system": "Hi.", "tools": [{"type": "function"}]}]}})),
        ["args.engine: prefix_cache.pinned.0.tools.0.function: Field required"],
    ),
    "cache off": (
        text(args(engine={"prefix_cache": {"enabled": False, "min_tokens": 3}})),
        ["args.engine.prefix_cache: prefix_cache.enabled is false: min_tokens would have no effect"],
    ),
    "no boundaries": (
        text(args(engine={"prefix_cache": {"boundaries": [], "max_gb": 3}})),
        ["args.engine.prefix_cache: prefix_cache.boundaries is empty and no prompt is pinned"],
    ),
    "mtp off, exact": (
        text(args(engine={"mtp": "off", "prompt_lookup": "off", "mtp_exact": "on"})),
        ["args.engine: mtp and prompt_lookup are off: mtp_exact 'on'"],
    ),
    "mtp off": (text(args(engine={"mtp": "off", "mtp_head": "x"})), ["args.engine: mtp is off: mtp_head 'x' would"]),
    "demo revision": (text(args(engine={"revision": "x"})), ["args.engine: model demo has no revisions: revision"]),
    "shared cpu": (text(args(engine={"device": "cpu", "share_device": True})), ["args.engine: device is cpu, which"]),
    "keys and open": (
        text(args(http={"api_keys": [KEY], "open": True})),
        ["args.http.open: has no effect, as http.api_keys, http.api_keys_file or http.api_keys_env is set"],
    ),
    "scorer off": (
        text(deployment("SpecPrefillScorer")),
        ["deployments.SpecPrefillScorer: does not exist, as"],
    ),
}


@pytest.mark.parametrize(("bad", "expected"), BAD.values(), ids=BAD)
def test_mistakes_in_a_config_file_are_listed_by_key(
    mistakes: Callable[[str], list[str]], bad: str, expected: list[str]
):
    lines = mistakes(bad)
    assert len(lines) == len(expected), lines
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)


GOOD = {
    "least": text(),
    "keys": text(args(http={"api_keys": [KEY]}), http="{host: 0.0.0.0}"),
    "a file of keys": text(args(http={"api_keys_file": "/keys.yaml"}), http="{host: 0.0.0.0}"),
    "keys in a variable": text(args(http={"api_keys_env": "KEYS"}), http="{host: 0.0.0.0}"),
    "open": text(args(http={"open": True}), http="{host: 0.0.0.0}"),
    "IPv6": text(http="{host: '::1', port: 1234}"),
    "a name": text(http="{host: localhost}"),
    "a loopback address": text(http="{host: 127.0.0.2}"),
    "defaults written out": text(args(spec_prefill={"enabled": False, "keep": 0.3}, engine={"device": "auto"})),
    "another model": text(args(engine={"model": "org/model"}, spec_prefill={"enabled": True})),
    "a model with the demo's tokenizer": text(
        args(engine={"model": str(DEMO_MODEL)}, spec_prefill={"enabled": True, "draft_model": "demo", "keep": 0.5})
    ),
    "planner": text(deployment("TextMTP", max_ongoing_requests=3, health_check_period_s=5)),
    "scorer": text(args(spec_prefill={"enabled": True}) + "\n" + deployment("SpecPrefillScorer")),
    "anchors": text("args:\n  engine: &e {max_running: 2}\n  spec_prefill: {enabled: true}"),
    "dotted path": text().replace("app:build_app", "app.build_app"),
    "another application beside it": text()
    + "- {name: b, route_prefix: /b, import_path: 'b:app', args: {x: 1}, deployments: [{name: B, num_replicas: 3}]}",
}


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_valid_config_file_is_accepted(read: Callable[[str], OrchardConfig | None], good: str):
    config = read(good)
    assert config is not None
    check_with_ray(config.raw, "x")


def test_shipped_config_file_is_valid():
    config = read_config(SHIPPED_CONFIG)
    assert config is not None
    check_with_ray(config.raw, "x")
    assert (config.host, config.port, config.name, config.route_prefix) == ("127.0.0.1", 8000, "orchard", "/")
    assert config.overrides["MLLM"] == {"logging_config": {"enable_access_log": False}}
    assert config.args.sparse_prefill_off is None


def test_shipped_config_serves_another_model_by_changing_a_line(read: Callable[[str], OrchardConfig | None]):
    config = read(SHIPPED_CONFIG.read_text().replace("model: demo\n", "model: org/model\n", 1))
    assert config is not None
    assert config.args.sparse_prefill_off == "no draft_model is set for org/model"


@pytest.mark.parametrize(
    "args", ["", "args: null", "args: {}", "args: {engine: null}", "args: {engine: {model: demo}}"]
)
def test_model_given_to_read_config_is_the_engines(tmp_path: Path, args: str):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"http_options: {{host: 127.0.0.1}}\napplications:\n- import_path: deployments.app:build_app\n  {args}\n"
    )
    config = read_config(file, "a/b")
    assert config is not None
    assert config.args.engine.model == config.application["args"]["engine"]["model"] == "a/b"


@pytest.mark.parametrize("args", ["args: [1]", "args: {engine: off}"])
def test_model_does_not_hide_a_mistake_in_the_file(tmp_path: Path, args: str):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"http_options: {{host: 127.0.0.1}}\napplications:\n- import_path: deployments.app:build_app\n  {args}\n"
    )
    with pytest.raises(ConfigError, match=r"args(\.engine)?: (Input should be|expected)"):
        read_config(file, "a/b")


def test_config_files_of_other_applications_are_ignored(read: Callable[[str], OrchardConfig | None]):
    assert read("http_option: 1\napplications: [{import_path: 'other:app', args: {x: 1}}]") is None
    assert read("applications: []") is None


def test_missing_config_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml is invalid:\n  the file cannot be read"):
        read_config(tmp_path / "none.yaml")


def test_values_of_keys_of_ray_are_validated_by_ray(read: Callable[[str], OrchardConfig | None]):
    config = read(text("logging_config: {log_level: LOUD}\nruntime_env: 3", http="{host: 127.0.0.1, root_path: 3}"))
    assert config is not None
    with pytest.raises(ConfigError) as error:
        check_with_ray(config.raw, "x")
    keys = [line.partition(":")[0] for line in error.value.lines]
    assert "http_options.root_path" in keys and "applications.0.runtime_env" in keys


@pytest.mark.parametrize(
    ("keys", "schema"),
    [
        (config_keys.TOP_KEYS, ServeDeploySchema),
        (config_keys.HTTP_KEYS, HTTPOptionsSchema),
        (config_keys.APPLICATION_KEYS, ServeApplicationSchema),
        (config_keys.DEPLOYMENT_KEYS, DeploymentSchema),
        (config_keys.LOGGING_KEYS, LoggingConfig),
    ],
)
def test_every_field_of_rays_schemas_is_either_known_or_refused(keys: dict[str, str | None], schema: Any):
    assert set(keys) == set(schema.model_fields)
