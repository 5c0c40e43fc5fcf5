"""Answers on a terminal: one, or a chat."""

from __future__ import annotations

import json
import sys

import trio

from trioengine.actors.engine import open_engine
from trioengine.actors.generation import Completion
from trioengine.actors.session import Session
from trioengine.cli.progress import download_bar
from trioengine.core.config import EngineConfig
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams


def print_answer(config: EngineConfig, prompt: str, params: SamplingParams, *, as_json: bool) -> None:
    """Stream one answer to stdout, or print it as one JSON object."""
    if not prompt.strip():
        raise RequestRejected("empty_prompt", "prompt is empty", param="prompt")
    trio.run(_print_answer, config, prompt, params, as_json)


async def _print_answer(config: EngineConfig, prompt: str, params: SamplingParams, as_json: bool) -> None:
    with download_bar() as progress:
        async with open_engine(config, on_progress=progress) as engine, engine.open_session() as session:
            if not as_json:
                await _stream(session, prompt, params)
                return
            async with session.generate(prompt, params) as generation:
                print(json.dumps(_as_object(await generation.result()), ensure_ascii=False))


async def _stream(session: Session, prompt: str, params: SamplingParams) -> None:
    async with session.generate(prompt, params, wait=True) as generation:
        async for chunk in generation:
            await _write(chunk.text)
    await _write("\n")


async def _write(text: str) -> None:
    """In a thread: a pager that stops reading must not stop the engine."""
    stdout = trio.wrap_file(sys.stdout)
    await stdout.write(text)
    await stdout.flush()


def _as_object(completion: Completion) -> dict[str, object]:
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
    }


def hold_chat(config: EngineConfig, params: SamplingParams) -> None:
    """Read lines from stdin and answer each, in one session."""
    trio.run(_hold_chat, config, params)


async def _hold_chat(config: EngineConfig, params: SamplingParams) -> None:
    with download_bar() as progress:
        async with open_engine(config, on_progress=progress) as engine, engine.open_session() as session:
            while question := await trio.to_thread.run_sync(_ask, abandon_on_cancel=True):
                await _stream(session, question, params)


def _ask() -> str:
    """A line; "" at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
