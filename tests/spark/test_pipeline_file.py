"""A pipeline's file: what is read from it, and every fault at once, before any Spark runs."""

from __future__ import annotations

import textwrap
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchqueue_async.cli.main import main
from batchqueue_async.errors import ConfigError
from batchqueue_async.spark.pipelines import kinds, reading
from batchqueue_async.spark.pipelines.fields import is_reference
from batchqueue_async.spark.pipelines.pipeline import SparkPipeline
from batchqueue_async.spark.pipelines.restart import RestartPolicy, Restarts
from batchqueue_async.spark.pipelines.sql_names import table_names

GOOD = """
sources:
  ticks: {type: rate-micro-batch, rows_per_batch: 10, start: "2026-01-01", time: timestamp}
views:
  even: {sql: SELECT value FROM ticks WHERE value % 2 = 0}
outputs:
  rows: {view: even, to: {type: sqlite, path: out.db, table: even}}
"""


def write(tmp_path, text):
    path = tmp_path / "pipeline.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def faults(tmp_path, text):
    with pytest.raises(ConfigError) as raised:
        SparkPipeline.from_file(write(tmp_path, text))
    return [str(each).replace(f"{tmp_path}/", "") for each in raised.value.faults]


def with_parts(**parts):
    """The good pipeline with some of its parts changed."""
    mapping = {
        "sources": {"ticks": {"type": "rate"}},
        "views": {"even": {"sql": "SELECT value FROM ticks"}},
        "outputs": {"rows": {"view": "even", "to": {"type": "console"}}},
    }
    for name, part in parts.items():
        mapping[name] = {**mapping.get(name, {}), **part} if isinstance(part, dict) else part
    return mapping


def fault_of(**parts):
    with pytest.raises(ConfigError) as raised:
        SparkPipeline.from_mapping(with_parts(**parts))
    (fault,) = raised.value.faults
    return str(fault).removeprefix("the mapping: ")


# --- what is read


def test_a_file_says_what_it_says(tmp_path):
    spec = SparkPipeline.from_file(write(tmp_path, GOOD), overrides={"directory": str(tmp_path)}).spec
    assert spec.name == "pipeline"
    assert spec.sources["ticks"].options["start"] == datetime(2026, 1, 1, tzinfo=UTC)
    assert spec.views["even"].inputs == ("ticks",)
    output = spec.outputs["rows"]
    assert output.targets[0].options["path"] == f"{tmp_path}/out.db"
    assert output.checkpoint == f"{tmp_path}/state/checkpoints/rows"
    assert (output.mode, output.targets[0].place) == ("append", "driver")


def test_overrides_are_values_as_a_file_has_them(tmp_path):
    path = write(tmp_path, GOOD)
    spec = SparkPipeline.from_file(
        path,
        overrides={
            "spark.master": "local[4]",
            "sources.ticks.rows_per_batch": "500",
            "timeouts.stop": "5s",
            "outputs.rows.trigger": "2s",
        },
    ).spec
    assert spec.session.master == "local[4]"
    assert spec.sources["ticks"].options["rows_per_batch"] == 500
    assert spec.timeouts.stop == 5.0
    assert spec.outputs["rows"].trigger.every == 2.0
    with pytest.raises(
        ConfigError, match=r"override sources.ticks.rows: source 'ticks': rows is not a field of source"
    ):
        SparkPipeline.from_file(path, overrides={"sources.ticks.rows": "1"})


def test_what_a_view_is_made_of():
    mapping = with_parts(
        sources={"names": {"type": "files", "format": "parquet", "path": "x", "static": True}},
        views={"both": {"sql": "SELECT * FROM even JOIN names ON true"}, "known": {"sql": "SELECT * FROM names"}},
        outputs={
            "more": {"view": "both", "to": {"type": "console"}},
            "whole": {"view": "known", "to": {"type": "console"}},
        },
    )
    spec = SparkPipeline.from_mapping(mapping).spec
    assert spec.sources_of("both") == {"ticks", "names"}
    assert (spec.is_stream("both"), spec.is_stream("known")) == (True, False)


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT * FROM a", ["a"]),
        ("select * from a, `b c` x join db.c using (id) left join d on a.x = d.x, e", ["a", "b c", "db.c", "d"]),
        ("SELECT * FROM (SELECT * FROM a WHERE x IN (SELECT y FROM b)) AS q", ["a", "b"]),
        ("WITH q AS (SELECT * FROM a), r AS (SELECT * FROM q) SELECT * FROM r JOIN b", ["a", "b"]),
        ("SELECT extract(YEAR FROM at), trim(BOTH 'x' FROM n), a IS DISTINCT FROM b FROM t", ["t"]),
        ("SELECT * FROM range(10) r", []),
        ("SELECT 'FROM x' -- FROM y\n FROM /* FROM z */ t", ["t"]),
        ("SELECT * FROM a UNION ALL SELECT * FROM b GROUP BY c", ["a", "b"]),
        ("VALUES (1)", []),
    ],
)
def test_the_tables_of_a_query(sql, names):
    assert table_names(sql) == names


# --- what is wrong


def test_every_fault_is_reported_at_once_with_its_place(tmp_path):
    found = faults(
        tmp_path,
        """\
        nam: x
        spark: {master: 3, pakages: []}
        sources:
          a: {type: rat}
          b: {type: files, format: jsn, path: x, schema: 'a INT'}
          c: {type: rate, watermark: {colum: x, delay: soon}}
        views:
          v: {sql: SELECT * FROM other JOIN w}
          w: {sql: SELECT 1 FROM c}
        outputs:
          o: {view: ww, to: {type: sqlit}}
          p: {view: w, mode: complet, to: {type: console, rows: many}}
        restart: {attempts: -1}
        timeouts: {stop: soon}
        """,
    )
    assert found == [
        "pipeline.yaml, line 1, column 1: nam is not a field of the file; did you mean name?",
        "pipeline.yaml, line 2, column 20: spark.pakages is not a field of spark; did you mean packages?",
        (
            "pipeline.yaml, line 2, column 9: spark.master=3 is not a text; "
            "write master: '...', in quotes where it looks like something else"
        ),
        "pipeline.yaml, line 4, column 7: source 'a': type='rat' is unknown; did you mean rate?",
        (
            "pipeline.yaml, line 5, column 20: source 'b': format='jsn' is unknown; "
            "did you mean json? or choose one of json, csv, parquet, orc, text"
        ),
        (
            "pipeline.yaml, line 6, column 31: source 'c': watermark.colum is not a field of watermark of source; "
            "did you mean column?"
        ),
        (
            "pipeline.yaml, line 6, column 41: source 'c': watermark.delay='soon' is not an interval; "
            "write a number and a unit, such as '10 seconds' or '5 minutes'"
        ),
        (
            "pipeline.yaml, line 8, column 7: view 'v': sql reads 'other', which is neither a source nor a view; "
            "there are a, b, c; a table of Spark's catalog is a source with type: table"
        ),
        "pipeline.yaml, line 8, column 7: view 'v': sql reads 'w', which comes later; move view 'w' before this one",
        ("pipeline.yaml, line 11, column 7: output 'o': view='ww' is neither a source nor a view; did you mean w?"),
        "pipeline.yaml, line 11, column 22: output 'o': to.type='sqlit' is unknown; did you mean sqlite?",
        (
            "pipeline.yaml, line 12, column 16: output 'p': mode='complet' is unknown; "
            "did you mean complete? or choose one of append, update, complete"
        ),
        "pipeline.yaml, line 12, column 51: output 'p': to.rows='many' is not a whole number; give an int of 1 or more",
        "pipeline.yaml, line 13, column 11: restart.attempts=-1 is below 0; set attempts to 0 or more",
        (
            "pipeline.yaml, line 14, column 12: timeouts.stop='soon' is not a finite number of seconds; "
            "give seconds as a float, or a text such as '250ms'"
        ),
    ]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"timeouts": []}, "timeouts=[] is not a mapping; write name: value lines"),
        ({"outputs": {"rows": None}}, "output 'rows': None is not a mapping"),
        ({"outputs": {"rows": {"view": "even"}}}, "output 'rows': to is missing; add to: {type: sqlite"),
        ({"outputs": {"rows": {"to": {"type": "console"}}}}, "output 'rows': view is missing"),
        ({"views": {"a-b": {"sql": "SELECT 1 FROM ticks"}}}, "view 'a-b': its name is not one that SQL takes"),
        ({"views": {"idle": {"sql": "SELECT 1 FROM ticks"}}}, "view 'idle': is read by no view and no output"),
        ({"views": {"v": {}}}, "view 'v': sql is missing; give exactly one of sql, function"),
        ({"views": {"even": {"sql": "SELECT 1"}}}, "view 'even': sql reads no source and no view; there are ticks"),
        (
            {"views": {"even": {"function": "json:dump", "inputs": ["ticks"]}}},
            "does not take 1 DataFrame; list in inputs",
        ),
        (
            {"views": {"even": {"function": "json:dmps", "inputs": ["ticks"]}}},
            "names no 'dmps' of json; did you mean dumps?",
        ),
        ({"views": {"even": {"function": "nowhere:f", "inputs": ["ticks"]}}}, "can't be imported (ModuleNotFoundError"),
        ({"views": {"even": {"function": "json", "inputs": ["ticks"]}}}, "function='json' is not module:function"),
        ({"sources": {"ticks": {"type": "files", "path": "x", "format": "json"}}}, "schema is missing; add schema:"),
        ({"sources": {"ticks": {"type": "rate", "options": {"password": "x"}}}}, "options.password holds a credential"),
        (
            {"spark": {"conf": {"spark.hadoop.fs.s3a.secret.key": "x"}}},
            "conf.spark.hadoop.fs.s3a.secret.key holds a cred",
        ),
        ({"spark": {"conf": {"spak.x": "x"}}}, "spark.conf names 'spak.x', which is not a setting of Spark"),
        (
            {"spark": {"conf": {"spark.x": "env:NOT_THERE"}}},
            "spark.conf.spark.x can't be read: a credential is to come",
        ),
    ],
    ids=str,
)
def test_what_is_refused(parts, words):
    assert words in fault_of(**parts)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            {"to": {"type": "sqlite", "path": "x"}, "mode": "complete"},
            "to.type='sqlite' appends, and the mode of the output",
        ),
        ({"to": {"type": "parquet", "path": "x"}, "mode": "update"}, "appends, and the mode of the output is update"),
        (
            {"to": {"type": "jsonl", "path": "x", "in": "spark"}},
            "to.in='spark' is not a place that writes jsonl; write in",
        ),
        ({"to": {"type": "delta", "path": "x"}}, ""),
        ({"to": {"type": "console"}, "dead_letters": "x"}, "dead_letters is for sinks of this library"),
        (
            {"to": {"type": "console"}, "trigger": "soon"},
            "trigger='soon' is not a trigger; write seconds, a text such as",
        ),
        ({"to": {"type": "jsonl", "path": "x", "keep_files": 3}}, "keep_files and keep_seconds go with max_bytes"),
        ({"to": {"type": "postgres", "dsn": "postgres://u:p@h/db"}}, "to.dsn holds a credential; write env:NAME"),
        (
            {"to": [{"type": "console"}, {"type": "parquet", "path": "x"}]},
            "a batch that is repeated after a crash would be in it twice; store the view",
        ),
    ],
    ids=str,
)
def test_what_an_output_may_not_be(output, words):
    if words:
        assert words in fault_of(outputs={"rows": {"view": "even", **output}})
    else:
        SparkPipeline.from_mapping(with_parts(outputs={"rows": {"view": "even", **output}}))


def test_a_jar_that_spark_does_not_have_is_missed_before_it_starts():
    kafka = {"type": "kafka", "brokers": "localhost:9092", "topics": "events"}
    local = {"master": "local[2]"}
    words = fault_of(sources={"ticks": kafka}, spark=local)
    assert "source 'ticks': type='kafka' needs spark-sql-kafka*.jar, which Spark does not have here; add spark" in words
    package = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
    SparkPipeline.from_mapping(with_parts(sources={"ticks": kafka}, spark={**local, "packages": [package]}))
    SparkPipeline.from_mapping(
        with_parts(sources={"ticks": kafka}, spark={**local, "jars": ["spark-sql-kafka-0-10.jar"]})
    )
    SparkPipeline.from_mapping(with_parts(sources={"ticks": kafka}))  # of another Spark nobody here can say it
    assert "postgresql*.jar" in fault_of(
        sources={"ticks": {"type": "jdbc", "url": "jdbc:postgresql://h/db", "table": "t"}}, spark=local
    )
    SparkPipeline.from_mapping(  # which has Derby
        with_parts(sources={"ticks": {"type": "jdbc", "url": "jdbc:derby:x", "table": "t"}}, spark=local)
    )


def test_secrets_are_references_and_are_in_no_message(tmp_path, monkeypatch):
    secret = "hunter2-and-more"
    found = faults(
        tmp_path,
        f"""\
        sources:
          a: {{type: jdbc, url: "jdbc:x://u:{secret}@h", table: t, password: {secret}}}
          b: {{type: rate, options: {{kafka.sasl.jaas.config: {secret}}}}}
        spark: {{conf: {{spark.my.token: {secret}, spark.x: "https://u:{secret}@h"}}}}
        outputs:
          o: {{view: b, to: {{type: http, url: "http://h", token: {secret}, tokn: {secret}}}}}
        """,
    )
    assert len(found) == 7
    assert secret not in "".join(found)
    monkeypatch.setenv("THE_TOKEN", secret)
    mapping = with_parts(spark={"conf": {"spark.my.token": "env:THE_TOKEN"}})
    spec = SparkPipeline.from_mapping(mapping).spec
    assert is_reference(spec.session.conf["spark.my.token"])
    assert secret not in repr(spec)


def test_two_outputs_have_two_checkpoints():
    rows = {"view": "even", "to": {"type": "console"}, "checkpoint": "/c"}
    assert "checkpoint is that of output 'rows'" in fault_of(outputs={"rows": rows, "more": rows})


def test_a_file_that_is_not_there_or_not_yaml(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        SparkPipeline.from_file(tmp_path / "none.yaml")
    assert "is not valid YAML" in faults(tmp_path, "a: [")[0]
    assert "has the tag" in faults(tmp_path, "sources: !!python/object:os.system {}")[0]
    assert "has the name 'sources' twice" in faults(tmp_path, "sources: {}\nsources: {}")[0]


# --- the command


def test_check_says_all_and_its_status(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(write(tmp_path, GOOD))]) == 0
    assert capsys.readouterr().out.endswith("pipeline.yaml: 1 sources, 1 views, 1 outputs; fine\n")
    assert main(["run", "--check", str(write(tmp_path, GOOD)), "--set", "timeouts.stop=soon", "--set", "nam=x"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in out] == ["override nam", "override timeouts.stop"]
    assert main(["run", str(tmp_path / "none.yaml")]) == 2
    assert main(["check", str(tmp_path / "x.yaml"), "--set", "nothing"]) == 1


def test_a_view_may_be_a_function_of_a_module_next_to_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # so that the path is as it was afterwards
    (tmp_path / "pipeline_views.py").write_text("def odd(ticks):\n    return ticks\n")
    text = GOOD.replace(
        "sql: SELECT value FROM ticks WHERE value % 2 = 0", "function: pipeline_views:odd, inputs: [ticks]"
    )
    assert main(["check", str(write(tmp_path, text))]) == 0


def test_help_says_what_the_exit_status_means(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(words in out for words in ("--once", "--from", "--until", "--explain", "3  something was not done"))


# --- when a query is started again


def test_restarts_back_off_and_end():
    policy = RestartPolicy(attempts=3, initial=1.0, multiplier=3.0, max_delay=5.0, reset_after=100.0)
    restarts = Restarts(policy)
    restarts.started(0.0)
    assert [restarts.failed(at) for at in (1.0, 10.0, 20.0, 30.0)] == [2.0, 13.0, 25.0, None]
    assert restarts.total == 4


def test_a_query_that_ran_long_enough_begins_anew():
    restarts = Restarts(RestartPolicy(attempts=1, initial=1.0, reset_after=100.0))
    restarts.started(0.0)
    assert restarts.failed(1.0) == 2.0
    restarts.started(2.0)
    assert restarts.failed(102.0) == 103.0
    restarts.started(103.0)
    assert restarts.failed(202.0) is None
    assert Restarts(RestartPolicy(attempts=0)).failed(0.0) is None


# --- the pages


def test_the_reference_has_every_type_and_every_field():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "spark-pipeline-fields.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for name, kind in kinds.SOURCES.items():
        row = next(row for row in rows if row.startswith(f"| `{name}` |"))
        assert [field for field in kind.fields if f"`{field}`" not in row] == []
    targets = page.partition("Every target has")[2]
    for name, places in kinds.TARGETS.items():
        for place, kind in places.items():
            needed = [*kind.fields, place]
            found = [row for row in targets.splitlines() if all(f"`{each}`" in row for each in needed)]
            assert found, f"{name} in {place} has no row with {needed}"
    for name in (
        *reading._TOP,
        *reading.SECTIONS,
        *reading._SESSION,
        *reading._SOURCE,
        *reading._VIEW,
        *reading._STORE,
    ):
        assert f"`{name}`" in page
    for name in (*reading._OUTPUT, *reading._TIMEOUTS, *reading._RESTART):
        assert f"`{name}`" in page


def test_the_file_of_the_guide_is_one(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "run-spark-from-a-file.md").read_text()
    pieces = [piece.partition("```")[0] for piece in page.split("```yaml\n")[1:]]
    monkeypatch.setenv("DATABASE_URL", "postgresql://localhost/db")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_views.py").write_text("def worst(minutes):\n    return minutes\n")
    spec = SparkPipeline.from_file(write(tmp_path, "".join(pieces))).spec
    assert spec.views["hours"].inputs == ("minutes",)
    assert spec.timeouts.once == 3600.0
