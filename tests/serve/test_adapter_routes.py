"""LoRA adapters over HTTP and WebSocket: `MODEL:NAME` is the model with one, and operators load and unload them."""

import pytest
from helpers.clients import DEFAULT_LIMITS, Client, chat, clients_of_a_loading_server, open_clients
from helpers.resuming import connection, refused

from trioengine import EngineConfig, ModelError
from trioengine.testing import simulated_engine

ADAPTED = EngineConfig(model="toy", adapters=("sql=adapters/sql",))


async def answer(clients, model, path="/v1/chat/completions", **fields):
    body = chat(model=model, **fields) if "prompt" not in fields else {"model": model, "max_tokens": 8, **fields}
    found = await clients.request("POST", path, body)
    assert found.status == 200, found.body
    assert found.json["model"] == model
    return found.json["choices"]


async def test_the_model_names_it(autojump_clock):
    async with open_clients(ADAPTED) as clients:
        plain, adapted = [await answer(clients, model) for model in ("toy", "toy:sql")]
        assert plain != adapted
        assert await answer(clients, "toy") == plain, "the prefix cache keeps them apart"
        assert await answer(clients, "toy:sql", n=2, temperature=0) == [adapted[0], adapted[0] | {"index": 1}]
        texts = [await answer(clients, model, "/v1/completions", prompt="hello") for model in ("toy", "toy:sql")]
        assert texts[0] != texts[1]
        listed = (await clients.request("GET", "/v1/models")).json["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [("toy", None), ("toy:sql", "toy")]
        assert (await clients.request("GET", "/v1/models/toy:sql")).json == listed[1]
        tokens = await clients.request("POST", "/tokenize", {"model": "toy:sql", "prompt": "hello"})
        assert tokens.status == 200


@pytest.mark.parametrize("model", ["toy:", "toy:other", "sql", "toy:sql:sql", ":sql"])
async def test_unknown_names(autojump_clock, model):
    async with open_clients(ADAPTED) as clients:
        found = await clients.request("POST", "/v1/chat/completions", chat(model=model))
        assert (found.status, found.error["code"], found.error["param"]) == (404, "model_not_found", "model")
        assert found.error["message"].endswith("this server serves 'toy', and its adapters as toy:NAME")


async def test_realtime(autojump_clock):
    async with open_clients(ADAPTED) as clients:
        texts = {}
        for model in ("toy", "toy:sql"):
            async with clients.realtime(path=f"/v1/realtime?model={model}") as client:
                assert client.events[0]["session"]["model"] == model
                (item,) = (await client.ask("hello"))["output"]
                texts[model] = item["content"]
        assert texts["toy"] != texts["toy:sql"]


async def test_while_the_model_loads(autojump_clock):
    async with clients_of_a_loading_server(DEFAULT_LIMITS) as (clients, _):
        for model in ("toy", "toy:sql"):
            found = await clients.request("POST", "/v1/chat/completions", chat(model=model))
            assert (found.status, found.error["code"]) == (503, "overloaded")
        assert await refused(clients, "model=toy:sql") == (503, "overloaded", None)


async def test_a_session_is_resumed_without_its_adapter(autojump_clock):
    async with open_clients(ADAPTED) as clients:
        async with connection(clients, "model=toy:sql&resume=30") as websocket:
            client = Client(websocket)
            token = (await client.next())["resume"]["token"]
            clients.engine.unload_adapter("sql")
        query = f"session={token}&last_seq=0"
        assert await refused(clients, f"model=toy&{query}") == (404, "model_not_found", "model")
        async with connection(clients, f"model=toy:sql&{query}") as client.websocket:
            assert (await client.ask("hello"))["status"] == "completed"
            await client.websocket.aclose()


@pytest.fixture
def weights_dir(tmp_path):
    for name in ("sql", "sql-2", "other", "misshapen"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
async def clients(autojump_clock, weights_dir):
    async with open_clients(weights_dir=str(weights_dir)) as clients:
        yield clients


async def load(clients, name, path):
    return await clients.request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})


async def unload(clients, name):
    return await clients.request("POST", "/v1/unload_lora_adapter", {"lora_name": name})


async def test_loaded_and_unloaded(autojump_clock, clients, weights_dir):
    assert (await load(clients, "sql", "sql")).json == {"models": ["toy:sql"]}
    assert dict(clients.engine.adapters) == {"sql": str(weights_dir / "sql")}
    adapted = await answer(clients, "toy:sql")
    assert adapted != await answer(clients, "toy")
    async with clients.realtime(path="/v1/realtime?model=toy:sql") as client:
        assert (await unload(clients, "sql")).json == {"models": []}
        assert (await load(clients, "sql", "sql-2")).json == {"models": ["toy:sql"]}
        for options in ({}, {"conversation": "none"}):  # the session keeps the adapter that it began with
            (item,) = (await client.ask("hello", **options))["output"]
            assert item["content"] != adapted[0]["message"]["content"]
        loaded = clients.simulation.worker.runner.adapters
        assert {*loaded.values()} == {str(weights_dir / "sql")}
    await unload(clients, "sql")
    found = await clients.request("POST", "/v1/chat/completions", chat(model="toy:sql"))
    assert (found.status, found.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("name", "path", "known"),
    [
        ("sql", "nowhere", (404, "weights_not_found", "lora_path")),
        ("sql", "../sql", (400, "invalid_value", "lora_path")),
        ("sql", "other", (400, "invalid_adapter", "lora_path")),
        ("", "sql", (400, "invalid_value", "lora_name")),
        ("one", "sql", (409, "adapter_exists", "lora_name")),
    ],
)
async def test_refusals(autojump_clock, clients, name, path, known):
    await load(clients, "one", "sql")
    found = await load(clients, name, path)
    assert (found.status, found.error["code"], found.error["param"]) == known
    assert found.error["message"].startswith((known[2], "checkpoint 'nowhere' not found"))


async def test_unloading_an_unknown_one(autojump_clock, clients):
    found = await unload(clients, "sql")
    assert (found.status, found.error["code"], found.error["param"]) == (404, "adapter_not_found", "lora_name")
    assert found.error["message"] == "lora_name 'sql' is not loaded; loaded: none"


async def test_one_that_the_worker_cannot_load(autojump_clock, clients):
    assert (await load(clients, "bad", "misshapen")).status == 200
    found = await clients.request("POST", "/v1/chat/completions", chat(model="toy:bad"))
    assert (found.status, found.error["code"]) == (500, "adapter_failed")
    assert "misshapen" not in found.error["message"]


async def test_a_start_with_a_bad_one(autojump_clock):
    with pytest.raises(ModelError, match=r"^adapter sql=adapters/other: path: .*: an adapter of another model"):
        async with simulated_engine(EngineConfig(model="toy", adapters=("sql=adapters/other",))):
            pass
