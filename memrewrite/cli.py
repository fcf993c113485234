"""The command line: parse, call, turn every error into one sentence and an exit code.

Nothing here imports torch, so that ``--help`` answers at once; the work is in ``memrewrite.commands``.
"""

import contextlib
import errno
import importlib
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from memrewrite.commands import config, flags, launched, signals
from memrewrite.records.errors import BudgetInfeasibleError, InternalError, MemrewriteError, OutputError, UsageError
from memrewrite.version import __version__

if TYPE_CHECKING:
    from memrewrite.commands.requests import Request

EXIT_INTERRUPTED = 130
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


class InterruptedRunError(MemrewriteError):
    """The user pressed Ctrl-C, or the process was asked to end."""

    exit_code = EXIT_INTERRUPTED


class _Group(click.Group):
    """A group whose commands report Ctrl-C, and its like, as an error of the family: click prints a line of its own."""

    command_class = flags.Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # which tells nothing, with -v either
            how = f"ended by {error}" if isinstance(error, signals.Ended) else "interrupted"
            raise InterruptedRunError(f"{how}; nothing half-written is left.") from None


@click.group(cls=_Group, no_args_is_help=False, context_settings=HELP, epilog=flags.EXIT_CODES)
@click.version_option(__version__, message="%(prog)s %(version)s", help="Print the version and exit.")
@click.pass_context
def main(context: click.Context) -> None:
    """Rewrite PyTorch models so that their training step fits a byte budget.

    What a command finds goes to stdout; progress and errors go to stderr. [tool.memrewrite] in pyproject.toml sets
    defaults for the options of all commands.

    Let the shell complete commands, options and their values:

    \b
      bash  eval "$(_MEMREWRITE_COMPLETE=bash_source memrewrite)"
      zsh   eval "$(_MEMREWRITE_COMPLETE=zsh_source memrewrite)"
      fish  _MEMREWRITE_COMPLETE=fish_source memrewrite | source
    """
    try:
        folder = Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("The current folder is gone; change to one that is there.") from error
    context.default_map = dict.fromkeys(main.commands, config.defaults(folder, flags.CONFIGURABLE))


@main.command(short_help="Rewrite a model so that its step fits a budget.")
@flags.model
@flags.budget
@flags.reserved
@click.option(
    "--passes",
    help='Run only these passes, separated by commas; by default all but those on request, "all" for these too.',
)
@click.option("--exact/--no-exact", default=False, help="Allow only rewrites that keep every bit of the outputs.")
@click.option("--compiled/--no-compiled", default=False, help="Plan for torch.compile of the result; measure that.")
@click.option("--strict/--no-strict", default=False, help="Let the result refuse calls that may take more.")
@flags.dynamic
@click.option(
    "--returns",
    type=click.Choice(["all", "lazy", "loss"]),
    default="all",
    help="With loss, a training step returns its loss alone; with lazy, logits are made when they are read.",
)
@click.option("--verify/--no-verify", default=True, help="Prove that the rewritten model takes the same steps.")
@click.option("--measure/--no-measure", default=True, help="Run both variants, each in a process of its own.")
@flags.timeout
@click.option(
    "--check", is_flag=True, help="Change nothing; exit with 0 if the model fits the budget as it is, else 1."
)
@click.option("-o", "--output", type=flags.PATH, help="Write the rewritten model to this folder.")
@click.option("--force", is_flag=True, help="Replace the output folder if it exists.")
@click.option("--report", type=flags.PATH, help="Write the report as a page of HTML to this file.")
@click.option("--png", type=flags.PATH, help="Draw the memory in use through a step to this file.")
@click.option("--snapshot", type=flags.PATH, help="Write every allocation to this file, for pytorch.org/memory_viz.")
@click.option("--advise", is_flag=True, help="List what else would fit the budget, each option simulated.")
@click.option("--diff", is_flag=True, help="Print what changed in the code of the graph, module by module.")
@flags.cache
@click.option("--no-cache", is_flag=True, help="Plan anew, and keep no plan.")
@flags.output
def optimize(**given: Any) -> int:
    """Rewrite the model TARGET so that its step fits a budget; verify, measure and save it."""
    from memrewrite.commands.requests import OptimizeRequest

    return _carried_out("optimize", OptimizeRequest(**given, typed=click.get_current_context().obj))


@main.command(short_help="Measure what a step of a model really takes.")
@flags.model
@click.option("--artifact", type=flags.PATH, help="Measure the rewritten model in this folder, too.")
@click.option("--batch-sizes", callback=flags.sizes, help="Measure the peak at each of these: 32,64,128.")
@click.option("--plot", type=flags.PATH, help="Draw the peak against the batch size: a .png, .svg or .pdf file.")
@click.option("--compiled/--no-compiled", default=False, help="Measure under torch.compile; on CUDA only.")
@flags.timeout
@flags.output
def measure(**given: Any) -> int:
    """Measure what a step of the model TARGET really takes, in a fresh process.

    Steps 1 and 2 are followed phase by phase: bytes in use after the inputs are there, forward, loss, backward and the
    optimizer's step. Then come the peak of what is allocated and reserved, what the whole CUDA device holds, and the
    time of a step. With --artifact the rewritten model is measured beside the original, with --batch-sizes the peak at
    each of several batch sizes.
    """
    from memrewrite.commands.requests import MeasureRequest

    return _carried_out("measure", MeasureRequest(**given))


@main.command(short_help="Verify a rewritten model against its original.")
@click.argument("artifact", type=flags.PATH)
@flags.model
@click.option("--exact/--no-exact", default=False, help="Demand the same bits, and compare parameters, too.")
@flags.timeout
@flags.output
def verify(**given: Any) -> int:
    """Verify that the rewritten model in the folder ARTIFACT takes the same steps as the model TARGET.

    Outputs, loss, gradients, buffers and random state are compared over three steps, in a fresh process. Each must have
    the same bits, or an error against float64 that is no larger than the original's own. The files of the artifact are
    checked against its manifest first.
    """
    from memrewrite.commands.requests import VerifyRequest

    return _carried_out("verify", VerifyRequest(**given))


@main.command(short_help="Show what a folder with a rewritten model holds.")
@click.argument("artifact", type=flags.PATH)
@flags.output
def show(**given: Any) -> int:
    """Show what the folder ARTIFACT holds: its report, the size of its code, its files.

    The files are read and checked against the manifest; nothing in them is run or imported.
    """
    from memrewrite.commands.requests import ShowRequest

    return _carried_out("show", ShowRequest(**given))


@main.command(short_help="Show what plans are kept, and remove them.")
@flags.cache
@click.option("--clear", is_flag=True, help="Remove all of them.")
@flags.output
def cache(**given: Any) -> int:
    """Show the plans that optimize keeps for the next time the same is asked, the newest first, and where they lie.

    MEMREWRITE_CACHE names another folder for them, or is off.
    """
    from memrewrite.commands.requests import CacheRequest

    return _carried_out("cache", CacheRequest(**given))


@main.command(short_help="Predict what a step takes, before it is run.")
@flags.model
@click.option("--device-memory", help="Say whether the step fits it, and the largest batch that does: 8GB, 7.5GiB.")
@click.option("--depth", type=click.IntRange(min=0), help="Show the tree of modules so many levels deep.")
@flags.output
def estimate(**given: Any) -> int:
    """Predict what a step of the model TARGET takes, of what and in which modules, before it is run.

    No memory of a device is used, and a model made on the meta device takes none at all.
    """
    from memrewrite.commands.requests import EstimateRequest

    return _carried_out("estimate", EstimateRequest(**given))


def _carried_out(command: str, request: "Request") -> int:
    """The exit code of a command. What it needs is imported as a whole: PyTorch loses an interrupt, or dies of one."""
    with signals.held():
        module = importlib.import_module(f"memrewrite.commands.{command}")
    try:
        return int(module.run(request))
    except SystemExit as error:  # of the target, as in its forward
        text = f"The target's code ended the process ({error.code}); let it raise an error instead."
        raise UsageError(text) from error


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code; errors become one sentence on stderr."""
    verbose = any(text in ("-v", "--verbose") for text in arguments)
    together = arguments[:1] == ["optimize"] and any(text.partition("=")[0] == "--mesh" for text in arguments)
    heard = launched.is_first() or not together
    try:
        typed = shlex.join(["memrewrite", *arguments])
        code = main.main(list(arguments), prog_name="memrewrite", standalone_mode=False, obj=typed)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "memrewrite"
        return _fail(UsageError(f"{error.format_message()} See {where} --help."), verbose, heard)
    except click.Abort:
        return _fail(InterruptedRunError("interrupted."), verbose, heard)
    except MemrewriteError as error:
        return _fail(error, verbose, heard)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:  # the text of --help
            return _fail(OutputError(f"Standard output cannot be written: {error.strerror}."), verbose, heard)
        kind = type(error).__name__
        text = f"internal error, {kind}: {str(error).strip().partition(chr(10))[0]}"
        wrapped = InternalError(f"{text} (run again with -v for the traceback)")
        wrapped.__cause__ = error
        return _fail(wrapped, verbose, heard)


def entry_point() -> NoReturn:
    """The console command; exits with the code of ``run``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths and names can hold what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    signals.heed()
    if sys.stdout is None:
        sys.exit(_fail(OutputError("Standard output is closed; give it a file, or /dev/null."), verbose=False))
    code = run(sys.argv[1:])
    with contextlib.suppress(ValueError):  # of a stream that is closed
        code = _flushed(code)
    sys.exit(code)


def _flushed(code: int) -> int:
    """The exit code, once standard output has taken everything; what it does not take is told and dropped."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would try once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _fail(OutputError(f"Standard output cannot be written: {error.strerror}."), verbose=False)
    return code


def _fail(error: MemrewriteError, verbose: bool, heard: bool = True) -> int:
    """The exit code of an error, which is told unless another process tells it."""
    with contextlib.suppress(OSError):  # nobody is left to be told
        if heard:
            _tell(error, verbose)
    return error.exit_code


def _tell(error: MemrewriteError, verbose: bool) -> None:
    if verbose and error.__cause__ is not None:
        click.echo("".join(traceback.format_exception(error.__cause__)), err=True, nl=False)
    if isinstance(error, BudgetInfeasibleError) and error.options:
        from rich.console import Console

        from memrewrite.report.option_table import option_table

        click.echo(f"memrewrite: {error.summary}", err=True)
        Console(stderr=True, width=80).print(option_table(error.options), markup=False, highlight=False, emoji=False)
    else:
        click.echo(f"memrewrite: {error}", err=True)
