"""`echo` and `logprobs` of completions: the scores of prompts and answers, whole and streamed."""

import json
from dataclasses import replace

import pytest
import trio
from helpers.clients import events_of, first_token, open_clients

from trioengine import EngineConfig, SamplingParams
from trioengine.testing.toy_model import IM_END, toy_answer, toy_logprobs

PATH = "/v1/completions"
FIELDS = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
TEXT = "to bé 😀"  # one token a byte
SPECIAL = f"<|im_start|>{TEXT}"


async def whole(clients, **fields):
    answer = await clients.request("POST", PATH, {**FIELDS, **fields})
    assert answer.status == 200, answer.json
    return answer.json["choices"]


async def streamed(clients, **fields):
    """The choices of a stream, put together; no event shows logprobs without its tokens."""
    answer = await clients.request("POST", PATH, {**FIELDS, **fields, "stream": True})
    assert answer.status == 200, answer.json
    *events, done = answer.events
    assert done == "[DONE]"
    choices = {}
    for piece in (event["choices"][0] for event in events):
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
        choice["text"] += piece["text"]
        if piece["logprobs"] is not None:
            before = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
            choice["logprobs"] = {name: before[name] + found for name, found in piece["logprobs"].items()}
        choice.update({name: piece[name] for name in ("finish_reason", "stop_reason") if name in piece})
    return [choices[index] for index in sorted(choices)]


either_way = pytest.mark.parametrize("answered", [whole, streamed])


def names(engine, ids):
    """By OpenAI's rule: text, or bytes that are not whole UTF-8."""
    table = engine.tokenizer.tokenizer.token_bytes
    return [
        table[id].decode()
        if table[id].decode(errors="ignore").encode() == table[id]
        else "bytes:" + "".join(f"\\x{byte:02x}" for byte in table[id])
        for id in ids
    ]


def due(engine, ids, positions):
    """The lists for tokens with these log-probabilities, but for the offsets."""
    top = []
    for position in positions:
        top.append(None if position is None else {})
        for id, value in (position or {}).items():
            (name,) = names(engine, [id])
            top[-1][name] = max(value, top[-1].get(name, value))
    own = [None if position is None else position[id] for id, position in zip(ids, positions, strict=True)]
    return {"tokens": names(engine, ids), "token_logprobs": own, "top_logprobs": top}


def without_offsets(logprobs):
    return {name: found for name, found in logprobs.items() if name != "text_offset"}


def text_at(engine, ids):
    """The offset of each token: the characters that are complete before it."""
    table = engine.tokenizer.tokenizer.token_bytes
    return [len(b"".join(table[id] for id in ids[:at]).decode(errors="ignore")) for at in range(len(ids))]


@either_way
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_prompts_with_their_answers(autojump_clock, clients, answered, as_ids, max_tokens):
    """Equal to the engine's own, of a text as of its token ids."""
    engine = clients.engine
    ids = engine.tokenizer.encode(SPECIAL)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, logprobs=3, prompt_logprobs=3)
    completion = await engine.generate(ids, params)
    prompt = list(ids) if as_ids else SPECIAL
    (choice,) = await answered(clients, prompt=prompt, echo=True, logprobs=3, max_tokens=max_tokens)
    assert choice["text"] == SPECIAL + completion.text
    assert choice["finish_reason"] == "length"
    all_ids = [*ids, *completion.token_ids]
    positions = [*completion.prompt_logprobs, *completion.logprobs]
    assert without_offsets(choice["logprobs"]) == due(engine, all_ids, positions)
    assert choice["logprobs"]["top_logprobs"][0] is None and choice["logprobs"]["token_logprobs"][0] is None
    assert positions[1:] == [toy_logprobs(id, 3) for id in all_ids[1:]]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[: len(ids)] == text_at(engine, ids)
    assert offsets[len(ids) :] == [len(SPECIAL) + at for at in range(max_tokens)]


@either_way
async def test_answers_alone(autojump_clock, clients, answered):
    """Their offsets begin behind the prompt, as OpenAI has it."""
    ids = clients.engine.tokenizer.encode("to be")
    (choice,) = await answered(clients, prompt="to be", logprobs=0)
    answer = toy_answer(ids, 5, ignore_eos=True)
    assert choice["text"] == clients.engine.tokenizer.decode(answer)
    assert without_offsets(choice["logprobs"]) == due(clients.engine, answer, [toy_logprobs(id, 0) for id in answer])
    assert choice["logprobs"]["text_offset"][0] == 5


@either_way
async def test_echo_alone(autojump_clock, clients, answered):
    for max_tokens in (0, 3):
        for prompt in (SPECIAL, clients.engine.tokenizer.encode(SPECIAL)):
            (choice,) = await answered(clients, prompt=prompt, echo=True, max_tokens=max_tokens)
            answer = toy_answer(clients.engine.tokenizer.encode(SPECIAL), max_tokens, ignore_eos=True)
            assert choice["text"] == SPECIAL + clients.engine.tokenizer.decode(answer)
            assert (choice["logprobs"], choice["finish_reason"]) == (None, "length")


@either_way
async def test_several_prompts(autojump_clock, clients, answered):
    choices = await answered(clients, prompt=["to be", "or", "n"], echo=True, logprobs=1, max_tokens=1)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for prompt, choice in zip(["to be", "or", "n"], choices, strict=True):
        assert choice["text"].startswith(prompt)
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
        assert choice["logprobs"]["text_offset"] == list(range(len(prompt) + 1))
        (alone,) = await answered(clients, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
        assert {**alone, "index": choice["index"]} == choice


@either_way
async def test_choices_of_prompts(autojump_clock, clients, answered):
    """With echo, each has the text of its prompt; with logprobs, the offsets begin behind it."""
    fields = {"prompt": ["to be", "or"], "n": 2, "temperature": 1, "seed": 3}
    choices = await answered(clients, **fields, echo=True)
    assert [choice["text"][:2] for choice in choices] == ["to", "to", "or", "or"]
    choices = await answered(clients, **fields, logprobs=2)
    assert [choice["logprobs"]["text_offset"][0] for choice in choices] == [5, 5, 2, 2]


@either_way
async def test_tokens_without_text(autojump_clock, clients, answered):
    """An end token, and tokens whose text a stop string holds back."""
    for fields in ({"ignore_eos": False, "max_tokens": 300}, {"stop": ["no such text" * 10], "max_tokens": 30}):
        (choice,) = await answered(clients, prompt="hello", logprobs=1, **fields)
        ids = toy_answer(b"hello", fields["max_tokens"], ignore_eos="stop" in fields)
        assert choice["logprobs"]["tokens"] == names(clients.engine, ids)
        assert ("stop" in fields) == (ids[-1] != IM_END)


@either_way
async def test_tokens_as_token_ids(autojump_clock, clients, answered):
    fields = {"prompt": [7, 8], "logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    (choice,) = await answered(clients, **fields, echo=True)
    ids = [7, 8, *toy_answer([7, 8], 1)]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in ids]
    assert choice["logprobs"]["top_logprobs"] == [None, *({f"token_id:{id}": -0.5} for id in ids[1:])]


async def test_the_order_of_a_stream_and_its_ids(autojump_clock, clients):
    """The first event has the prompt, and nothing of the answer."""
    fields = {**FIELDS, "prompt": "to be", "stream": True, "echo": True, "return_token_ids": True}
    for logprobs in (None, 1):
        first, *events, _ = (await clients.request("POST", PATH, {**fields, "logprobs": logprobs})).events
        (choice,) = first["choices"]
        assert (choice["text"], choice["token_ids"]) == ("to be", [])
        assert choice["prompt_token_ids"] == clients.engine.tokenizer.encode("to be")
        assert len((choice["logprobs"] or {"tokens": ()})["tokens"]) == (0 if logprobs is None else 5)
        assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 5


@either_way
async def test_many_are_rendered_in_a_thread(autojump_clock, clients, answered):
    prompt = list(range(256)) + list(range(200))
    (choice,) = await answered(clients, prompt=prompt, echo=True, logprobs=20, max_tokens=3)
    assert len(choice["logprobs"]["tokens"]) == 459
    assert json.dumps(choice["logprobs"]["token_logprobs"][1:]) == json.dumps([-0.5] * 458)


async def test_an_answer_that_ends_while_its_prompt_is_rendered(autojump_clock, clients, monkeypatch):
    """In a thread that takes long: nothing of the answer is lost."""

    async def take_a_second(function):
        await trio.sleep(1)
        return function()

    monkeypatch.setattr(clients.engine, "ports", replace(clients.engine.ports, run_in_thread=take_a_second))
    fields = {"prompt": [97 + number % 26 for number in range(400)], "echo": True, "logprobs": 5, "max_tokens": 20}
    assert await streamed(clients, **fields) == await whole(clients, **fields)


async def test_a_prompt_may_fill_the_context(autojump_clock):
    """If it is only scored."""
    async with open_clients(EngineConfig(model="toy")) as clients:
        length = clients.engine.limits.max_model_len
        prompt = [97 + number % 26 for number in range(length)]
        (choice,) = await whole(clients, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (length - 1)
        for too_long, max_tokens in ((prompt, 1), ([*prompt, 97], 0)):
            answer = await clients.request("POST", PATH, {"prompt": too_long, "echo": True, "max_tokens": max_tokens})
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        await clients.everything_is_given_back()


@pytest.mark.parametrize("shown", [{"echo": True}, {"logprobs": 0}, {}], ids=["echo", "logprobs", "neither"])
async def test_a_text_that_is_kept_is_counted(autojump_clock, clients, shown):
    """In the budget of the server's buffers, while the answer goes on."""
    async with clients.connect() as client:
        await client.send("POST", PATH, {**FIELDS, "prompt": "to be", "max_tokens": 400, "stream": True, **shown})
        await first_token(clients.engine)
        assert (clients.server.budget.num_bytes > 0) == bool(shown)
        await client.rest()


# ---- lm-evaluation-harness ------------------------------------------------------------------------------------------


def likelihood(choice, num_context):
    """The harness's reading of a context and its continuation, behind which it asks for one token that it drops."""
    logprobs = choice["logprobs"]
    scores = logprobs["token_logprobs"][num_context:-1]
    best = [max(top.values()) for top in logprobs["top_logprobs"][num_context:-1]]
    return sum(scores), scores == best


@pytest.mark.parametrize("eos", [False, True])
async def test_lm_evaluation_harness(autojump_clock, clients, eos):
    """Its request for two continuations; also where the token that it drops is the end token."""
    engine = clients.engine
    context = engine.tokenizer.encode("The capital of France is")
    wholes = [[*context, *engine.tokenizer.encode(text)] for text in (" Paris", " a cat")]
    if eos:
        wholes = [ending(each) for each in wholes]
    body = {"model": "toy", "prompt": wholes, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = await clients.request("POST", PATH, {**body, "echo": True})
    choices = sorted(answer.json["choices"], key=lambda choice: choice["index"])
    assert len(choices) == 2
    for choice, prompt in zip(choices, wholes, strict=True):
        scored = await engine.generate(prompt, max_tokens=0, prompt_logprobs=1)
        positions = list(zip(prompt, scored.prompt_logprobs, strict=True))[len(context) :]
        expected = sum(position[id] for id, position in positions)
        assert likelihood(choice, len(context)) == (expected, True)  # the toy model finds each token the best
        assert expected == -0.5 * (len(prompt) - len(context))
        assert choice["finish_reason"] == ("stop" if eos else "length")


def ending(prompt):
    """The prompt with a last token after which the toy model ends the answer."""
    return next(each for each in ([*prompt, id] for id in range(256)) if toy_answer(each, 1) == [IM_END])


async def test_many_scores_are_refused(autojump_clock, monkeypatch):
    monkeypatch.setattr("trioengine.serve.completions.MAX_SCORES", 40)
    async with open_clients() as clients:
        fields = {**FIELDS, "prompt": [[97] * 10, [98] * 11], "echo": True}
        assert (await clients.request("POST", PATH, {**fields, "logprobs": 0})).status == 200
        answer = await clients.request("POST", PATH, {**fields, "logprobs": 1})
        assert answer.status == 400
        assert (
            answer.json["error"]["message"] == "prompt: 42 log-probabilities are to be echoed; at most 40 are accepted"
        )


async def test_the_echo_comes_once_though_the_worker_dies_behind_it(autojump_clock):
    prompt = [97 + number % 26 for number in range(129)]  # the last token is computed in a step of its own
    fields = {**FIELDS, "prompt": prompt, "echo": True, "logprobs": 1, "stream": True}
    async with open_clients(EngineConfig(model="toy")) as clients, clients.connect() as client:
        await client.send("POST", PATH, fields)
        await client.head()
        echoed = await client.piece()
        assert clients.engine.statistics().generation_tokens == 0
        clients.simulation.worker.kill()
        pieces = events_of(echoed + await client.rest())
    choices = [event["choices"][0] for event in pieces if event != "[DONE]"]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == 129 + 5
    assert "".join(choice["text"] for choice in choices).startswith(bytes(prompt).decode())
