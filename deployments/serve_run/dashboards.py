"""The command `orchard dashboards`: puts Orchard's dashboard where Grafana reads it, and tells what else is missing.

A chart shows data when Ray's session and its dashboard run, the JSON file is in Grafana's folder, Grafana runs with
Ray's configuration, Prometheus runs where that configuration says, and Prometheus scrapes Orchard.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deployments.metrics import dashboard
from deployments.serve_run.config_file import OrchardConfig
from deployments.serve_run.prometheus_config import (
    ORCHARD_JOB,
    RAY_JOB,
    ScrapeTarget,
    prometheus_config,
    scrape_target,
)
from deployments.serve_run.ray_session import RaySession, latest_session
from deployments.serve_run.stop import say

FILE_NAME = "orchard_grafana_dashboard.json"
"""Named as Ray names its own."""

FOLDER_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
DEFAULT_PROMETHEUS, DEFAULT_GRAFANA = "http://localhost:9090", "http://localhost:3000"
"""As in Ray."""

ANSWER_S = 5.0


class CannotPlace(Exception):
    """The dashboard cannot be written; the message is for the operator."""


@dataclass(frozen=True)
class Missing:
    """A reason why charts show no data."""

    what: str
    remedy: str
    """A command or a setting that helps."""


def folder_of_dashboards(session: RaySession, named: Path | None, environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder whose dashboards Grafana shows.

    Args:
        session: Ray's newest session here.
        named: What the operator has named, instead of the folder of Ray's session.
        environ: Environment variables; None: those of this process.

    Raises:
        CannotPlace: There is no such folder.
    """
    environ = os.environ if environ is None else environ
    if named is None and FOLDER_VARIABLE in environ:
        named = Path(environ[FOLDER_VARIABLE])
    if named is not None:
        if not named.is_dir():
            raise CannotPlace(f"{named} is not a directory. Create it, or name another one with --grafana.")
        return named
    other = "or name the folder of Grafana's dashboards with --grafana DIR."
    if not session.path.exists():
        raise CannotPlace(f"There is no Ray session ({session.path}). Start the server first, {other}")
    if not session.is_running:
        ended = f"The Ray session {session.path.resolve()} has ended, and the next one gets a folder of its own."
        raise CannotPlace(f"{ended} Start the server first, {other}")
    folder = session.dashboards()
    if folder is None or not folder.is_dir():
        raise CannotPlace(
            f"Ray has no folder of dashboards in {session.metrics}: its dashboard runs on the head node only, and not "
            "with `orchard serve --no-dashboard`, the default on a small Mac. Start the server with --dashboard, run "
            f"this command on the head node, {other}"
        )
    return folder


def place(folder: Path) -> Path:
    """Write the dashboard into a folder, unless the same is there; return its file.

    Raises:
        CannotPlace: The folder has another file of this name, or is not writable.
    """
    file, text = folder / FILE_NAME, dashboard.FILE.read_text(encoding="utf-8")
    try:
        if file.exists():
            found = file.read_text(encoding="utf-8")
            if found == text:
                return file
            if not _is_ours(found):
                raise CannotPlace(f"{file} is not Orchard's dashboard: it is left as it is. Move it away.")
        beside = file.with_suffix(".tmp")  # not .json: Grafana reads the folder at any time
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise CannotPlace(f"{file} cannot be written: {error}.") from None
    return file


def run(config: OrchardConfig, grafana: Path | None, key_file: Path, is_check: bool) -> int:
    """Place the dashboard, print a prometheus.yml to standard output, and what is missing to standard error.

    Args:
        config: Of the server.
        grafana: Folder of Grafana's dashboards; None: that of Ray's session.
        key_file: File with an API key for Prometheus, if the server has keys.
        is_check: Write nothing, and let the exit status tell whether something is missing.

    Returns:
        0, or 1: the dashboard is not in its folder, or with is_check, something is missing.
    """
    session, target = latest_session(), scrape_target(config)
    if not is_check:
        sys.stdout.write(prometheus_config(target, key_file, session.discovery))
        sys.stdout.flush()
    try:
        folder = folder_of_dashboards(session, grafana)
        file = folder / FILE_NAME if is_check else place(folder)
        if is_check and not (file.is_file() and file.read_bytes() == dashboard.FILE.read_bytes()):
            raise CannotPlace(f"{file} is not the dashboard of this version. Run `orchard dashboards`.")
    except CannotPlace as error:
        say(str(error))
        return 1
    with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
        found = list(missing(session, target, key_file, client))
    rest = [f"  * {one.what}\n    {one.remedy}" for one in found] or ["  nothing"]
    say("\n".join([f"Orchard's dashboard is in {file}; in Grafana it is /d/{dashboard.UID}. Missing:", *rest]))
    return 1 if is_check and found else 0


def missing(
    session: RaySession,
    target: ScrapeTarget,
    key_file: Path,
    client: httpx.Client,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Missing]:
    """Yield what keeps the charts from showing data, beside the file of the dashboard.

    Args:
        session: Ray's newest session here.
        target: Where the metrics of Orchard are.
        key_file: File with the API key for Prometheus, if the server has keys.
        client: For requests to Prometheus and Grafana.
        environ: Environment variables that name them, as Ray reads them; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    if target.needs_key and not key_file.is_file():
        yield Missing(
            f"{key_file} does not exist, and {target.url} needs an API key.",
            "Write one that is administrative into it; others do not see the names of keys.",
        )
    yield from _missing_in_prometheus(environ, target, client)
    yield from _missing_in_grafana(environ, session, client)


def _missing_in_prometheus(environ: Mapping[str, str], target: ScrapeTarget, client: httpx.Client) -> Iterator[Missing]:
    host = environ.get("RAY_PROMETHEUS_HOST", DEFAULT_PROMETHEUS).rstrip("/")
    named = f"{host} (RAY_PROMETHEUS_HOST)"
    try:
        headers = dict(json.loads(environ.get("RAY_PROMETHEUS_HEADERS", "{}")))
    except ValueError as error:
        yield Missing(f"RAY_PROMETHEUS_HEADERS is not JSON: {error}.", 'It is an object such as {"X-Org": "1"}.')
        return
    scraped = {ORCHARD_JOB: dashboard.EXISTS, RAY_JOB: "ray_node_mem_total"}
    for job, metric in scraped.items():
        try:
            found = _json(client.get(f"{host}/api/v1/query", params={"query": metric}, headers=headers))["data"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            yield Missing(
                f"No Prometheus answers at {named}: {_said(error)}.",
                "Start one with the configuration that this command prints: `orchard dashboards >prometheus.yml; "
                "prometheus --config.file=prometheus.yml --web.listen-address=127.0.0.1:9090`.",
            )
            return
        if not found["result"]:
            of = f"of Orchard ({target.url})" if job == ORCHARD_JOB else "of Ray"
            yield Missing(
                f"Prometheus at {named} has no metrics {of}.",
                f"Give it the job `{job}` of the configuration that this command prints; {host}/targets tells why a "
                "job fails.",
            )


def _missing_in_grafana(environ: Mapping[str, str], session: RaySession, client: httpx.Client) -> Iterator[Missing]:
    host = environ.get("RAY_GRAFANA_HOST", DEFAULT_GRAFANA).rstrip("/")
    named = f"{host} (RAY_GRAFANA_HOST)"
    start = f"`grafana server --homepath /usr/share/grafana --config {session.grafana_ini}`"
    try:
        health = _json(client.get(f"{host}/api/health"))
        if health["database"] != "ok":
            yield Missing(f"Grafana at {named} is not healthy: {health}.", "Look at its log.")
            return
        shown = client.get(f"{host}/api/dashboards/uid/{dashboard.UID}").status_code
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        yield Missing(f"No Grafana answers at {named}: {_said(error)}.", f"Start it with Ray's configuration: {start}.")
        return
    if shown == httpx.codes.NOT_FOUND:
        yield Missing(
            f"Grafana at {named} does not show Orchard's dashboard yet.",
            f"It reads the folder every 10 s, if it was started with Ray's configuration: {start}.",
        )


def _json(response: httpx.Response) -> dict[str, Any]:
    return response.raise_for_status().json()


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] if isinstance(error, httpx.HTTPError) else "its answer is of another program"


def _is_ours(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("uid") == dashboard.UID and found.get("title") == dashboard.TITLE
