#!/bin/sh
# CRIU's action script: CRIU runs it at every stage, and only the end of a dump is worth starting Python for.
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
exec /usr/bin/env python3 -I -S "${0%/*}/hook.py"
