"""A Prometheus that takes remote write, from Debian's packages."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request

import pytest

from . import base
from .base import Server, apt_program


class PrometheusServer(Server):
    name = "prometheus"

    def prepare(self) -> None:
        self.program = apt_program("prometheus", "prometheus")
        (self.directory / "prometheus.yml").write_text("scrape_configs: []\n")

    def command(self) -> list[str]:
        return [
            self.program,
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address={self.address}",
            "--web.enable-remote-write-receiver",
            "--log.level=warn",
        ]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def samples(self, query: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """What a query for a range vector finds."""
        asked = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{asked}", timeout=10) as response:
            found = json.load(response)["data"]["result"]
        return [(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in found]


def promtool() -> str:
    """The program that checks metrics and rules; without it the test is skipped, and under CI it fails."""
    try:
        return apt_program("promtool", "prometheus")
    except base.UnavailableError as error:
        base.MISSING["promtool"] = str(error)
        if os.environ.get("CI"):
            pytest.fail(f"promtool cannot be had, and CI demands it: {error}", pytrace=False)
        pytest.skip(f"promtool cannot be had: {error}")
