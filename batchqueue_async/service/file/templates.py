"""Files to begin with: a commented service from one kind of source to one kind of sink."""

from __future__ import annotations

from batchqueue_async._support.wording import nearest
from batchqueue_async.errors import ConfigError

CODE = "code"
"""The source that is the program itself: its code puts items into a queue."""

_HEAD = """\
# A service of batchqueue_async.
# `batchqueue check {file}{app}` looks for errors, `batchqueue run {file}{app}` runs it.
# yaml-language-server: $schema=batchqueue.schema.json
version: 1
service:
  name: {name}
  drain_timeout: 30s          # from the first SIGTERM to the end, at most
observe:
  listen: ["127.0.0.1:9464", "unix:"]   # /metrics, /ui, ...; unix: is what `batchqueue top` finds
  # traces: true              # spans of batches, to where OTEL_EXPORTER_OTLP_ENDPOINT says
logs: {{level: info, format: text}}
"""

_SOURCES = {
    "amqp": """\
    type: amqp
    url: amqp://localhost/
    user: guest
    password: env:AMQP_PASSWORD   # or file:/run/secrets/amqp; never the secret itself
    queue: {name}
""",
    "kafka": """\
    type: kafka
    bootstrap: [localhost:9092]
    topics: [{name}]
    group: {name}
""",
    "nats": """\
    type: nats
    url: nats://localhost:4222
    subject: {name}.>
    stream: {upper}
    durable: {name}
""",
    "redis": """\
    type: redis
    url: redis://localhost:6379/0
    stream: {name}
    group: {name}
""",
}
_SOURCE = """\
sources:
  incoming:
{body}    decode: json                # bodies are JSON objects; a function of yours by @app.decoder
    dead_letters: {name}.dead   # where messages go that are given up; drop loses them knowingly
    to: {name}
"""
_QUEUE = """\
queues:
  {name}:
    handler: handle             # a function that {module}.py registers with @app.handler("handle")
    max_batch: 500
    linger: 50ms
    overflow: block
    feeds: [rows]               # the queue that the handler puts its rows into: it ends after this one
  rows: {{exporter: {name}_out, max_batch: 1000, overflow: block}}
"""
_EXPORTER = """\
exporters:
  {name}{out}:
    sink: {kind}
    path: ./{name}-queue          # the send queue on disk, which survives outages and restarts
    max_bytes: 1GiB
    overflow: block
    batch: {{max_records: 500, linger: 200ms}}
    retry: {{initial: 1s, max_delay: 5m}}
    breaker: {{threshold: 5, reset_timeout: 30s}}
"""
_SINKS = {
    "sqlite": "path: ./{name}.db, table: {name}",
    "jsonl": "path: ./{name}.jsonl, max_bytes: 100MiB",
    "postgres": "dsn: env:DATABASE_URL, table: {name}",
    "kafka": "bootstrap: [localhost:9092], topic: {name}",
    "http": "url: http://localhost:8080/{name}, token: env:API_TOKEN",
    "otlp": "endpoint: http://localhost:4317, signal: logs",
    "otlp-http": "endpoint: http://localhost:4318, signal: logs",
    "clickhouse": "url: http://localhost:8123, table: {name}",
    "opensearch": "url: http://localhost:9200, index: {name}",
    "amqp": "url: amqp://localhost/, queue: {name}",
    "nats": "url: nats://localhost:4222, subject: {name}.out",
    "redis": "url: redis://localhost:6379/0, stream: {name}.out",
    "parquet": "url: ./{name}-parquet",
    "delta": "uri: ./{name}-delta",
    "iceberg": "table: default.{name}, catalog: {{type: sql, uri: 'sqlite:///{name}.db', warehouse: ./{name}-lake}}",
}

FROM = (CODE, *_SOURCES)
TO = tuple(_SINKS)


def template(source: str, sink: str, name: str = "orders") -> str:
    """A file that takes from one kind of source, or from code, and writes into one kind of sink.

    Example:
        >>> print(template("redis", "sqlite").splitlines()[0])
        # A service of batchqueue_async.

    Raises:
        ConfigError: there is no such source or sink.
    """
    for given, known, what in ((source, FROM, "source"), (sink, TO, "sink")):
        if given not in known:
            raise ConfigError(f"{given!r} is not a kind of {what}; {nearest(given, known)}")
    coded = source == CODE
    words = {
        "name": name,
        "upper": name.upper(),
        "file": f"{name}.yaml",
        "module": name,
        "kind": sink.replace("-", "_"),
    }
    words |= {"app": f" --app {name}:app" if coded else "", "out": "_out" if coded else ""}
    parts = [_HEAD]
    if coded:
        parts.append(_QUEUE)
    else:
        parts.append(
            _SOURCE.format(body=_SOURCES[source].format(**words), **words).replace("{", "{{").replace("}", "}}")
        )
    parts.append(_EXPORTER)
    fields = _SINKS[sink].format(**words)
    return "".join(each.format(**words) for each in parts) + f"sinks:\n  {words['kind']}: {{type: {sink}, {fields}}}\n"


def program(name: str = "orders") -> str:
    """The code that goes with a file whose source is code."""
    return f'''\
"""The handlers that {name}.yaml names: `batchqueue run {name}.yaml --app {name}:app`."""

from batchqueue_async.service import App

app = App()


@app.handler("handle")
async def handle(batch: list[dict]) -> None:
    """What is returned normally is done; what is raised goes to `on_error`, or is logged and counted."""
    await app.queue("rows").produce_many([{{"id": each["id"]}} for each in batch])
'''
