"""Make, list and revoke API keys. A running server with the file takes a change with its next request."""

import argparse
import hashlib
import os
import secrets
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deployments.commands.key_file import KeyFile
from deployments.commands.output import CommandError, UsageError, say, show, show_json, show_table
from deployments.http.api_keys import ApiKeyEntry
from deployments.serve_run.config_file import DEFAULT_CONFIG, ConfigError, chosen_file, read_config

KEY_BYTES = 32
SHOWN_DIGITS = 12
LABEL_RULE = "it must be 1 to 128 characters of printable ASCII without a space at either end"
LIMITS = ("max_requests_per_minute", "max_tokens_per_minute", "max_rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser(
        "add",
        help="make a key, print it once, and write its hash to the file",
        description="Makes a key, writes its SHA-256 to the file, and prints the key, which is stored nowhere.",
    )
    add.add_argument("name", help="label of the key in errors, logs and metrics, unique")
    add.add_argument("--tenant", help="keys with the same tenant share cached prefixes")
    add.add_argument("--client", help="keys with the same client share one fair share of the engine; default: NAME")
    add.add_argument("--admin", action="store_true", help="may read whole status pages and clear the prefix cache")
    for limit in LIMITS:
        add.add_argument(f"--{limit.replace('_', '-')}", type=int, metavar="N", help="default: no limit")
    listed = actions.add_parser("ls", aliases=["list"], help="list the keys of the file, without the keys themselves")
    listed.set_defaults(action="ls")  # under its other name, too
    revoke = actions.add_parser("revoke", help="remove a key from the file")
    revoke.add_argument("name")
    for action in (add, listed, revoke):
        place = action.add_mutually_exclusive_group()
        place.add_argument("--file", type=Path, help="file of keys; default: http.api_keys_file of the configuration")
        place.add_argument("--config", help=f"configuration of the server; default: {DEFAULT_CONFIG}, if there is one")
        action.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status."""
    path, note = _file_of(options)
    file = KeyFile(path)
    if options.action == "add":
        return _add(file, note, options)
    if options.action == "revoke":
        file.remove(options.name)
        if options.json:
            show_json({"revoked": options.name, "file": str(file.path)})
        say(f"{options.name} is revoked; keys left in {file.path}: {len(file.entries())}. {note}")
        return 0
    entries = file.entries()
    if options.json:
        show_json({"file": str(file.path), "keys": [_described(entry) for entry in entries]})
        return 0
    if not entries:
        say(f"{file.path} has no keys. {note}")
        return 0
    columns = ("name", "hash", "tenant", "client", "admin", "#requests/min", "#tokens/min", "#rows")
    show_table(columns, [_row(entry) for entry in entries], str(file.path))
    return 0


def _add(file: KeyFile, note: str, options: argparse.Namespace) -> int:
    key = f"orc-{secrets.token_urlsafe(KEY_BYTES)}"
    given = {name: getattr(options, name) for name in ("name", "tenant", "client", *LIMITS)}
    try:
        entry = ApiKeyEntry(
            hash=f"sha256:{hashlib.sha256(key.encode()).hexdigest()}", is_administrative=options.admin, **given
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0])
        option = "NAME" if where == "name" else f"--{where.replace('_', '-')}"
        rule = "it must be at least 1" if where in LIMITS else LABEL_RULE
        raise UsageError(f"{option} is {first['input']!r}: {rule}") from None
    file.add(entry)
    if options.json:
        show_json({"key": key, "file": str(file.path), **_described(entry)})
    else:
        show(key)
    say(f"This is the only time that the key of {entry.name!r} is shown; {file.path} has its hash. {note}")
    return 0


def _file_of(options: argparse.Namespace) -> tuple[Path, str]:
    """Return the file of keys, and a sentence that tells when a change is in force."""
    at_once = "A running server takes the change with its next request, on the node that has this file."
    if options.file is not None:
        return options.file.expanduser(), at_once
    config = chosen_file(options.config)
    if config is not None:
        try:
            found = read_config(config)
        except ConfigError as error:
            raise CommandError(str(error)) from None
        if found is not None and (path := found.args.http.api_keys_file) is not None:
            return Path(path).expanduser(), at_once
    default = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "orchard" / "keys.yaml"
    return default, (
        f"{config or 'The default configuration'} names no http.api_keys_file: a server needs "
        f"`api_keys_file: {default}` in the section `http` of its args, and a restart, to ask for keys."
    )


def _described(entry: ApiKeyEntry) -> dict[str, Any]:
    return entry.model_dump(mode="json")


def _row(entry: ApiKeyEntry) -> list[object]:
    digits = entry.hash.removeprefix("sha256:")[:SHOWN_DIGITS]
    limits = [getattr(entry, limit) for limit in LIMITS]
    return [
        entry.name,
        digits,
        entry.tenant,
        entry.client or entry.name,
        "yes" if entry.is_administrative else "",
        *limits,
    ]
