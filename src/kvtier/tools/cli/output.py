"""Output of commands that measure."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

STDOUT = "-"


def write_json(text: str, target: str) -> None:
    """Write to a file, whose directory is made if missing, or to stdout ("-")."""
    if target == STDOUT:
        print(text)
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def check_packages(wanted: list[str], extra: str, needs_report: bool) -> None:
    """Raise ``ConfigError`` for missing packages, before an hour is spent measuring.

    extra: the extra of kvtier that installs them. needs_report: whether to include those of the
    HTML report.
    """
    from kvtier.core.errors import ConfigError, install_command

    wanted = [*wanted, *(["matplotlib", "jinja2"] if needs_report else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed; install all that is needed: "
            f"{install_command(extra)}"
            + (", or leave the report out with --no-report" if needs_report else "")
        )
