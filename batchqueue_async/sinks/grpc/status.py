"""What a failed gRPC call says of a batch: which error its status is, and how long the server asks to be left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import AuthError, PermanentError, RetryableError, SinkError, TooLargeError
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
_REFUSES_US = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
_DETAILS = "grpc-status-details-bin"
_NANOS = 1_000_000_000


def error_for(code: str, what: str, *, details: str = "", wait: float | None = None) -> SinkError:
    """The error that a status is; `details` is the server's text, which is looked at and not quoted.

    Example:
        >>> error_for("UNAVAILABLE", "Export at localhost:4317", wait=2.0)
        RetryableError('Export at localhost:4317 ended with UNAVAILABLE')
    """
    said = f"{what} ended with {code}"
    if code in _REFUSES_US:
        return AuthError(f"{said}; check the sink's token or headers")
    # The status is that of an overloaded server too: only gRPC's own words tell the two apart.
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        return TooLargeError(said)
    if code in _LATER:
        return RetryableError(said, retry_after=wait)
    return PermanentError(said)


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
