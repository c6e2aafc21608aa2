"""The console command `ucx-gaudi`: becomes the program inside this package."""

import os
import sys


def main() -> None:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "ucx-gaudi")
    os.execv(program, [program] + sys.argv[1:])


if __name__ == "__main__":
    main()
