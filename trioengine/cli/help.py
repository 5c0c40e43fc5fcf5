"""The help: texts of options, their panels, and commands that print it as plain text.

rich's boxes would take a tenth of a second to import.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from trioengine.cli.sources import warn_about_unknown_variables
from trioengine.core.wording import brief, did_you_mean

HELP = {  # of the fields of EngineConfig, ServeConfig and SamplingParams
    "generation_config": "Sampling defaults: auto (the model's own), none, or a file or a directory with one.",
    "chat_template": "A file with a chat template, in place of the model's.",
    "adapters": "A LoRA adapter as NAME=DIRECTORY; may be given several times.",
    "device": "auto, cpu, cuda or cuda:N.",
    "dtype": "auto, float32 or bfloat16.",
    "max_model_len": "Tokens of prompt and answer together; without it the model's own limit.",
    "max_num_seqs": "Sequences in one step.",
    "max_num_queued_reqs": "Requests that may wait beside those that run; more are refused.",
    "max_sessions": "Sessions at a time.",
    "max_num_batched_tokens": "Tokens in one step, and of prompts between two tokens of a request.",
    "chunked_prefill_size": "Tokens of prompts in one step; without it 512 on the CPU, and no limit on a GPU.",
    "block_size": "Tokens in a block of the KV cache.",
    "kv_cache_memory": "Bytes; without it a quarter of the free memory, at most 4 GiB, on the CPU.",
    "gpu_memory_utilization": "Share of a GPU's memory for weights and KV cache, without --kv-cache-memory.",
    "enable_prefix_caching": "Reuse the computation of prompts that begin alike.",
    "encoder_cache_memory": "Bytes of encoded images that are kept for later requests.",
    "payload_memory": "Bytes of images on their way to the worker, or kept for later turns.",
    "num_threads": "Threads of the worker; without it torch's own choice.",
    "kernels": "auto, native (in C++, on a CPU with a compiler), triton (on a GPU) or torch.",
    "cuda_graphs": "auto: record decoding steps as CUDA graphs, with triton; none; pad: only pad steps, for tests.",
    "quantization": "Products of integers: gguf, of weights stored so; int8, of others too; none; auto: gguf if fast.",
    "kv_cache_dtype": "auto: as the model; int8: 8-bit integers, for almost 2 (bfloat16) or 4 times as many tokens.",
    "batch_invariant": "Refuse to start unless answers have the same bits whatever shares a step: native kernels.",
    "startup_timeout": "Seconds without progress while the worker loads.",
    "step_timeout": "Seconds that one step may take.",
    "unresponsive_timeout": "Seconds that the worker may leave a ping unanswered.",
    "ping_interval": "Seconds between two pings of the worker.",
    "worker_shutdown_timeout": "Seconds that the engine may take to end.",
    "max_restarts": "Deaths in a row, of workers that delivered no token, until the engine gives up.",
    "on_worker_loss": "resume: requests in flight go on with the next worker; fail: they end with an error.",
    "host": "The address to listen on.",
    "port": "0: a free one.",
    "served_model_name": "The model's name for clients.",
    "api_key": "A key that clients must have; may be given several times.",
    "admin_key": "A key for the operators' routes, and for all others; may be given several times.",
    "allowed_origin": "A site whose pages may ask, as https://example.com; may be given several times.",
    "allowed_host": "A name or address that the Host header may have, without a port; may be given several times.",
    "root_path": "A prefix under which a proxy serves the routes, as /llm.",
    "ssl_certfile": "A certificate chain in PEM: the port speaks TLS.",
    "ssl_keyfile": "The certificate's key in PEM; without it in the same file.",
    "weights_dir": "Where the checkpoints lie that an operator may name to /update_weights.",
    "unknown_fields": "warn, or refuse: requests with fields that this server does not know.",
    "tool_call_parser": "The form of tool calls: hermes, llama3 or json; auto: as the chat template shows it.",
    "reasoning_parser": "The form of reasoning, which is split off: deepseek_r1 or qwen3; none: it stays in the text.",
    "insecure": "Serve other machines without a key, all of them.",
    "shutdown_timeout": "Seconds that requests have after the first SIGTERM or SIGINT.",
    "max_connections": "Connections at a time; an idle one makes room for more, or they are answered with 503.",
    "max_sessions_per_key": "WebSockets, requests and their choices of a key at a time; more are answered with 429.",
    "max_body_size": "Bytes of a request's body; without it 4 MiB, or 32 MiB for a model that takes images.",
    "max_header_size": "Bytes of a request's head.",
    "max_message_size": "Bytes of a WebSocket message; without it 1 MiB, or 32 MiB for a model that takes images.",
    "max_conversation_size": "Bytes in memory of the items of a WebSocket's conversation.",
    "max_buffered_bytes": "Bytes of bodies and of WebSocket connections at a time; more are answered with 503.",
    "max_buffered_bytes_per_key": "The same of one key; more are answered with 429.",
    "handshake_timeout": "Seconds for a request's head.",
    "body_timeout": "Seconds for a request's body.",
    "idle_timeout": "Seconds between two requests.",
    "client_ping_interval": "Seconds between two pings of a WebSocket, and for the answer.",
    "send_timeout": "Seconds that a client may leave its data unread.",
    "max_tokens": "Tokens of the answer; without it up to the context.",
    "temperature": "0 is greedy.",
    "top_k": "Choose among that many tokens; 0 or -1: all.",
    "top_p": "Choose among the likeliest tokens that add up to this.",
    "min_p": "Least probability of a token, relative to the likeliest one's.",
    "repetition_penalty": "Over prompt and answer, multiplicative.",
    "presence_penalty": "Over the answer, additive.",
    "frequency_penalty": "Over the answer, additive, times the count.",
    "seed": "For answers that can be repeated.",
    "stop": "A string that ends the answer; may be given several times.",
    "stop_token_ids": "A token id that ends the answer; may be given several times.",
    "min_tokens": "No end before that many tokens.",
    "ignore_eos": "Do not end at the model's end token.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "num_speculative_tokens": "Tokens drafted a step, at most: where the text repeats itself, or by --draft-model.",
    "draft_model": "A smaller model of the same vocabulary, which drafts tokens; named or found as the model is.",
}
PANELS = {
    "Model": (
        "generation_config",
        "chat_template",
        "adapters",
        "device",
        "dtype",
        "kernels",
        "cuda_graphs",
        "quantization",
        "batch_invariant",
        "num_threads",
        "max_model_len",
        "served_model_name",
    ),
    "Batching and cache": (
        "max_num_batched_tokens",
        "chunked_prefill_size",
        "enable_prefix_caching",
        "block_size",
        "kv_cache_memory",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "encoder_cache_memory",
        "payload_memory",
        "num_speculative_tokens",
        "draft_model",
    ),
    "Network": (
        "host",
        "port",
        "root_path",
        "shutdown_timeout",
        "unknown_fields",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "Security": (
        "api_key",
        "admin_key",
        "allowed_origin",
        "allowed_host",
        "ssl_certfile",
        "ssl_keyfile",
        "weights_dir",
        "insecure",
    ),
    "Limits": (
        "max_num_seqs",
        "max_num_queued_reqs",
        "max_sessions",
        "max_connections",
        "max_sessions_per_key",
        "max_body_size",
        "max_header_size",
        "max_message_size",
        "max_conversation_size",
        "max_buffered_bytes",
        "max_buffered_bytes_per_key",
        "handshake_timeout",
        "body_timeout",
        "idle_timeout",
        "client_ping_interval",
        "send_timeout",
    ),
    "Worker": (
        "startup_timeout",
        "step_timeout",
        "unresponsive_timeout",
        "ping_interval",
        "worker_shutdown_timeout",
        "max_restarts",
        "on_worker_loss",
    ),
}
OTHERS = "More"  # the panel of other fields
_WHOLE = 1000  # characters of a summary; it is wrapped, not cut
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def panel_of(name: str) -> str:
    """The panel of a field of EngineConfig or ServeConfig."""
    return _PANEL_OF.get(name, OTHERS)


class CommandGroup(TyperGroup):
    """A group whose help shows the commands' summaries whole."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(_WHOLE)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Treat `help` and `help COMMAND` as `--help` and `COMMAND --help`."""
        if args[0] == "help":
            args = [*args[1:], "--help"]
        if args[0] == "--help":
            print(ctx.get_help())
            ctx.exit()
        if self.get_command(ctx, args[0]) is None:
            flag = f"--{args[0]}"
            is_flag = any(flag in parameter.opts for parameter in self.params)
            near = f"; did you mean {flag!r}?" if is_flag else did_you_mean(args[0], self.commands)
            ctx.fail(f"unknown command {brief(args[0])}{near}")
        return super().resolve_command(ctx, args)


class PanelCommand(TyperCommand):
    """A command whose help has a section for each panel, in the order of `PANELS`; its own options come first."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(_WHOLE)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except typer.TyperException as exc:
            exc.ctx = ctx  # type: ignore[attr-defined]  # the parser leaves it out
            warn_about_unknown_variables(ctx)
            raise
        if rest:
            takes_prompt = any(parameter.name == "prompt" for parameter in self.params)
            remedy = "; quote a prompt of several words, and name a model by --model" if takes_prompt else ""
            ctx.fail(f"unexpected argument {brief(rest[0])}{remedy}")
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        shown = [each for each in self.get_params(ctx) if not getattr(each, "hidden", False)]
        return [self.options_metavar or "", *(piece for each in shown for piece in each.get_usage_pieces(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            name: [] for name in ("Arguments", "Options", "Sampling", *PANELS)
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
