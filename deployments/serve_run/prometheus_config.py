"""The configuration of a Prometheus that reads Orchard's metrics and Ray's."""

from dataclasses import dataclass
from pathlib import Path

from deployments.serve_run.config_file import KEY_OPTIONS, OrchardConfig

ORCHARD_JOB, RAY_JOB = "orchard", "ray"
"""Values of the label `job`; that of Ray is also in its service discovery file."""

SCRAPE_INTERVAL_S = 10
"""As in Ray's configuration. Panels need several samples within the shortest interval that Grafana asks for."""

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that a server listens on, and those that reach it from this machine."""

_TEXT = """\
# Written by `orchard dashboards` for Prometheus.
global:
  scrape_interval: {interval_s}s

scrape_configs:
- job_name: {job} # each node answers for itself
  scheme: {scheme}
  metrics_path: {path}
{authorization}{targets}
- job_name: {ray_job} # Ray's own metrics of all nodes, which the dashboards that Ray brings need
  file_sd_configs:
  - files: ['{discovery}']
    refresh_interval: 30s
"""

_AUTHORIZATION = """\
  authorization: # a file with one API key, an administrative one, as others do not see the names of keys
    credentials_file: '{key_file}'
"""

_THIS_NODE = """\
  static_configs:
  - targets: ['{address}']
"""

_ALL_NODES = """\
  file_sd_configs:
  - files: ['{discovery}'] # the addresses of Ray's nodes
    refresh_interval: 30s
  relabel_configs:
  - {{source_labels: [__address__], regex: '(.*):\\d+', replacement: '$1:{port}', target_label: __address__}}
  - {{replacement: {job}, target_label: job}}
"""


@dataclass(frozen=True)
class ScrapeTarget:
    """Where Prometheus finds `GET /metrics`."""

    scheme: str
    """`http` or `https`."""
    host: str
    port: int
    path: str
    needs_key: bool
    """Whether the server has API keys."""
    is_on_all_nodes: bool = False
    """Whether the server listens on all addresses, and so on those of all nodes of a cluster."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}"

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def scrape_target(config: OrchardConfig) -> ScrapeTarget:
    """Return where a Prometheus on this machine reads the server of a configuration file."""
    return ScrapeTarget(
        scheme="https" if config.http.get("ssl_certfile") else "http",
        host=_ANY_ADDRESS.get(config.host, config.host),
        port=config.port,
        path=config.route_prefix.rstrip("/") + "/metrics",
        needs_key=any(getattr(config.args.http, option) for option in KEY_OPTIONS),
        is_on_all_nodes=config.host in _ANY_ADDRESS,
    )


def prometheus_config(target: ScrapeTarget, key_file: Path, discovery: Path) -> str:
    """Return a complete prometheus.yml, for all nodes where the server listens on all addresses.

    Args:
        target: Where the metrics are.
        key_file: A file with an API key, of use only where the server has keys.
        discovery: Ray's service discovery file, which exists while Ray's dashboard runs.
    """
    targets = _ALL_NODES if target.is_on_all_nodes and discovery.exists() else _THIS_NODE
    return _TEXT.format(
        interval_s=SCRAPE_INTERVAL_S,
        job=ORCHARD_JOB,
        scheme=target.scheme,
        path=target.path,
        authorization=_AUTHORIZATION.format(key_file=key_file) if target.needs_key else "",
        targets=targets.format(address=target.address, discovery=discovery, port=target.port, job=ORCHARD_JOB),
        ray_job=RAY_JOB,
        discovery=discovery,
    )
