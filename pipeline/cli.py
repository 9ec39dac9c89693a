"""The verbs. How they end: pipeline.exit.EXIT_CODES."""

from __future__ import annotations

import os
import sys

import typer

from pipeline.commands import model, store
from pipeline.exit import configure_logging, exit_code_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune Qwen3-VL with the frozen vision tower run once per image.\n\n"
    "plan: what the cache costs and brings. cache: run the tower, store its output. verify, prune: look after it. "
    "train: LoRA or QLoRA from that store. eval, predict, merge: what comes after.",
)
app.command()(store.plan)
app.command()(store.cache)
app.command()(store.verify)
app.command()(store.repack)
app.command()(store.prune)
app.command()(model.train)
app.command("eval")(model.evaluate)
app.command()(model.predict)
app.command()(model.merge)
app.command()(model.demo)


def main() -> None:
    """The console script."""
    # Rows of ever new lengths fragment the GPU's memory otherwise. Read by torch when it is first imported.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    configure_logging()
    sys.exit(exit_code_of(lambda: app(standalone_mode=False)))
