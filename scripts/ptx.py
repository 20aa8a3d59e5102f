"""Compile the CUDA kernels of ``kvtier/devices`` to PTX: ``python -m scripts.ptx``.

PTX is text that every driver of CUDA 12.2 or later compiles for its own GPU, so that neither a
toolkit nor a compiler is needed where kvtier runs. Needs NVRTC: ``pip install
nvidia-cuda-nvrtc-cu12==12.2.140``; a newer one would make PTX that older drivers refuse.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_char_p, c_size_t, c_void_p, create_string_buffer
from hashlib import sha256
from importlib.metadata import files
from pathlib import Path

DEVICES = Path(__file__).parents[1] / "src" / "kvtier" / "devices"
DISTRIBUTION = "nvidia-cuda-nvrtc-cu12"
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++17")


def digest(source: Path) -> str:
    """Return the line of a PTX file that says which source it was made from."""
    return (
        f"// Made by scripts/ptx.py from {source.name}, {sha256(source.read_bytes()).hexdigest()}"
    )


def nvrtc() -> ctypes.CDLL:
    """Return the compiler's library, from its wheel."""
    found = {path.name: path.locate() for path in files(DISTRIBUTION) or []}
    for name, path in found.items():
        if name.startswith("libnvrtc-builtins"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(found["libnvrtc.so.12"]))


def compile_kernel(compiler: ctypes.CDLL, source: Path) -> str:
    """Return the PTX of a source file. Ends the program with the compiler's words if it fails."""
    program, size = c_void_p(), c_size_t()
    name = source.name.encode()
    compiler.nvrtcCreateProgram(byref(program), source.read_bytes(), name, 0, None, None)
    options = (c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    failed = compiler.nvrtcCompileProgram(program, len(options), options)
    what = "ProgramLog" if failed else "PTX"
    getattr(compiler, f"nvrtcGet{what}Size")(program, byref(size))
    text = create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{what}")(program, text)
    if failed:
        sys.exit(text.value.decode())
    lines = text.value.decode().splitlines()
    own = [
        line for line in lines if not line.startswith((".global", "//"))
    ]  # no constants of NVRTC
    return "\n".join([digest(source), *own]) + "\n"


def main() -> None:
    compiler = nvrtc()
    for source in DEVICES.glob("*.cu"):
        source.with_suffix(".ptx").write_text(compile_kernel(compiler, source), encoding="utf-8")


if __name__ == "__main__":
    main()
