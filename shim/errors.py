"""The one error type of the shim: a gRPC status with a sentence for a person."""

from __future__ import annotations

# https://grpc.github.io/grpc/core/md_doc_statuscodes.html; containerd maps them back to its own error types.
UNKNOWN = 2
INVALID_ARGUMENT = 3
NOT_FOUND = 5
ALREADY_EXISTS = 6
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14


class ShimError(Exception):
    """An operation failed. `str()` is a sentence that names the thing and says what to do; `code` is a gRPC code."""

    def __init__(self, message: str, code: int = UNKNOWN) -> None:
        super().__init__(message)
        self.code = code
