"""ClickHouse twice: Debian's server, which is old and speaks its own HTTP, and a current engine without a server.

The engine is chDB, which is all of ClickHouse as a library, in an environment of its own; `clickhouse_program.py` puts
HTTP before it, with what ClickHouse answers. The one has the interface's real headers, statuses and users, the other
today's types, settings and deduplication.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from .base import CACHE, HOST, Server, UnavailableError, apt_program, free_port, lock

CHDB = "26.9.0"

CONFIG = """<yandex>
  <logger><level>warning</level><console>1</console></logger>
  <http_port>{port}</http_port><tcp_port>{tcp}</tcp_port><interserver_http_port>{interserver}</interserver_http_port>
  <listen_host>{host}</listen_host>
  <path>{directory}/data/</path><tmp_path>{directory}/tmp/</tmp_path>
  <users_config>{directory}/users.xml</users_config>
  <default_profile>default</default_profile><default_database>default</default_database>
  <mark_cache_size>5368709</mark_cache_size>
</yandex>
"""
USER = "<networks><ip>127.0.0.1</ip></networks><profile>default</profile><quota>default</quota>"
USERS = f"""<yandex>
  <profiles><default><max_memory_usage>1000000000</max_memory_usage></default></profiles>
  <users>
    <default><password></password>{USER}</default>
    <tester><password>right-password</password>{USER}</tester>
  </users>
  <quotas><default/></quotas>
</yandex>
"""


class _ClickHouse(Server):
    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def ready(self) -> bool:
        try:
            return self.sql("SELECT 1") == ["1"]
        except (urllib.error.URLError, OSError):
            return False

    def sql(self, statement: str) -> list[str]:
        """The lines of the answer."""
        with urllib.request.urlopen(self.url, statement.encode(), timeout=20) as response:
            return response.read().decode().splitlines()

    def rows(self, table: str, order: str = "id") -> list[dict]:
        """All rows of a table."""
        return [json.loads(line) for line in self.sql(f"SELECT * FROM {table} ORDER BY {order} FORMAT JSONEachRow")]


class ClickHouseServer(_ClickHouse):
    name = "clickhouse"

    def prepare(self) -> None:
        self.program = apt_program("clickhouse-server", "clickhouse-server", "/usr/sbin")
        places = {"host": HOST, "port": self.port, "tcp": free_port(), "interserver": free_port()}
        (self.directory / "config.xml").write_text(CONFIG.format(directory=self.directory, **places))
        (self.directory / "users.xml").write_text(USERS)

    def command(self) -> list[str]:
        return [self.program, f"--config-file={self.directory}/config.xml"]


class ClickHouseEngine(_ClickHouse):
    name = "chdb"

    def prepare(self) -> None:
        self.python = installed()

    def command(self) -> list[str]:
        program = Path(__file__).with_name("clickhouse_program.py")
        return [str(self.python), "-P", str(program), str(self.port), str(self.directory / "data")]


def installed() -> Path:
    """The Python of an environment that has chDB, made once."""
    place = CACHE / f"chdb-{CHDB}-{sys.version_info.major}.{sys.version_info.minor}"
    python = place / "bin" / "python"
    with lock("chdb"):
        if not (place / "ready").exists():
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(place)],
                [str(python), "-m", "pip", "install", "--quiet", "--no-deps", f"chdb-core=={CHDB}"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
                if done.returncode:
                    raise UnavailableError(f"pip cannot install chdb-core=={CHDB}: {done.stderr[-300:]}")
            (place / "ready").touch()
    return python
