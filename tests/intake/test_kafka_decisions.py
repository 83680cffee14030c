"""What the lane to Kafka decides, without a loop and without a broker: points, room, rebalances, stalls."""

from __future__ import annotations

import random
import weakref

import pytest
from aiokafka.structs import ConsumerRecord
from hypothesis import given
from hypothesis import strategies as st

from batchqueue_async.intake.kafka.assignment import Assignment, Limits
from batchqueue_async.intake.kafka.progress import Place, Progress, Window
from batchqueue_async.intake.kafka.records import KafkaMessage, KafkaRun, size_of_all
from batchqueue_async.intake.kafka.stalls import Sight, StallWatch
from batchqueue_async.intake.ports import Epoch

A, B = Place("orders", 0), Place("orders", 1)


def assignment(places=(A,), messages=100, size=1_000, least=1, ahead=1_000):
    made = Assignment(Limits(messages=messages, bytes=size, least=least, ahead=ahead))
    made.assign(places)
    return made


# --- the window


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40), st.randoms(use_true_random=False), st.lists(st.integers(1, 5))
)
def test_the_point_is_the_first_unfinished_of_what_was_received_in_any_order_with_gaps_and_runs(steps, chance, sizes):
    offsets = [sum(steps[: at + 1]) for at in range(len(steps))]
    position = offsets[-1] + 7  # the position also counts what is no record
    window, runs, rest, sizes = Window(), [], list(offsets), list(sizes)
    while rest:
        size = sizes.pop() if sizes else 1
        run, rest = rest[:size], rest[size:]
        window.received(run[0])
        if len(run) > 1 and chance.random() < 0.5:
            window.split(run[0], run)
            runs += [(run[0], [each]) for each in run]
        else:
            runs.append((None, run))
    unfinished = set(offsets)
    chance.shuffle(runs)
    for first, run in runs:
        assert window.point(position) == min(unfinished)
        if first is None:
            window.finished(run[0])
        else:
            window.finished_within(first, run[0])
        unfinished -= set(run)
    assert window.point(position) == position
    assert len(window) == 0


def test_a_window_with_nothing_pending_knows_only_the_position():
    assert Window().point(None) is None
    assert Window().point(5) == 5


# --- room


def test_a_full_partition_is_left_alone_until_a_quarter_of_its_room_is_free():
    made = assignment((A, B))
    part = made.part(A)
    for offset in range(50):
        assert A in made.offered()
        part.received(offset, 1, 1)
    assert made.offered() == [B]
    part.freed(12, 12)
    assert made.offered() == [B]
    part.freed(1, 1)
    assert made.offered() == [A, B]


def test_a_partition_is_bounded_by_bytes_and_by_what_lies_beyond_its_commit_point():
    made = assignment((A, B), ahead=10)
    made.part(A).received(0, 1, 500)
    for offset in range(10):
        made.part(B).received(offset, 1, 0)
        if offset:
            made.part(B).window.finished(offset)
            made.part(B).freed(1, 0)
    assert made.part(B).held == 1
    assert made.offered() == []
    made.part(B).window.finished(0)
    assert made.offered() == [B]


def test_what_is_asked_for_passes_no_bound_whichever_partition_answers():
    made = assignment((A, B), messages=100)
    made.part(A).received(0, 30, 30)
    assert made.lot([A, B], 1_000, 1 << 20) == 20
    assert made.lot([B], 1_000, 1 << 20) == 50
    assert made.lot([B], 7, 1 << 20) == 7
    assert made.lot([B], 1_000, 1_000) == 1  # nobody knows yet how large records are
    made.took(10, 1_000)
    assert made.lot([B], 1_000, 450) == 4
    assert made.lot([B], 1_000, 1) == 1
    made.took(10, 10)
    assert made.lot([B], 1_000, 450) == 5  # large records are remembered for a while
    made.took(0, 0)


def test_a_stuck_partition_leaves_room_for_the_others():
    limits = Limits(messages=500, bytes=1_000, least=8, ahead=5_000)
    assert [limits.messages(count) for count in (1, 2, 10, 1_000)] == [500, 250, 50, 8]


# --- rebalances


def test_in_41_outcomes_of_the_drain_count_and_later_ones_do_not():
    made = assignment()
    part = made.part(A)
    part.received(0, 1, 1)
    part.received(1, 1, 1)
    revoked = made.revoke()
    assert not part.epoch.open
    assert not part.epoch.over
    part.window.finished(0)
    assert made.due({A: 2}) == {A: 1}
    made.fence(revoked)
    assert part.epoch.over
    assert made.due({A: 2}) == {}


def test_in_43_a_late_fence_leaves_a_newer_assignment_alone():
    made = assignment()
    revoked = made.revoke()
    made.fence(revoked)
    made.assign([A])
    newer = made.part(A)
    made.fence(revoked)
    assert made.part(A) is newer
    assert newer.epoch.open
    assert made.assigned


def test_in_48_records_that_come_before_the_assignment_is_announced_belong_to_it():
    made = assignment()
    made.fence(made.revoke())
    early = made.part(A)
    early.received(7, 1, 1)
    made.assign([A, B])
    assert made.part(A) is early
    assert made.due({A: 8, B: 3}) == {A: 7, B: 3}


# --- commits


def test_nothing_is_committed_twice_and_the_points_belong_to_their_assignment():
    made = assignment()
    old = {A: made.part(A)}
    assert made.due({A: 5}) == {A: 5}
    made.fence(made.revoke())
    made.assign([A])
    made.committed({A: 5}, old)  # the answer came after the rebalance
    assert made.due({A: 5}) == {A: 5}
    made.committed({A: 5}, {A: made.part(A)})
    assert made.due({A: 5}) == {}
    assert made.due({A: None}) == {}


def test_in_39_only_the_position_counts_what_is_no_record():
    made = assignment()
    part = made.part(A)
    for offset in (0, 1, 2, 4, 5, 6, 12, 13, 14):
        part.received(offset, 1, 1)
        part.window.finished(offset)
    assert made.due({A: 16}) == {A: 16}


# --- stalls


STUCK = Sight(assigned=True, room=True, behind=True)


@pytest.mark.parametrize(
    ("sight", "reason"),
    [
        (STUCK, "there are messages, and none came for 60 s"),
        (STUCK._replace(behind=None), "the broker did not answer for 60 s"),
        (STUCK._replace(assigned=False), "the group assigned nothing for 60 s"),
        (STUCK._replace(room=False), None),
        (STUCK._replace(behind=False), None),
        (STUCK._replace(assigned=False, behind=False), "the group assigned nothing for 60 s"),
    ],
)
def test_a_consumer_is_stuck_when_it_could_go_on_and_does_not(sight, reason):
    watch = StallWatch(60.0, now=100.0)
    assert watch.verdict(sight, now=159.0) is None
    assert watch.verdict(sight, now=160.0) == reason
    watch.progressed(161.0)
    assert watch.verdict(sight, now=220.0) is None


def test_time_without_room_does_not_count():
    watch = StallWatch(60.0, now=0.0)
    assert watch.verdict(STUCK._replace(room=False), now=59.0) is None
    assert watch.verdict(STUCK, now=118.0) is None
    assert watch.verdict(STUCK, now=119.0) is not None


def test_windows_of_many_offsets_stay_small():
    chance = random.Random(1)
    window, flying = Window(), []
    for offset in range(0, 30_000, 3):
        window.received(offset)
        flying.append(offset)
        if len(flying) == 100:
            window.finished(flying.pop(chance.randrange(100)))
    for offset in flying:
        window.finished(offset)
    assert len(window) == 0


def test_what_a_run_holds_is_what_its_messages_give_back():
    part = Progress(A, Epoch("orders/0"))
    bodies = (b"x" * 100, None, b"", b"yy")
    records = [
        ConsumerRecord("orders", 0, at, 0, 0, key, body, None, _length(key), _length(body), ())
        for at, (key, body) in enumerate(zip((b"k", None, b"", None), bodies, strict=True))
    ]
    size = size_of_all(records)
    run = KafkaRun(records, part, A, size)
    part.received(0, len(run), size)
    assert size == 103 + 0 + 2 + 3
    assert run.bodies() == [b"x" * 100, b"", b"", b"yy"]
    assert run.bodies() == [each.body for each in run] == [b"x" * 100, b"", b"", b"yy"]
    assert run.bodies() == [b"x" * 100, b"", b"", b"yy"], "of messages as of records"
    assert [each.tombstone for each in run] == [False, True, False, False]
    run[1].attempt = 3
    run[2].value = "decoded"
    run.taken = 7.0
    messages = run.split()
    assert messages == list(run), "the same objects each time"
    assert [(each.attempt, each.value) for each in messages] == [(1, None), (3, None), (1, "decoded"), (1, None)]
    for message in messages:
        assert (message.epoch, message.order, message.taken) == (part.epoch, A, 7.0)
    assert [message.size for message in messages] == [103, 0, 2, 3]
    for message in messages:
        message.finish()
    assert (part.held, part.bytes, part.window.point(4)) == (0, 0, 4)


class Interrupted(BaseException):
    pass


class InterruptedRecord:
    """A record at which its reader is interrupted once, as by Ctrl-C."""

    def __init__(self, record):
        self.record = record
        self.read = False

    def __getattr__(self, name):
        if name == "value" and not self.read:
            self.read = True
            raise Interrupted
        return getattr(self.record, name)


def some_records(count):
    return [ConsumerRecord("orders", 0, at, 0, 0, None, b"%d" % at, None, -1, 1, ()) for at in range(count)]


def test_a_message_takes_the_place_of_its_record_which_goes_at_once():
    records = some_records(3)
    gone = [weakref.ref(record) for record in records]
    run = KafkaRun(records, Progress(A, Epoch("orders/0")), None, 3)
    assert all(each() is not None for each in gone), "nobody has asked for a message"
    assert [message.offset for message in run] == [0, 1, 2]
    assert all(each() is None for each in gone), "with both, batches grow old before the garbage collector"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_run_whose_messages_were_made_in_part_goes_on_there(place):
    records = some_records(3)
    records[place] = InterruptedRecord(records[place])
    run = KafkaRun(records, part := Progress(A, Epoch("orders/0")), None, 3)
    part.received(0, 3, 3)
    with pytest.raises(Interrupted):
        list(run)
    first = records[0] if place else None
    assert run.bodies() == [b"0", b"1", b"2"]
    messages = run.split()
    assert [(type(each), each.offset, each.body) for each in messages] == [
        (KafkaMessage, at, b"%d" % at) for at in range(3)
    ]
    assert first is None or messages[0] is first, "what was handed out stays"
    for message in reversed(messages):
        message.finish()
    assert (part.held, part.window.point(3)) == (0, 3)


def _length(data):
    return -1 if data is None else len(data)
