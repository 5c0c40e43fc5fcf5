"""The commands as processes of their own, on the default model."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import trio
from trio_websocket import open_websocket_url

COMMAND = [sys.executable, "-m", "trioengine"]
STORY = ["generate", "Tell me a story.", "--ignore-eos"]  # longer than any test
PATIENCE = 240  # seconds until a process that should have ended is a failure


def _hear_interrupts():
    """Also where the tests run in the background of a shell, which has them ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(*arguments, **options):
    """A command; it is killed by its id if it is still there at the end."""
    process = subprocess.Popen([*COMMAND, *arguments], text=True, preexec_fn=_hear_interrupts, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(*arguments, stdin=None):
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_one_answer(smollm2):
    options = ["--model", str(smollm2), "--temperature", "0", "--max-tokens", "16", "--dtype", "float32"]
    streamed = ended("generate", "Name the capital of France.", *options)
    assert (streamed.returncode, streamed.stderr) == (0, "")
    assert "Paris" in streamed.stdout
    printed = ended("generate", "-", "--json", *options, stdin="Name the capital of France.")
    assert (printed.returncode, printed.stderr) == (0, "")
    answer = json.loads(printed.stdout)
    assert answer["text"] == streamed.stdout.removesuffix("\n")
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])


def test_an_answer_without_a_stderr(smollm2):
    generate = [*COMMAND, "generate", "Name the capital of France.", "--max-tokens", "16", "--temperature", "0"]
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *generate, "--model", str(smollm2)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert printed.returncode == 0
    assert "Paris" in printed.stdout


def test_a_reader_that_goes(smollm2):
    with started(
        "generate", "Tell me a story.", "--ignore-eos", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        assert process.wait(PATIENCE) == 1
        assert process.stderr.read() == ""


def test_an_interrupt(smollm2):
    with started(
        "generate", "Tell me a story.", "--ignore-eos", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == ""


def num_unread(pipe):
    """Bytes that its reader has not taken yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_an_interrupt_while_a_chat_waits_for_a_line(smollm2):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started("chat", str(smollm2), "--max-tokens", "4", "--temperature", "0", **pipes) as process:
        process.stdin.write("Name the capital of France.\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith("\n")
        process.stdin.write("half a line")
        process.stdin.flush()
        while num_unread(process.stdin):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == ""


def test_a_benchmark_longer_than_the_context(smollm2):
    sizes = ["--prompt-len", "60", "--output-len", "5", "--max-model-len", "64"]
    refused = ended("bench", "offline", str(smollm2), *sizes)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "trioengine: error: --prompt-len 60 and --output-len 5: the context has 64 tokens\n"


def test_a_context_longer_than_the_models(smollm2):
    refused = ended("generate", "hi", "--model", str(smollm2), "--max-model-len", "100000")
    problem = f"must be at most 8192, the context of model {str(smollm2)!r}, got 100000"
    assert (refused.returncode, refused.stderr) == (2, f"trioengine: error: --max-model-len {problem}\n")


def test_bench_offline(smollm2):
    sizes = ["--requests", "2", "--prompt-len", "8", "--output-len", "4", "--repeat", "1"]
    figures = json.loads(ended("bench", "offline", str(smollm2), *sizes, "--json").stdout)
    assert (figures["requests"], figures["prompt_len"], figures["output_len"]) == (2, 8, 4)
    assert figures["output_tps"] > 0
    assert figures["ttft_median"] > 0


async def converse(port):
    with trio.fail_after(PATIENCE):
        async with open_websocket_url(f"ws://127.0.0.1:{port}/v1/realtime") as websocket:

            async def until(name):
                while (event := json.loads(await websocket.get_message()))["type"] != name:
                    pass
                return event

            item = {"type": "message", "role": "user"}
            content = [{"type": "input_text", "text": "Name the capital of France."}]
            events = [
                {"type": "conversation.item.create", "item": item | {"content": content}},
                {"type": "response.create", "response": {"temperature": 0, "max_output_tokens": 16}},
            ]
            for event in events:
                await websocket.send_message(json.dumps(event))
            return (await until("response.done"))["response"]


def children(pid):
    """The processes whose parent this is."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_serve_answers_and_drains(smollm2):
    with started("serve", str(smollm2), "--port", "0", stderr=subprocess.PIPE) as process:
        lines = iter(process.stderr.readline, "")
        port = next(match.group(1) for line in lines if (match := re.search(r"listening on http://.*:(\d+)", line)))
        next(line for line in lines if "ready: " in line)
        (worker,) = children(process.pid)
        response = trio.run(converse, int(port))
        assert "Paris" in response["output"][0]["content"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()
        assert not is_alive(worker)
