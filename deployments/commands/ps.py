"""Show a running server: nodes, memory by account, queue with positions and waits, and the slowest requests."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from deployments.commands import connection
from deployments.commands.connection import Connection, Refused, Unreachable
from deployments.commands.output import UsageError, console, printable, show, show_json, size, table
from deployments.engine_ids import short_id

ACCOUNTS = {
    "weights_bytes": "weights",
    "row_bytes": "rows",
    "prefill_bytes": "prompts in progress",
    "transient_bytes": "within a step",
    "prefix_cache_bytes": "prefix cache",
    "image_cache_bytes": "image features",
    "unaccounted_bytes": "unaccounted",
    "free_bytes": "free",
}
"""Accounts of the memory budget, which add up to its limit."""
BAR_CHARS = 30
ID_CHARS = 8
NUM_SLOWEST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    connection.add_arguments(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C; with --json, one line each time")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks; default: 1"
    )
    parser.add_argument("--json", action="store_true", help="print the bodies of /v1/status and /v1/requests as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the verb; return its exit status: 1 while no engine of the server is ready."""
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval is {options.interval:g}; it must be between 0.1 and 3600")
    server = connection.connection_of(options)
    if options.watch:
        return _watch(server, options)
    found = look(server)
    if options.json:
        show_json(found)
    else:
        console().print(page(found))
    return 0 if found["status"].get("ready") else 1


def look(server: Connection) -> dict[str, Any]:
    """Return the server's status and its slowest requests; `requests` is null where this key may not see them."""
    status = server.status()
    try:
        slowest = server.get(f"/v1/requests?slowest={NUM_SLOWEST}")["data"]
    except Refused as refused:
        if refused.status != 403:
            raise
        slowest = None
    return {"url": server.url, "status": status, "requests": slowest}


def _watch(server: Connection, options: argparse.Namespace) -> int:
    try:
        if options.json:
            while True:
                show(json.dumps(look(server), ensure_ascii=False))
                sys.stdout.flush()
                time.sleep(options.interval)
        from rich.live import Live

        with Live(console=console(), screen=sys.stdout.isatty(), auto_refresh=False) as live:
            while True:
                live.update(_page_or_reason(server), refresh=True)
                time.sleep(options.interval)
    except KeyboardInterrupt:  # the usual end
        return 0


def _page_or_reason(server: Connection) -> Any:
    """Return the page, or why there is none: a server that goes away may come back."""
    try:
        return page(look(server))
    except (Unreachable, Refused) as error:
        return f"{time.strftime('%H:%M:%S')}  {error}"


def page(found: dict[str, Any]) -> Any:
    """Return what the verb shows, for a rich console."""
    from rich.console import Group

    status = found["status"]
    engines = [one["engine"] for one in status["engines"]]
    is_ready = "ready" if status.get("ready") else "not ready"
    head = (
        f"Orchard at {found['url']}: model {printable(status.get('model', '?'))}, {is_ready}, "
        f"{status.get('num_running', 0)} rows running, {status.get('num_waiting', 0)} requests waiting"
    )
    parts = [head, table(("node", "state", "#rows", "#waiting", "#wait", "#memory", "drafts by"), _nodes(status))]
    parts += [f"{reason}" for reason in _reasons(engines)]
    if any(one.get("admission") for one in engines):
        parts.append(table(("account", "#size", "share of the limit"), _accounts(engines), "Memory"))
    queued = [(one, item) for one in engines for item in one.get("queue") or ()]
    if queued:
        parts.append(table(("#position", "request", "#choices", "#waited", "#expected"), _queue(queued), "Queue"))
    if found["requests"]:
        parts += ["Slowest requests", *map(_request, found["requests"])]
    if found["requests"] is None:
        parts.append("Requests and queue are shown to administrative keys only.")
    return Group(*parts)


def _nodes(status: dict[str, Any]) -> Iterator[list[object]]:
    for replica in status["engines"]:
        engine, admission = replica["engine"], replica["engine"].get("admission") or {}
        limit = admission.get("limit_bytes")
        state = engine["state"]
        if state in ("loading", "compiling", "warming"):
            state = f"{state} {engine.get('load_progress', 0):.0%}"
        yield [
            short_id(str(replica.get("engine_id") or replica.get("node_id") or "this one"), ID_CHARS),
            state,
            f"{engine.get('num_running')}/{engine.get('max_running')}",
            f"{engine.get('num_waiting')}/{engine.get('max_queue')}",
            _seconds(engine.get("expected_wait_s")),
            None if limit is None else f"{size(limit - admission['free_bytes'])} of {size(limit)}",
            (engine.get("speculation") or {}).get("proposer") or "",
        ]


def _reasons(engines: list[dict[str, Any]]) -> Iterator[str]:
    for engine in engines:
        for reason in (engine.get("error"), engine.get("unavailable")):
            if reason:
                yield printable(reason)
        if (work := engine.get("work")) and work.get("is_late"):
            yield f"late: {printable(work.get('name', 'work'))} takes {work['seconds']:.1f} s so far"


def _accounts(engines: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield a line per account, summed over all nodes."""
    admissions = [one["admission"] for one in engines if one.get("admission")]
    limit = sum(one["limit_bytes"] for one in admissions) or 1
    for name, label in ACCOUNTS.items():
        num_bytes = sum(one.get(name, 0) for one in admissions)
        share = min(1.0, max(0.0, num_bytes / limit))
        bar = "█" * round(BAR_CHARS * share)
        yield [label, size(num_bytes), f"{bar:<{BAR_CHARS}} {share:>4.0%}"]


def _queue(queued: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[list[object]]:
    for _, item in sorted(queued, key=lambda pair: pair[1]["position"]):
        again = " (preempted)" if item.get("preempted") else ""
        waits = _seconds(item["waited_s"]), _seconds(item.get("expected_wait_s"))
        yield [item["position"], f"{item['request_id']}{again}", item["num_rows"], *waits]


def _request(one: dict[str, Any]) -> str:
    """Return two lines, as ids and sentences are too long for a table."""
    usage = one.get("usage") or {}
    facts = [_seconds(one["seconds"])]
    if one["first_token_s"] is not None:
        facts.append(f"first token {_seconds(one['first_token_s'])}")
    if usage:
        tokens = (usage[name] for name in ("num_prompt_tokens", "num_cached_tokens", "num_tokens"))
        facts.append("{} prompt tokens ({} cached), {} generated".format(*tokens))
    if one["outcome"] != "answered":
        facts.append(f"{one['outcome']} {one['error'] or ''}".strip())
    return f"  {printable(one['id'])}: {printable(', '.join(map(str, facts)))}\n      {printable(one['why'])}"


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.2f} s"
