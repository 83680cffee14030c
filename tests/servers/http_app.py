"""An HTTP server for tests, run by uvicorn in a process of its own: keeps what it is sent, and answers as it is told.

What is under `/_` belongs to the tests: `/_received` tells the requests that were taken, `/_script` takes the answers
to come, a list of {"status", "headers", "body", "delay", "keep"}; when it is empty, the rules of `/_rules` hold:
{"max_body", "token", "delay"}.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque


class App:
    def __init__(self):
        self.received = []
        self.script = deque()
        self.rules = {}

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        body = await whole(receive)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if scope["path"].startswith("/_"):
            await answer(send, 200, body=self.control(scope["path"], body))
            return
        query = scope["query_string"].decode()
        found = self.script.popleft() if self.script else self.judge(headers, body)
        await asyncio.sleep(found.get("delay", 0))
        if found.get("keep", found.get("status", 204) < 300):
            content = base64.b64encode(body).decode()
            self.received.append({"path": scope["path"], "query": query, "headers": headers, "body": content})
        await answer(send, found.get("status", 204), found.get("headers"), found.get("body", "").encode())

    def judge(self, headers, body):
        token = self.rules.get("token")
        if token and headers.get("authorization") != f"Bearer {token}":
            return {"status": 401}
        if len(body) > self.rules.get("max_body", len(body)):
            return {"status": 413}
        return {"delay": self.rules.get("delay", 0)}

    def control(self, path, body):
        if path == "/_script":
            self.script = deque(json.loads(body))
        elif path == "/_rules":
            self.rules = json.loads(body)
        elif path == "/_reset":
            self.__init__()
        elif path == "/_received":
            return json.dumps(self.received).encode()
        return b"{}"


async def whole(receive):
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def answer(send, status, headers=None, body=b""):
    fields = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def lifespan(receive, send):
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


app = App()
