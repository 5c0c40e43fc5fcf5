"""`trioengine generate`, and the writing of answers to stdout, which `chat` shares."""

from __future__ import annotations

import sys

import trio

from trioengine.cli.chat_session import AnyGeneration, AnySession, local_session
from trioengine.cli.errors import warn
from trioengine.cli.tty import STDIN, Screen, json_line
from trioengine.core.config import EngineConfig
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason


def print_answer(config: EngineConfig, prompt: str, params: SamplingParams, *, as_json: bool) -> None:
    """Stream one answer to stdout, or print it as one JSON object. Raises RequestRejected for a bad prompt."""
    require_prompt(prompt)
    trio.run(_print_answer, config, prompt, params, as_json)


def read_all() -> str:
    """Read standard input to its end; blocks. Bytes that are not UTF-8 become surrogates, for `require_prompt`."""
    with open(STDIN, encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        return file.read()


def require_prompt(prompt: str) -> None:
    """Raises RequestRejected for an empty prompt, and for one that is not UTF-8."""
    if not prompt.strip():
        raise RequestRejected("empty_prompt", "prompt is empty", param="prompt")
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:
        raise RequestRejected("invalid_value", "prompt is not UTF-8", param="prompt") from exc


async def answer_prompt(session: AnySession, prompt: str, params: SamplingParams, *, as_json: bool = False) -> None:
    """Write an answer to stdout, as it comes or as one JSON object; waits while the engine is full, asleep or lost."""
    generation = session.generate(prompt, params, wait=True)
    if not as_json:
        await write_answer(generation)
        return
    async with generation:
        await write(json_line(_as_object(await generation.result())))


async def write_answer(generation: AnyGeneration) -> None:
    """Write an answer to stdout as it comes, and a newline; note an end that is not the answer's own.

    A terminal gets printable characters only, in lines that break at words; a file or a pipe gets the text as it is.
    """
    screen = Screen(sys.stdout) if sys.stdout.isatty() else None
    try:
        await _write_chunks(generation, screen)
    except BaseException:
        if screen is not None:
            print(screen.end_line(), end="", flush=True)  # an error, or the shell's prompt, follows
        raise
    await write("\n" if screen is None else f"{screen.flush()}\n")
    completion = generation.completion
    cause = completion.cause
    if screen is not None and completion.finish_reason is FinishReason.LENGTH:
        limit = generation.params.max_tokens
        await write("(the context is full)\n" if limit is None else f"(--max-tokens {limit} reached)\n")
    elif cause is Cause.CLIENT:
        await write("(stopped)\n")
    elif cause is not None:
        warn(f"the answer was cut off ({cause.value})")


async def write(text: str) -> None:
    """Write to stdout in a thread: a pager that stops reading must not stop the engine."""
    stdout = trio.wrap_file(sys.stdout)
    await stdout.write(text)
    await stdout.flush()


async def _print_answer(config: EngineConfig, prompt: str, params: SamplingParams, as_json: bool) -> None:
    async with local_session(config) as session:
        await answer_prompt(session, prompt, params, as_json=as_json)


async def _write_chunks(generation: AnyGeneration, screen: Screen | None) -> None:
    async with generation:
        async for chunk in generation:
            if text := chunk.text if screen is None else screen.feed(chunk.text):
                await write(text)


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
