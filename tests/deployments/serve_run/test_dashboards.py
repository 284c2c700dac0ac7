"""`orchard dashboards`: where the dashboard goes, what Prometheus is to scrape, and what is missing."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ray._common.utils import get_default_ray_temp_dir

from deployments.metrics import dashboard
from deployments.serve_run import dashboards
from deployments.serve_run.config_file import OrchardConfig, read_config
from deployments.serve_run.dashboards import CannotPlace, Missing, folder_of_dashboards, missing, place
from deployments.serve_run.prometheus_config import ScrapeTarget, prometheus_config, scrape_target
from deployments.serve_run.ray_session import RaySession, latest_session
from tests.deployments.serve_run.test_cli import orchard, shipped
from tests.e2e.server import SHIPPED_CONFIG

HERE = ScrapeTarget("http", "127.0.0.1", 8000, "/metrics", needs_key=False)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RaySession:
    """A session that runs, with the files of Ray's dashboard."""
    monkeypatch.setattr(RaySession, "is_running", True)
    return ray_session(tmp_path)


def ray_session(tmp_path: Path) -> RaySession:
    root = tmp_path / "ray" / "session_1"
    folder = root / "metrics" / "grafana" / "dashboards"
    provider = root / "metrics" / "grafana" / "provisioning" / "dashboards" / "default.yml"
    for directory in (folder, provider.parent):
        directory.mkdir(parents=True)
    provider.write_text(yaml.safe_dump({"providers": [{"name": "Ray", "options": {"path": str(folder)}}]}))
    (tmp_path / "ray" / "session_latest").symlink_to(root)
    return latest_session({"RAY_TMPDIR": str(tmp_path)})


def config(tmp_path: Path, host: str = "127.0.0.1", **http: Any) -> OrchardConfig:
    raw = yaml.safe_load(SHIPPED_CONFIG.read_text())
    raw["http_options"]["host"] = host
    raw["applications"][0]["args"]["http"] = http
    (tmp_path / "serve_config.yaml").write_text(yaml.safe_dump(raw))
    found = read_config(tmp_path / "serve_config.yaml")
    assert found is not None
    return found


def answering(answers: dict[str, Any]) -> httpx.Client:
    """A client whose requests get these answers by URL, or no connection."""

    def answer(request: httpx.Request) -> httpx.Response:
        url = str(request.url)
        found = next((value for start, value in answers.items() if url.startswith(start)), None)
        if found is None:
            raise httpx.ConnectError("Connection refused")
        return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, json=found)

    return httpx.Client(transport=httpx.MockTransport(answer))


def result(*samples: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"result": list(samples)}}


ALL_WELL: dict[str, Any] = {
    "http://localhost:9090/api/v1/query": result({"value": [0, "1"]}),
    "http://localhost:3000/api/health": {"database": "ok"},
    "http://localhost:3000/api/dashboards/uid/orchard": {},
}


def found_missing(session: RaySession, answers: dict[str, Any], **environ: str) -> list[Missing]:
    return list(missing(session, HERE, Path("orchard.key"), answering(answers), environ))


def test_the_dashboard_is_put_beside_rays_and_the_second_time_changes_nothing(session: RaySession):
    folder = folder_of_dashboards(session, None, {})
    assert folder == session.path.resolve() / "metrics" / "grafana" / "dashboards"
    file = place(folder)
    assert json.loads(file.read_text())["uid"] == "orchard"
    written = file.stat()
    assert place(folder) == file and file.stat().st_ino == written.st_ino
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_a_folder_of_the_operator_comes_before_that_of_the_session(session: RaySession, tmp_path: Path):
    (named := tmp_path / "named").mkdir()
    (by_ray := tmp_path / "by_ray").mkdir()
    environ = {"RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR": str(by_ray)}
    assert folder_of_dashboards(session, None, environ) == by_ray
    assert folder_of_dashboards(session, named, environ) == named
    with pytest.raises(CannotPlace, match="is not a directory"):
        folder_of_dashboards(session, tmp_path / "absent", {})


def test_an_older_dashboard_is_replaced_and_a_foreign_file_is_left_alone(tmp_path: Path):
    file = tmp_path / dashboards.FILE_NAME
    for foreign in ("{}", "[]", "my notes", '{"uid": "orchard", "title": "Fruit"}'):
        file.write_text(foreign)
        with pytest.raises(CannotPlace, match="is not Orchard's dashboard"):
            place(tmp_path)
        assert file.read_text() == foreign
    file.write_text(json.dumps({**dashboard.dashboard(), "panels": []}))
    assert place(tmp_path).read_text() == dashboard.FILE.read_text()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / dashboards.FILE_NAME).with_suffix(".tmp").mkdir()
    with pytest.raises(CannotPlace, match=r"cannot be written: .*Is a directory"):
        place(tmp_path)


def test_without_a_running_session_or_its_dashboard_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    absent = latest_session({"RAY_TMPDIR": str(tmp_path)})
    with pytest.raises(CannotPlace, match=r"no Ray session.*Start the server first, or name .* with --grafana"):
        folder_of_dashboards(absent, None, {})
    ended = ray_session(tmp_path)
    with pytest.raises(CannotPlace, match=r"session_1 has ended.*Start the server first"):
        folder_of_dashboards(ended, None, {})
    monkeypatch.setattr(RaySession, "is_running", True)
    (ended.metrics / "grafana" / "provisioning" / "dashboards" / "default.yml").unlink()
    with pytest.raises(CannotPlace, match=r"Start the server with --dashboard, .* on the head node"):
        folder_of_dashboards(ended, None, {})


def test_a_session_runs_while_a_process_of_ray_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    session = ray_session(tmp_path)
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, "--session-dir=/ray/session_1"], stdin=subprocess.PIPE) as other:
        assert not session.is_running
        monkeypatch.setattr("deployments.serve_run.ray_session.PROCESSES", (psutil.Process(other.pid).name(),))
        assert session.is_running
        assert other.stdin is not None
        other.stdin.close()
    assert not session.is_running


@pytest.mark.parametrize("environ", [{}, {"TMPDIR": "/a"}, {"RAY_TMPDIR": "/b"}, {"TMPDIR": "/a", "RAY_TMPDIR": "/b"}])
def test_sessions_are_where_ray_puts_them(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]):
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert str(latest_session(environ).path.parent) == get_default_ray_temp_dir()


def test_nothing_is_missing_when_all_answer(session: RaySession):
    assert found_missing(session, ALL_WELL) == []


@pytest.mark.parametrize(
    ("url", "answer", "what", "remedy"),
    [
        (
            "http://localhost:9090/",
            None,
            r"No Prometheus answers at http://localhost:9090 \(RAY_PROM",
            "prometheus --co",
        ),
        (
            "http://localhost:9090/",
            {},
            "No Prometheus .*: its answer is of another program",
            "prometheus --config.file",
        ),
        ("http://localhost:9090/", 404, "No Prometheus .*404", "prometheus --config.file"),
        ("http://localhost:9090/api/v1/query?query=vllm", result(), "no metrics of Orchard", "the job `orchard`"),
        ("http://localhost:9090/api/v1/query?query=ray", result(), "no metrics of Ray", "the job `ray`"),
        ("http://localhost:3000/", None, r"No Grafana answers at http://localhost:3000 \(RAY_GRAFANA", "grafana.ini"),
        ("http://localhost:3000/api/health", {"database": "failing"}, "is not healthy", "its log"),
        ("http://localhost:3000/api/dashboards", 404, "does not show Orchard's dashboard yet", "grafana.ini"),
    ],
)
def test_what_does_not_answer_is_missing_with_its_remedy(
    session: RaySession, url: str, answer: Any, what: str, remedy: str
):
    answers = {url: answer} | {start: value for start, value in ALL_WELL.items() if start != url}
    if answer is None:
        answers = {start: value for start, value in ALL_WELL.items() if not start.startswith(url)}
    (one,) = found_missing(session, answers)
    assert re.search(what, one.what) and remedy in one.remedy, one


def test_prometheus_and_grafana_are_those_that_ray_is_told_of(session: RaySession):
    elsewhere = {url.replace("localhost", "other"): answer for url, answer in ALL_WELL.items()}
    hosts = {"RAY_PROMETHEUS_HOST": "http://other:9090/", "RAY_GRAFANA_HOST": "http://other:3000"}
    assert found_missing(session, elsewhere, **hosts) == []
    assert found_missing(session, elsewhere, **hosts, RAY_PROMETHEUS_HEADERS='[["X-Scope-OrgID", "a"]]') == []
    (one,) = found_missing(session, elsewhere, **hosts, RAY_PROMETHEUS_HEADERS="nonsense")
    assert "RAY_PROMETHEUS_HEADERS is not JSON" in one.what


def test_server_with_keys_needs_a_key_file(session: RaySession, tmp_path: Path):
    target = ScrapeTarget("http", "127.0.0.1", 8000, "/metrics", needs_key=True)
    key_file = tmp_path / "orchard.key"
    (one,) = missing(session, target, key_file, answering(ALL_WELL), {})
    assert f"{key_file} does not exist, and http://127.0.0.1:8000/metrics needs an API key" in one.what
    key_file.write_text("secret")
    assert list(missing(session, target, key_file, answering(ALL_WELL), {})) == []


def test_a_server_of_one_machine_is_scraped_by_its_address(tmp_path: Path, session: RaySession):
    target = scrape_target(config(tmp_path))
    assert target == HERE
    orchard, ray = yaml.safe_load(prometheus_config(target, Path("k"), session.discovery))["scrape_configs"]
    assert orchard == {
        "job_name": "orchard",
        "scheme": "http",
        "metrics_path": "/metrics",
        "static_configs": [{"targets": ["127.0.0.1:8000"]}],
    }
    assert ray["file_sd_configs"][0]["files"] == [str(session.path / "prom_metrics_service_discovery.json")]


def test_all_nodes_are_scraped_where_the_server_listens_on_all_addresses(tmp_path: Path, session: RaySession):
    target = scrape_target(config(tmp_path, "0.0.0.0", api_keys=["sha256:" + "0f" * 32]))
    key = Path("/keys/prometheus")
    (one, _) = yaml.safe_load(prometheus_config(target, key, session.discovery))["scrape_configs"]
    assert one["authorization"] == {"credentials_file": "/keys/prometheus"}
    assert one["static_configs"] == [{"targets": ["127.0.0.1:8000"]}], "without Ray's dashboard there is no discovery"
    session.discovery.write_text("[]")
    (one, _) = yaml.safe_load(prometheus_config(target, key, session.discovery))["scrape_configs"]
    assert one["relabel_configs"] == [
        {
            "source_labels": ["__address__"],
            "regex": r"(.*):\d+",
            "replacement": "$1:8000",
            "target_label": "__address__",
        },
        {"replacement": "orchard", "target_label": "job"},
    ]


def test_addresses_with_colons_and_certificates_are_honoured(tmp_path: Path):
    target = scrape_target(config(tmp_path, "::1"))
    assert (target.address, target.url) == ("[::1]:8000", "http://[::1]:8000/metrics")
    secure = config(tmp_path)
    secure.http["ssl_certfile"] = "/cert.pem"
    assert scrape_target(secure).url == "https://127.0.0.1:8000/metrics"


@pytest.mark.parametrize("is_check", [False, True])
def test_the_status_tells_whether_the_dashboard_is_in_place_and_with_check_whether_all_is(
    session: RaySession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_check: bool,
):
    monkeypatch.setattr(dashboards, "latest_session", lambda: session)
    monkeypatch.setenv("RAY_PROMETHEUS_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_GRAFANA_HOST", "http://127.0.0.1:1")

    def run() -> int:
        return dashboards.run(config(tmp_path), None, tmp_path / "orchard.key", is_check)

    assert run() == (1 if is_check else 0)
    said = capsys.readouterr()
    if is_check:
        assert said.out == "" and "Run `orchard dashboards`" in said.err
        place(folder_of_dashboards(session, None, {}))
        assert run() == 1
        said = capsys.readouterr()
    else:
        assert yaml.safe_load(said.out)["scrape_configs"]
    assert "No Prometheus answers" in said.err and "No Grafana answers" in said.err


def test_the_command_without_a_session_prints_the_configuration_and_ends_with_status_1(tmp_path: Path):
    shipped(tmp_path, 8123)
    done = orchard(tmp_path, "dashboards")
    assert done.returncode == 1 and "There is no Ray session" in done.stderr and "Traceback" not in done.stderr
    assert "targets: ['127.0.0.1:8123']" in done.stdout
    (tmp_path / "grafana").mkdir()
    done = orchard(tmp_path, "dashboards", "--grafana", "grafana")
    assert done.returncode == 0 and (tmp_path / "grafana" / dashboards.FILE_NAME).exists()
    done = orchard(tmp_path, "dashboards", "--config", "absent.yaml")
    assert done.returncode == 1 and "absent.yaml is invalid" in done.stderr and done.stdout == ""
