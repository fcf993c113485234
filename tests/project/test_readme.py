"""What the README and its like print is so: links, commands, options, names, passes and exit codes."""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest

import memrewrite
from memrewrite import cli
from memrewrite.passes.functionalize import Functionalize
from memrewrite.records import errors
from memrewrite.records.errors import MemrewriteError
from memrewrite.search import registry

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "tests").rglob("*.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def shell_lines() -> list[list[str]]:
    """The words of every command line the README prints, in blocks and in the text."""
    text = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:memrewrite|python|bash|pip) [^`]*)`", text)
    lines = "".join(blocks("sh")).replace("\\\n", "").splitlines()
    return [words for line in [*lines, *inline] if (words := shlex.split(line, comments=True))]


def table(head: str) -> list[list[str]]:
    """The cells of the README's table that begins with the line ``head``, without the backticks around names."""
    rows = README.partition(f"{head}\n")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[: rows.index("")]]
    assert cells, f"there is no table that begins with {head}"
    return cells


@pages
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 255


COMMANDS = [words[1:] for words in shell_lines() if words[0] == "memrewrite" and not words[1].startswith("-")]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_memrewrite_lines_parse(words: list[str]) -> None:
    command = cli.main.commands[words[0]]
    context = click.Context(command, help_option_names=["-h", "--help"])  # which the command keeps, for all tests
    given, rest, _ = command.make_parser(context).parse_args(words[1:])
    named = {name: value for name, value in given.items() if value is not None}
    assert not rest
    assert {parameter.name for parameter in command.params if parameter.required} <= named.keys()


def test_every_command_is_printed() -> None:
    assert {words[0] for words in COMMANDS} == cli.main.commands.keys()


def test_options_in_the_text_exist() -> None:
    known = {
        name for command in cli.main.commands.values() for p in command.params for name in (*p.opts, *p.secondary_opts)
    }
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", README))
    assert named
    assert named <= known


def test_files_that_are_run_exist() -> None:
    files = {word for words in shell_lines() for word in words if re.fullmatch(r"(examples|tests|\.ci)/[\w/.]+", word)}
    assert files
    assert not [file for file in files if not (ROOT / file).exists()]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_parses_and_names_what_there_is(code: str) -> None:
    ast.parse(code)
    for name in re.findall(r"\bmemrewrite\.([A-Za-z_]\w*)", re.sub(r"(from|import) memrewrite\S*", "", code)):
        assert name in memrewrite.__all__
    for place, name in re.findall(r"from (memrewrite[\w.]*) import (\w+)", code):
        file = ROOT / (place.replace(".", "/") + ".py")
        assert f"def {name}(" in file.read_text() or f"class {name}(" in file.read_text()


def test_measured_figures_are_those_of_the_results() -> None:
    results = (ROOT / "tests" / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for name, value in table("| target | result |"):
        assert f"| {name} | {value} |" in results


def test_the_passes_are_the_registrys_in_their_own_words() -> None:
    told = {name.strip("`"): does for name, does in table("| pass | |")}
    docs = {name: inspect.getdoc(importlib.import_module(f"memrewrite.passes.{name}")) or "" for name in told}
    assert list(told) == [Functionalize.name, *registry.NAMES]
    assert told == {name: doc.splitlines()[0].replace("``", "`") for name, doc in docs.items()}


def test_exit_codes_are_those_of_the_errors() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MemrewriteError)]
    raised = {kind.exit_code for kind in kinds} | {cli.EXIT_INTERRUPTED}
    assert [int(code) for code, _ in table("| code | meaning |")] == sorted({0, 1} | raised)
