"""``python -m docs.generate [--check]``: write, or check, what pages say of the code, its tests and its commands."""

from __future__ import annotations

import sys

from docs.generate import promises, reference


def main(check: bool) -> int:
    """Write the pages, or with ``check`` name each that would change; 1 = one would."""
    return max(page.main(check=check) for page in (promises, reference))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
