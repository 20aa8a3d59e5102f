"""Versions of engines: compare their sources with kvtier's contracts, and tell which were run.

    python -m scripts.engine_versions sources        fetch the sources, compare (make scan-engines)
    python -m scripts.engine_versions record NAME JUNIT_XML
                                                     note what a test run of that version passed
    python -m scripts.engine_versions record-shapes NAME JUNIT_XML
                                                     note which models it served from which tiers
    python -m scripts.engine_versions tables         write the tables of the README and the docs
    python -m scripts.engine_versions tables --check exit with 1 where one is out of date

NAME is an engine and a version, such as vllm-0.30.0.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from benchmarks.vllm.fetch import source_archive
from kvtier.connectors.common.contract import Contract
from kvtier.connectors.sglang.shared.contract import LINKER, STORAGE
from kvtier.connectors.vllm.shared.fronts import OFFLOADING, OWN

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / ".peers/sources"
RECORD = ROOT / "tests/engine_versions.json"
"""By engine and version, what was run: written by ``record``."""
SHAPES = ROOT / "tests/engine_shapes.json"
"""By engine and version, shape and tier, the ranks with which it passed: written by
``record-shapes``."""
BEGIN, END = "<!-- Written by scripts/engine_versions.py: -->\n", "<!-- end -->\n"
BEGIN_SHAPES = "<!-- Shapes, written by scripts/engine_versions.py: -->\n"


@dataclass(frozen=True)
class Part:
    """A part of kvtier that serves an engine. title: for people."""

    engine: str
    title: str
    contract: Contract


PARTS = (
    Part("vllm", "vLLM, OffloadingConnector", OFFLOADING.contract),
    Part("vllm", "vLLM, KvtierConnector", OWN.contract),
    Part("sglang", "SGLang, storage back end", STORAGE),
    Part("sglang", "SGLang, linker", LINKER),
)
VERSIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "0.18.1", "0.20.2", "0.23.0", "0.25.1", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0",
        "0.32.0", "0.33.0",
    ),
    "sglang": ("0.5.8", "0.5.14", "0.5.16", "0.5.17", "0.5.18", "0.5.21", "0.5.23"),
}  # fmt: skip
"""Versions whose sources are compared: all that people run, and one that is too old."""


# -- sources ---------------------------------------------------------------------------------------


def fetch(engine: str, version: str) -> Path:
    """Return a folder with the files of an engine that contracts name; fetched once."""
    package = SOURCES / f"{engine}-{version}" / engine
    wanted = {f"{engine}/{file}" for each in PARTS for file in each.contract.files}
    have = package.parent / "files.json"
    if not have.exists() or set(json.loads(have.read_text())) != wanted:
        for name, content in _archive(engine, version):
            inside = _inside(PurePosixPath(name), engine)
            if inside in wanted:
                file = package.parent / inside
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content())
        package.mkdir(parents=True, exist_ok=True)
        (package / "_version.py").write_text(f'__version__ = "{version}"\n')
        have.write_text(json.dumps(sorted(wanted)))
    return package


def _archive(engine: str, version: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the files of an engine: of its sources where its wheel is large, else of its wheel."""
    if engine == "vllm":
        with tarfile.open(fileobj=io.BytesIO(source_archive(engine, version))) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    yield member.name, file.read
        return
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", folder, f"{engine}=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                yield name, partial(archive.read, name)


def _inside(path: PurePosixPath, engine: str) -> str:
    """Return a file's path from its package on, in an archive's own folder or not."""
    parts = path.parts if path.parts[0] == engine else path.parts[1:]
    return "/".join(parts) if parts and parts[0] == engine else ""


def compare() -> bool:
    """Print how each version differs from each contract. Return whether it is as promised."""
    is_right = True
    for part in PARTS:
        for version in VERSIONS[part.engine]:
            found = part.contract.differences(fetch(part.engine, version))
            promised = part.contract.covers(version)
            verdict = "agrees" if not found else f"{len(found)} differences"
            is_wrong = promised is bool(found)
            is_right = is_right and not is_wrong
            print(f"{part.title:28} {version:8} {verdict}{' - NOT AS PROMISED' * is_wrong}")
            for each in found if promised else ():
                print(f"    {each}")
    return is_right


# -- what was run ----------------------------------------------------------------------------------


def record(name: str, report: Path) -> None:
    """Note how many tests passed under a version. Exits where any failed, or none ran.

    The part that served is the one whose connector the report names, or the first that covers it.
    """
    engine, version = name.split("-", 1)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {each: int(suite.get(each, 0)) for each in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    if count["failures"] or count["errors"] or not passed:
        sys.exit(f"{name}: {count}: not recorded")
    named = {each.get("name"): each.get("value", "") for each in suite.iter("property")}
    title = next(
        each.title
        for each in PARTS
        if each.engine == engine
        and each.contract.covers(version)
        and each.title.endswith(named.get("connector", ""))
    )
    known = read_record()
    known.setdefault(title, {})[version] = passed
    ordered = {
        each.title: dict(sorted(known[each.title].items(), key=lambda item: _order(item[0])))
        for each in PARTS
        if each.title in known
    }
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
    write_tables()


def record_shapes(name: str, report: Path) -> None:
    """Note the cells of the table of shapes that tests of a version show.

    A test names its cells in properties ``shows``: shape, tier, and ranks or who refuses. One that
    passed adds them, and one that failed removes them. Exits if no test names any.
    """
    known = read_shapes()
    cells = known.setdefault(name, {})
    num_cells = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        has_passed = case.find("failure") is None and case.find("error") is None
        for each in case.iter("property"):
            if each.get("name") != "shows":
                continue
            shape, tier, ranks = json.loads(each.get("value", ""))
            passed = cells.setdefault(shape, {}).setdefault(tier, [])
            passed[:] = sorted({*passed, ranks} if has_passed else {*passed} - {ranks})
            num_cells += 1
    if not num_cells:
        sys.exit(f"{name}: no test of {report} names a cell of the table")
    SHAPES.write_text(json.dumps(known, indent=1) + "\n")
    write_tables()


Shapes = dict[str, dict[str, dict[str, list[str]]]]
"""By engine and version, shape and tier: the ranks with which a test passed."""


def read_shapes() -> Shapes:
    found: Shapes = json.loads(SHAPES.read_text()) if SHAPES.exists() else {}
    return found


def read_record() -> dict[str, dict[str, int]]:
    """Tests that passed, by a part's title and a version of its engine."""
    found: dict[str, dict[str, int]] = json.loads(RECORD.read_text())
    return found


def _order(version: str) -> list[int]:
    return [int(each) for each in version.split(".")]


# -- tables ----------------------------------------------------------------------------------------


def summary() -> Iterator[str]:
    """Yield the README's table: a row for each part."""
    yield "| part | run on the CPU | sources compared, not run |"
    yield "| -- | -- | -- |"
    record = read_record()
    for part in PARTS:
        ran = list(record.get(part.title, {}))
        others = [
            each for each in VERSIONS[part.engine] if part.contract.covers(each) and each not in ran
        ]
        yield f"| {part.title} | {', '.join(ran) or 'none'} | {', '.join(others)} |"


def versions() -> Iterator[str]:
    """Yield the table of the docs: a row for each version."""
    yield "| engine | version | served by | tests passed on the CPU |"
    yield "| -- | -- | -- | -- |"
    record = read_record()
    for engine, each_version in VERSIONS.items():
        for version in each_version:
            parts = [each for each in PARTS if each.engine == engine]
            name = f"{parts[0].contract.name}, "
            serving = [part.title for part in parts if part.contract.covers(version)]
            titles = ", ".join(each.removeprefix(name) for each in serving)
            passed = [
                f"{record[each][version]} ({each.removeprefix(name)})"
                for each in serving
                if version in record.get(each, {})
            ]
            told = ", ".join(passed) or ("sources compared only" if serving else "")
            yield f"| {name[:-2]} | {version} | {titles or 'nothing'} | {told} |"


def shapes() -> Iterator[str]:
    """Yield the table of shapes: a row for each shape and version, a column for each tier."""
    found = read_shapes()
    titles = {part.engine: part.contract.name for part in PARTS}
    rows = [
        (titles[engine], version, shape, tiers)
        for name, of_shapes in found.items()
        for engine, _, version in [name.partition("-")]
        for shape, tiers in of_shapes.items()
    ]
    columns = list(dict.fromkeys(tier for *_, tiers in rows for tier in tiers))
    yield f"| shape | version | {' | '.join(columns)} |"
    yield "| -- | -- |" + " -- |" * len(columns)
    for engine, version, shape, tiers in sorted(rows, key=lambda row: (row[2], _order(row[1]))):
        cells = (", ".join(tiers.get(tier, ())) for tier in columns)
        yield f"| {shape} | {engine} {version} | {' | '.join(cells)} |"


TABLES = (
    (ROOT / "README.md", BEGIN, summary),
    (ROOT / "docs/versions.md", BEGIN, versions),
    (ROOT / "docs/versions.md", BEGIN_SHAPES, shapes),
)


def write_tables(*, is_check: bool = False) -> bool:
    """Write the tables between their marks. Return whether all were as they are now."""
    is_current = True
    for page, begin, rows in TABLES:
        text = page.read_text()
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        made = f"{before}{begin}\n" + "".join(f"{row}\n" for row in rows()) + f"\n{END}{after}"
        if made != text:
            is_current = False
            print(f"{page.relative_to(ROOT)}: the table of versions is out of date")
            if not is_check:
                page.write_text(made)
    return is_current


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sources")
    for command in ("record", "record-shapes"):
        recording = commands.add_parser(command)
        recording.add_argument("name")
        recording.add_argument("report", type=Path)
    commands.add_parser("tables").add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.command == "sources":
        sys.exit(not compare())
    elif given.command == "record":
        record(given.name, given.report)
    elif given.command == "record-shapes":
        record_shapes(given.name, given.report)
    else:
        sys.exit(not write_tables(is_check=given.check) and given.check)


if __name__ == "__main__":
    main()
