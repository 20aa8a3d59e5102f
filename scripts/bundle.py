"""A folder that installs kvtier on a machine without a package index (``make bundle PYTHON=3.12``).

    python -m scripts.bundle 3.12 build/bundle/kvtier-py3.12-x86_64
    python -m scripts.bundle /opt/python/bin/python3.12 FOLDER --extras engine,s3 --platform aarch64

It has wheels of kvtier's dependencies for that Python and platform, and kvtier: compiled, if that
Python runs here and the platform is this machine's; otherwise as a source distribution, with what
builds it except CMake and Ninja, which are half of the limit. What an environment with an engine
has is left out, most of all torch, of which each accelerator needs its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("torch", "numpy", "matplotlib")
"""Engines bring torch and numpy; only the charts of reports need matplotlib, which is 20 MB."""
EXTRAS = "engine,node,codecs,encryption"
BUILD_TOOLS = ("scikit-build-core>=0.11", "nanobind>=2.4")
MAX_BYTES = 60 << 20
FACTS = "import platform, sys; print(*sys.version_info[:2], sep='.'); print(platform.machine())"


def requirements(extras: Iterable[str]) -> list[str]:
    """Return what kvtier with these extras requires, without ``LEFT_OUT``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    unknown = set(extras) - set(optional)
    if unknown:
        known = ", ".join(optional)
        sys.exit(f"no extra of kvtier is called {', '.join(sorted(unknown))}; there are {known}")
    lines = {*project["dependencies"], *(line for extra in extras for line in optional[extra])}
    return sorted(line for line in lines if Requirement(line).name not in LEFT_OUT)


def missing(folder: Path, python: str, machine: str) -> set[str]:
    """Return requirements of the folder's wheels, on that Python and machine, without a wheel.

    pip chooses wheels for another Python, but evaluates markers for the one that it runs on.
    """
    target = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
    }
    wheels = list(folder.glob("*.whl"))
    present = {canonicalize_name(wheel.name.partition("-")[0]) for wheel in wheels}
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
        for line in metadata.get_all("Requires-Dist", ()):
            required = Requirement(line)
            marker = required.marker
            if marker is None or marker.evaluate({**target, "extra": ""}):
                required.marker = None
                found.add(required)
    needed = (required for required in found if required.name not in LEFT_OUT)
    return {str(needs) for needs in needed if canonicalize_name(needs.name) not in present}


def pip(*arguments: str | Path) -> None:
    words = [sys.executable, "-m", "pip", *map(str, arguments), "-q", "--disable-pip-version-check"]
    if subprocess.run([*words, *os.environ.get("PIP_ARGS", "").split()], check=False).returncode:
        sys.exit(f"failed: {' '.join(words)}")


def download(wanted: Iterable[str], folder: Path, python: str, machine: str) -> None:
    """Fetch wheels of these requirements and of all that they require."""
    tags = (f"--platform=manylinux_2_{glibc}_{machine}" for glibc in (28, 27, 24, 17))
    choice = ("--only-binary=:all:", f"--python-version={python}", *tags, f"--dest={folder}")
    lines = set(wanted)
    while lines:
        pip("download", *choice, "--constraint", ROOT / "constraints.txt", *sorted(lines))
        for package in LEFT_OUT:  # other packages require numpy
            for wheel in folder.glob(f"{package}-*"):
                wheel.unlink()
        lines = missing(folder, python, machine)


def interpreter_of(python: str, machine: str) -> tuple[str, str]:
    """Return the version that ``python``, a version or a program, is, and that program.

    The program is "" where none of that version runs here, or for another machine.
    """
    is_version = re.fullmatch(r"3\.\d+", python) is not None
    for program in (f"python{python}", sys.executable) if is_version else (python,):
        try:
            facts = subprocess.run(
                [program, "-c", FACTS], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        version, here = facts.stdout.split()
        if version == python or not is_version:
            return version, program if here == machine else ""
    if not is_version:
        sys.exit(f"{python} does not run; name a Python, or a version such as 3.12")
    return python, ""


def add_kvtier(folder: Path, interpreter: str) -> None:
    if interpreter:
        native = "--config-settings=cmake.define.KVTIER_NATIVE=ON"
        pip("--python", interpreter, "wheel", "--no-deps", native, f"--wheel-dir={folder}", ROOT)
        return
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder.resolve()], cwd=ROOT, check=True)


def make(folder: Path, python: str, machine: str, extras: Iterable[str]) -> None:
    version, interpreter = interpreter_of(python, machine)
    lines = requirements(extras)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download([*lines, *(() if interpreter else BUILD_TOOLS)], folder, version, machine)
    add_kvtier(folder, interpreter)
    install, listed = "pip install --no-index --find-links .", "-r requirements.txt"
    commands = [f"{install} {listed}"]
    if not interpreter:  # not isolated, because pip hides a CMake that it has installed itself
        names = " ".join(Requirement(tool).name for tool in BUILD_TOOLS)
        commands = [f"{install} {names}", f"{install} --no-build-isolation {listed}"]
    text = "\n".join([*(f"# {command}" for command in commands), "kvtier", *lines, ""])
    (folder / "requirements.txt").write_text(text, encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    form = "compiled" if interpreter else f"as sources: no Python {version} for {machine} runs here"
    print(f"{folder}: {size / 2**20:.1f} MiB, without {', '.join(LEFT_OUT)}; kvtier is {form}")
    print("Copy the folder. In it:", *commands, sep="\n    ")
    if size > MAX_BYTES:
        print(f"That is more than {MAX_BYTES >> 20} MiB: name fewer extras", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="version, such as 3.12, or a Python of that version")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--platform", default=platform.machine(), help="x86_64 or aarch64")
    parser.add_argument("--extras", default=EXTRAS, help=f"({EXTRAS})")
    given = parser.parse_args()
    make(given.folder, given.python, given.platform, given.extras.split(","))


if __name__ == "__main__":
    main()
