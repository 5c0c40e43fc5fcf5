"""Configuration, sampling parameters, ledger: each bad value is named."""

import pytest

from trioengine import EngineConfig, InvalidConfig, RequestRejected, SamplingParams
from trioengine.core.errors import InvariantError
from trioengine.core.ledger import Ledger, Stand
from trioengine.core.messages import FinishReason

BAD_PARAMS = {
    "max_tokens": [0, -1, 1.5, True, "3"],
    "temperature": [-1, float("nan"), float("inf"), "hot", True],
    "top_k": [-2, 1.5],
    "top_p": [0, 1.1],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [2**63, 1.0],
    "stop": [3, ("",), ("x" * 257,), ("x",) * 17, (3,)],
    "stop_token_ids": [3, (-1,), (1.5,), (1,) * 1025],
    "min_tokens": [-1],
    "ignore_eos": [1, None],
    "skip_special_tokens": ["yes"],
    "logit_bias": [3, {"a": 1.0}, {1: 101.0}, {1: None}, dict.fromkeys(range(1025), 0.0)],
    "logprobs": [-1, 21],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_PARAMS.items() for value in values])
def test_a_bad_sampling_parameter_is_named(name, value):
    with pytest.raises(RequestRejected, match=name) as caught:
        SamplingParams(**{name: value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)
    assert len(str(caught.value)) < 250


def test_sampling_parameters_take_one_string_or_lists():
    params = SamplingParams(stop="\n", stop_token_ids=[3], max_tokens=2, min_tokens=2)
    assert (params.stop, params.stop_token_ids) == (("\n",), (3,))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(RequestRejected, match="min_tokens must be at most max_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3)


BAD_CONFIG = {
    "model": ["", 3],
    "device": ["tpu", "cuda:x", 3],
    "dtype": ["int4"],
    "max_num_seqs": [0, 1.5, True],
    "max_sessions": [0],
    "max_num_batched_tokens": [0, 5],
    "block_size": [0],
    "max_restarts": [0],
    "max_num_queued_reqs": [-1],
    "max_model_len": [0],
    "kv_cache_memory": [0, "1G"],
    "num_threads": [0],
    "gpu_memory_utilization": [0, 1.5],
    "startup_timeout": [0, "1"],
    "step_timeout": [-1],
    "unresponsive_timeout": [float("inf")],
    "ping_interval": [0],
    "worker_shutdown_timeout": [None],
    "restart_delays": [(), (-1.0,), ("1",)],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_CONFIG.items() for value in values])
def test_a_bad_configuration_is_named(name, value):
    with pytest.raises(InvalidConfig, match=name):
        EngineConfig(**{name: value})


def test_the_worker_gets_its_part():
    config = EngineConfig(device="cuda:1", dtype="float32", max_model_len=100, num_threads=2).for_worker("/m.gguf")
    assert (config.model_path, config.device, config.max_model_len, config.num_threads) == ("/m.gguf", "cuda:1", 100, 2)


def test_the_ledger_balances_on_every_way():
    ledger = Ledger()
    ledger.open_session()
    ledger.reject()
    for reason in FinishReason:
        ledger.receive()
        ledger.check()
        ledger.move(Stand.PREPARING, Stand.WAITING)
        assert (ledger.preparing, ledger.waiting, ledger.running, ledger.in_flight) == (0, 1, 0, 1)
        ledger.move(Stand.WAITING, Stand.RUNNING)
        ledger.settle(Stand.RUNNING, reason)
        ledger.check()
    assert (ledger.received, ledger.finished, ledger.aborted, ledger.failed, ledger.rejected) == (4, 2, 1, 1, 1)
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
    ledger.move(Stand.WAITING, Stand.PREPARING)
    with pytest.raises(InvariantError, match="waiting"):
        ledger.check()
