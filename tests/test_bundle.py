"""Bundles for machines without a package index have what kvtier requires there."""

from __future__ import annotations

import platform
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.bundle import EXTRAS, LEFT_OUT, interpreter_of, missing, requirements

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1\n{}"


def make_wheel(folder: Path, name: str, *requires: str) -> None:
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-1.dist-info/METADATA", METADATA.format(name, lines))


def test_what_the_extras_require_is_listed_without_what_engines_bring() -> None:
    listed = {Requirement(line).name for line in requirements(EXTRAS.split(","))}
    assert {"blake3", "typer", "transformers", "fastapi", "msgspec", "uvloop"} <= listed
    assert {"zstandard", "cryptography"} <= listed
    assert not listed & set(LEFT_OUT)
    (client,) = set(requirements(["s3"])) - set(requirements([]))
    assert client.startswith("obstore")


def test_an_extra_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match="no extra of kvtier is called enigne; there are engine"):
        requirements(["enigne"])


def test_a_wheel_that_only_the_other_python_needs_is_found_missing(tmp_path: Path) -> None:
    make_wheel(
        tmp_path,
        "web_kit",
        "only-new>=1; python_version >= '3.13'",
        "only-old; python_version < '3.12'",
        "only-arm; platform_machine == 'aarch64'",
        "Present_One<9",
        "torch>=2",
        "extra-one; extra == 'more'",
    )
    make_wheel(tmp_path, "present_one")
    assert missing(tmp_path, "3.13", "x86_64") == {"only-new>=1"}
    assert missing(tmp_path, "3.11", "x86_64") == {"only-old"}
    assert missing(tmp_path, "3.12", "aarch64") == {"only-arm"}


def test_kvtier_is_compiled_only_by_a_python_of_that_version_for_this_machine() -> None:
    version, here = f"3.{sys.version_info.minor}", platform.machine()
    assert interpreter_of(version, here)[0] == version
    assert interpreter_of(version, here)[1]
    assert interpreter_of(sys.executable, here) == (version, sys.executable)
    assert interpreter_of(sys.executable, "another") == (version, "")
    assert interpreter_of("3.99", here) == ("3.99", "")
    with pytest.raises(SystemExit, match="/no/python does not run; name a Python, or a version"):
        interpreter_of("/no/python", here)
