"""What is shipped to deploy with: files that agree with the program and each other, as their readers accept."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from servers.prometheus import promtool
from test_docs import ROOT

DEPLOY = ROOT / "examples" / "deploy"
PROGRAM = ROOT / "examples" / "kafka_to_postgres.py"
PODS = DEPLOY / "kubernetes" / "kafka-to-postgres.yaml"
UNIT = DEPLOY / "systemd" / "kafka-to-postgres.service"
ADDED = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', PROGRAM.read_text()))


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def manifests():
    return [each for each in yaml.safe_load_all(PODS.read_text()) if each]


def stateful_set():
    return next(each for each in manifests() if each["kind"] == "StatefulSet")


def unit():
    joined = UNIT.read_text().replace("\\\n", " ")
    return [line.split("=", 1) for line in joined.splitlines() if re.match(r"[A-Z]\w*=", line)]


def options(words):
    return {word.split("=")[0] for word in words if word.startswith("--")}


def instructions():
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def test_the_image_copies_what_is_there_and_does_not_run_as_root():
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert [each for each in sources if not (ROOT / each).exists()] == []
    last = [(name, rest) for name, rest in instructions()]
    assert ("STOPSIGNAL", "SIGTERM") in last
    user = next(rest for name, rest in last if name == "USER")
    assert int(user.split(":")[0]) > 0
    command = [json.loads(rest) for name, rest in last if name in {"ENTRYPOINT", "CMD"}]
    assert options(word for words in command for word in words) <= ADDED


def test_the_image_has_what_the_program_imports():
    installed = re.search(r'"\.\[([\w,]+)\]"', (DEPLOY / "Dockerfile").read_text())[1].split(",")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(installed) <= set(extras)
    copied = next(rest for name, rest in instructions() if name == "COPY" and "kafka_to_postgres" in rest)
    local = re.findall(r"^from (\w+) import", PROGRAM.read_text(), re.MULTILINE)
    for module in local:
        if (PROGRAM.parent / f"{module}.py").exists():
            assert f"examples/{module}.py" in copied


@pytest.mark.parametrize(
    "words",
    [
        compose()["services"]["kafka-to-postgres"]["command"],
        stateful_set()["spec"]["template"]["spec"]["containers"][0]["args"],
        shlex.split(dict(unit())["ExecStart"]),
    ],
    ids=["compose", "kubernetes", "systemd"],
)
def test_the_program_knows_its_arguments(words):
    assert options(words)
    assert options(words) <= ADDED


def test_compose_names_what_it_declares():
    found = compose()
    for name, service in found["services"].items():
        assert set(service.get("secrets", ())) <= set(found["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in found["volumes"], (name, source)
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} would be open to other machines"
        assert "latest" not in service.get("image", "a:1")
        assert ":" in service.get("image", "a:1")
    build = found["services"]["kafka-to-postgres"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")


def seconds(text):
    return float(text.removesuffix("s"))


def test_each_is_killed_later_than_its_drain_ends():
    service = compose()["services"]["kafka-to-postgres"]
    for words, killed in (
        (service["command"], seconds(service["stop_grace_period"])),
        (
            stateful_set()["spec"]["template"]["spec"]["containers"][0]["args"],
            stateful_set()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        ),
        (shlex.split(dict(unit())["ExecStart"]), float(dict(unit())["TimeoutStopSec"])),
    ):
        joined = " ".join(words)
        assert float(re.search(r"--drain[= ](\d+)", joined)[1]) < killed, joined


def test_kubernetes_accepts_the_manifests():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in manifests():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_the_parts_of_the_manifests_fit():
    found = {each["kind"]: each for each in manifests()}
    pods = found["StatefulSet"]["spec"]["template"]
    labels = pods["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    monitor = yaml.safe_load((DEPLOY / "kubernetes" / "podmonitor.yaml").read_text())
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    (container,) = pods["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in found["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert mounted == claimed | {volume["name"] for volume in pods["spec"]["volumes"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] in ports
        assert get["path"] in {"/livez", "/readyz"}


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    copy = tmp_path / UNIT.name
    # It looks for the program, which is not installed here.
    copy.write_text(UNIT.read_text().replace("/opt/batchqueue/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    about = [line for line in done.stderr.splitlines() if copy.name in line]
    assert about == []
    settings = dict(unit())
    assert settings["Type"] == "notify"
    assert float(settings["WatchdogSec"]) > 0


def test_prometheus_accepts_its_configuration(tmp_path):
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    token = tmp_path / "token"
    token.write_text("x")
    path = folder / "prometheus.yml"
    path.write_text(path.read_text().replace("/run/secrets/ops_token", str(token)))
    done = subprocess.run(
        [promtool(), "check", "config", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_is_given_its_source_and_its_dashboard():
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose()["services"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/batchqueue.yaml").read_text())["providers"]
    targets = [volume.split(":")[1] for volume in compose()["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/batchqueue.json" in targets


def test_the_constraints_name_every_dependency_and_no_address():
    lines = [
        line
        for line in (ROOT / "examples" / "deploy" / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.+!]+( ; .+)?", line)] == []
    pinned = {line.split("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for group in project["optional-dependencies"].values() for each in group),
    ]
    names = {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-").replace(".", "-") for each in wanted}
    assert names - {"batchqueue-async"} - pinned == set()


def test_the_extra_all_is_every_other_one_but_spark():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.search(r"\[(.+)\]", everything)[1].split(",")) == set(extras) - {"all", "spark"}
