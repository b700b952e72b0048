"""`python3 -m criuconf explain LOGFILE`: what a log of CRIU says went wrong. `-` reads the log from standard input.

Exit status: 0 with an explanation, 1 when the log tells of no failure, 2 when it cannot be read.
"""

from __future__ import annotations

import sys

from . import CriuConfError, explain


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "explain":
        print("usage: python3 -m criuconf explain LOGFILE", file=sys.stderr)
        return 2
    try:
        found = explain(sys.stdin.buffer.read() if arguments[1] == "-" else arguments[1])
    except CriuConfError as error:
        print(f"criuconf: {error}", file=sys.stderr)
        return 2
    if found is None:
        print("The log tells of no failure.")
        return 1
    print(f"cause:   {found.cause or 'not known'}")
    print(f"line:    {found.line}")
    if found.meaning:
        print(f"meaning: {found.meaning}")
        print(f"remedy:  {found.remedy}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
