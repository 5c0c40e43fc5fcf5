"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
LOCAL_SERVER = "http://127.0.0.1:8000"  # as `serve` listens without options
MODEL_HELP = "A name that `pull` knows, a .gguf file, a Hugging Face directory or a hub id."
Model = Annotated[str, typer.Argument(help=MODEL_HELP, envvar="TRIOENGINE_MODEL", show_envvar=False)]
Connect = Annotated[str, typer.Option(metavar="URL", help="The server.")]
AdminKey = Annotated[str | None, typer.Option(help="The server's key for operators.")]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def require_command(context: typer.Context) -> None:
    """Without a command, print the help and end with exit code 2."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
