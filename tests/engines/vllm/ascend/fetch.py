"""Fetch the Python sources of vllm-ascend's releases, from the index that pip is set up for.

    python -m tests.engines.vllm.ascend.fetch FOLDER

Nothing is built or installed: it would need CANN.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path, PurePosixPath

from benchmarks.vllm.fetch import source_archive
from tests.engines.vllm.ascend.sources import PACKAGE, VERSIONS


def main(folder: Path) -> None:
    for version in VERSIONS:
        archive = source_archive(PACKAGE, version)
        num = 0
        with tarfile.open(fileobj=io.BytesIO(archive)) as content:
            for member in content:
                path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if path.suffix == ".py" and path.parts[0] == PACKAGE:
                    member.name = str(path)
                    content.extract(member, folder / version, filter="data")
                    num += 1
        print(f"{num} files of vllm-ascend {version} are in {folder / version}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
