"""A server whose answers come at scripted times, over memory streams: every figure of a benchmark is known."""

import json

import trio
from trio.testing import memory_stream_pair

from trioengine.client.address import Endpoint

EVENT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def sse(event):
    return b"data: %s\n\n" % json.dumps(event).encode()


def text_event(text):
    return sse({"choices": [{"index": 0, "delta": {"content": text}, "text": text}], "usage": None})


def usage_event(prompt_tokens, completion_tokens):
    return sse({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


def answer(ttft, *gaps, prompt_tokens=3, tokens=None, after=0.0):
    """A script: the first text after `ttft` seconds, one more after each gap, usage `after` the last."""
    count = 1 + len(gaps) if tokens is None else tokens
    texts = [(pause, text_event(" x")) for pause in (ttft, *gaps)]
    return [(0, text_event("")), *texts, (after, usage_event(prompt_tokens, count)), (0, DONE)]


class ScriptedServer:
    """Gives the scripts in the order in which requests come; the last one stays. `/metrics` is a page, or 404."""

    def __init__(self, nursery, *scripts, metrics=None, models=None):
        self.requests = []  # (path, headers, JSON body)
        self.asked = []  # the paths without a body
        self.cut_short = []  # for each answer whose client went away: seconds since its request
        self.metrics = metrics
        self.models = plain(200, b'{"data": [{"id": "scripted"}]}') if models is None else models
        self._nursery = nursery
        self._scripts = list(scripts)

    @property
    def endpoint(self):
        return Endpoint("localhost", "/", [], self._open)

    async def _open(self):
        ours, theirs = memory_stream_pair()
        self._nursery.start_soon(self._handle, theirs)
        return ours

    async def _handle(self, stream):
        path, headers, body = await read_request(stream)
        if path.endswith("/metrics"):
            self.asked.append(path)
            page = None if self.metrics is None else self.metrics()
            await stream.send_all(plain(404, b"{}") if page is None else plain(200, page.encode()))
        elif path.endswith("/v1/models"):
            self.asked.append(path)
            await stream.send_all(self.models)
        else:
            self.requests.append((path, headers, json.loads(body)))
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            await self._answer(stream, script)
        await stream.aclose()

    async def _answer(self, stream, script):
        if isinstance(script, bytes):
            await stream.send_all(script)
            return
        began = trio.current_time()
        try:
            await stream.send_all(EVENT_STREAM)
            for seconds, piece in script:
                with trio.move_on_after(seconds) as waiting:
                    await stream.receive_some()  # the client hangs up
                if not waiting.cancelled_caught:
                    raise trio.BrokenResourceError
                await stream.send_all(b"%x\r\n%s\r\n" % (len(piece), piece))
            await stream.send_all(b"0\r\n\r\n")
        except trio.BrokenResourceError:
            self.cut_short.append(trio.current_time() - began)


async def read_request(stream):
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some()
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers.get("content-length", 0)):
        body += await stream.receive_some()
    return first.split()[1], headers, body


def plain(status, body):
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)
