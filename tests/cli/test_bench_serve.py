"""`bench serve` against a server whose answers come at scripted times: every figure is exact."""

import json
import statistics

import pytest
import trio
from helpers.scripted_server import DONE, ScriptedServer, answer, plain, sse, text_event, usage_event

from trioengine import EngineError
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.load import Departure, End, LengthUnit, Moment, Prompts, plan
from trioengine.cli.bench.report import ServerMeasurements, as_json_object, print_table, summarize
from trioengine.cli.bench.serve import measure
from trioengine.client.address import Endpoint

PROMPTS = Prompts([" a", " b"], LengthUnit.WORDS)
WARM_UP = answer(0.1)


def close(value):
    return pytest.approx(value, abs=1e-9)


async def measured(config, *scripts, metrics=None):
    """The result of a load on a scripted server, and that server."""
    async with trio.open_nursery() as nursery:
        server = ScriptedServer(nursery, WARM_UP, *scripts, metrics=metrics)
        result = await measure(config, server.endpoint, PROMPTS)
    return result, server


async def test_the_times_of_a_request_are_vllms(autojump_clock):
    config = BenchConfig(num_prompts=1, random_input_len=5, random_output_len=4, ignore_eos=True)
    result, server = await measured(config, answer(0.5, 0.1, 0.3, prompt_tokens=7, tokens=4, after=0.2))
    (sample,) = result.run.samples
    assert (sample.end, sample.prompt_tokens, sample.output_tokens) == (End.COMPLETED, 7, 4)
    assert (sample.ttft, sample.e2el) == (close(0.5), close(1.1))
    assert sample.itl == (close(0.1), close(0.3))
    assert sample.tpot == close((1.1 - 0.5) / 3)
    assert result.run.seconds == close(1.1)
    path, headers, body = server.requests[-1]
    assert (path, headers["host"], result.model) == ("/v1/chat/completions", "localhost", "scripted")
    assert len(body.pop("messages")[0]["content"].split()) == 5
    assert body == {
        "model": "scripted",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_the_figures_of_a_run(autojump_clock):
    """Two good requests and a slow one, all at once; one is refused."""
    config = BenchConfig(
        num_prompts=4, goodput=("ttft:310", "tpot:150"), metric_percentiles="50,90", percentile_metrics="ttft,tpot"
    )
    refused = plain(429, b'{"error": {"message": "the queue is full"}}')
    scripts = [answer(0.2, 0.1, 0.1), answer(0.3, 0.1), answer(1.0, 0.5, 0.5), refused]
    result, _ = await measured(config, *scripts)
    told = summarize(result.run, config.metrics, config.percentiles, config.goals)
    assert (told.completed, told.left, told.failed, told.max_concurrent_requests) == (3, 0, 1, 4)
    assert (told.total_input_tokens, told.total_output_tokens, told.duration) == (9, 8, close(2.0))
    assert (told.request_throughput, told.request_goodput) == (close(1.5), close(1.0))
    assert (told.output_throughput, told.total_token_throughput) == (close(4.0), close(8.5))
    ttft, tpot = told.distributions["ttft"], told.distributions["tpot"]
    assert (ttft.mean, ttft.median, ttft.std) == (close(0.5), close(0.3), close(statistics.pstdev([0.2, 0.3, 1.0])))
    assert ttft.percentiles == {50: close(0.3), 90: close(0.3 + 0.7 * 0.8)}
    assert tpot.percentiles[50] == close(0.1)
    assert [sample.error for sample in result.run.samples if sample.error] == ["HTTP 429: the queue is full"]


async def test_a_closed_loop(autojump_clock):
    config = BenchConfig(num_prompts=5, max_concurrency=2)
    result, _ = await measured(config, answer(1.0))
    assert result.run.seconds == close(3.0)
    assert result.run.max_concurrency == 2
    assert [sample.e2el for sample in result.run.samples] == [close(1.0)] * 5  # waiting for a place does not count
    assert sorted(sample.began for sample in result.run.samples) == [close(at) for at in (0, 0, 1, 1, 2)]


async def test_requests_come_at_their_rate(autojump_clock):
    config = BenchConfig(num_prompts=8, request_rate=2.0, seed=3)
    result, _ = await measured(config, answer(0.1))
    began = [sample.began for sample in result.run.samples]
    assert began == sorted(began)
    assert began[-1] == close(4.0)
    assert began == [close(job.at) for job in plan(config, PROMPTS)]


LEAVING = [
    (Departure(Moment.AT_ONCE), 0.0),
    (Departure(Moment.BEFORE_THE_FIRST, seconds=0.3), 0.3),
    (Departure(Moment.BEFORE_THE_FIRST, seconds=0.9), 0.5),  # with the first text
    (Departure(Moment.IN_THE_MIDDLE, texts=2), 0.6),
]


@pytest.mark.parametrize(("departure", "seconds"), LEAVING)
async def test_a_client_leaves(autojump_clock, monkeypatch, departure, seconds):
    """Its connection is closed in that moment, and the others' figures do not count it."""
    monkeypatch.setattr("trioengine.cli.bench.load.departures", lambda *load: [departure, None])
    result, server = await measured(BenchConfig(num_prompts=2), answer(0.5, 0.1, 0.1, 0.1))
    left, stayed = result.run.samples
    assert (left.end, left.error, stayed.end) == (End.LEFT, None, End.COMPLETED)
    assert server.cut_short == [close(seconds)]
    assert summarize(result.run, ("ttft",), (99,)).completed == 1


BROKEN = [
    (plain(400, b"no"), "HTTP 400: no"),
    (b"", "the server closed the connection before the end of its response"),
    (b"nonsense\r\n\r\n", "the server's response is not HTTP"),
    ([(0, text_event("x"))], "the stream ended before [DONE]"),
    ([(0, text_event("x")), (0, DONE)], "the server sent no token counts (usage)"),
    ([(0, sse({"error": {"message": "the worker was lost"}})), (0, DONE)], "the worker was lost"),
    ([(0, b"data: {\n\n")], "an event of the stream is not understood: b'{'"),
    ([(0, b'data: {"choices": [{}]}\n\n')], "an event of the stream is not understood"),
    ([(0, b"data: " + b"x" * (1 << 20))], "a line of the stream is longer than"),
]


@pytest.mark.parametrize(("script", "error"), BROKEN)
async def test_a_request_that_fails(autojump_clock, script, error):
    result, _ = await measured(BenchConfig(num_prompts=1), script)
    (sample,) = result.run.samples
    assert sample.end is End.FAILED
    assert sample.error.startswith(error)


async def test_events_may_come_in_any_pieces(autojump_clock):
    whole = text_event("é") + b": keep-alive\n\n" + text_event(" x") + usage_event(2, 2) + DONE
    pieces = [(0.1, whole[index : index + 1]) for index in range(len(whole))]
    result, _ = await measured(BenchConfig(num_prompts=1), pieces)
    (sample,) = result.run.samples
    assert (sample.end, sample.output_tokens, len(sample.itl)) == (End.COMPLETED, 2, 1)


async def test_completions_have_a_prompt(autojump_clock):
    config = BenchConfig(num_prompts=1, endpoint="/v1/completions", base_url="http://localhost:1/prefix/", model="m")
    result, server = await measured(config, answer(0.1, 0.1))
    assert result.run.samples[0].end is End.COMPLETED
    path, _, body = server.requests[-1]
    assert (path, body["model"]) == ("/prefix/v1/completions", "m")
    assert isinstance(body["prompt"], str)


async def test_a_server_that_refuses_the_first_request(autojump_clock):
    async with trio.open_nursery() as nursery:
        server = ScriptedServer(nursery, plain(401, b'{"error": {"message": "a key is needed"}}'))
        with pytest.raises(EngineError, match="cannot be measured: HTTP 401: a key is needed"):
            await measure(BenchConfig(), server.endpoint, PROMPTS)


UNLISTED = [
    (401, {"error": {"message": "this needs a key"}}, r"models: HTTP 401: this needs a key \(--api-key\)$"),
    (503, {"error": {"message": "draining"}}, "models: HTTP 503: draining$"),
    (404, {"detail": "Not Found"}, r'models: HTTP 404: \{"detail": "Not Found"\}; use --model$'),
    (404, b"\n<!DOCTYPE html><html></html>", "models: HTTP 404; use --model$"),
    (404, b"", "models: HTTP 404; use --model$"),
    (200, {"data": []}, "models; use --model$"),
]


@pytest.mark.parametrize(("status", "body", "said"), UNLISTED)
async def test_a_server_that_does_not_list_its_models(autojump_clock, status, body, said):
    async with trio.open_nursery() as nursery:
        server = ScriptedServer(
            nursery, WARM_UP, models=plain(status, body if isinstance(body, bytes) else json.dumps(body).encode())
        )
        with pytest.raises(EngineError, match=said):
            await measure(BenchConfig(), server.endpoint, PROMPTS)


BASES = [
    ("http://localhost:1/v1", None, "/v1/chat/completions"),  # as OpenAI's clients want it
    ("http://localhost:1/prefix/v1/", "/v1/completions", "/prefix/v1/completions"),
    ("http://localhost:1/v1", "/completions", "/v1/completions"),
]


@pytest.mark.parametrize(("base_url", "endpoint", "path"), BASES)
async def test_a_base_url_may_have_the_version(autojump_clock, base_url, endpoint, path):
    config = BenchConfig(num_prompts=1, base_url=base_url, endpoint=endpoint)
    result, server = await measured(config, answer(0.1, 0.1), metrics=lambda: "")
    assert (result.run.samples[0].end, result.model) == (End.COMPLETED, "scripted")
    assert server.requests[-1][0] == path
    assert set(server.asked) == {path.partition("/v1")[0] + "/metrics", path.partition("/v1")[0] + "/v1/models"}


async def test_no_server(autojump_clock):
    async def refuse():
        raise OSError("connection refused")

    with pytest.raises(EngineError, match="the connection to localhost failed: connection refused"):
        await measure(BenchConfig(), Endpoint("localhost", "/", [], refuse), PROMPTS)


BUCKETS = (0.01, 0.1, 1)


def page(usage, counts, total):
    rows = [
        "# TYPE trioengine_stop_to_ended_seconds histogram",
        *(
            f'trioengine_stop_to_ended_seconds_bucket{{le="{bound}"}} {count}'
            for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True)
        ),
        f"trioengine_stop_to_ended_seconds_sum {total}",
        f"trioengine_kv_cache_usage_perc {usage}",
        "trioengine_num_requests_running 0.0",
        'trioengine_request_success_total{finished_reason="stop"} 4.0',
    ]
    return "\n".join(rows) + "\n"


async def test_what_our_server_says_of_clients_that_leave(autojump_clock):
    """Blocks are in use for 0.05 s after each client: read every 2 ms, that is seen within 2 ms."""
    seen = {"reads": 0, "cut_short": 0, "until": 0.0}

    def metrics():
        seen["reads"] += 1
        if seen["reads"] == 1:
            return page(0, (5, 5, 5, 5), 0.01)
        if len(server.cut_short) > seen["cut_short"]:
            seen["cut_short"], seen["until"] = len(server.cut_short), trio.current_time() + 0.05
        in_use = trio.current_time() < seen["until"]
        return page(0.25 if in_use else 0, (5, 9, 15, 15), 3.01)

    async with trio.open_nursery() as nursery:
        server = ScriptedServer(nursery, WARM_UP, answer(0.1, 0.1, 0.1), metrics=metrics)
        result = await measure(BenchConfig(num_prompts=10, leave=100, random_output_len=3), server.endpoint, PROMPTS)
    assert {sample.end for sample in result.run.samples} == {End.LEFT}
    stops = result.server.stop_to_ended
    assert (stops.count, stops.mean) == (10, close(0.3))
    assert stops.counts == (0, 4, 10, 10)
    assert (stops.quantile(40), stops.quantile(70)) == (close(0.1), close(0.1 + 0.9 * 0.5))
    assert result.server.blocks_free == [pytest.approx(0.051, abs=0.002)] * 5


async def test_the_cpu_time_of_the_servers_process(autojump_clock, capsys):
    """Any server may have it; the request before the run does not count."""
    seconds = iter((2.5, 2.75))
    config = BenchConfig(num_prompts=2, random_output_len=2, leave=50)
    result, _ = await measured(config, answer(0.1, 0.1), metrics=lambda: f"process_cpu_seconds_total {next(seconds)}\n")
    assert result.server == ServerMeasurements(cpu_seconds=0.25)
    summary = summarize(result.run, config.metrics, config.percentiles)
    report = as_json_object(config, result.model, LengthUnit.WORDS, summary, result.server)
    assert report["server_cpu_seconds"] == 0.25
    print_table(LengthUnit.WORDS, summary, result.server)
    each = 0.25 / summary.total_output_tokens * 1e6
    assert f"0.25 s, {each:.1f} µs for each output token" in capsys.readouterr().out


async def test_cpu_time_that_the_server_has_only_once(autojump_clock):
    pages = iter(("process_cpu_seconds_total 1\n", "other 1\n"))
    result, _ = await measured(BenchConfig(num_prompts=1), answer(0.1, 0.1), metrics=lambda: next(pages))
    assert result.server == ServerMeasurements()


@pytest.mark.parametrize("metrics", [None, lambda: "go_goroutines 7\n", lambda: "trioengine_x y\n"])
async def test_a_server_without_our_metrics(autojump_clock, metrics):
    config = BenchConfig(num_prompts=2, leave=50)
    result, _ = await measured(config, answer(0.1, 0.1), metrics=metrics)
    assert result.server == ServerMeasurements()


async def test_blocks_that_are_never_free(autojump_clock):
    reads = iter(range(10**6))
    config = BenchConfig(num_prompts=1, leave=100)

    def metrics():
        return page(0 if next(reads) < 3 else 0.5, (0,) * 4, 0)

    result, _ = await measured(config, answer(0.1, 0.1), metrics=metrics)
    assert result.server.blocks_free == [float("inf")]
    told = summarize(result.run, config.metrics, config.percentiles)
    report = as_json_object(config, result.model, LengthUnit.WORDS, told, result.server)
    assert json.loads(json.dumps(report, allow_nan=False))["disconnect_to_blocks_free_ms"] == ["inf"]


# ---- the report ----------------------------------------------------------------------------------------------------


async def test_the_report_has_vllms_names(autojump_clock, capsys):
    config = BenchConfig(num_prompts=2, random_output_len=2, goodput=("e2el:1000",), api_key="secret", leave=50)
    result, _ = await measured(config, answer(0.1, 0.1))
    told = summarize(result.run, config.metrics, config.percentiles, config.goals)
    report = as_json_object(config, result.model, LengthUnit.WORDS, told, result.server)
    text = json.dumps(report, allow_nan=False)
    assert "secret" not in text
    assert {"duration", "completed", "failed", "request_throughput", "request_goodput", "output_throughput"} <= set(
        report
    )
    assert {"mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_e2el_ms", "total_token_throughput"} <= set(report)
    assert (report["request_rate"], report["backend"], report["model"]) == ("inf", "openai", "scripted")
    assert report["mean_ttft_ms"] == close(100)
    print_table(LengthUnit.WORDS, told, result.server)
    table = capsys.readouterr().out
    for name in ("requests completed", "clients that left", "goodput", "time to first token (TTFT)", "100.00"):
        assert name in table
    assert "stop to ended" not in table
