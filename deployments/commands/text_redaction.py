"""Removes secrets, addresses and names of people and machines from text that leaves this machine."""

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

SECRET_VARIABLES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
MIN_SECRET_CHARS = 6
MAX_QUOTED_CHARS = 60
"""Longer quoted texts may be a part of a prompt."""

_SECRETS = re.compile(
    r"sha256:[0-9a-f]{16,}|\b(?:orc|sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_\-]{12,}|(?<=Bearer )\S+|(?<=x-api-key: )\S+"
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+@")
_HOST_IN_URL = re.compile(r"(?<=://)(?!\[?(?:127\.|::1|localhost|0\.0\.0\.0))[^/\s:\"'<>)]+")
_HOME = re.compile(r"/(?:Users|home)/[^/\s\"':]+")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
_MAC = re.compile(r"\b[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}\b")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b")
_QUOTED = re.compile(
    rf"'[^'\n]{{{MAX_QUOTED_CHARS},}}'|\"[^\"\n]{{{MAX_QUOTED_CHARS},}}\"|“[^”\n]{{{MAX_QUOTED_CHARS},}}”"
)


class TextRedaction:
    """Replaces what a text should not tell.

    Args:
        names: Words that are secret here besides what is found: keys, names of API keys.
    """

    def __init__(self, names: Iterable[str] = ()):
        values = [value for name, value in os.environ.items() if SECRET_VARIABLES.search(name)]
        secrets = {value for value in (*values, *names) if len(value) >= MIN_SECRET_CHARS}
        host = socket.gethostname()
        hosts = {name for name in (host, host.partition(".")[0]) if len(name) > 3 and name != "localhost"}
        self._words = [(word, "[secret]") for word in sorted(secrets, key=len, reverse=True)]
        self._words += [(word, "[host]") for word in sorted(hosts, key=len, reverse=True)]
        home = str(Path.home())
        self._home = home if len(home) > 1 else None

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for word, instead in self._words:
            text = text.replace(word, instead)
        if self._home is not None:
            text = text.replace(self._home, "~")
        text = _SECRETS.sub("[secret]", text)
        text = _USER_IN_URL.sub("[secret]@", text)
        text = _HOST_IN_URL.sub("[address]", text)
        text = _HOME.sub("~", text)
        text = _MAC.sub("[address]", text)
        text = _IPV6.sub(_address, _IPV4.sub(_address, text))
        return _MAIL.sub("[address]", text)

    def log_line(self, line: str) -> str:
        """Return a line of a log, also without long quoted texts."""
        return self(_QUOTED.sub(lambda found: f"[text of {len(found[0]) - 2} characters]", line))


def _address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "[address]"
