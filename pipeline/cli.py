"""The verbs. How they end: pipeline.exit.EXIT_CODES."""

from __future__ import annotations

import os

import typer

from pipeline.commands import experiments, model, slurm, store
from pipeline.exit import configure_logging, exit_code_of, leave, stop_request
from pipeline.requeue import requeue_if_asked, take_limit
from pipeline.time_records import note_start

# Rows of ever new lengths fragment the GPU's memory otherwise. Read by torch when it is first imported.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune Qwen3-VL with the frozen vision tower run once per image.\n\n"
    "plan: what the cache costs and brings. cache: run the tower, store its output. verify, prune: look after it. "
    "train: LoRA or QLoRA from that store. eval, predict, merge: what comes after. "
    "experiments, compare: several runs over one cache. "
    "submit, status, cancel: all of it as SLURM jobs; check: whether the cache is complete.",
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
app.command()(experiments.experiments)
app.command()(experiments.compare)
app.command()(slurm.submit)
app.command()(slurm.status)
app.command()(slurm.cancel)
app.command()(slurm.check)


def main() -> None:
    """The console script."""
    for name, value in ALLOCATOR.items():
        os.environ.setdefault(name, value)
    note_start()
    configure_logging()
    max_requeues = take_limit()
    if max_requeues is not None:
        stop_request.install()  # before the slow imports: from now on the signal means a clean stop
    code = exit_code_of(lambda: app(standalone_mode=False))
    if max_requeues is not None:
        requeue_if_asked(max_requeues, stop_request, code)
    leave(code)
