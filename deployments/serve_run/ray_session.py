"""RaySession: the files of this machine's newest Ray session that Prometheus and Grafana read."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

DISCOVERY_FILE = "prom_metrics_service_discovery.json"
"""Ray's dashboard writes the metrics ports of all nodes into it, for Prometheus."""

PROCESSES = ("raylet", "gcs_server")


@dataclass(frozen=True)
class RaySession:
    """The session of the last Ray node that was started here; `path` need not exist."""

    path: Path
    """The link `session_latest`, not what it points to: it stays right when Ray is started again."""
    metrics: Path
    """Where Ray's dashboard writes configurations for Prometheus and Grafana."""

    @property
    def discovery(self) -> Path:
        """The service discovery file for Prometheus."""
        return self.path / DISCOVERY_FILE

    @property
    def grafana_ini(self) -> Path:
        """The configuration file with which Grafana is to be started."""
        return self.metrics / "grafana" / "grafana.ini"

    @property
    def is_running(self) -> bool:
        """Whether a Ray process of the session runs, as far as this user may see."""
        session = self.path.resolve().name
        found = (process.info for process in psutil.process_iter(["name", "cmdline"]))
        return any(
            info["name"] in PROCESSES and any(session in word for word in info["cmdline"] or ()) for info in found
        )

    def dashboards(self) -> Path | None:
        """Return the folder whose dashboards Grafana shows; None while Ray's dashboard has not written its files."""
        provider = self.metrics / "grafana" / "provisioning" / "dashboards" / "default.yml"
        try:
            return Path(yaml.safe_load(provider.read_text())["providers"][0]["options"]["path"])
        except FileNotFoundError:
            return None


def latest_session(environ: Mapping[str, str] | None = None) -> RaySession:
    """Return the newest session, by the variables that also tell Ray where to write.

    Args:
        environ: Environment variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    path = ray_temp_dir(environ) / "session_latest"
    return RaySession(path, Path(environ.get("RAY_METRICS_OUTPUT_ROOT") or path / "metrics"))


def ray_temp_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of all sessions, as Ray 2.60 does; it is repeated here since importing Ray takes seconds."""
    system = environ.get("TMPDIR", "/tmp") if sys.platform.startswith("linux") else "/tmp"
    return Path(environ.get("RAY_TMPDIR", system)) / "ray"
