"""``python3 packaging/node``: see ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path

# Started by the directory's name, the directory itself is on the path, and the package in it is not.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

if sys.argv[1:2] == ["init"]:
    from node.init import run

    run(sys.argv[2])
else:
    from node.cli import main

    sys.exit(main())
