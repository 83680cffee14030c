"""HTTP before chDB, in a process of its own: the body is the statement, an error has ClickHouse's header and status."""

from __future__ import annotations

import gzip
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from chdb import session

STATUSES = {60: 404, 81: 404, 115: 404, 16: 404, 193: 401, 516: 401, 497: 403}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        statement = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            statement = gzip.decompress(statement)
        try:
            with turn:
                found, status, headers = engine.query(statement.decode(), "TabSeparated").bytes() or b"", 200, {}
        except Exception as error:  # the engine's errors of all kinds
            found = str(error).encode()
            code = int(re.search(r"Code: (\d+)", str(error))[1])
            status, headers = STATUSES.get(code, 500), {"X-ClickHouse-Exception-Code": str(code)}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *_):
        """Nothing: it would be the log of each request."""


class Server(ThreadingHTTPServer):
    daemon_threads = True


if __name__ == "__main__":
    turn = Lock()
    engine = session.Session(sys.argv[2])
    engine.query("CREATE DATABASE IF NOT EXISTS tests ENGINE = Atomic")
    engine.query("USE tests")
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
