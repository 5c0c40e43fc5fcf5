"""Configuration, sampling parameters, ledger: each bad value is named."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from trioengine import EngineConfig, InvalidConfig, RequestRejected, SamplingParams
from trioengine.core.codec import decode, encode
from trioengine.core.config import MAX_SESSIONS
from trioengine.core.errors import InvariantError
from trioengine.core.ledger import Ledger, RequestState
from trioengine.core.messages import AddMessage, Configure
from trioengine.core.sampling_params import EMBEDDING, ResolvedParams, checked_defaults, replace_valid, resolved_params
from trioengine.core.types import Cause, FinishReason, token_ids
from trioengine.core.wording import brief

HUGE = 10**400  # no float holds it
UNPRINTABLE = 10**5000  # more digits than Python prints
NO_NUMBERS = ["3", None, True, [], {}, (1,), float("nan"), float("inf"), -float("inf"), HUGE, -HUGE, UNPRINTABLE]
NO_INTEGERS = [*NO_NUMBERS, 1.5, 2**70, -(2**70)]
NO_SWITCHES = [1, 0, None, "yes", []]

BAD_PARAMS = {
    "max_tokens": [0, -1, 2**31, *NO_INTEGERS],
    "temperature": [-1, 100.5, *NO_NUMBERS],
    "top_k": [-2, 2**31, *NO_INTEGERS],
    "top_p": [-0.1, 1.1, *NO_NUMBERS],
    "min_p": [-0.1, 1.1, *NO_NUMBERS],
    "repetition_penalty": [0, -1, 0.009, 1e-39, 100.5, 1e300, *NO_NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NO_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NO_NUMBERS],
    "seed": [2**63, -(2**63) - 1, 1.0, *NO_INTEGERS],
    "stop": [3, None, {"a"}, ("",), ("x" * 257,), ("x",) * 17, (3,)],
    "stop_token_ids": [3, None, "12", (-1,), (1,) * 1025, range(3), *[(value,) for value in NO_INTEGERS]],
    "min_tokens": [-1, 2**31, *NO_INTEGERS],
    "ignore_eos": NO_SWITCHES,
    "skip_special_tokens": NO_SWITCHES,
    "logit_bias": [
        3,
        None,
        [(1, 2.0)],
        {"a": 1.0},
        {2**31: 1.0},
        {1: 101.0},
        dict.fromkeys(range(1025), 0.0),
        *[{1: value} for value in NO_NUMBERS],
    ],
    "logprobs": [-1, 21, *NO_INTEGERS],
    "prompt_logprobs": [-1, 21, *NO_INTEGERS],
    "cache_salt": [3, None, b"x", "x" * 257, "half \ud800"],
    "grammar": ["[a-z]", {}, 3],
    "num_speculative_tokens": [-1, 16, *NO_INTEGERS],
}
OPTIONAL = {
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "grammar",
    "num_speculative_tokens",
    "draft_model",
    "chat_template",
    "max_model_len",
    "kv_cache_memory",
    "chunked_prefill_size",
    "num_threads",
}


def bad_values(table):
    return [
        (name, value) for name, values in table.items() for value in values if value is not None or name not in OPTIONAL
    ]


def test_every_parameter_is_tried():
    assert BAD_PARAMS.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), bad_values(BAD_PARAMS), ids=lambda value: brief(value)[:30])
def test_a_bad_sampling_parameter_is_named(name, value):
    with pytest.raises(RequestRejected, match=rf"^{name}(: token id|: bias)? must ") as caught:
        SamplingParams(**{name: value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)
    assert len(str(caught.value)) < 250


def test_the_range_is_said():
    for name, value, rule in [
        ("temperature", HUGE, "a number from 0 to 100"),
        ("repetition_penalty", 0, "a number from 0.01 to 100"),
        ("top_p", 2, "a number from 0 to 1"),
        ("top_k", 2**70, "an integer from -1 to 2147483647"),
    ]:
        with pytest.raises(RequestRejected, match=f"{name} must be {rule}, got"):
            SamplingParams(**{name: value})


def test_what_of_a_mapping_is_wrong_is_said():
    with pytest.raises(RequestRejected, match=r"^logit_bias: token id must be an integer from 0 to .*, got '5'"):
        SamplingParams(logit_bias={"5": 1})
    with pytest.raises(RequestRejected, match=r"^logit_bias: bias must be a number from -100 to 100, got '5'"):
        SamplingParams(logit_bias={5: "5"})
    with pytest.raises(RequestRejected, match=r"^stop_token_ids: token id must be an integer from 0 to .*, got '5'"):
        SamplingParams(stop_token_ids=["5"])


def test_the_logit_bias_is_a_copy():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias["x"] = float("nan")
    assert params.logit_bias == {1: 1.0}


def test_valid_fields_are_replaced_without_another_validation():
    params = SamplingParams(temperature=0.5, stop="x")
    assert replace_valid(params, max_tokens=3, stop=()) == SamplingParams(temperature=0.5, max_tokens=3)
    assert params == SamplingParams(temperature=0.5, stop=("x",))
    with pytest.raises(AttributeError, match="'temprature'"):
        replace_valid(params, temprature=1.0)


def test_values_that_were_not_given_are_the_models_defaults_or_neutral():
    params = SamplingParams(top_p=1.0, max_tokens=5)
    resolved = resolved_params(params, {"temperature": 0.2, "top_p": 0.5}, seed=3)
    assert resolved == ResolvedParams(temperature=0.2, top_p=1.0, max_tokens=5, seed=3)
    assert (resolved.top_k, resolved.min_p, resolved.repetition_penalty) == (0, 0.0, 1.0)
    assert resolved.num_speculative_tokens == 0
    assert checked_defaults({"top_k": np.int64(4), "max_tokens": 7}) == {"top_k": 4, "max_tokens": 7}
    with pytest.raises(RequestRejected, match="top_p must be"):
        checked_defaults({"top_p": 2})


def types(values):
    return {type(value) for value in values}


def test_numbers_of_numpy_become_pythons():
    """So that they travel, and print, as any other."""
    params = SamplingParams(
        max_tokens=np.int64(5),
        seed=np.uint8(7),
        temperature=np.float32(0.5),
        top_p=np.int32(1),
        min_p=Fraction(1, 4),
        stop_token_ids=[np.int64(3)],
        logit_bias={np.int64(4): np.float16(2)},
    )
    assert (params.max_tokens, params.seed, params.temperature, params.min_p) == (5, 7, 0.5, 0.25)
    assert types([params.max_tokens, params.seed, *params.stop_token_ids, *params.logit_bias]) == {int}
    assert types([params.temperature, params.top_p, params.min_p, *params.logit_bias.values()]) == {float}
    message = AddMessage(1, 1, 0, token_ids(), resolved_params(params, {}), ())
    assert decode(encode(message)) == message
    config = EngineConfig(max_num_seqs=np.int64(8), step_timeout=np.float32(2), restart_delays=[np.float64(1), 2])
    assert types([config.max_num_seqs]) == {int}
    assert types([config.step_timeout, *config.restart_delays]) == {float}


@pytest.mark.parametrize("value", [np.True_, np.float64(3), np.array([1, 2]), np.float32("nan")])
def test_what_is_no_number_of_numpy_either(value):
    with pytest.raises(RequestRejected, match="max_tokens must be an integer"):
        SamplingParams(max_tokens=value)
    with pytest.raises(InvalidConfig, match="step_timeout must be a number above 0"):
        EngineConfig(step_timeout=-value if isinstance(value, np.floating) else value)


def test_a_number_that_no_float_holds_is_not_above_zero():
    with pytest.raises(InvalidConfig, match="step_timeout must be a number above 0"):
        EngineConfig(step_timeout=Fraction(1, 10**400))


LEAST = {
    "max_tokens": 1,
    "temperature": 0,
    "top_k": -1,
    "top_p": 0,
    "min_p": 0,
    "repetition_penalty": 0.01,
    "presence_penalty": -2,
    "frequency_penalty": -2,
    "seed": -(2**63),
    "min_tokens": 0,
    "logit_bias": {0: -100},
    "logprobs": 0,
    "prompt_logprobs": 0,
    "num_speculative_tokens": 0,
}
MOST = {
    "max_tokens": 2**31 - 1,
    "temperature": 100,
    "top_k": 2**31 - 1,
    "top_p": 1,
    "min_p": 1,
    "repetition_penalty": 100,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "seed": 2**63 - 1,
    "min_tokens": 2**31 - 1,
    "logit_bias": {2**31 - 1: 100},
    "stop_token_ids": (0, 2**31 - 1),
    "logprobs": 20,
    "prompt_logprobs": 20,
    "num_speculative_tokens": 15,
}


@pytest.mark.parametrize("values", [LEAST, MOST], ids=["least", "most"])
def test_the_bounds_themselves_are_allowed_and_travel(values):
    message = AddMessage(1, 1, 0, token_ids(), ResolvedParams(**values), ())
    assert decode(encode(message)) == message


def test_sampling_parameters_take_one_string_or_lists():
    params = SamplingParams(stop="\n", stop_token_ids=[3], max_tokens=2, min_tokens=2)
    assert (params.stop, params.stop_token_ids) == (("\n",), (3,))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(RequestRejected, match="min_tokens must be at most max_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3)


BAD_CONFIG = {
    "model": ["", "a\0b", "\ud800", *NO_NUMBERS[1:]],
    "generation_config": ["", "a\0b", "\ud800", *NO_NUMBERS[1:]],
    "chat_template": ["", "a\0b", "\ud800", *NO_NUMBERS[1:]],
    "adapters": ["sql=dir", ("sql",), ("=dir",), ("sql=",), (7,), ("a=b", "a=c"), ("a\0=b",), None],
    "draft_model": ["", "a\0b", "\ud800", *NO_NUMBERS[1:]],
    "on_worker_loss": ["", "retry", *NO_NUMBERS],
    "device": ["tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:128", "cuda:01", "cuda:٣", "cuda:" + "9" * 20, *NO_NUMBERS],
    "dtype": ["int4", *NO_NUMBERS],
    "kernels": ["", "cuda", *NO_NUMBERS],
    "cuda_graphs": ["", "always", *NO_NUMBERS],
    "quantization": ["", "int4", *NO_NUMBERS],
    "kv_cache_dtype": ["", "fp8", *NO_NUMBERS],
    "max_num_seqs": [0, 2**31, *NO_INTEGERS],
    "max_sessions": [0, MAX_SESSIONS + 1, *NO_INTEGERS],
    "max_num_batched_tokens": [0, 5, 2**31, *NO_INTEGERS],
    "chunked_prefill_size": [0, 2**31, *NO_INTEGERS],
    "block_size": [0, 2**31, *NO_INTEGERS],
    "max_restarts": [0, 2**31, *NO_INTEGERS],
    "payload_memory": [0, 2**63, *NO_INTEGERS],
    "max_num_queued_reqs": [-1, 2**31, *NO_INTEGERS],
    "max_model_len": [0, 1, 2**31, *NO_INTEGERS],
    "kv_cache_memory": [0, "1G", 2**63, *NO_INTEGERS],
    "encoder_cache_memory": [-1, 2**63, *NO_INTEGERS],
    "num_threads": [0, 1025, *NO_INTEGERS],
    "num_speculative_tokens": [-1, 16, *NO_INTEGERS],
    "gpu_memory_utilization": [0, 1.5, *NO_NUMBERS],
    "enable_prefix_caching": NO_SWITCHES,
    "batch_invariant": NO_SWITCHES,
    "startup_timeout": [0, 2e9, *NO_NUMBERS],
    "step_timeout": [-1, 2e9, *NO_NUMBERS],
    "unresponsive_timeout": [0, 2e9, *NO_NUMBERS],
    "ping_interval": [0, 2e9, *NO_NUMBERS],
    "worker_shutdown_timeout": [0, 2e9, *NO_NUMBERS],
    "restart_delays": [(), [], 5, "5", {1.0}, None, (-1.0,), *[(0.0, value) for value in NO_NUMBERS]],
}


def test_every_field_is_tried():
    assert BAD_CONFIG.keys() == {field.name for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(("name", "value"), bad_values(BAD_CONFIG), ids=lambda value: brief(value)[:30])
def test_a_bad_configuration_is_named(name, value):
    with pytest.raises(InvalidConfig, match=rf"^{name} (\(5\) )?must ") as caught:
        EngineConfig(**{name: value})
    assert len(str(caught.value)) < 250


def test_threads_are_bounded_by_the_cores_of_the_machine():
    EngineConfig().check_cores(1)
    EngineConfig(num_threads=8).check_cores(2)
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig(num_threads=9).check_cores(2)
    assert str(caught.value) == "num_threads must be at most 8 (4 for each of 2 cores), got 9"
    assert caught.value.fields == ("num_threads",)


def test_a_context_is_bounded_by_the_models():
    EngineConfig().check_context(8)
    EngineConfig(max_model_len=8).check_context(8)
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig("toy", max_model_len=9).check_context(8)
    assert str(caught.value) == "max_model_len must be at most 8, the context of model 'toy', got 9"
    assert caught.value.fields == ("max_model_len",)


def test_the_greatest_configuration_travels():
    most = EngineConfig(
        device="cuda:127",
        max_model_len=2**31 - 1,
        max_num_seqs=2**31 - 1,
        max_num_batched_tokens=2**31 - 1,
        block_size=2**31 - 1,
        chunked_prefill_size=2**31 - 1,
        kv_cache_memory=2**63 - 1,
        encoder_cache_memory=2**63 - 1,
        gpu_memory_utilization=1,
        num_threads=1024,
        restart_delays=[0, 10**9],
    )
    assert most.restart_delays == (0, 10**9)
    message = Configure(most.for_worker("m.gguf"))
    assert decode(encode(message)) == message


def test_the_worker_gets_its_part():
    config = EngineConfig(device="cuda:1", dtype="float32", max_model_len=100, num_threads=2).for_worker("/m.gguf")
    assert (config.model_path, config.device, config.max_model_len, config.num_threads) == ("/m.gguf", "cuda:1", 100, 2)
    drafting = EngineConfig(draft_model="small").for_worker("/m.gguf", "/small.gguf")
    assert (config.draft_model_path, drafting.draft_model_path) == (None, "/small.gguf")


def test_the_ledger_balances_on_every_way():
    ledger = Ledger()
    ledger.open_session()
    ledger.reject()
    for reason in FinishReason:
        ledger.receive()
        ledger.check()
        ledger.move(RequestState.PREPARING, RequestState.WAITING)
        assert (ledger.preparing, ledger.waiting, ledger.running, ledger.in_flight) == (0, 1, 0, 1)
        ledger.move(RequestState.WAITING, RequestState.RUNNING)
        ledger.settle(RequestState.RUNNING, reason)
        ledger.check()
    assert (ledger.received, ledger.finished, ledger.aborted, ledger.failed, ledger.rejected) == (5, 3, 1, 1, 1)
    ledger.free_session()
    assert ledger.sessions == 0


def test_a_ledger_that_does_not_balance_says_so():
    ledger = Ledger()
    ledger.received = 1
    with pytest.raises(InvariantError, match="received 1"):
        ledger.check()
    ledger = Ledger()
    ledger.free_session()
    with pytest.raises(InvariantError, match="sessions"):
        ledger.check()
    ledger = Ledger()
    ledger.receive()
    ledger.move(RequestState.WAITING, RequestState.PREPARING)
    with pytest.raises(InvariantError, match="waiting"):
        ledger.check()


def test_a_request_that_leaves_the_line_is_received_and_aborted():
    ledger = Ledger()
    ledger.leave_line(Cause.CLIENT)
    ledger.check()
    assert (ledger.received, ledger.aborted, ledger.in_flight, ledger.rejected) == (1, 1, 0, 0)
    assert ledger.abort_causes[Cause.CLIENT] == 1


def test_a_suspended_request_is_in_flight():
    ledger = Ledger()
    ledger.receive()
    ledger.move(RequestState.PREPARING, RequestState.WAITING)
    ledger.move(RequestState.WAITING, RequestState.SUSPENDED)
    assert (ledger.suspended, ledger.in_flight) == (1, 1)
    ledger.check()
    ledger.settle(RequestState.SUSPENDED, FinishReason.ABORT, Cause.SLEEP)
    assert (ledger.suspended, ledger.in_flight, ledger.abort_causes[Cause.SLEEP]) == (0, 0, 1)


def test_parameters_that_embed():
    """Callers cannot make them: they are one constant, which keeps its meaning on the wire."""
    resolved = resolved_params(EMBEDDING, {}, seed=0)
    message = AddMessage(1, 2, 0, token_ids([3]), resolved, ())
    assert EMBEDDING.embeds and resolved.embeds and decode(encode(message)).params.embeds
    assert not SamplingParams().embeds
    assert not SamplingParams(max_tokens=0, prompt_logprobs=0).embeds
    with pytest.raises(RequestRejected, match="max_tokens must be at least 1 without prompt_logprobs, got 0"):
        SamplingParams(max_tokens=0)
