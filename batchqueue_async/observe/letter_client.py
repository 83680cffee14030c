"""The commands' end: asks running processes of this user about their dead letters; needs no extra."""

from __future__ import annotations

import contextlib
import http
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from batchqueue_async.errors import BatchQueueError
from batchqueue_async.observe import client
from batchqueue_async.observe.letter_requests import COMMAND, PREFIX, LetterHolder, LetterRequest, letter_of_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.observe.letter_requests import Verb

_MOST_AT_ONCE = 16


class LetterProcess(NamedTuple):
    """A process that was asked what it has open.

    Attributes:
        name: its number, or its socket before it has said its number.
        path: its socket.
        holders: its exporters and durable queues.
        fault: why it can't be asked; empty if it can.
    """

    name: str
    path: Path
    holders: Sequence[LetterHolder] = ()
    fault: str = ""


class LettersCutOffError(BatchQueueError):
    """A request did not come to its end.

    Attributes:
        count: letters that had been dealt with by then, as far as is known.
        begun: whether there may be more; nothing was changed if it had not begun.
    """

    def __init__(self, text: str, count: int, *, begun: bool) -> None:
        super().__init__(text)
        self.count = count
        self.begun = begun


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of a change.

    Attributes:
        count: letters that were dealt with.
        missing: numbers that are not there.
        dropped: records that the send queue dropped meanwhile, since it was full.
    """

    count: int
    missing: Sequence[int]
    dropped: int = 0


def ask_all(sockets: Sequence[tuple[str, Path]]) -> list[LetterProcess]:
    """What each process has open; all are asked at once, so that several that stand still cost the time of one."""
    if not sockets:
        return []
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(sockets))) as pool:
        return list(pool.map(ask, *zip(*sockets, strict=True)))


def ask(name: str, path: Path) -> LetterProcess:
    """What a process has open."""
    try:
        lines = list(_lines(path, "GET", PREFIX))
        said = lines[0]
        known = msgspec.convert(said["holders"], list[LetterHolder])
        return LetterProcess(str(int(said["pid"])), path, known)
    except BatchQueueError as error:
        return LetterProcess(name, path, fault=str(error))
    except (LookupError, TypeError, ValueError):
        return LetterProcess(name, path, fault=f"{path}: answers, and not as a process of batchqueue_async does")


def letters(process: LetterProcess, holder: LetterHolder) -> Iterator[DeadLetter]:
    """The letters of an exporter that keeps them in memory.

    Raises:
        LettersCutOffError: not all of them came.
    """
    query = urlencode({"name": holder.name}, errors="surrogatepass")
    count = 0
    for each in _lines(process.path, "GET", f"{PREFIX}/list?{query}"):
        if "letter" in each:
            count += 1
            yield letter_of_json(each["letter"])
        elif "count" in each:
            _raise_fault(each)
            return
    raise _ended(process, count)


def change(
    process: LetterProcess,
    holder: LetterHolder,
    verb: Verb,
    *,
    seqs: Sequence[int] | None,
    before: float | None,
    timeout: float,
    progress: Callable[[int], object],
) -> Changed:
    """Put letters back, or delete them, in the process that has them.

    Raises:
        LettersCutOffError: it was not done, or not whole.
    """
    request = LetterRequest(
        kind=holder.kind,
        name=holder.name,
        path=holder.path,
        seqs=None if seqs is None else list(seqs),
        before=before,
        timeout=timeout,
    )
    count, begun = 0, False
    try:
        # Not msgspec's own: a path may hold bytes that UTF-8 does not have.
        body = json.dumps(msgspec.to_builtins(request)).encode()
        for each in _lines(process.path, "POST", f"{PREFIX}/{verb}", body):
            if "done" in each:
                count, begun = each["done"], True
                progress(count)
            else:
                _raise_fault(each)
                return Changed(each["count"], each["missing"], each["dropped"])
    except LettersCutOffError:
        raise
    except BatchQueueError as error:
        raise LettersCutOffError(str(error), count, begun=begun) from None
    raise _ended(process, count)


def _raise_fault(said: dict[str, Any]) -> None:
    if "error" in said:
        raise LettersCutOffError(said["error"], said["count"], begun=said["begun"])


def _ended(process: LetterProcess, count: int) -> LettersCutOffError:
    return LettersCutOffError(
        f"process {process.name}: it ended before it was done; what is left stays where it is, on disk or, of an "
        "exporter in memory, gone with it",
        count,
        begun=True,
    )


def _lines(path: Path, method: str, target: str, body: bytes | None = None) -> Iterator[dict[str, Any]]:
    """The lines of an answer, as they come.

    Raises:
        BatchQueueError: the process does not answer, or stands still.
    """
    headers = {COMMAND: "dead-letters", "Host": "localhost", "Content-Type": "application/json"}
    connection = client.UnixConnection(path, client.TIMEOUT)
    with contextlib.closing(connection):
        try:
            connection.request(method, target, body=body, headers=headers)
            answer = connection.getresponse()
            if answer.status == http.HTTPStatus.NOT_FOUND and not answer.headers.get_content_type().endswith("json"):
                raise BatchQueueError(
                    f"{path}: takes no commands; only the socket that `unix:` alone makes does, "
                    f"in {client.socket_directories()[0]}"
                )
            while text := answer.readline():
                yield json.loads(text)
        except TimeoutError:
            raise BatchQueueError(
                f"{path}: no answer for {client.TIMEOUT:g} s; does the process stand still, as after SIGSTOP?"
            ) from None
        except ValueError:
            raise BatchQueueError(f"{path}: answers, and not as a process of batchqueue_async does") from None
        except (OSError, http.client.HTTPException) as error:
            raise BatchQueueError(f"{path}: the connection broke off ({error})") from None
