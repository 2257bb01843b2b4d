"""The entry of the command ``fulmen``, outside the package of that name, which takes seconds to import: an interrupt in
that time is answered like any other."""

import sys


def main() -> int:
    try:
        from fulmen.lab.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("fulmen: interrupted", file=sys.stderr)
        return 130
