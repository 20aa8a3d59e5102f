"""Gets what vLLM's own unit tests need into a folder: ``python prepare.py FOLDER VERSION``.

They are only in vLLM's source distribution, which pip fetches and looks at without building it, and
they want the config and a tokenizer of a model by name, which are made here: nothing is downloaded
from a model hub.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

MODEL = "facebook/opt-125m"
WANTED = ("tests", "pyproject.toml")


def fetch(folder: Path, version: str) -> Path:
    """Fetch the source distribution. Its own build script makes the metadata, for no device."""
    found = folder / f"vllm-{version}.tar.gz"
    if not found.exists():
        command = [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation",
            "--no-binary", "vllm", "-d", str(folder), f"vllm=={version}",
        ]  # fmt: skip
        settings = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
        subprocess.run(command, check=True, env=os.environ | settings)
    return found


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the tests, and nothing of vLLM itself, which is installed."""
    with tarfile.open(archive) as content:
        for member in content:
            inside = Path(*Path(member.name).parts[1:])
            if inside.parts and inside.parts[0] in WANTED:
                member.name = str(inside)
                content.extract(member, folder, filter="data")


def make_model(home: Path) -> None:
    """Make a model without weights where the hub's client looks for downloaded ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import OPTConfig, PreTrainedTokenizerFast

    place = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = place / "snapshots" / "0"
    snapshot.mkdir(parents=True, exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text("0")
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(snapshot)
    names = ["<pad>", "</s>", "<unk>", *(f"word{each}" for each in range(200))]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(snapshot)


def main() -> None:
    folder, version = Path(sys.argv[1]).absolute(), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    unpack(fetch(folder, version), folder)
    make_model(folder / "hf")


if __name__ == "__main__":
    main()
