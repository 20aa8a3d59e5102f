"""Run the tests of the native core under sanitizers (``make check-native``).

    python native/sanitizers/check.py                      # address and undefined, then thread
    python native/sanitizers/check.py --only thread tests/native/test_stress.py

Each sanitizer has a build of its own under build/sanitize/; the installed core is not touched.
Wanted: GCC with its sanitizer runtimes. The interpreter is not instrumented, so the runtime is
loaded before it, and what it says of others' code is left out (thread.supp, leak.supp).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = (
    "tests/native",
    "tests/index/policies",
    "tests/index/test_index.py",
    "tests/index/test_index_machine.py",
    "tests/index/test_key_index.py",
    "tests/index/test_learning_index.py",
    "tests/index/test_learning_keys.py",
    "tests/tiers/disk/test_io.py",
)
# A sanitizer is ten times slower and more: properties are tried with fewer examples than elsewhere,
# and what measures or reaches for the network or a whole model is not here.
SETTINGS = {
    "HYPOTHESIS_PROFILE": "sanitize",
    "PYTHONMALLOC": "malloc",
    "KVTIER_REQUIRE_NATIVE": "1",
}


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """One build. flags: of -fsanitize; runtimes: loaded first; options: the runtimes' settings."""

    name: str
    flags: str
    runtimes: tuple[str, ...]
    options: dict[str, str]


SANITIZERS = (
    Sanitizer(
        "address",
        "address,undefined",
        ("libasan.so", "libubsan.so"),
        {
            "ASAN_OPTIONS": "detect_leaks=1:malloc_context_size=4:detect_stack_use_after_return=1"
            ":strict_string_checks=1:allocator_may_return_null=1",
            "LSAN_OPTIONS": f"suppressions={HERE / 'leak.supp'}:print_suppressions=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    ),
    Sanitizer(
        "thread",
        "thread",
        ("libtsan.so",),
        {
            # Not instrumented: the interpreter. Tests fork while threads run, as servers do.
            "TSAN_OPTIONS": f"suppressions={HERE / 'thread.supp'}:ignore_noninstrumented_modules=1"
            ":die_after_fork=0:second_deadlock_stack=1:history_size=4:exitcode=66"
        },
    ),
)


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def runtime(name: str) -> str:
    """The path of a library that belongs to the compiler."""
    found = subprocess.run(
        [compiler(), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not os.path.isabs(found):
        raise SystemExit(
            f"{compiler()} has no {name}; install its sanitizer runtimes, or name another: CXX="
        )
    return os.path.realpath(found)


def build(sanitizer: Sanitizer) -> Path:
    """Compile the core; gives the extension."""
    folder = ROOT / "build" / "sanitize" / sanitizer.name
    python = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    nanobind = subprocess.run(python, check=True, capture_output=True, text=True).stdout.strip()
    tools = Path(sys.executable).parent
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DKVTIER_NATIVE=ON"]  # noqa: RUF005
        + [f"-DKVTIER_SANITIZE={sanitizer.flags}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
        + [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", folder], check=True, env=environment)
    (core,) = folder.glob("_native*.so")
    return core


def fixed_addresses() -> list[str]:
    """ThreadSanitizer's runtime does not know every layout of a process that chance may give."""
    command = ["setarch", platform.machine(), "-R"]
    try:
        works = subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return command if works else []


def run_tests(sanitizer: Sanitizer, core: Path, arguments: Sequence[str]) -> int:
    # The runtime hooks C++ exceptions, so it has to find them in a process that starts without.
    preload = ":".join(map(runtime, (*sanitizer.runtimes, "libstdc++.so")))
    environment = (
        os.environ
        | SETTINGS
        | sanitizer.options
        | {"KVTIER_SANITIZED_CORE": str(core), "PYTHONPATH": str(HERE)}
    )
    # By env, not in `environment`: what starts the tests need not be watched.
    command = [*fixed_addresses(), "env", f"LD_PRELOAD={preload}", sys.executable, "-m", "pytest"]
    options = [
        "-p",
        "use_core",
        "-p",
        "no:cacheprovider",
        "-q",
        "--capture=sys",
        "-o",
        "faulthandler_timeout=0",
    ]
    return subprocess.run(
        [*command, *options, *arguments], check=False, cwd=ROOT, env=environment
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=[each.name for each in SANITIZERS])
    parser.add_argument("tests", nargs="*", help="for pytest; the native core's tests if none")
    given, others = parser.parse_known_args()
    failed = []
    for sanitizer in SANITIZERS:
        if given.only in (None, sanitizer.name):
            print(f"== {sanitizer.flags}", flush=True)
            if run_tests(sanitizer, build(sanitizer), [*others, *(given.tests or TESTS)]):
                failed.append(sanitizer.flags)
    print("failed: " + "; ".join(failed) if failed else "no sanitizer complained")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
