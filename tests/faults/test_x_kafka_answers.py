"""What a broker says of itself is held against no record."""

from __future__ import annotations

import asyncio
import json
from itertools import count

import aiokafka
import pytest
from aiokafka import errors
from kafka_tools import create, read
from outage_kit import LIMIT, config

import batchqueue_async as bq
from batchqueue_async.sinks.kafka import KafkaSink

pytestmark = pytest.mark.real_time
names = count()


@pytest.mark.parametrize("code", [-1, 56, 9_999], ids=["unknown server error", "storage", "a newer broker's"])
@pytest.mark.parametrize("idempotent", [False, True], ids=["plain", "idempotent"])
async def test_x_45_an_error_within_the_broker_gives_no_record_up(kafka, monkeypatch, code, idempotent):
    topic = f"answers{next(names)}"
    await create(kafka, topic)
    answers = iter([code] * 6)

    async def send_batch(producer, batch, *arguments, **options):
        code = next(answers, None)
        if code is None:
            return await sent(producer, batch, *arguments, **options)
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(errors.for_code(code)())
        return answer

    sent = aiokafka.AIOKafkaProducer.send_batch
    monkeypatch.setattr(aiokafka.AIOKafkaProducer, "send_batch", send_batch)
    given_up = []
    policy = config(on_dead_letter=lambda records, reason: given_up.append((records, reason)))
    async with bq.Exporter(KafkaSink(kafka.address, topic, idempotent=idempotent), policy) as exporter:
        await exporter.consume([{"id": number} for number in range(3)])
        await exporter.flush(timeout=LIMIT)
        assert given_up == []
        assert exporter.stats().retries > 0
    assert sorted(json.loads(message.value)["id"] for message in await read(kafka, topic)) == [0, 1, 2]


async def test_x_45_a_record_that_the_broker_calls_invalid_is_given_up(kafka):
    """A topic that keeps the last of each key takes no record without one: INVALID_RECORD, as the broker has it."""
    topic = f"answers{next(names)}"
    await create(kafka, topic, **{"cleanup.policy": "compact"})
    given_up = []
    policy = config(on_dead_letter=lambda records, reason: given_up.append((records, reason)))
    async with bq.Exporter(KafkaSink(kafka.address, topic), policy) as exporter:
        await exporter.consume([{"id": 1}])
        await exporter.flush(timeout=LIMIT)
    ((records, reason),) = given_up
    assert records == [{"id": 1}]
    assert "InvalidRecord" in reason
    assert issubclass(errors.for_code(87), errors.UnknownError)
