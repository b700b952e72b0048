"""Answers any GET on port 8000 of the loopback interface with numbers that a function computes, as JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

fermata: Any = None
with contextlib.suppress(ImportError):
    import fermata


def keep_out(models: list[Any]) -> None:
    """Where the container can import `fermata`, the models' weights are kept out of its snapshots."""
    if fermata:
        for number, model in enumerate(models):
            fermata.exclude_from_snapshot(model, name=f"model-{number}")


def serve(compute: Callable[[], list[int]], loaded: float) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            began = time.monotonic()
            tokens = compute()
            if fermata:
                fermata.snapshot_ready()
            body = json.dumps({"tokens": tokens, "seconds": time.monotonic() - began, "loaded_s": loaded}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
