"""Answers on a terminal: one, or a chat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trioengine.actors.engine import open_engine
from trioengine.actors.generation import Completion
from trioengine.actors.session import Session
from trioengine.cli.progress import progress_bars
from trioengine.cli.standard_input import STDIN, Lines
from trioengine.core.config import EngineConfig
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams


def print_answer(config: EngineConfig, prompt: str, params: SamplingParams, *, as_json: bool) -> None:
    """Stream one answer to stdout, or print it as one JSON object. Raises RequestRejected for a bad prompt."""
    check_prompt(prompt)
    trio.run(_print_answer, config, prompt, params, as_json)


def check_prompt(prompt: str) -> None:
    """Raises RequestRejected for what is no prompt."""
    if not prompt.strip():
        raise RequestRejected("empty_prompt", "prompt is empty", param="prompt")
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:
        raise RequestRejected("invalid_value", "prompt is not UTF-8", param="prompt") from exc


async def _print_answer(config: EngineConfig, prompt: str, params: SamplingParams, as_json: bool) -> None:
    async with _open_session(config) as session:
        await answer(session, prompt, params, as_json=as_json)


@asynccontextmanager
async def _open_session(config: EngineConfig) -> AsyncIterator[Session]:
    with progress_bars() as bars:
        async with (
            open_engine(config, on_progress=bars.download, on_load=bars.loading) as engine,
            engine.open_session() as session,
        ):
            yield session


async def answer(session: Session, prompt: str, params: SamplingParams, *, as_json: bool = False) -> None:
    """Write an answer to stdout, as it comes or as one JSON object; while the engine cannot take it, it waits."""
    async with session.generate(prompt, params, wait=True) as generation:
        if as_json:
            await _write(json.dumps(_as_object(await generation.result()), ensure_ascii=False))
        else:
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
    lines = Lines()
    async with _open_session(config) as session:
        await converse(session, lines, params)


async def converse(session: Session, lines: Lines, params: SamplingParams) -> None:
    """Answer each line until an empty one; of a line that cannot be answered stderr says why."""
    while question := await _ask(lines):
        try:
            check_prompt(question)
            await answer(session, question, params)
        except RequestRejected as exc:
            print("trioengine: error:", exc, file=sys.stderr)


async def _ask(lines: Lines) -> str:
    """A line; "" at the end of the input."""
    if os.isatty(STDIN):
        await _write("> ")
    return (await lines.next()).strip()
