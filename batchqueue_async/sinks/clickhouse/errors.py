"""What ClickHouse's errors mean, by their codes; of its own text, which quotes values, only names are shown. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchqueue_async.errors import AuthError, PermanentError, RetryableError, SinkError, ThrottledError

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODE = re.compile(r"Code: (\d+)")
_ROW = re.compile(r"\(at row (\d+)\)")
_NAME = re.compile(r"\(([A-Z][A-Z0-9_]{3,})\)")


def _codes(numbers: str) -> frozenset[int]:
    return frozenset(map(int, numbers.split()))


_AUTH = {192, 193, 194, 195, 291, 492, 497, 516}
_THROTTLED = {201, 202, 252, 203}
# Of a value, or of how a row is written.
_RECORD = _codes("6 26 27 28 33 38 41 43 48 53 69 70 72 85 117 130 131 190 321 349 376 407 467 469 591 646 675 676 691")
_LATER = _codes(
    "3 23 24 32 74 75 76 95 96 159 160 164 170 173 198 209 210 216 225 226 236 241 242 243 244 246 254 "
    "274 279 285 286 287 290 297 305 308 313 317 319 335 341 344 394 415 416 425 439 473 499 519 568 571 "
    "572 574 596 606 607 619 620 668 700 722 730 733 735 745 999 1000"
)
# What is set up wrong: no such table, database, column or setting, or a query that this server does not know.
_SETUP = {8, 10, 16, 36, 44, 60, 62, 73, 81, 115, 218, 452}
_OF_COLUMNS = {8, 10, 16, 44, 53, 60, 117}
_KINDS = {159: "timeout", 160: "timeout", 209: "timeout", 210: "network", 279: "network"}


def code_of(headers: Mapping[str, str], text: str) -> int:
    """The code of an error, from its header field or its text; 0 where there is none.

    Example:
        >>> code_of({}, "Code: 60, e.displayText() = DB::Exception: Table default.t doesn't exist.")
        60
    """
    said = headers.get("x-clickhouse-exception-code", "")
    if said.isdecimal():
        return int(said)
    found = _CODE.search(text)
    return 0 if found is None else int(found[1])


def is_of_columns(code: int) -> bool:
    """Whether an error may come of columns that are others now."""
    return code in _OF_COLUMNS


def is_of_setup(code: int) -> bool:
    """Whether an error is of what is set up wrong, which no record is to be given up for."""
    return code in _SETUP


def error_for(code: int, where: str, text: str, retryable: frozenset[int] = frozenset()) -> SinkError | None:
    """The error that a code is; None where the code is unknown and the status has to say it.

    Example:
        >>> error = error_for(27, "ClickHouse at h", "Cannot parse input: expected ... (at row 3)")
        >>> error, error.culprits
        (PermanentError('ClickHouse at h: code 27'), (2,))
    """
    name = _NAME.search(text)
    said = f"{where}: code {code}{f' {name[1]}' if name else ''}"
    if code in retryable:
        return RetryableError(said, error_type="server")
    if code in _AUTH:
        return AuthError(f"{said}; check the user, the password and its rights")
    if code in _THROTTLED:
        return ThrottledError(said)
    if code in _LATER:
        return RetryableError(said, error_type=_KINDS.get(code, "server"))
    row = _ROW.search(text)
    if code in _RECORD or row:  # where it names a row it is about that row, by any code
        return PermanentError(said, error_type="refused", culprits=() if row is None else (int(row[1]) - 1,))
    return None
