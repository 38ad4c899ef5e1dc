"""Runs the mutations of `mutations.toml`: puts each bug into a copy of the tree and expects its tests to fail.

    python -m tests.mutations [--area stream] [--only gap-of-one] [--jobs 2]

A bug is found by its text within a package and not by file and line, so code may move. Tests that fail without any bug
catch nothing: they run once in the unchanged copy first. Ends with status 1 if a bug survives or cannot be tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Final

TREE: Final = Path(__file__).parents[2]
FILE: Final = Path(__file__).parent / "mutations.toml"
CAUGHT: Final = "caught"
SECONDS_MAX: Final = 1_800
"""Longest run of tests: a bug may also make them wait for ever."""
PYTEST_FAILED: Final = 1
"""Its status where tests failed, and not where there are none or they cannot be collected."""


@dataclass(frozen=True)
class Mutation:
    """One bug: `old` text of one file of `package` becomes `new`; the `tests` that match `k` must catch it."""

    id: str
    area: str
    package: str
    """The folder that holds the file."""
    old: str
    new: str
    means: str
    """What goes wrong, in a sentence."""
    tests: tuple[str, ...]
    """Files or folders."""
    k: str
    """As pytest's -k."""

    def file_in(self, tree: Path) -> Path:
        """The file that holds `old`.

        Raises:
            LookupError: no file holds it, or it is there more than once.
        """
        texts = {path: path.read_text().count(self.old) for path in sorted((tree / self.package).rglob("*.py"))}
        found = {path: count for path, count in texts.items() if count}
        if sum(found.values()) != 1:
            where = ", ".join(f"{path.relative_to(tree)} ({count})" for path, count in found.items()) or "nowhere"
            raise LookupError(f"its text must be there once: {where}")
        return next(iter(found))


def mutations() -> list[Mutation]:
    """All mutations, in the order of the file."""
    rows = tomllib.loads(FILE.read_text())["mutation"]
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Trial:
    """Tries mutations, each in one of several copies of the tree."""

    def __init__(self, folder: Path, copies: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(copies):
            self._free.put(_copied(folder / str(number)))

    def without(self, group: Sequence[Mutation]) -> dict[str, str]:
        """What is wrong with the tests of mutations without any of them, by id; all of them are in the same folders."""
        tree = self._free.get()
        try:
            if not _failure(tree, group[0].tests, " or ".join(f"({one.k})" for one in group)):
                return {}
            return {one.id: why for one in group if (why := _failure(tree, one.tests, one.k))}
        finally:
            self._free.put(tree)

    def outcome(self, mutation: Mutation) -> tuple[Mutation, str, float]:
        """A mutation with `CAUGHT`, or what happened instead, and the seconds that it took."""
        tree, begun = self._free.get(), monotonic()
        try:
            with _changed(mutation.file_in(tree), mutation):
                why = _failure(tree, mutation.tests, mutation.k)
        except LookupError as error:
            why = f"not tried: {error}"
        finally:
            self._free.put(tree)
        outcome = CAUGHT if why in ("fail", "take too long") else why or "SURVIVED"
        return mutation, outcome, monotonic() - begun


@contextmanager
def _changed(file: Path, mutation: Mutation) -> Iterator[None]:
    before = file.read_text()
    _write(file, before.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        _write(file, before)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    # Python compares times of whole seconds: what it compiled of the other text would be taken for this one.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _failure(tree: Path, tests: Sequence[str], k: str) -> str:
    """What the tests do but pass: fail, take too long, or what pytest says; empty: they pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["-k", k, *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=_environment(tree), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return "take too long"
    if done.returncode == PYTEST_FAILED:
        return "fail"
    last = (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2]
    return f"pytest ended with {done.returncode}: {last}" if done.returncode else ""


def _environment(tree: Path) -> Mapping[str, str]:
    paths = [str(tree / part) for part in ("collectors", "detectors", "service", ".")]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


def _copied(folder: Path) -> Path:
    """A copy of the tree, from which Python imports rather than from what is installed."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    shutil.copytree(TREE, folder, symlinks=True, ignore=left_out)
    names = "rankwatch", "rankwatch_detectors", "rankwatch_service", "tests"
    script = f"import {', '.join(names)}; print(*(one.__file__ for one in ({', '.join(names)})))"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=True)
    if not all(Path(one).is_relative_to(folder) for one in found.stdout.split()):
        raise RuntimeError(f"Python does not import from the copy: {found.stdout}")
    return folder


def main() -> int:
    """Try the chosen mutations and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    every = mutations()
    parser.add_argument("--area", choices=sorted({one.area for one in every}), help="only those of this area")
    parser.add_argument("--only", metavar="ID", action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tried at once (%(default)s)")
    asked = parser.parse_args()
    if unknown := set(asked.only or ()) - {one.id for one in every}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    chosen = [one for one in every if asked.area in (None, one.area) and (not asked.only or one.id in asked.only)]
    caught = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as threads:
        trial = Trial(Path(folder).resolve(), asked.jobs)
        groups = [[one for one in chosen if one.tests == tests] for tests in dict.fromkeys(one.tests for one in chosen)]
        failing = {name: why for found in threads.map(trial.without, groups) for name, why in found.items()}
        tried = [one for one in chosen if one.id not in failing]
        outcomes = [
            (one, f"not tried: its tests {failing[one.id]} without it", 0.0) for one in chosen if one not in tried
        ]
        for mutation, outcome, seconds in chain(outcomes, threads.map(trial.outcome, tried)):
            caught += outcome == CAUGHT
            print(f"{mutation.area:<10} {mutation.id:<26} {seconds:4.0f} s  {outcome}", flush=True)
            if outcome != CAUGHT:
                print(f"    {mutation.means}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
