# Every command makes its own environment first: a fresh clone needs only python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
DEMO_STAMP := $(VENV)/.demo-installed
DOCS_STAMP := $(VENV)/.docs-installed
LOCAL_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venvs/demo-local)
LOCAL_STAMP := $(LOCAL_VENV)/.local-installed
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; run: make PYTHON=/path/to/python3.11")'
SHELL := /bin/bash

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml .ci/hatch_build.py $(wildcard batchqueue_async/_native/*.[ch])
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[spark]" --group dev
	@touch $@

.PHONY: install
install: $(STAMP) ## make .venv with the package and the development tools

.PHONY: format
format: $(STAMP) ## format the code and apply safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lint
lint: $(STAMP) ## ruff: formatting and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: $(STAMP) ## mypy and pyright, both strict
	$(BIN)/mypy
	$(BIN)/pyright

.PHONY: java
java: ## the Java that Spark needs: installed when it is missing and this is root, else its command is shown
	@$(PYTHON) .ci/java.py

# Without Java, Spark's tests are skipped and the coverage gate can't hold; in CI (CI is set) that is a failure. The core runs
# a second time with the hot path in Python; the gate counts all parts.
.PHONY: unit
unit: $(STAMP) ## all tests, in parts, three at a time, with the coverage gate
	@$(PYTHON) .ci/java.py || test -z "$$CI"
	$(BIN)/python .ci/suite.py $$($(PYTHON) .ci/java.py --check || echo --no-gate)

.PHONY: test-native
test-native: $(STAMP) ## the compiled hot path and hostile objects under AddressSanitizer and UBSan; FUZZ=60 seconds
	@$(PYTHON) .ci/native.py sanitize $(BIN)/python $(or $(FUZZ),60)

.PHONY: wheels
wheels: $(STAMP) ## wheels with the compiled hot path, for each of PYTHONS="3.11 3.12 3.13 3.14" that is found, into dist/
	@$(PYTHON) .ci/native.py wheels $(PYTHONS)

.PHONY: test-spark
test-spark: $(STAMP) java ## the tests of the Spark parts alone
	$(BIN)/pytest tests/spark

SEEDS ?= 20000
.PHONY: chaos
chaos: $(STAMP) ## SEEDS=20000 random programs against the queue; SEED=123 replays one
	$(BIN)/python tests/support/queue_programs.py $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

PYTHONS ?= 3.11 3.12 3.13 3.14
.PHONY: test-all-pythons
test-all-pythons: ## the core's tests, and SEEDS=20000 random programs, with each of PYTHONS="3.11 3.12 3.13 3.14" that is found
	@$(PYTHON) .ci/pythons.py --seeds $(SEEDS) $(PYTHONS)

.PHONY: constraints
constraints: $(STAMP) ## pin what the dependencies resolve to, in examples/deploy/constraints.txt
	$(BIN)/python .ci/dependencies.py constraints

.PHONY: test-lowest
test-lowest: $(STAMP) ## tests of the core, exporters, sinks and consumers with every dependency at its lower bound
	$(BIN)/python .ci/dependencies.py lowest $(TESTS)

.PHONY: test-newest
test-newest: $(STAMP) ## the same with the newest of every dependency
	$(BIN)/python .ci/dependencies.py newest $(TESTS)

.PHONY: quick-starts
quick-starts: ## run each quick start in a fresh environment, and print its seconds; PAGES="threads otlp"
	@$(CHECK_PYTHON)
	@$(PYTHON) .ci/quick_starts.py $(PAGES)

.PHONY: sbom
sbom: $(STAMP) ## a bill of materials of the pinned dependencies, CycloneDX, into dist/sbom.json
	$(BIN)/python -m pip install --quiet --group release
	@mkdir -p dist
	$(BIN)/cyclonedx-py requirements examples/deploy/constraints.txt --pyproject pyproject.toml --output-file dist/sbom.json

.PHONY: test
test: lint types docs unit ## linters, type checkers, documents and all tests

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

.PHONY: docs
docs: $(DOCS_STAMP) ## build the documents into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

.PHONY: map
map: ## print every folder and module of the package, one line each
	@$(PYTHON) docs/from_tree.py map

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --group bench
	@touch $@

.PHONY: bench
bench: $(BENCH_STAMP) ## the speed table, compared with other queues; BENCH="--help" lists the options
	$(BIN)/python -m tests.benchmarks $(BENCH)

.PHONY: bench-page
bench-page: $(BENCH_STAMP) ## the documents' page of figures and its plot, from the last `make bench`
	$(BIN)/python -m tests.benchmarks.page

.PHONY: bench-bridge
bench-bridge: $(BENCH_STAMP) ## threads to a queue, compared with janus and culsans; BENCH="--help" lists the options
	$(BIN)/python -m tests.benchmarks.bridge $(BENCH)

.PHONY: bench-export
bench-export: $(STAMP) ## the exporter's speed table; a table, and JSON in bench-results/
	$(BIN)/python -m tests.benchmarks.export --out bench-results/export.json $(BENCH)

.PHONY: bench-sinks
bench-sinks: $(BENCH_STAMP) ## the sinks compared with their bare clients, against real servers; a table, and JSON in bench-results/
	$(BIN)/python -m tests.benchmarks.sinks --out bench-results/sinks.json $(BENCH)

.PHONY: bench-profile
bench-profile: $(STAMP) ## cProfile one row of the bench: make bench-profile ROW=nowait
	$(BIN)/python -m tests.benchmarks --profile $(or $(ROW),nowait)

$(DEMO_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --group demo
	@touch $@

.PHONY: demo
demo: java $(DEMO_STAMP) ## a pipeline of Spark from a file into SQLite, checked and drawn; goes on where it was interrupted
	$(BIN)/python examples/spark_demo.py $(DEMO)

# What the package itself needs, and nothing for its development: seconds instead of minutes in a fresh clone.
$(LOCAL_STAMP): pyproject.toml
	@$(CHECK_PYTHON)
	@test -x $(LOCAL_VENV)/bin/python || $(PYTHON) -m venv $(LOCAL_VENV)
	$(LOCAL_VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > $(LOCAL_VENV)/needs
	$(LOCAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(LOCAL_VENV)/needs
	@touch $@

.PHONY: demo-local
demo-local: $(LOCAL_STAMP) ## seconds, and no Java: a destination is killed and comes back, and nothing is lost
	PYTHONPATH=. $(LOCAL_VENV)/bin/python examples/local_demo.py $(DEMO)

.PHONY: bench-spark
bench-spark: java $(STAMP) ## DriverSink and the data source, compared with bare Spark
	$(BIN)/python -m tests.benchmarks.spark $(BENCH)

.PHONY: bench-spark-writes
bench-spark-writes: java $(STAMP) ## micro-batches and jobs of Spark into handlers, SQLite and JSON lines, compared with the same by hand
	$(BIN)/python -m tests.benchmarks.spark.writes $(BENCH)

.PHONY: chaos-spark
chaos-spark: java $(STAMP) ## kill campaigns of the Spark parts: CHAOS=100 drivers of four queries each; a backlog of BACKLOG=1000 batches
	BATCHQUEUE_SPARK_KILLS=$(or $(CHAOS),100) $(BIN)/pytest tests/spark -m cluster -o timeout=7200
	BATCHQUEUE_SPARK_BACKLOG=$(or $(BACKLOG),1000) $(BIN)/pytest tests/spark/test_driver_sink.py -k backlog -o timeout=7200

.PHONY: chaos-intake
chaos-intake: $(STAMP) ## consumers of brokers through outages and kills, CHAOS=20 times each; a line and a time limit for each
	BATCHQUEUE_INTAKE_REPEATS=$(or $(CHAOS),20) BATCHQUEUE_INTAKE_SEEDS=$(or $(SEEDS_INTAKE),500) \
		$(BIN)/pytest -v -o console_output_style=times --tb=short -m repeated tests/intake \
		tests/faults/test_in_kafka.py tests/faults/test_in_rabbit.py

.PHONY: bench-intake
bench-intake: $(BENCH_STAMP) ## consumers compared with their bare clients and FastStream, against real brokers; JSON in bench-results/
	$(BIN)/python -m tests.benchmarks.intake --out bench-results/intake.json $(BENCH)
	$(BIN)/python -m tests.benchmarks.intake.kafka --out bench-results/intake-kafka.json $(BENCH)

KILLS ?= 1000

.PHONY: chaos-durable
chaos-durable: $(STAMP) ## kill a durable queue KILLS times (1000); CHAOS=5000 histories with faults and crashes
	BATCHQUEUE_KILLS=$(KILLS) $(BIN)/pytest tests/durable/test_kill.py
	BATCHQUEUE_CHAOS=$(or $(CHAOS),5000) $(BIN)/pytest -o timeout=14400 tests/faults/test_d_everywhere.py

.PHONY: fleet
fleet: $(STAMP) ## a fleet of real processes held against its simulation; FLEET="--processes 4 --rate 4000"
	$(BIN)/python -m tests.benchmarks.fleet $(FLEET)

.PHONY: soak
soak: $(STAMP) ## MINUTES=10 against real servers with faults at random, SEED=1; a report in bench-results/soak
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) $(SOAK)

OUTAGE ?= 60

.PHONY: chaos-export
chaos-export: $(STAMP) ## an outage of OUTAGE (60) seconds for the exporter and each network sink, and CHAOS=100 kills
	BATCHQUEUE_OUTAGE=$(OUTAGE) BATCHQUEUE_EXPORT_KILLS=$(or $(CHAOS),100) BATCHQUEUE_EXPORT_SEEDS=3000 \
		$(BIN)/pytest -o timeout=7200 \
		-k "outage or Outage or Killed or kills or histories" tests/export tests/sinks

.PHONY: fuzz
fuzz: $(STAMP) ## FUZZ=60 seconds of random bytes for the record parser; with coverage where atheris is installed
	$(BIN)/python tests/durable/fuzz_records.py --seconds $(or $(FUZZ),60)

.PHONY: bench-durable
bench-durable: $(BENCH_STAMP) ## the durable queue, compared with its peers; BENCH="--help" lists the options
	$(BIN)/python tests/benchmarks/durable/bench.py $(BENCH)

.PHONY: clean
clean: ## remove the environment and everything generated
	rm -rf $(VENV) .venvs .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage* docs/_build docs/reference/api
	rm -rf bench-results demo-output spark-warehouse
