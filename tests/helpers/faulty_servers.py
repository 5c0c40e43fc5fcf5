"""Servers with OpenAI's API and one published bug each, for the fuzzer by URL: tiny, in process, on trio.

`FaultyServer` alone has no bug: it answers each prompt with words that depend on the prompt alone, one every `pause`
seconds, for `SLOTS` requests at a time; the others wait. A subclass plants a bug.
"""

import json
import re
import zlib
from functools import partial

import trio

SLOTS = 3
PAUSE = 0.0005  # seconds for a token
WORDS = ["red", "blue", "green", "gold", "pink", "teal", "grey", "plum", "lime", "navy"]
MARKER = re.compile(r"Repeat: (\w+)$")


class FaultyServer:
    """A server without a bug, in sglang's dialect, which has aborts by id and updates."""

    memory, files = 100 << 20, 10  # the figures of its process

    def __init__(self, pause=PAUSE):
        self.pause = pause
        self.running = self.waiting = self.tokens = self.finished = 0
        self.free = trio.Semaphore(SLOTS)
        self.scopes = {}  # by request id: those of requests that run or wait
        self.cache = set()  # prompts
        self.version = 0
        self.paused = trio.Event()
        self.paused.set()
        self.port = None

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, self.accept, 0, host="127.0.0.1"))
            self.port = listener.socket.getsockname()[1]
            task_status.started(self)

    async def accept(self, stream):
        try:
            await self.read(stream)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def read(self, stream):
        data = b""
        while b"\r\n\r\n" not in data:
            if not (piece := await stream.receive_some()):
                return
            data += piece
        head, body = data.split(b"\r\n\r\n", 1)
        length = int((re.search(rb"(?i)content-length: (\d+)", head) or [0, 0])[1])
        while len(body) < length:
            if not (piece := await stream.receive_some()):
                return
            body += piece
        await self.answer(stream, head.split()[1].decode().split("?")[0], body)

    async def send(self, stream, status, value, kind="application/json"):
        text = (value if isinstance(value, str) else json.dumps(value)).encode()
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        await stream.send_all(head.encode() + text)

    async def answer(self, stream, path, body):
        if path == "/v1/chat/completions":
            await self.complete(stream, body)
        elif path == "/v1/models":
            await self.send(stream, 200, {"data": [{"id": "fake"}]})
        elif path == "/metrics":
            gauges = {"num_running_reqs": self.running, "num_queue_reqs": self.waiting}
            counters = {"generation_tokens_total": self.tokens, "num_requests_total": self.finished}
            page = "".join(f"sglang:{name} {value}\n" for name, value in (gauges | counters).items())
            await self.send(stream, 200, page, "text/plain")
        elif path == "/health":
            await self.send(stream, 200, {})
        else:
            found = getattr(self, "on" + path.replace("/", "_"), None)
            await (self.send(stream, 404, {}) if found is None else found(stream, json.loads(body or b"{}")))

    async def on_abort_request(self, stream, body):
        for id, scope in list(self.scopes.items()):
            if body.get("abort_all") or id == body.get("rid"):
                scope.cancel()
        await self.send(stream, 200, {})

    async def on_flush_cache(self, stream, body):
        self.cache.clear()
        await self.send(stream, 200, {})

    async def on_update_weights_from_disk(self, stream, body):
        self.cache.clear()
        await self.send(stream, 200, {})

    async def complete(self, stream, body):
        try:
            fields = json.loads(body)
            prompt, limit = fields["messages"][0]["content"], fields["max_tokens"] + 0
            if fields["temperature"] < 0 or len(body) > 1 << 20 or fields["model"] != "fake":
                raise ValueError(body)
        except (ValueError, TypeError, KeyError):
            await self.send(stream, 400, {"error": {"message": "bad request"}})
            return
        name = fields.get("rid", "") or str(id(stream))
        with trio.CancelScope() as scope:
            self.scopes[name] = scope
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.watch, stream, scope)
                await self.run(stream, prompt, limit, fields["stream"])
                nursery.cancel_scope.cancel()
        self.scopes.pop(name, None)

    async def watch(self, stream, scope):
        try:
            while await stream.receive_some():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    async def run(self, stream, prompt, limit, streamed):
        self.waiting += 1
        try:
            await self.paused.wait()
            await self.free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            await self.generate(stream, prompt, limit, streamed)
        finally:
            self.running -= 1
            self.free.release()

    def words(self, prompt, limit):
        found = MARKER.search(prompt)
        start = zlib.crc32(prompt.encode())
        words = [WORDS[(start + index * 7) % len(WORDS)] for index in range(limit)]
        return ([found[1], *words] if found else words)[:limit]

    async def generate(self, stream, prompt, limit, streamed):
        words, cached = self.words(prompt, limit), 4 if prompt in self.cache else 0
        if streamed:
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for word in words:
            await trio.sleep(self.pause)
            self.tokens += 1
            if streamed:
                await self.event(stream, {"choices": [{"delta": {"content": word + " "}}]})
        self.cache.add(prompt)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": limit}
        end = {"finish_reason": "length"}
        whole = {"usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}
        self.finished += 1
        if streamed:
            await self.event(stream, whole | {"choices": [end | {"delta": {}}]})
            await stream.send_all(b"data: [DONE]\n\n")
        else:
            message = {"message": {"content": "".join(word + " " for word in words)}}
            await self.send(stream, 200, whole | {"choices": [end | message]})

    async def event(self, stream, value):
        await stream.send_all(f"data: {json.dumps(value)}\n\n".encode())


class LeakAfterDisconnect(FaultyServer):
    """SGLang 36333, 36876: the gauge of running requests keeps a request whose client left in the middle."""

    async def run(self, stream, prompt, limit, streamed):
        try:
            await super().run(stream, prompt, limit, streamed)
        except BaseException:
            self.running += streamed
            raise


class FilesKept(FaultyServer):
    """A server that keeps 20 files open for each request whose client left in the middle."""

    async def run(self, stream, prompt, limit, streamed):
        try:
            await super().run(stream, prompt, limit, streamed)
        except BaseException:
            self.files += 20
            raise


class StuckAfterAborts(FaultyServer):
    """vLLM-Omni 3774: each abort in the middle costs a slot; /health answers, and nothing else does."""

    async def run(self, stream, prompt, limit, streamed):
        await self.free.acquire()
        await self.generate(stream, prompt, limit, streamed)
        self.free.release()


class AbortHitsAnother(FaultyServer):
    """ik_llama.cpp 1929: a client that leaves the queue aborts an active request."""

    async def run(self, stream, prompt, limit, streamed):
        queued = self.free.value == 0
        try:
            await super().run(stream, prompt, limit, streamed)
        except trio.Cancelled:
            if queued:
                for scope in list(self.scopes.values())[:1]:
                    scope.cancel()
            raise


class AbortByPrefix(FaultyServer):
    """SGLang: an abort of an id also ends the requests whose ids begin with it."""

    async def on_abort_request(self, stream, body):
        for id, scope in list(self.scopes.items()):
            if body.get("abort_all") or id.startswith(body.get("rid")):
                scope.cancel()
        await self.send(stream, 200, {})


class AnotherConversation(FaultyServer):
    """llama.cpp 27148: after an abandoned request the prompt cache restores its conversation for the next one."""

    left = None

    async def run(self, stream, prompt, limit, streamed):
        restored, self.left = self.left or prompt, None
        try:
            await super().run(stream, restored, limit, streamed)
        except BaseException:
            self.left = prompt
            raise


class StaleCache(FaultyServer):
    """LMDeploy 4917: the prefix cache outlives an update of the weights."""

    async def on_update_weights_from_disk(self, stream, body):
        await self.send(stream, 200, {})


class GaugeDrift(FaultyServer):
    """vLLM 22545: an abort of a queued request leaves it in the gauge."""

    async def run(self, stream, prompt, limit, streamed):
        queued = self.free.value == 0
        try:
            await super().run(stream, prompt, limit, streamed)
        except BaseException:
            self.waiting += queued
            raise


class CrashByAbort(FaultyServer):
    """vLLM 49146: an abort of a queued request ends the engine, and each later request breaks off."""

    crashed = False

    async def run(self, stream, prompt, limit, streamed):
        if self.crashed:
            await stream.aclose()
            return
        queued = self.free.value == 0
        try:
            await super().run(stream, prompt, limit, streamed)
        except BaseException:
            self.crashed = queued
            raise


class Sleeper(FaultyServer):
    """A server without a bug, in vLLM's dialect: it sleeps and wakes, and holds requests while it sleeps."""

    asleep = False

    async def answer(self, stream, path, body):
        if path == "/metrics":
            values = {"num_requests_running": self.running, "num_requests_waiting": self.waiting}
            page = "".join(f"vllm:{name} {value}\n" for name, value in values.items())
            await self.send(stream, 200, page, "text/plain")
        else:
            await super().answer(stream, path, body)

    async def on_sleep(self, stream, body):
        self.asleep, self.paused = True, trio.Event()
        self.cache.clear()
        await self.send(stream, 200, {})

    async def on_wake_up(self, stream, body):
        self.asleep = False
        self.paused.set()
        await self.send(stream, 200, {})

    async def on_is_sleeping(self, stream, body):
        await self.send(stream, 200, {"is_sleeping": self.asleep})


class Pauser(Sleeper):
    """A server without a bug, in vLLM's dialect, in which a pause is a light sleep: it reports both."""

    async def on_pause(self, stream, body):
        self.paused = trio.Event()
        await self.send(stream, 200, {})

    async def on_resume(self, stream, body):
        self.paused.set()
        await self.send(stream, 200, {})

    async def on_is_paused(self, stream, body):
        await self.send(stream, 200, {"is_paused": not self.paused.is_set()})

    async def on_is_sleeping(self, stream, body):
        await self.send(stream, 200, {"is_sleeping": not self.paused.is_set()})


class GarbageAfterWake(Sleeper):
    """vLLM 54235: after sleep and wake the weights are garbage."""

    def words(self, prompt, limit):
        return ["!"] * limit if self.version else super().words(prompt, limit)

    async def on_wake_up(self, stream, body):
        self.version += self.asleep
        await super().on_wake_up(stream, body)


class HeldForever(Sleeper):
    """vLLM 45326: a request that arrives while the server drains is neither answered nor refused."""

    async def on_wake_up(self, stream, body):
        self.asleep, self.paused = False, trio.Event()
        self.paused.set()
        await self.send(stream, 200, {})


class StateStuck(Sleeper):
    """vLLM 51476: the flag of the coordinator stays."""

    async def on_is_sleeping(self, stream, body):
        self.version += self.asleep
        await self.send(stream, 200, {"is_sleeping": bool(self.version)})
