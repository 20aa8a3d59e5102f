"""A bill of materials of a wheel: kvtier and what it requires, in CycloneDX's JSON.

    python scripts/sbom.py WHEEL FILE     needs the packages cyclonedx-bom and packaging

Installs the wheel without extras into an empty environment, has ``cyclonedx-py`` describe that, and
checks that the description is complete.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FORMAT = ("--spec-version", "1.6", "--output-format", "JSON", "--output-reproducible")


def describe(wheel: Path, file: Path) -> None:
    """Write the bill of materials of a wheel to ``file``."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin/python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "-q"]
        arguments = os.environ.get("PIP_ARGS", "").split()
        subprocess.run([*pip, "install", *arguments, "--only-binary=:all:", wheel], check=True)
        subprocess.run([*pip, "uninstall", "-y", "setuptools", "pip"], check=True)
        subprocess.run(
            [
                *(sys.executable, "-m", "cyclonedx_py", "environment", *FORMAT),
                *("--pyproject", ROOT / "pyproject.toml", "--output-file", file, python),
            ],
            check=True,
            env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
        )
    found = json.loads(file.read_text())
    # cyclonedx-py leaves a version out that is not written in pyproject.toml.
    _, version, _, _ = parse_wheel_filename(wheel.name)
    address = f"pkg:pypi/kvtier@{version}"
    found["metadata"]["component"] |= {"version": str(version), "purl": address}
    file.write_text(json.dumps(found, indent=2) + "\n")
    if problems := missing_in(found):
        sys.exit(f"{file} is not complete: {'; '.join(problems)}")


def missing_in(found: dict[str, Any]) -> list[str]:
    """Return what a bill of materials of kvtier lacks, as sentences."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    components = {canonicalize_name(each["name"]): each for each in found.get("components", ())}
    wanted = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    problems = [f"{name} is not in it" for name in sorted(wanted - set(components))]
    for name, component in components.items():
        if not component.get("version") or not component.get("purl"):
            problems.append(f"{name} has no version or address")
    subject = found.get("metadata", {}).get("component", {})
    if subject.get("name") != project["name"] or not subject.get("version"):
        problems.append("its subject is not kvtier of a version")
    return problems


if __name__ == "__main__":
    describe(Path(sys.argv[1]), Path(sys.argv[2]))
