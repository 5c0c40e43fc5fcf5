"""A request has the same tokens and log-probabilities, to the last bit, alone and in any program of requests.

A program adds, stops and runs requests with any chunks, prefix hits, preemptions, drafts and numbers of threads, and
loses the worker. The environment variable EXACTNESS_PROGRAMS sets the number of random programs for each model; of
many, run them with `-o faulthandler_timeout=0`.
"""

import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import tiny_decoders
from helpers.tiny_gguf import write_gguf
from helpers.torch_driver import load, needs_compiler, spoil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trioengine.core.messages import AddMessage, AddSession, EndSession, StopSession, Tokens
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.sequence import MAX_FORCED, Limits
from trioengine.worker.scheduling.speculation import shared

FEW = 25
PROGRAMS = int(os.environ.get("EXACTNESS_PROGRAMS", FEW))
OPTIONS = settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink a failure takes minutes
    suppress_health_check=list(HealthCheck),
)
CONTEXT = 128  # tokens
REQUESTS = 32  # of a model, of which its programs choose
THREADS = (1, 2, 3)
PARAMS = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.7, "logprobs": 0, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.5, "logprobs": 0, "top_p": 0.95},
    {"temperature": 1.3, "logprobs": 1, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}},
    {"temperature": 0.9, "logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 0},
)
MODELS = {  # name: size of the vocabulary, types of a GGUF file, or a variant of tiny_decoders, or none; configuration
    "float32": (200, None, {"quantization": "none", "block_size": 16}),  # which is read in place
    "bfloat16": (200, None, {"dtype": "bfloat16", "quantization": "none", "block_size": 16}),
    "integers": (200, "Q4_1", {"dtype": "auto", "block_size": 8}),
    "integers beside pairs": (200, "Q4_1", {"dtype": "bfloat16", "block_size": 16}),  # as the default model
    "integers beside bfloat16": (200, None, {"dtype": "bfloat16", "quantization": "int8", "block_size": 5}),
    "integers in the cache": (200, None, {"quantization": "none", "kv_cache_dtype": "int8", "block_size": 16}),
    "float32, a large vocabulary": (49_152, None, {"quantization": "none", "block_size": 8}),
    "integers, a large vocabulary": (
        49_152,
        "Q8_0",
        {"dtype": "bfloat16", "kv_cache_dtype": "int8", "block_size": 8},
    ),
    "windows and four norms": (200, "gemma3", {"quantization": "none", "block_size": 16}),
    "windows of all layers": (200, "mistral-window", {"dtype": "bfloat16", "quantization": "int8", "block_size": 8}),
    "windows in pairs": (200, "mistral-window", {"dtype": "bfloat16", "quantization": "int8", "block_size": 16}),
    "convolutions": (200, "lfm2-biases", {"dtype": "bfloat16", "quantization": "int8", "block_size": 5}),
    "delta nets": (200, "qwen3_5", {"dtype": "bfloat16", "quantization": "int8", "block_size": 8}),
    "delta nets in float32": (200, "qwen3_5-even", {"quantization": "none", "block_size": 5}),
    "norms of all heads": (200, "olmo2", {"dtype": "bfloat16", "quantization": "int8", "block_size": 8}),
    "experts": (200, "qwen3-moe-dense", {"quantization": "none", "block_size": 16}),
    "shared experts": (200, "qwen3-next-some", {"dtype": "bfloat16", "quantization": "int8", "block_size": 8}),
    "experts of integers": (200, "olmoe", {"dtype": "bfloat16", "quantization": "int8", "block_size": 8}),
}


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    params: ResolvedParams


@dataclass
class Answer:
    """All that came for a request, in its order."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finish_reason: object = None

    def take(self, row):
        self.tokens += row.token_ids
        self.logprobs += row.logprobs or ()
        self.prompt_logprobs += row.prompt_logprobs or ()
        self.finish_reason = row.finish_reason


class Model:
    """A model with its requests, and the answers that they get alone."""

    def __init__(self, runner):
        self.runner = runner
        rng, vocab_size = random.Random(0), runner.info.vocab_size
        prefixes = [[rng.randrange(3, vocab_size) for _ in range(40)] for _ in range(3)]
        self.requests = []
        for number in range(REQUESTS):
            prefix = rng.choice(prefixes)[: rng.choice((0, 1, 8, 17, 40))]
            prompt = (*prefix, *(rng.randrange(3, vocab_size) for _ in range(rng.choice((1, 2, 7, 30)))))
            params = PARAMS[number % len(PARAMS)]
            more = {"seed": number, "max_tokens": rng.choice((1, 6, 30, 45)), "ignore_eos": True}
            self.requests.append(Asked(prompt, ResolvedParams(**params, **more)))
        self.alone = [self._alone(number) for number in range(REQUESTS)]

    def limits(self, **changes):
        info = self.runner.info
        values = {"state_slots": info.state_slots, "windows": info.windows, **changes}
        return Limits(info.vocab_size, CONTEXT, info.kv_blocks_total, info.block_size, **values)

    def _alone(self, number):
        torch.set_num_threads(1)
        life = Life(self, self.limits(enable_prefix_caching=False))
        life.add(number)
        life.run()
        return life.answers[0]


class Oracle:
    """A runner that knows the answers of a life; each third token of its drafts is wrong."""

    def __init__(self, runner, life):
        self.runner, self.life = runner, life
        self.execute = runner.execute

    def draft(self, wanted, room):
        shares = shared([each.most for each in wanted], room)
        return [self._drafted(each.sequence, share) for each, share in zip(wanted, shares, strict=True)]

    def _drafted(self, sequence, share):
        tokens = self.life.model.alone[self.life.numbers[sequence.request]].tokens
        places = range(sequence.num_output_tokens, len(tokens))[:share]
        return tuple(tokens[place] ^ (place % 3 == 0) for place in places)


class Life:
    """Requests of one engine core after the other, as an engine posts them."""

    def __init__(self, model, limits):
        self.model, self.limits = model, limits
        self.numbers, self.answers = [], []  # by request
        self.stopped = set()
        self.num_speculative_tokens = 0
        self.happened = Counter()
        self.start()

    def start(self):
        """A new worker, whose caches have never been written."""
        runner = self.model.runner
        for loaded in runner.loaded:
            spoil(loaded.cache)
            if loaded.states is not None:
                spoil(loaded.states)
        drafting = runner if runner.draft_model is not None else Oracle(runner, self)
        self.core = EngineCore(drafting, self.limits, lambda: 0.0)

    def add(self, number):
        self.numbers.append(number)
        self.answers.append(Answer())
        self.post(len(self.numbers) - 1)

    def post(self, request):
        asked, answer = self.model.requests[self.numbers[request]], self.answers[request]
        params = replace(asked.params, num_speculative_tokens=self.num_speculative_tokens)
        if answer.tokens:
            params = replace(params, prompt_logprobs=None)
        else:
            answer.prompt_logprobs.clear()
        ids = token_ids((*asked.prompt, *answer.tokens))
        self.handle(AddSession(request))
        self.handle(AddMessage(request, request, 0, ids, params, (), num_output=len(answer.tokens)))

    def handle(self, message):
        self.take(self.core.handle(message))

    def take(self, replies):
        for reply in replies:
            if isinstance(reply, Tokens):
                for row in reply.rows:
                    answer = self.answers[row.request]
                    answer.take(row)
                    if row.finish_reason is not None:
                        self.core.handle(EndSession(row.request))

    def step(self):
        if self.core.has_work:
            before = self.core.statistics()
            self.take(self.core.step())
            after = self.core.statistics()
            self.happened["preemption"] += after.num_preemptions - before.num_preemptions
            self.happened["prefix hit"] += after.prefix_cache_hits - before.prefix_cache_hits
            self.happened["kept draft"] += after.accepted_tokens - before.accepted_tokens
            self.happened["batch"] += before.num_running > 1

    def run(self):
        while self.core.has_work:
            self.step()

    def stop(self, place):
        if live := self.live:
            request = live[place % len(live)]
            self.stopped.add(request)
            self.handle(StopSession(request, request))
            self.happened["stop"] += 1

    def kill(self):
        live = self.live
        self.start()
        for request in live:
            self.happened["resumed answer"] += bool(self.answers[request].tokens)
            self.post(request)

    @property
    def live(self):
        return [request for request, answer in enumerate(self.answers) if answer.finish_reason is None]

    def check(self):
        for request, (number, answer) in enumerate(zip(self.numbers, self.answers, strict=True)):
            expected = self.model.alone[number]
            if request in self.stopped:
                assert answer.tokens == expected.tokens[: len(answer.tokens)]
                assert answer.logprobs == expected.logprobs[: len(answer.logprobs)]
            else:
                assert answer == expected


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, REQUESTS - 1), min_size=1, max_size=6)),
    st.tuples(st.just("steps"), st.integers(1, 20)),
    st.tuples(st.just("threads"), st.sampled_from(THREADS)),
    st.tuples(st.just("speculation"), st.sampled_from((0, 1, 5, 15))),
    st.tuples(st.just("stop"), st.integers(0, 7)),
    st.tuples(st.just("kill"), st.none()),
)
LIMITS = st.fixed_dictionaries(
    {
        "chunked_prefill_size": st.integers(1, 64),
        "max_num_seqs": st.integers(1, 12),
        "enable_prefix_caching": st.booleans(),
    }
)


def fewest(limits, blocks):
    """As few blocks of windows as one sequence may need."""
    longest = limits.windows.size + limits.max_num_batched_tokens + MAX_FORCED
    return limits.windows and limits.windows._replace(num_blocks=min(blocks, 2 + -(-longest // limits.block_size)))


def run_program(model, limits, blocks, operations):
    limits = model.limits(max_num_batched_tokens=limits["chunked_prefill_size"] + 16, **limits)
    life = Life(model, replace(limits, kv_blocks_total=blocks, windows=fewest(limits, blocks)))
    for name, argument in operations:
        match name:
            case "add":
                for number in argument:
                    life.add(number)
            case "steps":
                for _ in range(argument):
                    life.step()
            case "threads":
                torch.set_num_threads(argument)
                life.happened["threads"] += 1
            case "speculation":  # of later requests
                life.num_speculative_tokens = argument
            case "stop":
                life.stop(argument)
            case "kill":
                life.kill()
    life.run()
    life.check()
    return life.happened


@pytest.mark.parametrize("name", MODELS)
def test_random_programs(tiny_llama, tmp_path, name):
    vocab_size, kind, config = MODELS[name]
    shape = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": vocab_size, "num_hidden_layers": 2}
    if kind is None:
        path = tiny_llama.write(tmp_path / "model", "bias", **shape)
    elif kind in tiny_decoders.VARIANTS:
        path = tiny_decoders.write(tmp_path / "model", kind)
    else:
        kinds = dict.fromkeys(tiny_llama.tensors({**tiny_llama.BASE, **shape}), kind)
        kinds = {name: kind for name in kinds if "norm" not in name}
        path = write_gguf(tiny_llama, tmp_path / "model.gguf", "plain", kinds=kinds, **shape)
    check_programs(load(path, max_model_len=CONTEXT, kv_cache_memory=4 << 20, **config))


@pytest.mark.parametrize("name", ["bfloat16", "integers in the cache"])
def test_random_programs_with_a_draft_model(tiny_llama, tmp_path, name):
    """Half of its layers are those of the model, so that it is right now and then."""
    vocab_size, _, config = MODELS[name]
    shape = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": vocab_size}
    path = tiny_llama.write(tmp_path / "model", "bias", num_hidden_layers=2, **shape)
    draft = tiny_llama.write(tmp_path / "draft", "bias", num_hidden_layers=1, **shape)
    options = {"max_model_len": CONTEXT, "kv_cache_memory": 4 << 20, "draft_model_path": str(draft)}
    check_programs(load(path, **options, **config))


def check_programs(runner):
    model = Model(runner)
    happened = Counter()

    @OPTIONS
    @given(limits=LIMITS, tokens=st.integers(120, 192), operations=st.lists(OPERATIONS, min_size=8, max_size=30))
    def programs(limits, tokens, operations):
        blocks = -(-tokens // model.runner.info.block_size)
        happened.update(run_program(model, limits, blocks, operations))

    programs()
    wanted = {"preemption", "prefix hit", "batch", "stop", "resumed answer", "threads", "kept draft"}
    if model.runner.states is not None:
        wanted.remove("kept draft")
    assert PROGRAMS < FEW or all(happened[each] for each in wanted)
