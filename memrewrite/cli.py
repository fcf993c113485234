"""The command line: parse, call, turn every error into one sentence and an exit code.

Nothing here imports torch, so that ``--help`` answers at once; the work is in ``memrewrite.commands``.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from memrewrite import __version__, config, flags
from memrewrite.commands.requests import EstimateRequest, OptimizeRequest
from memrewrite.errors import BudgetInfeasibleError, InternalError, MemrewriteError, UsageError

EXIT_INTERRUPTED = 130


class InterruptedRunError(MemrewriteError):
    """The user pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


class _Group(click.Group):
    """A group whose commands report Ctrl-C as an error of the family: click prints a line of its own for it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise InterruptedRunError("interrupted; nothing half-written is left.") from error


@click.group(cls=_Group, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Rewrite PyTorch models so that their training step fits a byte budget."""
    context.default_map = dict.fromkeys(main.commands, config.defaults(Path.cwd(), flags.CONFIGURABLE))


@main.command(context_settings={"show_default": True})
@flags.model
@flags.budget
@click.option("--passes", help="Comma-separated passes to run; all by default.")
@click.option("--exact/--no-exact", default=False, help="Only rewrites that keep every bit.")
@click.option("--verify/--no-verify", default=True, help="Prove that results stay the same.")
@click.option("--measure/--no-measure", default=True, help="Run both variants in processes of their own.")
@flags.timeout
@click.option("--check", is_flag=True, help="Change nothing; exit 0 if the model fits the budget, else 1.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the rewritten model.")
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--diff", is_flag=True, help="Print what changed in the graph's code.")
@flags.output
def optimize(**given: Any) -> int:
    """Rewrite the model TARGET so that its step fits a budget; verify, measure and save it.

    TARGET is path/model.py[:attr] or package.module:attr. It runs that file with your rights.

    Without attr: get_model, build_model, model, then the only nn.Module subclass in the file. Example inputs come from
    --input, get_inputs() or example_inputs in the file. [tool.memrewrite] in pyproject.toml sets defaults.

    Exit codes: 0 done; 1 --check failed or the measured peak is over budget; 2 usage; 3 cannot capture; 4 not
    equivalent; 5 out of memory or measuring died; 6 budget infeasible; 70 internal; 130 interrupted.
    """
    request = OptimizeRequest(**given)
    from memrewrite.commands import optimize

    return optimize.run(request)


@main.command(context_settings={"show_default": True})
@flags.model
@click.option("--device-memory", help="Say whether the step fits it, and the largest batch that does: 8GB, 7.5GiB.")
@click.option("--depth", type=click.IntRange(min=0), help="Show the tree of modules so many levels deep.")
@flags.output
def estimate(**given: Any) -> int:
    """Predict what a step of the model TARGET takes, of what and in which modules, before it is run.

    TARGET and inputs are those of memrewrite optimize. It runs that file with your rights. No memory of a device is
    used, and a model made on the meta device takes none at all.

    Exit codes: 0 done; 1 the step does not fit --device-memory; 2 usage; 3 the model fails on the inputs; 5 out of
    memory; 70 internal; 130 interrupted.
    """
    request = EstimateRequest(**given)
    from memrewrite.commands import estimate

    return estimate.run(request)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code; errors become one sentence on stderr."""
    verbose = any(text in ("-v", "--verbose") for text in arguments)
    try:
        code = main.main(list(arguments), prog_name="memrewrite", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _fail(UsageError(f"{error.format_message()} See memrewrite optimize --help."), verbose)
    except click.Abort:
        return _fail(InterruptedRunError("interrupted."), verbose)
    except MemrewriteError as error:
        return _fail(error, verbose)
    except Exception as error:
        kind = type(error).__name__
        text = f"internal error, {kind}: {str(error).strip().partition(chr(10))[0]}"
        wrapped = InternalError(f"{text} (run again with -v for the traceback)")
        wrapped.__cause__ = error
        return _fail(wrapped, verbose)


def entry_point() -> NoReturn:
    """The console command; exits with the code of ``run``."""
    sys.exit(run(sys.argv[1:]))


def _fail(error: MemrewriteError, verbose: bool) -> int:
    if verbose and error.__cause__ is not None:
        click.echo("".join(traceback.format_exception(error.__cause__)), err=True, nl=False)
    if isinstance(error, BudgetInfeasibleError) and error.options:
        from rich.console import Console

        from memrewrite.report.option_table import option_table

        click.echo(f"memrewrite: {error.summary}", err=True)
        Console(stderr=True, width=80).print(option_table(error.options), markup=False, highlight=False, emoji=False)
    else:
        click.echo(f"memrewrite: {error}", err=True)
    return error.exit_code
