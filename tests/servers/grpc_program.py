"""A gRPC server for tests, in a process of its own: OTLP's services, and a store with a unary and a stream method.

It keeps what it is sent, and answers as `/test.Control/...` tells it, in JSON: `Script` takes the answers to come, a
list of {"code", "details", "retry", "delay", "partial"}; `Rules` what holds for all of them: {"token"}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
from collections import deque
from pathlib import Path

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from batchqueue_async.sinks.otlp.request import SIGNALS


class Program:
    def __init__(self):
        self.requests, self.answers, self.demands = [], deque(), {}

    def services(self):
        yield (
            "test.Control",
            {
                name: grpc.unary_unary_rpc_method_handler(getattr(self, name.lower()))
                for name in ("Script", "Rules", "Reset", "Received")
            },
        )
        store = {
            "Put": grpc.unary_unary_rpc_method_handler(self.put),
            "PutAll": grpc.stream_unary_rpc_method_handler(self.put_all),
        }
        yield "test.Store", store
        for signal_ in SIGNALS.values():
            handler = grpc.unary_unary_rpc_method_handler(
                self.export(signal_),
                request_deserializer=signal_.request().FromString,
                response_serializer=signal_.response().SerializeToString,
            )
            yield signal_.method.split("/")[1], {"Export": handler}

    # -- what the tests say and ask ------------------------------------------------------------------------------

    async def script(self, request, _context):
        self.answers = deque(json.loads(request))
        return b"{}"

    async def rules(self, request, _context):
        self.demands = json.loads(request)
        return b"{}"

    async def reset(self, _request, _context):
        self.__init__()
        return b"{}"

    async def received(self, _request, _context):
        return json.dumps(self.requests).encode()

    # -- what clients call ---------------------------------------------------------------------------------------

    async def judge(self, context):
        """What the answer is to be."""
        token = self.demands.get("token")
        if token and dict(context.invocation_metadata()).get("authorization") != f"Bearer {token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        answer = self.answers.popleft() if self.answers else {}
        await asyncio.sleep(answer.get("delay", 0))
        return answer

    async def fail(self, answer, context):
        if "code" not in answer:
            return
        code = getattr(grpc.StatusCode, answer["code"])
        if "retry" in answer:
            info = error_details_pb2.RetryInfo()
            info.retry_delay.CopyFrom(duration_pb2.Duration(nanos=int(answer["retry"] * 1e9) % 10**9))
            info.retry_delay.seconds = int(answer["retry"])
            detail = any_pb2.Any()
            detail.Pack(info)
            status = status_pb2.Status(code=code.value[0], message="later", details=[detail])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        await context.abort(code, answer.get("details", ""))

    def keep(self, context, content):
        metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        self.requests.append({"metadata": metadata, "content": base64.b64encode(content).decode()})

    async def put(self, request, context):
        answer = await self.judge(context)
        await self.fail(answer, context)
        self.keep(context, request)
        return b"1"

    async def put_all(self, requests, context):
        answer = await self.judge(context)
        content = [request async for request in requests]
        promised = dict(context.invocation_metadata()).get("message-count", len(content))
        if int(promised) != len(content):  # cut off: its end looks like that of a whole one
            await context.abort(grpc.StatusCode.DATA_LOSS, f"{len(content)} of {promised} messages")
        await self.fail(answer, context)
        self.keep(context, b"|".join(content))
        return str(len(content)).encode()

    def export(self, signal_):
        async def export(request, context):
            answer = await self.judge(context)
            await self.fail(answer, context)
            self.keep(context, request.SerializeToString())
            response = signal_.response()()
            setattr(response.partial_success, signal_.rejected, answer.get("partial", 0))
            return response

        return export


async def main(address, certificate):
    program = Program()
    server = grpc.aio.server()
    for name, handlers in program.services():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    if certificate:
        cert, key = (Path(path).read_bytes() for path in certificate)
        server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
    else:
        server.add_insecure_port(address)
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(0.5)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
