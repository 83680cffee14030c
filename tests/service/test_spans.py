"""`observe.traces`: spans of a service's batches in a real Collector; what is wrong with it, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import fastjsonschema
import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once
from service_process import Running

import batchqueue_async as bq
from batchqueue_async import observe
from batchqueue_async._support import tracing
from batchqueue_async.cli.main import main
from batchqueue_async.errors import ConfigError
from batchqueue_async.service import App, Service, read_service, spans
from batchqueue_async.service.file.json_schema import json_schema
from batchqueue_async.sinks.otlp.request import SIGNALS

QUIET = "observe: {enabled: false, traces: true}\n"
ROWS = "queues: {rows: {handler: taken}}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A directory of its own, none of OpenTelemetry's variables, and no provider in this process."""
    monkeypatch.chdir(tmp_path)
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(api, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(api, "_TRACER_PROVIDER_SET_ONCE", Once())
    yield
    assert tracing.active is None


@pytest.fixture
def app():
    made = App()

    @made.handler("taken")
    async def taken(batch):
        made.taken = [*getattr(made, "taken", ()), *batch]

    return made


def spec_of(text, *settings):
    Path("s.yaml").write_text(text)
    return read_service("s.yaml", settings=settings, environ={})


def arrived(grpc_server):
    """The spans that came, each with its resource's attributes."""
    request = SIGNALS["traces"].request()
    return [
        (span, {each.key: each.value.string_value for each in group.resource.attributes})
        for call in grpc_server.received()
        for group in request.FromString(call.content).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def wait_for(grpc_server, *names):
    deadline = time.monotonic() + 60
    while not set(names) <= {span.name for span, _ in arrived(grpc_server)}:
        assert time.monotonic() < deadline, [span.name for span, _ in arrived(grpc_server)]
        time.sleep(0.05)  # they come from another process, and nothing tells when
    return {span.name: (span, resource) for span, resource in arrived(grpc_server)}


# --- with a real collector


@pytest.mark.timeout(600)  # the Collector is built when the first test asks for it
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_service_sends_its_spans_to_a_collector(collector, grpc_server, protocol):
    """Those of handlers go with them, those that are left out do not; a reload that changes it is refused whole."""
    text = (
        "service: {name: shop}\n"
        "observe: {enabled: false, traces: {skip: [rows]}}\n"
        "queues: {q: {handler: spanned, feeds: [rows]}, rows: {handler: rows_written}}\n"
        "exporters: {e: {sink: fed, overflow: block}}\n"
        "sinks: {fed: {type: code, use: feeds_one}}\n"
    )
    address = collector.address if protocol == "grpc" else collector.http_address
    variables = {"ENDPOINT": f"http://{address}", "PROTOCOL": protocol}
    target = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    with Running(text, **target, OTEL_BSP_SCHEDULE_DELAY="50") as service:
        found = wait_for(grpc_server, "process q", "own")
        assert service.process.stdout.readline() == "written\n"
        Path("s.yaml").write_text(text.replace("skip: [rows]", "skip: [q]"))
        service.signal(signal.SIGHUP)
        assert "observe.traces.skip changed; restart" in service.until("reload_refused")
        service.signal(signal.SIGTERM)
        code, said = service.end()
    assert code == 0, said
    (handler, resource), (own, _) = found["process q"], found["own"]
    assert resource["service.name"] == "shop"
    assert own.parent_span_id == handler.span_id
    assert own.trace_id == handler.trace_id
    assert {span.name for span, _ in arrived(grpc_server)} == {"process q", "own"}


@pytest.mark.real_time(one_loop=True)
@pytest.mark.timeout(600)
async def test_the_last_spans_are_sent_at_the_end(app, collector, grpc_server, monkeypatch):
    """And a service that comes after another in the same process has a provider of its own."""
    monkeypatch.setattr(spans, "LAST_SPANS", 60.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    for name in ("first", "second"):
        if name == "second":
            monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
        spec = spec_of(
            f"service: {{name: {name}, drain_timeout: 60s}}\n{QUIET}queues: {{{name}: {{handler: taken}}}}\n"
        )
        async with Service(spec, app) as service:
            await service.queues[name].produce(1)
    assert app.taken == [1, 1]
    found = {span.name: resource["service.name"] for span, resource in arrived(grpc_server)}
    assert found == {"process first": "first", "process second": "named"}


def test_a_collector_that_does_not_answer_cannot_keep_the_process():
    text = (
        "service: {drain_timeout: 1s}\n"
        "observe: {enabled: false, traces: true}\n"
        "queues: {q: {handler: spanned, feeds: [rows]}, rows: {handler: rows_written}}\n"
        "exporters: {e: {sink: fed, overflow: block}}\n"
        "sinks: {fed: {type: code, use: feeds_one}}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with Running(text, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}") as service:
            assert service.process.stdout.readline() == "written\n"
            service.until("running")
            service.signal(signal.SIGTERM)
            code, said = service.end()
    assert code == 0, said
    assert "traces_not_sent" in said


# --- whose provider


@pytest.fixture
def memory():
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory):
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(memory))
    return made


async def test_the_provider_of_the_program_is_used_and_stays(app, memory, provider):
    api.set_tracer_provider(provider)
    async with Service(spec_of(QUIET + ROWS), app) as service:
        await service.queues["rows"].produce(1)
    assert [span.name for span in memory.get_finished_spans()] == ["process rows"]
    with api.get_tracer("program").start_as_current_span("later"):
        pass
    assert [span.name for span in memory.get_finished_spans()] == ["process rows", "later"]


@pytest.mark.parametrize("section", ["traces: false", "traces: null", "traces: {enabled: false, skip: [rows]}"])
async def test_where_it_is_switched_off_nothing_is_traced(app, memory, provider, section):
    api.set_tracer_provider(provider)
    async with Service(spec_of(f"observe: {{enabled: false, {section}}}\n{ROWS}"), app) as service:
        await service.queues["rows"].produce(1)
    assert not memory.get_finished_spans()


async def test_without_an_exporter_spans_go_nowhere(app, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    async with Service(spec_of(QUIET + ROWS), app) as service:
        await service.queues["rows"].produce(1)
    assert app.taken == [1]


async def test_an_exporter_that_breaks_at_the_end_is_told(app, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")

    def broken(provider):
        raise OSError("the disk is full")

    monkeypatch.setattr(TracerProvider, "shutdown", broken)
    with caplog.at_level(logging.WARNING, "batchqueue_async"):
        async with Service(spec_of(QUIET + ROWS), app):
            pass
    assert "traces_not_sent" in caplog.text
    assert "the disk is full" in caplog.text


# --- what is wrong


def check(capsys, *more):
    Path("s.yaml").write_text(QUIET + "queues: {rows: {handler: taken}}\n")
    Path("prog.py").write_text(
        "from batchqueue_async.service import App\napp = App()\n\n@app.handler('taken')\nasync def taken(batch): ...\n"
    )
    code = main(["check", "s.yaml", "--app", "prog:app", *more])
    return code, capsys.readouterr().out


def test_check_of_a_file_with_traces(capsys):
    assert check(capsys) == (0, "s.yaml: 1 queue; fine\n")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("opentelemetry.trace", "needs opentelemetry-api; run: pip install 'batchqueue-async[otel]'"),
        ("opentelemetry.sdk.trace", "run: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
    ],
)
async def test_a_package_that_is_missing_is_named_by_check_and_run(capsys, app, monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, module, None)
    code, said = check(capsys)
    assert code == 1
    assert said.startswith("s.yaml:1:")
    assert "observe.traces needs" in said
    assert words in said
    assert check(capsys, "--no-env")[0] == 0  # packages are another machine's
    with pytest.raises(ConfigError, match=r"observe\.traces needs"):
        await Service(spec_of(QUIET + ROWS), app).__aenter__()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TRACES_EXPORTER": "otpl"}, "the exporter 'otpl' of OTEL_TRACES_EXPORTER: it is not installed; did you mean"),
        (
            {"TRACES_EXPORTER": "console, otlp", "EXPORTER_OTLP_PROTOCOL": "http/json"},
            "the protocol 'http/json' of OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
        (
            {"EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "needs an exporter of OpenTelemetry; run: pip install opentelemetry-exporter-otlp-proto-http",
        ),
        (
            {"EXPORTER_OTLP_COMPRESSION": "brotli"},
            "can't make the exporter otlp_proto_grpc (",
        ),
    ],
)
def test_variables_that_can_not_be_met_are_told(capsys, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    known = [each for each in spans.entry_points(group="opentelemetry_traces_exporter") if "http" not in each.name]
    monkeypatch.setattr(spans, "entry_points", lambda group: known)
    code, said = check(capsys)
    assert code == 1
    assert words in said


# --- whether the collector is there


@pytest.fixture
def listener():
    """A port that takes connections; what came, when it is closed, is in its list."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("name", ["EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_check_connects_to_the_collector_and_sends_nothing(capsys, monkeypatch, listener, protocol, name):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    if "TRACES" in name:  # the one for traces comes first
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{unused_port()}")
    monkeypatch.setenv(f"OTEL_{name}", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert check(capsys, "--connect") == (0, "s.yaml: 1 queue; fine\n")
    listener.settimeout(60)
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_check_names_a_collector_that_is_away(capsys, monkeypatch, protocol):
    port = unused_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://somebody:secret@127.0.0.1:{port}")
    assert check(capsys)[0] == 0  # nobody asked for it
    code, said = check(capsys, "--connect")
    assert code == 1
    assert said.startswith("s.yaml:1:")
    assert f"observe.traces sends to 127.0.0.1:{port}, which can't be reached: " in said
    assert "start it, or correct OTEL_EXPORTER_OTLP_ENDPOINT" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("variables", "addresses"),
    [
        ({}, [("localhost", 4317)]),
        ({"EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, [("localhost", 4318)]),
        ({"EXPORTER_OTLP_ENDPOINT": "otel:4317"}, [("otel", 4317)]),
        ({"EXPORTER_OTLP_ENDPOINT": "https://otel"}, [("otel", 4317)]),
        ({"EXPORTER_OTLP_ENDPOINT": "https://otel", "EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, [("otel", 443)]),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://[::1]:9/x"}, [("::1", 9)]),
        ({"EXPORTER_OTLP_ENDPOINT": "unix:///run/otel.sock"}, []),
        ({"TRACES_EXPORTER": "none"}, []),
        ({"TRACES_EXPORTER": "console"}, []),
    ],
)
def test_where_the_collector_is(monkeypatch, variables, addresses):
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert spans.collectors(spec_of(QUIET + ROWS)) == addresses


def test_nobody_knows_where_the_programs_own_provider_sends(monkeypatch, provider):
    api.set_tracer_provider(provider)
    assert spans.collectors(spec_of(QUIET + ROWS)) == []
    assert spans.collectors(spec_of("observe: {enabled: false}\n" + ROWS)) == []


async def test_a_program_that_traces_by_itself_is_told(app, provider):
    traces = observe.trace(provider)
    try:
        with pytest.raises(
            ConfigError, match=r"the program traces by itself, with observe\.trace.*remove one of the two"
        ):
            await Service(spec_of(QUIET + ROWS), app).__aenter__()
    finally:
        traces.stop()


def test_names_that_are_left_out_have_to_be_there():
    with pytest.raises(
        ConfigError, match=r"observe\.traces\.skip='row' is not a source, queue or exporter.*did you mean"
    ):
        spec_of("observe: {traces: {skip: row}}\n" + ROWS)


def test_the_schema_takes_what_the_file_may_say():
    judge = fastjsonschema.compile(json.loads(json.dumps(json_schema())))
    for given in (True, False, None, {}, {"enabled": False}, {"skip": ["rows"]}):
        judge({"observe": {"traces": given}, "queues": {"rows": {"handler": "taken"}}})
    for given in ("on", 1, {"skips": ["rows"]}):
        with pytest.raises(fastjsonschema.JsonSchemaException):
            judge({"observe": {"traces": given}})
    with pytest.raises(bq.ConfigError, match=r"observe\.traces"):
        spec_of("observe: {traces: 1}\n" + ROWS)
