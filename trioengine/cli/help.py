"""The groups of options that `--help` shows, as plain text: rich's boxes would take a tenth of a second to import."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from trioengine.cli.sources import warn_about_unknown_variables
from trioengine.core.bounds import brief, did_you_mean

PANELS = {
    "Model": ("device", "dtype", "kernels", "batch_invariant", "num_threads", "max_model_len", "served_model_name"),
    "Batching and cache": (
        "max_num_batched_tokens",
        "chunked_prefill_size",
        "enable_prefix_caching",
        "block_size",
        "kv_cache_memory",
        "gpu_memory_utilization",
        "encoder_cache_memory",
        "payload_memory",
    ),
    "Network": ("host", "port", "shutdown_timeout"),
    "Security": ("api_key", "admin_key", "allowed_origin", "weights_dir", "insecure"),
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
OTHERS = "More"  # for a field that is in none of them
_WHOLE = 1000  # characters of a summary, which is wrapped
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def panel_of(name: str) -> str:
    """The panel of a field of EngineConfig or ServeConfig."""
    return _PANEL_OF.get(name, OTHERS)


class CommandGroup(TyperGroup):
    """Commands whose summaries in the help are shown whole."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(_WHOLE)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """`help`, and `help COMMAND`, are `--help`, and `COMMAND --help`."""
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
