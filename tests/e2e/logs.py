"""Lines that Orchard's processes have logged, and those among them that no test expects."""

from pathlib import Path

from tests.e2e.server import Server

COMPLAINTS = ("Traceback (most recent call last)", "exception was never retrieved", "was never awaited")


def read_logs(server: Server, ray_dir: Path) -> dict[str, str]:
    """By name. Ray's own are left out: beside another cluster on the machine its dashboard complains of a port."""
    texts = {"serve run": server.output}
    for path in ray_dir.rglob("*"):
        is_ours = path.parent.name == "serve" or path.name.startswith(("worker-", "python-core-worker"))
        if is_ours and path.is_file() and path.suffix in (".log", ".out", ".err"):
            texts[path.name] = path.read_text(errors="replace")
    return texts


def complaints(texts: dict[str, str], before: dict[str, str] | None = None) -> list[str]:
    """Lines with their place. before: what the logs held earlier, which does not count."""
    news = {name: text[len((before or {}).get(name, "")) :] for name, text in texts.items()}
    return [
        f"{name}: {text[max(0, text.index(complaint) - 300) :][:3000]}"
        for name, text in news.items()
        for complaint in COMPLAINTS
        if complaint in text
    ]
