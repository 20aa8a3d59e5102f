"""Install a bundle in an empty environment, and run the demo there (``make test-bundle``).

    unshare --map-root-user --net python -m scripts.check_bundle build/bundle/rehearsed

The environment has the running Python's torch and numpy, as one with an engine has, and otherwise
nothing but the bundle: no network, no index, no other folder of wheels.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from scripts.bundle import LEFT_OUT, ROOT
from scripts.check_release import run, say

PLACE = ROOT / "build/bundle/environment"


def packages_of(*names: str) -> set[str]:
    """Return installed packages: these, and what they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            needs = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            continue  # not for this machine
        if name not in found:
            found.add(name)
            markers = ((need.name, need.marker) for need in needs)
            waiting += [need for need, mark in markers if not mark or mark.evaluate({"extra": ""})]
    return found


def add(packages: set[str], folder: Path) -> None:
    """Put installed packages into another environment."""
    for name in packages:
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            source, target = str(package.locate_file(top)), folder / top
            if target.exists():  # a new environment has setuptools
                continue
            if name in LEFT_OUT:  # large, and never replaced
                target.symlink_to(source)
            elif os.path.isdir(source):
                shutil.copytree(source, target)
            else:
                shutil.copy(source, target)


def main(bundle: Path) -> None:
    if socket.if_nameindex() != [(1, "lo")]:
        sys.exit("there is a network: run this under unshare --map-root-user --net")
    run(sys.executable, "-m", "venv", "--clear", PLACE)
    packages = packages_of(*(package for package in LEFT_OUT if package != "matplotlib"))
    (library,) = PLACE.glob("lib/python3*/site-packages")
    add(packages, library)
    env = {
        "PATH": f"{PLACE / 'bin'}:/usr/bin:/bin",  # a compiler, for a bundle with sources
        "HOME": str(PLACE),
        "PIP_CONFIG_FILE": os.devnull,
        "HF_HUB_OFFLINE": "1",
    }
    say(f"install beside {', '.join(sorted(packages))}")
    lines = (bundle / "requirements.txt").read_text(encoding="utf-8").splitlines()
    for command in (line[2:] for line in lines if line.startswith("# ")):
        run(*command.split(), env=env, cwd=bundle)
    run("pip", "check", env=env, cwd=PLACE)
    if not json.loads(run("kvtier", "doctor", "--json", env=env, cwd=PLACE))["native"]:
        sys.exit("kvtier has no native core")
    say("the demo")
    result = PLACE / "demo.json"
    demo = ("kvtier", "bench", "serve", "--quick", "--no-report", "--json", result)
    print(run(*demo, env=env, cwd=PLACE).strip())
    targets = json.loads(result.read_text())["targets"]
    same = [target["value"] for target in targets if target["id"] == "C1"]
    if same != [1.0]:
        sys.exit(f"the demo did not give the same logits: {same}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
