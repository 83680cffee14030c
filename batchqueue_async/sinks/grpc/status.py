"""What a failed gRPC call says of a batch: which error its status is, and how long the server asks to be left alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import (
    AuthError,
    PermanentError,
    RetryableError,
    SinkError,
    ThrottledError,
    TooLargeError,
)
from batchqueue_async.sinks._shared.extras import require

if TYPE_CHECKING:
    from collections.abc import Iterable

# As OTLP's specification has them, and RESOURCE_EXHAUSTED without a RetryInfo too: the others would give up data that
# an overloaded server may take later.
_LATER = {
    "ABORTED",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
}
# What the implementations say of a message above their limit. The status alone is an overloaded server's too:
#
#   C-core, grpcio, grpc-js  RESOURCE_EXHAUSTED  "Received message larger than max (10485760 vs. 4194304)"
#   grpc-go                  RESOURCE_EXHAUSTED  "grpc: received message larger than max (...)", and likewise
#                                                "received message after decompression larger than max"
#   grpc-java                RESOURCE_EXHAUSTED  "gRPC message exceeds maximum size 4194304: 10485760", "Decompressed
#                                                gRPC message exceeds maximum size 4194304"
#   grpc-dotnet              RESOURCE_EXHAUSTED  "Received message exceeds the maximum configured message size."
#   tonic                    OUT_OF_RANGE        "Error, decoded message length too large: found 10485760 bytes, the
#                                                limit is: 4194304 bytes"
#   proxies                  UNKNOWN, INTERNAL,  "Received http2 header with status: 413", "unexpected HTTP status code
#                            UNAVAILABLE         received from server: 413 (Request Entity Too Large)"
_LIMIT_CODES = {"RESOURCE_EXHAUSTED", "OUT_OF_RANGE"}
_LIMIT = re.compile(r"message\b.*?\b(?:larger than|exceeds|too large)\b", re.IGNORECASE | re.DOTALL)
_PROXY_LIMIT = re.compile(r"\bstatus\b.*?\b413\b", re.IGNORECASE | re.DOTALL)
_TYPES = {"DEADLINE_EXCEEDED": "timeout", "UNAVAILABLE": "network"}
_REFUSES_US = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
_DETAILS = "grpc-status-details-bin"
_NANOS = 1_000_000_000


def is_too_large(code: str, details: str) -> bool:
    """Whether a status says that the message is above the server's limit.

    Example:
        >>> is_too_large("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4194304: 10485760")
        True
        >>> is_too_large("RESOURCE_EXHAUSTED", "quota exceeded")
        False
    """
    if code in _LIMIT_CODES:
        return _LIMIT.search(details) is not None
    return code in {"UNKNOWN", "INTERNAL", "UNAVAILABLE"} and _PROXY_LIMIT.search(details) is not None


def error_for(
    code: str, what: str, *, details: str = "", wait: float | None = None, retryable: frozenset[str] = frozenset()
) -> SinkError:
    """The error that a status is; `details` is the server's text, which is looked at and not quoted.

    `retryable` are more codes that may pass.

    Example:
        >>> error_for("UNAVAILABLE", "Export at localhost:4317", wait=2.0)
        RetryableError('Export at localhost:4317 ended with UNAVAILABLE')
    """
    said = f"{what} ended with {code}"
    if code in _REFUSES_US:
        return AuthError(f"{said}; check the sink's token or headers")
    if is_too_large(code, details):
        return TooLargeError(said)
    if code == "RESOURCE_EXHAUSTED":
        return ThrottledError(said, retry_after=wait)
    if code in _LATER or code in retryable:
        return RetryableError(said, retry_after=wait, error_type=_TYPES.get(code, "server"))
    return PermanentError(said, error_type="refused")


def retry_delay(metadata: Iterable[tuple[str, Any]] | None) -> float | None:
    """The seconds that a `google.rpc.RetryInfo` among the trailing metadata asks for.

    Example:
        >>> retry_delay([("content-type", "application/grpc")]) is None
        True
    """
    for name, value in metadata or ():
        if name == _DETAILS:
            return _delay(value)
    return None


def _delay(encoded: bytes) -> float | None:
    status: Any = require("google.rpc.status_pb2", "otlp").Status()
    info: Any = require("google.rpc.error_details_pb2", "otlp").RetryInfo()
    broken: type[Exception] = require("google.protobuf.message", "otlp").DecodeError
    try:
        status.ParseFromString(encoded)
        for detail in status.details:
            if detail.Unpack(info):
                return float(max(0.0, info.retry_delay.seconds + info.retry_delay.nanos / _NANOS))
    except broken:  # details are an extra: without them the status still says enough
        return None
    return None
