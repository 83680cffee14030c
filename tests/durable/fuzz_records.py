"""The record parser against bytes of any kind: `make fuzz`, SECONDS=60 by default.

With atheris (`pip install atheris`) the inputs are guided by coverage; without it they are random. A failing input is
printed, or kept by atheris in a file `crash-…` to be given as an argument. The tests run `one_input` as well.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

try:
    import atheris
except ImportError:
    atheris = None

MARKER = b"\x01\x02\x03\x04\x05\x06\x07\x08"

if atheris is not None and __name__ == "__main__":
    with atheris.instrument_imports(include=["batchqueue_async.durable"]):
        for name in ("disk.acklog", "dead_letters", "disk.recovery", "disk.scan"):
            import_module(f"batchqueue_async.durable.{name}")

from durable_kit import ROOT, RecordingFiles  # noqa: E402 - after the path, and after the instrumentation

from batchqueue_async.durable import dead_letters  # noqa: E402
from batchqueue_async.durable.disk import acklog, recovery, segment  # noqa: E402
from batchqueue_async.durable.disk import format as fmt  # noqa: E402
from batchqueue_async.durable.disk.checksum import crc32  # noqa: E402
from batchqueue_async.durable.disk.scan import scan  # noqa: E402

HEADER = fmt.SegmentHeader(bytes(range(16)), 7, 1, MARKER, 1_700_000_000_000_000_000)


def check_parser(content: bytes, allowed: set[bytes] | None) -> None:
    """Whatever the bytes: no error, no step back, no large read, and no payload but those that are `allowed`."""
    files = RecordingFiles(base={ROOT / "x": content})
    descriptor = files.open_read(ROOT / "x")
    segment.read_header(files, descriptor)
    segment.read_footer(files, descriptor, len(content), HEADER)
    position = fmt.DATA_START
    for item in segment.Walk(files, descriptor, MARKER, start=fmt.DATA_START, end=len(content)):
        assert item.offset >= position
        assert item.end > item.offset
        assert item.end <= len(content)
        position = item.end
        if isinstance(item, segment.Found) and item.decoded is not None and allowed is not None:
            assert {payload for payload in item.decoded.payloads if payload is not None} <= allowed
    found = scan(files, descriptor, HEADER, len(content), 0)
    assert found.data_end <= max(len(content), fmt.DATA_START)
    hint = acklog.decode(content, number=7, marker=MARKER, first_seq=1, next_seq=100)
    assert hint.settled.count <= 99
    dead_letters.decode(1, content)
    recovery.parse_identity(content)


def forged(data: bytes) -> bytes:
    """A frame header with any values and the right checksum, which only somebody who knows the marker could write."""
    fields = fmt._FRAME.unpack((data + bytes(fmt.FRAME_HEADER))[: fmt.FRAME_HEADER])[2:]
    rest = data[fmt.FRAME_HEADER :]
    table = rest[: fmt.TABLE_ROW * min(fields[3], 64)]
    fields = (*fields[:-2], crc32(table), crc32(rest[len(table) :]))
    blank = fmt._FRAME.pack(MARKER, 0, *fields)
    crc = crc32(fmt._OFFSET.pack(fmt.DATA_START), crc32(blank[12:], crc32(MARKER)))
    return fmt._FRAME.pack(MARKER, crc, *fields) + rest


def hurt(data: bytes) -> tuple[bytes, set[bytes]]:
    """Good frames with pieces of `data` written over and between them."""
    payloads = [b"alpha", b"", b"beta" * 20, data[:40]]
    content = bytearray(fmt.encode_segment_header(HEADER))
    for number, payload in enumerate(payloads):
        pieces = fmt.encode_frame(
            [payload, b"also"],
            kind=fmt.ATOMIC if number % 2 else fmt.GROUP,
            codec=0,
            first_seq=1 + 2 * number,
            enqueued_ns=5,
            synced_seq=1,
            marker=MARKER,
            offset=len(content),
        )
        content += b"".join(pieces)
    for start in range(0, len(data) - 3, 8):
        at = int.from_bytes(data[start : start + 2], "little") % (len(content) + 1)
        size = data[start + 2] % 24
        content[at : at + size] = data[start + 3 : start + 8]
    return bytes(content), {*payloads, b"also"}


def one_input(data: bytes) -> None:
    """What atheris calls: the first byte chooses how the others become a file."""
    kind, rest = (data[0] % 4 if data else 0), data[1:]
    if kind == 0:
        check_parser(rest, set())
    elif kind == 1:
        check_parser(fmt.encode_segment_header(HEADER) + rest, set())
    elif kind == 2:
        check_parser(*hurt(rest))
    else:
        check_parser(fmt.encode_segment_header(HEADER) + forged(rest), None)


def by_chance(seconds: float, seed: int) -> int:
    """Random inputs for so long; how many."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        data = chance.randbytes(chance.choice([1, 10, 61, 100, 300, 3_000]))
        try:
            one_input(data)
        except BaseException:
            sys.stderr.write(f"seed {seed}, input {count}: {data.hex()}\n")
            raise
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    arguments, rest = parser.parse_known_args()
    if atheris is None:
        seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4))
        sys.stdout.write(f"atheris is not installed; {by_chance(arguments.seconds, seed)} random inputs, seed {seed}\n")
        return
    options = [f"-max_total_time={int(arguments.seconds)}", "-max_len=4096", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, *rest], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
