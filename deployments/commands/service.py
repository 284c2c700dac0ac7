"""Run the server as a service of this user: a LaunchAgent on macOS, a user unit of systemd on Linux."""

import argparse
import os
import platform
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.commands.output import CommandError, say, show, show_json

TAKES_REST = True
"""Arguments behind `--` are those of `orchard serve`, or of `orchard join`."""

LABEL = "orchard.serve"
UNIT = "orchard.service"
STOP_S = 45
"""Running answers get drain_timeout_s, 25 s by default, before the service is killed."""
MEMBER_STOP_S = 120
"""A member's answers and snapshots move to other machines, and those that clients read through it have time to end."""
RESTART_S = 10
OPEN_FILES = 10240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser(
        "install",
        help="write the service and start it, now and at each login",
        epilog="Arguments behind `--` are those of `orchard serve`, or of `orchard join` with --member. The working "
        "directory is the present one.",
    )
    install.add_argument(
        "--member",
        metavar="HEAD",
        help="run a member of this head's cluster instead of a server: it joins at each login, and leaves when the "
        "service stops. Join once by hand before, or give --token behind `--`",
    )
    status = actions.add_parser("status", help="tell whether it is installed and runs; status 1 if it does not run")
    remove = actions.add_parser("remove", aliases=["uninstall"], help="stop the service and delete all its files")
    remove.set_defaults(action="remove")  # under its other name, too
    for action in (install, remove):
        action.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    status.add_argument("--json", action="store_true", help="print JSON")


@dataclass(frozen=True)
class Service:
    """How a system runs a service of a user."""

    file: Path
    """Description of the service for the system."""
    content: bytes
    start: tuple[tuple[str, ...], ...]
    """Commands that load and start it."""
    stop: tuple[tuple[str, ...], ...]
    """Commands that stop and forget it; those of a service that does not run fail."""
    after_removal: tuple[tuple[str, ...], ...]
    state: tuple[str, ...]
    """A command whose output has the state and the process."""
    logs: tuple[Path, ...]
    note: str
    """Sentence for the user once it is installed."""

    @property
    def program(self) -> str:
        return self.state[0]


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    head = getattr(options, "member", None)
    command = serve_command(options.rest) if head is None else member_command(head, options.rest)
    service = service_here(command, Path.cwd(), STOP_S if head is None else MEMBER_STOP_S)
    if options.action == "status":
        return _status(service, options.json)
    if options.rest and options.action == "remove":
        raise CommandError("`orchard service remove` takes no arguments behind `--`")
    if options.dry_run:
        _show_plan(service, options.action)
        return 0
    if shutil.which(service.program) is None:
        raise CommandError(
            f"{service.program} is not on the PATH: this system cannot run the service; nothing was done"
        )
    return _install(service) if options.action == "install" else _remove(service)


def serve_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of the server, by the interpreter and the program of this environment."""
    return [sys.executable, str(Path(sys.executable).parent / "orchard"), "serve", *arguments]


def member_command(head: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of a member, which ends when the machine leaves the cluster."""
    return [sys.executable, str(Path(sys.executable).parent / "orchard"), "join", head, "--stay", *arguments]


def service_here(command: Sequence[str], directory: Path, stop_s: int = STOP_S) -> Service:
    """Return the service for this system, which has stop_s seconds to end. Raises CommandError."""
    system = platform.system()
    if system == "Darwin":
        return launch_agent(command, directory, stop_s)
    if system == "Linux":
        return systemd_unit(command, directory, stop_s)
    raise CommandError(f"{system} has neither launchd nor systemd")


def launch_agent(command: Sequence[str], directory: Path, stop_s: int = STOP_S) -> Service:
    """Return the LaunchAgent. `caffeinate -is` keeps the Mac awake, not its display."""
    home, domain = Path.home(), f"gui/{os.getuid()}"
    log = home / "Library" / "Logs" / "orchard.log"
    file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    described = {
        "Label": LABEL,
        "ProgramArguments": ["/usr/bin/caffeinate", "-is", *command],
        "WorkingDirectory": str(directory),
        "EnvironmentVariables": {"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": stop_s,
        "ProcessType": "Interactive",
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return Service(
        file,
        plistlib.dumps(described, sort_keys=False),
        start=(("launchctl", "bootstrap", domain, str(file)),),
        stop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        after_removal=(),
        state=("launchctl", "print", f"{domain}/{LABEL}"),
        logs=(log,),
        note=f"Its log is {log}. macOS may refuse a LaunchAgent the way to other machines of the local network, so a "
        "cluster of several Macs has to be started in a Terminal.",
    )


def systemd_unit(command: Sequence[str], directory: Path, stop_s: int = STOP_S) -> Service:
    """Return the user unit."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    file = config / "systemd" / "user" / UNIT
    content = f"""\
[Unit]
Description=Orchard, a server for MLX models

[Service]
Type=exec
ExecStart={" ".join(map(_quoted, command))}
WorkingDirectory={str(directory).replace("%", "%%")}
Environment={_quoted(f"PATH={os.environ.get('PATH', '/usr/bin:/bin')}", in_command=False)}
Restart=on-failure
RestartSec={RESTART_S}
KillMode=mixed
TimeoutStopSec={stop_s}
UMask=0077

[Install]
WantedBy=default.target
"""
    control = ("systemctl", "--user")
    return Service(
        file,
        content.encode(),
        start=((*control, "daemon-reload"), (*control, "enable", UNIT), (*control, "restart", UNIT)),
        stop=((*control, "disable", "--now", UNIT),),
        after_removal=((*control, "daemon-reload"), (*control, "reset-failed", UNIT)),
        state=(*control, "show", UNIT, "--property=ActiveState,SubState,MainPID,Result"),
        logs=(),
        note=f"Its log: journalctl --user -u {UNIT}. It ends with your last session unless `loginctl enable-linger` "
        "keeps it.",
    )


def _quoted(word: str, in_command: bool = True) -> str:
    """Return a word for a unit file: % begins a specifier there, and $ a variable in commands."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{escaped.replace("$", "$$") if in_command else escaped}"'


def _show_plan(service: Service, action: str) -> None:
    if action == "install":
        show(f"# {service.file}")
        show(service.content.decode())
    commands = service.start if action == "install" else service.stop
    for command in commands:
        show(" ".join(command))
    if action == "remove":
        show("\n".join(f"rm {path}" for path in (service.file, *service.logs)))


def _install(service: Service) -> int:
    """Write the file and start the service; an older one is replaced, also while it runs."""
    if service.file.exists():
        if service.file.read_bytes() == service.content and _state(service)[0]:
            say(f"{service.file} is installed as it should be, and the service runs.")
            return 0
        for command in service.stop:
            _call(command)
    try:
        service.file.parent.mkdir(parents=True, exist_ok=True)
        for log in service.logs:
            log.parent.mkdir(parents=True, exist_ok=True)
        service.file.write_bytes(service.content)
    except OSError as error:
        raise CommandError(f"{service.file} cannot be written: {error.strerror}") from None
    for command in service.start:
        code, said = _call(command)
        if code:
            raise CommandError(f"{service.file} is written, but `{' '.join(command)}` failed: {said}")
    say(f"Installed {service.file}, and started. {service.note}")
    return 0


def _remove(service: Service) -> int:
    if not service.file.exists():
        say(f"{service.file} does not exist: no service is installed.")
        return 0
    for command in service.stop:
        _call(command)  # fails where the service is not loaded
    service.file.unlink()
    for log in service.logs:
        log.unlink(missing_ok=True)
    for command in service.after_removal:
        _call(command)
    say(f"Stopped and removed {service.file}.")
    return 0


def _status(service: Service, as_json: bool) -> int:
    is_installed = service.file.exists()
    is_running, state = _state(service) if is_installed else (False, "not installed; `orchard service install` does it")
    if as_json:
        show_json({"file": str(service.file), "installed": is_installed, "running": is_running, "state": state})
    else:
        show(f"{service.file}: {state}")
    return 0 if is_running else 1


def _state(service: Service) -> tuple[bool, str]:
    """Return whether the service runs, and its state in words."""
    if shutil.which(service.program) is None:
        return False, f"installed, but {service.program} is not on the PATH"
    code, said = _call(service.state)
    if code:
        return False, f"installed, not loaded ({said or f'{service.program} ended with {code}'})"
    state = re.search(r"^\s*(?:state = |ActiveState=)(\S+)", said, re.MULTILINE)
    pid = re.search(r"^\s*(?:pid = |MainPID=)([1-9]\d*)", said, re.MULTILINE)
    if state is not None and state[1] in ("running", "active"):
        return True, f"installed, runs as process {pid[1] if pid else '?'}"
    ended = re.search(r"^\s*(?:last exit code = |Result=)(.+)$", said, re.MULTILINE)
    why = f"; it ended last with {ended[1].strip()}" if ended else ""
    return False, f"installed, does not run ({state[1] if state else 'unknown'}{why})"


def _call(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()
