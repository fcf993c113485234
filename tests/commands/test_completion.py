"""Shell completion, which is click's own: scripts for three shells, and what they ask for."""

import subprocess
import sys

import pytest

# As the installed command does it, without its being installed; PyTorch must stay out of it.
COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'memrewrite'\nfrom memrewrite.cli import entry_point\n"
    "try: entry_point()\nfinally: assert 'torch' not in sys.modules",
]


def completed(shell: str, **environment: str) -> str:
    """What the command prints for the shell, one word a line."""
    asked = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "_MEMREWRITE_COMPLETE": shell, **environment}
    done = subprocess.run(COMMAND, env=asked, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def words(line: str) -> set[str]:
    """The completions of the last word of ``line``, as bash asks for them."""
    given = line.split(" ")
    output = completed("bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(given) - 1))
    return {each.partition(",")[2] for each in output.splitlines()}


@pytest.mark.parametrize(
    ("shell", "sentence"),
    [("bash", "complete -o nosort -F"), ("zsh", "compdef"), ("fish", "complete --no-files --command memrewrite")],
)
def test_the_script(shell: str, sentence: str) -> None:
    script = completed(f"{shell}_source")
    assert sentence in script
    assert f"_MEMREWRITE_COMPLETE={shell}_complete" in script


def test_commands() -> None:
    assert words("memrewrite ") >= {"optimize", "measure", "verify", "show"}
    assert words("memrewrite me") == {"measure"}


@pytest.mark.parametrize("command", ["optimize", "measure", "verify"])
def test_values_of_amp(command: str) -> None:
    assert words(f"memrewrite {command} --amp ") == {"off", "bf16", "fp16"}


def test_options() -> None:
    assert words("memrewrite optimize --bu") == {"--budget"}
    assert {"--batch-size", "--batch-sizes"} == words("memrewrite measure --batch")
