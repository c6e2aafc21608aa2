"""The console commands `ucx-gaudi` and `ucp-check`: become the programs of their names inside this package."""

import os
import sys


def main() -> None:
    name = "ucp-check" if os.path.basename(sys.argv[0]).startswith("ucp-check") else "ucx-gaudi"
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    os.execv(program, [program] + sys.argv[1:])


if __name__ == "__main__":
    main()
