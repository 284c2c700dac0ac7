"""The checks of `orchard doctor`: pure functions from readings to a finding with its remedy."""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deployments.cluster.cluster_view import FRESH_S
from deployments.commands.doctor_readings import Readings
from deployments.commands.output import size

State = Literal["green", "yellow", "red", "none"]
"""none: the check does not apply here, or was not asked for."""

GIB = 2**30
MIN_MACOS = 14
PYTHONS = ((3, 11), (3, 14))
MIN_TOTAL_BYTES, MIN_AVAILABLE_BYTES = 8 * GIB, 2 * GIB
MIN_DISK_BYTES = {"red": GIB, "yellow": 10 * GIB}
MIN_OPEN_FILES = 10240
MAX_RAY_DIR = 103 - 70
"""macOS allows 103 bytes in the path of a socket, and Ray's names below its folder take up to 70."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    state: State
    text: str
    remedy: str = ""


NOT_A_MAC = Finding("none", "only on macOS")


def _check_system(found: Readings) -> Finding:
    if found.system == "Linux":
        return Finding("green", f"Linux on {found.machine}")
    if found.macos is None:
        return Finding("red", f"{found.system} is not supported", "use macOS 14 or later on Apple silicon, or Linux")
    version = ".".join(map(str, found.macos))
    if found.macos[0] < MIN_MACOS:
        return Finding("red", f"macOS {version}: MLX needs {MIN_MACOS} or later", "update macOS")
    return Finding("green", f"macOS {version}")


def _check_processor(found: Readings) -> Finding:
    if found.macos is None:
        return NOT_A_MAC
    if found.is_translated:
        return Finding(
            "red",
            "this Python runs under Rosetta, which has no Metal",
            "install uv and Python for arm64, then `uv sync`",
        )
    if found.machine != "arm64":
        return Finding("red", f"{found.machine}: MLX needs Apple silicon", "use a Mac with Apple silicon")
    return Finding("green", "Apple silicon")


def _check_python(found: Readings) -> Finding:
    version = ".".join(map(str, found.python))
    if PYTHONS[0] <= found.python <= PYTHONS[1]:
        return Finding("green", f"Python {version}")
    return Finding("red", f"Python {version} is not between 3.11 and 3.14", "uv sync --python 3.11")


def _check_environment(found: Readings) -> Finding:
    if found.macos is None:
        return NOT_A_MAC
    if found.hidden_files is not None:
        return Finding("red", found.hidden_files, "chflags -R nohidden .venv; keep the checkout outside of iCloud")
    return Finding("green", "Python reads the .pth files of this environment")


def _check_versions(found: Readings) -> Finding:
    wrong = [
        f"{name} {installed or 'is missing'} (pinned: {pinned})"
        for name, (installed, pinned) in found.versions.items()
        if installed != pinned
    ]
    if wrong:
        return Finding("red", ", ".join(wrong), "uv sync --locked")
    return Finding("green", ", ".join(f"{name} {pinned}" for name, (_, pinned) in found.versions.items()))


def _check_memory(found: Readings) -> Finding:
    text = f"{size(found.total_bytes)}, {size(found.available_bytes)} available"
    if found.pressure == 4:
        return Finding("red", f"{text}; macOS reports critical memory pressure", "close other programs")
    if found.total_bytes < MIN_TOTAL_BYTES:
        return Finding("yellow", text, f"models of a few GiB need at least {size(MIN_TOTAL_BYTES)}")
    if found.pressure is None and found.available_bytes < MIN_AVAILABLE_BYTES:
        return Finding("yellow", text, "close other programs, or set memory.limit_gb")
    return Finding("green", text)


def _check_wired_limit(found: Readings) -> Finding:
    if found.macos is None:
        return NOT_A_MAC
    if found.wired_limit_mb is None:
        return Finding("none", "iogpu.wired_limit_mb cannot be read")
    if found.wired_limit_mb:
        return Finding(
            "yellow",
            f"iogpu.wired_limit_mb is {found.wired_limit_mb}: too high a limit can make macOS panic",
            "sudo sysctl iogpu.wired_limit_mb=0, unless a model needs it",
        )
    return Finding("green", "iogpu.wired_limit_mb is not set")


def _check_sleep(found: Readings) -> Finding:
    if found.macos is None:
        return NOT_A_MAC
    if found.is_low_power:
        return Finding("yellow", "low power mode slows the GPU", "sudo pmset -a lowpowermode 0")
    if found.sleep_minutes:
        return Finding(
            "yellow",
            f"an idle Mac sleeps after {found.sleep_minutes} min and then answers nothing",
            "caffeinate -is orchard serve; `orchard service install` does it",
        )
    return Finding("green", "the Mac does not sleep")


def _check_local_network(found: Readings) -> Finding:
    if found.peer is None:
        return Finding("none", "no other machine is named; --peer HOST:PORT tests the way to one")
    if found.peer_errno == 0:
        return Finding("green", f"{found.peer} can be reached from this terminal")
    if found.macos is not None and found.peer_errno == errno.EHOSTUNREACH and found.peer_seconds < 0.5:
        return Finding(
            "red",
            f"macOS refuses this program the way to {found.peer} (Local Network privacy)",
            "System Settings, Privacy & Security, Local Network: allow the terminal; start Ray in a Terminal that "
            "stays open, not by a LaunchAgent or an ssh session that ends",
        )
    reason = errno.errorcode.get(found.peer_errno or 0, str(found.peer_errno))
    return Finding("red", f"{found.peer} cannot be reached: {reason}", "is it up, and on this network?")


def _check_config(found: Readings) -> Finding:
    if found.config_path is None:
        return Finding("none", "there is no serve_config.yaml here; the server uses its defaults")
    if found.config_mistakes is not None:
        return Finding("red", found.config_mistakes, "`orchard serve --check` repeats this after each change")
    return Finding("green", f"{found.config_path} is valid")


def _check_server(found: Readings) -> Finding:
    if found.server_problem is not None:
        return Finding("none", f"no server answers at {found.server_url}")
    if found.server_unready is not None:
        return Finding("red", found.server_unready, "wait while the model is loaded; `orchard ps` shows how far it is")
    return Finding("green", f"the server at {found.server_url} is ready")


def _check_port(found: Readings) -> Finding:
    if found.server_problem is None:
        return Finding("green", "the port is that of the running server")
    if found.port_problem is not None:
        return Finding("red", found.port_problem, "stop that process, or choose another http_options.port")
    return Finding("green", "the port is free")


def _check_ray(found: Readings) -> Finding:
    if found.ray_note is not None and not found.ray_answers:
        return Finding(
            "red",
            f"the cluster at {found.ray_note}, noted by `ray start`, does not answer; a server would wait for it",
            "ray stop --force" if found.ray_pids else "start its head, or `ray stop` to forget it",
        )
    if found.ray_pids and found.ray_note is None and found.server_problem is not None:
        pids = ", ".join(map(str, found.ray_pids))
        return Finding("yellow", f"Ray runs without a server: processes {pids}", "ray stop --force, if they are yours")
    return Finding(
        "green", "no left-over cluster" if found.ray_note is None else f"the cluster at {found.ray_note} is up"
    )


def _check_ray_dir(found: Readings) -> Finding:
    length = len(found.ray_dir.encode())
    if length > MAX_RAY_DIR:
        return Finding(
            "red",
            f"RAY_TMPDIR has {length} bytes; sockets below it allow {MAX_RAY_DIR}: {found.ray_dir}",
            "set RAY_TMPDIR to a short path, such as /tmp/orchard",
        )
    return Finding("green", f"Ray's files are in {found.ray_dir}")


def _check_ray_token(found: Readings) -> Finding:
    if found.token_mode is None:
        return Finding("none", "no ~/.ray/auth_token: only clusters of several machines need one made by hand")
    if found.is_token_exposed:
        text = f"~/.ray/auth_token has the mode {found.token_mode:04o}: who reads it can run code in the cluster"
        return Finding("red", text, "chmod 600 ~/.ray/auth_token")
    return Finding("green", "~/.ray/auth_token is private")


def _check_cluster(found: Readings) -> Finding:
    view = found.cluster
    if found.cluster_problem is not None:
        return Finding("red", found.cluster_problem, "`orchard leave --force` on a member, then `orchard join` again")
    if view is None:
        return Finding("none", "this machine belongs to no cluster")
    if view.heard_age_s > FRESH_S:
        return Finding(
            "red",
            f"the head is silent: {view.describe()}",
            f"give its command again on {view.head}, by which the same cluster goes on; if it is gone for good, "
            "`orchard serve --cluster --adopt` on the machine with the newest copy",
        )
    if view.num_members and not view.num_fresh:
        text = f"no machine has an up-to-date copy of the head's log: {view.describe()}"
        return Finding("yellow", text, "wait half a minute; the members' ~/.orchard/cluster/member.log tells more")
    return Finding("green", view.describe())


def _check_open_files(found: Readings) -> Finding:
    if found.hard_open_files is not None and found.hard_open_files < MIN_OPEN_FILES:
        return Finding(
            "yellow",
            f"at most {found.hard_open_files} open files: about {found.hard_open_files // 2} connections",
            f"raise the hard limit to {MIN_OPEN_FILES} (ulimit -Hn)",
        )
    return Finding("green", f"open files: {found.hard_open_files or 'no limit'}")


def _check_disk(found: Readings) -> Finding:
    text = ", ".join(f"{size(num_bytes)} free for {folder}" for folder, num_bytes in found.disk.items())
    least = min(found.disk.values(), default=0)
    if least < MIN_DISK_BYTES["red"]:
        return Finding("red", text, "free some space: logs and models need it")
    if least < MIN_DISK_BYTES["yellow"]:
        return Finding("yellow", text, "a model takes several GiB; HF_HOME names another disk")
    return Finding("green", text)


def _check_hub(found: Readings) -> Finding:
    if not found.asked_hub:
        return Finding("none", "not asked; --hub connects to it")
    if found.hub_problem is not None:
        return Finding("yellow", found.hub_problem, "models on disk can be served without; HF_ENDPOINT names a mirror")
    return Finding("green", "the hub can be reached")


def _check_model(found: Readings) -> Finding:
    if not found.checked_model:
        return Finding("none", "not checked (--quick)")
    if found.model_problem is not None:
        return Finding("red", f"{found.model}: {found.model_problem}", f"`orchard check {found.model}` tells more")
    return Finding("green", f"{found.model} can be served here")


def _check_keys(found: Readings) -> Finding:
    if found.keys_problem is not None:
        return Finding("red", found.keys_problem, "`orchard keys` writes this file; its mode must be 0600")
    if found.keys_file is None:
        return Finding("none", "no http.api_keys_file")
    return Finding("green", f"{found.keys_file} is valid and private")


CHECKS: dict[str, Callable[[Readings], Finding]] = {
    "system": _check_system,
    "processor": _check_processor,
    "Python": _check_python,
    "environment": _check_environment,
    "versions": _check_versions,
    "memory": _check_memory,
    "wired limit": _check_wired_limit,
    "sleep": _check_sleep,
    "disk": _check_disk,
    "open files": _check_open_files,
    "configuration": _check_config,
    "keys": _check_keys,
    "model": _check_model,
    "hub": _check_hub,
    "port": _check_port,
    "Ray": _check_ray,
    "Ray's folder": _check_ray_dir,
    "Ray's token": _check_ray_token,
    "cluster": _check_cluster,
    "local network": _check_local_network,
    "server": _check_server,
}
"""By name, in the order in which they are shown."""
