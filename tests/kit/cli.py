"""Run the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from kvtier.tools.cli import app


def kvtier(*arguments: str, stdin: str = "", **variables: str) -> Result:
    """Run ``kvtier`` with these arguments, input and environment variables."""
    return CliRunner().invoke(app, list(arguments), input=stdin, env=variables)


def refused(*arguments: str, stdin: str = "", **variables: str) -> str:
    """Return the error message of a command that is refused in one sentence, on one line."""
    done = kvtier(*arguments, stdin=stdin, **variables)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())
