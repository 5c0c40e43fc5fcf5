"""OpenAI's completions and chat completions, streamed."""

from __future__ import annotations

import json
from typing import Any

from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.http_client import Address, BackendError, exchange, refusal
from trioengine.cli.bench.sample import Stopwatch

_DATA, _DONE = b"data:", b"[DONE]"
_MAX_LINE = 1 << 20  # bytes


class Completions:
    """`POST` to the endpoint; the prompt is a user message, or for one that is not `/chat/completions` the prompt."""

    def __init__(self, address: Address, config: BenchConfig, model: str) -> None:
        self._address = address
        self._path = config.path
        self._is_chat = self._path.endswith("/chat/completions")
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": config.random_output_len,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            self._fields["ignore_eos"] = True

    async def ask(self, prompt: str, watch: Stopwatch) -> None:
        """As in Backend."""
        body = self._fields | (
            {"messages": [{"role": "user", "content": prompt}]} if self._is_chat else {"prompt": prompt}
        )
        async with exchange(self._address, "POST", self._path, body, on_sent=watch.sent) as response:
            if response.status != 200:
                raise BackendError(refusal(response.status, await response.read()))
            rest, is_over = b"", False
            while piece := await response.receive_some():  # to its very end: who closes earlier has left
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(_DATA):
                        is_over = self._is_last(line[len(_DATA) :].strip(), watch)
                if len(rest) > _MAX_LINE:
                    raise BackendError(f"a line of the stream is longer than {_MAX_LINE} bytes")
        if not is_over:
            raise BackendError("the stream ended before [DONE]")

    def _is_last(self, data: bytes, watch: Stopwatch) -> bool:
        """Tell the watch what an event means; True for the end of the stream."""
        if data == _DONE:
            return True
        try:
            event = json.loads(data)
            if "error" in event:
                raise BackendError(str(event["error"].get("message", event["error"])))
            choices, usage = event.get("choices"), event.get("usage")
            text = choices and (choices[0]["delta"].get("content") if self._is_chat else choices[0]["text"])
            if text:
                watch.text()
            else:
                watch.event()
            if usage:
                watch.usage(usage["prompt_tokens"], usage["completion_tokens"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
            raise BackendError(f"an event of the stream is not understood: {data[:80]!r}") from exc
        return False
