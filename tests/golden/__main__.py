"""Shows in words what has changed in the answers that tests/golden/files freezes, and freezes them anew.

uv run python -m tests.golden            # the differences of all kinds
uv run python -m tests.golden --renew    # the same, and writes the files
uv run python -m tests.golden openapi    # of one kind
"""

import argparse
import sys

from tests.golden.golden_file import differences, dumps, read
from tests.golden.kinds import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"one or more of {', '.join(KINDS)}; all if none is given")
    parser.add_argument("--renew", action="store_true", help="write the files")
    options = parser.parse_args()
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"there is no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    num_changes = 0
    for kind in [KINDS[name] for name in options.kinds or KINDS]:
        exchanges = kind.exchanges()
        changes = differences(read(kind.path), exchanges)
        num_changes += len(changes)
        for change in changes:
            sys.stdout.write(f"{kind.name}: {change}\n")
        if options.renew:
            kind.path.write_text(dumps(kind.title, exchanges), encoding="utf-8")
    sys.stdout.write(f"{num_changes} changes{' written' if options.renew and num_changes else ''}\n")
    raise SystemExit(0 if options.renew or not num_changes else 1)


if __name__ == "__main__":
    main()
