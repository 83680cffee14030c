"""Which acknowledgements leave for RabbitMQ, against a model of its channel."""

from __future__ import annotations

import struct
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from batchqueue_async.intake.amqp.acks import AckWindow


class Channel:
    """Settles tags as RabbitMQ does: a tag that it does not know closes the channel, a range covers what is open."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.acked: set[int] = set()
        self.requeued: set[int] = set()

    def write(self, frames: bytes) -> None:
        while frames:
            kind, number, size, basic, method, tag, bits, end = struct.unpack(">BHIHHQBB", frames[:21])
            assert (kind, number, size, basic, end) == (1, 7, 13, 60, 0xCE)
            frames = frames[21:]
            assert tag in self.open, f"406: unknown delivery tag {tag}"
            covered = [one for one in self.open if one <= tag] if method == 80 and bits & 1 else [tag]
            (self.acked if method == 80 else self.requeued).update(covered)
            assert method == 80 or bits == 2
            self.open = [one for one in self.open if one not in covered]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_done_is_acked_and_nothing_else(data: st.DataObject) -> None:
    channel, window = Channel(), AckWindow()
    running: list[int] = []
    done: set[int] = set()
    returned: set[int] = set()
    tag = 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["receive", "finish", "finish", "give back", "write"])):
            case "receive":
                for _ in range(data.draw(st.integers(1, 5))):
                    tag += 1
                    channel.open.append(tag)
                    window.received(tag)
                    running.append(tag)
            case "finish" if running:
                done.add(one := running.pop(data.draw(st.integers(0, len(running) - 1))))
                window.done(one)
            case "give back" if running:
                returned.add(one := running.pop(data.draw(st.integers(0, len(running) - 1))))
                window.give_back(one)
            case _:
                channel.write(window.take().frames(7))
                assert channel.acked == done
                assert channel.requeued == returned
                assert len(window) == len(running) == len(channel.open)
    channel.write(window.take().frames(7))
    assert channel.acked == done
    assert channel.requeued == returned


def test_in_9_a_slow_message_holds_back_no_other() -> None:
    window = AckWindow()
    for tag in range(1, 101):
        window.received(tag)
    for tag in range(100, 1, -1):
        window.done(tag)
    told = window.take()
    assert told.upto == 0
    assert sorted(told.alone) == list(range(2, 101))
    assert len(window) == 1


def test_in_35_single_acks_ascend_in_whatever_order_messages_finish() -> None:
    window, shuffled = AckWindow(), Random(7)
    for tag in range(1, 501):
        window.received(tag)
    tags = list(range(2, 501))
    shuffled.shuffle(tags)
    for tag in tags:
        window.done(tag)
    assert window.take().alone == list(range(2, 501))


def test_in_10_a_range_covers_nothing_that_is_open() -> None:
    window = AckWindow()
    for tag in (1, 2, 3):
        window.received(tag)
    window.done(1)
    window.done(3)
    told = window.take()
    assert (told.upto, told.alone) == (1, [3])
    window.done(2)
    assert window.take().upto == 2  # not 3, which was told alone: the broker does not know it any more


def test_in_order_one_frame_is_enough() -> None:
    window = AckWindow()
    for tag in range(1, 1001):
        window.received(tag)
        window.done(tag)
    assert len(window.take().frames(1)) == 21
    assert window.take().frames(1) == b""
