"""The clients that run.py checks, each with pinned packages and the program that uses it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client, and a program beside this file: JavaScript (.mjs) or Python.

    The first package is the client itself; `version` is shown instead of its version if the program stands for a client
    that is not installed. With `tls` the program gets a server that speaks TLS, in place of the plain one.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    version: str = ""
    tls: bool = False

    @property
    def on_node(self):
        return self.program.endswith(".mjs")

    @property
    def shown_version(self):
        return self.version or self.packages[0].rpartition("@" if self.on_node else "==")[2]


_CLIENTS = (
    Client(
        "ai-sdk",
        "ai_sdk.mjs",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
    ),
    Client("openai-node", "openai_node.mjs", ("openai@7.57.0", "ws@8.23.0"), tls=True),
    Client("agents-realtime", "agents_realtime.mjs", ("@openai/agents-realtime@0.20.0", "zod@4.6.7")),
    Client(
        "llama-index",
        "llama_index_client.py",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3", "llama-index-core==0.14.25"),
    ),
    Client("litellm", "litellm_client.py", ("litellm==1.110.2",)),
    Client("llm", "llm_client.py", ("llm==0.36", "setuptools==80.9.0")),
    Client("lm-eval", "lm_eval_client.py", ("lm_eval[api]==0.4.13", "transformers==5.24.0")),
    Client("guidellm", "guidellm_client.py", ("guidellm==0.8.1",)),
    Client("vllm-bench", "vllm_bench_bodies.py", ("aiohttp==3.14.5",), version="0.32.0"),
)
CLIENTS = {client.name: client for client in _CLIENTS}
