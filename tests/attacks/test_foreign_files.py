"""A recording of somebody else costs bounded memory and time of a child, whose end is one line."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from rankwatch_service import foreign_files
from rankwatch_service.cli.app import app
from rankwatch_service.foreign_files import ForeignReader, ReaderEndedError
from rankwatch_service.replay.files import BATCH_BYTES_MAX
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import TEXT_BYTES_MAX
from rankwatch_service.replay.sources import HEADER_NAMES_MAX, open_source
from tests.support.recordings.outcome import replayed

ROWS = 60_000
REPEATED = "x" * 200_000


def table(path: Path, rows: int = ROWS, **columns: object) -> Path:
    """A recording of one series, with further columns."""
    usual = {"step": range(rows), "loss": [2.5] * rows}
    parquet.write_table(pa.table({**{name: pa.array(column) for name, column in usual.items()}, **columns}), path)
    return path


def repeated(text: str = REPEATED, rows: int = ROWS) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def grown_mib(path: Path) -> float:
    """By how much a process grows that reads a file."""
    script = (
        "import resource, sys; from pathlib import Path; from rankwatch_service.replay.sources import open_source\n"
        "from rankwatch_service.replay.rows import RowReader\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak(); list(RowReader(open_source(Path(sys.argv[1])), {}).rows()); print(peak() - before)"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=True)
    return float(done.stdout)


def test_a_column_that_nobody_asked_for_is_not_read(tmp_path: Path) -> None:
    path = table(tmp_path / "bomb.parquet", note=repeated())
    assert path.stat().st_size < 1 << 20
    assert grown_mib(path) < 500, "unpacked it has 12 GB"
    outcome = replayed(table(path, rows=64, note=repeated(rows=64)))
    assert (outcome.rows, outcome.left_out_columns) == (64, ["note"])


@pytest.mark.parametrize("name", ["host", "attempt", "device_uuid"])
def test_a_known_column_of_one_long_text_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReplayError, match=f"column {name}: a text of more than {TEXT_BYTES_MAX} bytes"):
        replayed(table(tmp_path / "bomb.parquet", **{name: repeated()}))


@pytest.mark.parametrize("name", ["fingerprint", "nonfinite", "grad_norm"])
def test_a_known_column_of_numbers_that_is_one_long_text_stays_a_dictionary(tmp_path: Path, name: str) -> None:
    text = "1".rjust(200_000) if name != "fingerprint" else REPEATED
    assert grown_mib(table(tmp_path / "bomb.parquet", **{name: repeated(text)})) < 500


def test_texts_that_are_all_different_end_the_reading_at_the_limit_of_a_batch(tmp_path: Path) -> None:
    rows, size = 1_100, BATCH_BYTES_MAX // 1_000
    texts = pa.array([f"{number:05}".ljust(size, "x") for number in range(rows)])
    path = tmp_path / "bomb.parquet"
    whole = pa.table({"step": range(rows), "fingerprint": texts})
    parquet.write_table(whole, path, compression="zstd", use_dictionary=False)
    with pytest.raises(ReplayError, match=r"row 1: 1100 rows have more than 256 MiB"):
        replayed(path)


@pytest.mark.parametrize("name", ["wide.csv", "wide.parquet"])
def test_a_file_of_too_many_columns_is_refused(tmp_path: Path, name: str) -> None:
    names = ["step", *(f"c{number}" for number in range(HEADER_NAMES_MAX))]
    if name.endswith("csv"):
        (tmp_path / name).write_text(f"{','.join(names)}\n")
    else:
        parquet.write_table(pa.table({one: pa.array([1]) for one in names}), tmp_path / name)
    with pytest.raises(ReplayError, match=r"has 10,001 columns; at most 10,000 are read"):
        open_source(tmp_path / name)


def test_text_in_dictionaries_is_read_as_text_without_them_is(tmp_path: Path) -> None:
    """Honest files: words, numbers that are texts, empty fields, a wrong one in its row."""
    hosts, losses = ["a", "b", None, "a"] * 8, ["1.5", " 2.5 ", "", "nan"] * 8
    for name, dictionary in (("with.parquet", True), ("without.parquet", False)):
        columns = {"step": list(range(32)), "host": hosts, "grad_norm": losses, "nonfinite": ["true", "0"] * 16}
        parquet.write_table(pa.table(columns), tmp_path / name, use_dictionary=dictionary)
    first, second = (replayed(tmp_path / name) for name in ("with.parquet", "without.parquet"))
    assert (first.rows, first.metrics, first.left_out) == (second.rows, second.metrics, second.left_out)
    assert "grad_norm" in first.metrics
    parquet.write_table(pa.table({"step": [1, 2, 3], "loss": ["1", "1", "x"]}), tmp_path / "wrong.parquet")
    with pytest.raises(ReplayError, match=r"row 3, column loss: 'x' is not a number"):
        replayed(tmp_path / "wrong.parquet")


def asked(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> str:
    """Why a reader ended that answers by this body of a function."""
    script = (
        "from rankwatch_service import foreign_files\n"
        "foreign_files.MEMORY_BYTES, foreign_files.ANSWER_CPU_S_MAX = 1 << 29, 1\n"
        "foreign_files.memory_bytes = lambda: 1 << 29\n"
        f"def one(question):\n    {body}\nforeign_files.answer(one)\n"
    )
    (folder / "hostile_reader.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with ForeignReader("hostile_reader") as reader, pytest.raises(ReaderEndedError) as ended:
        reader.ask("anything")
    return str(ended.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return bytearray(1 << 30), b''", "more than"),
        ("import os; os.abort()", "more than"),
        ("import itertools; all(True for _ in itertools.count())", "s of processor time"),
        ("raise RecursionError('too deep')", "has failed: RecursionError: too deep"),
        ("import os; os._exit(9)", "has failed: status 9"),
    ],
)
def test_however_a_reader_ends_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, why: str
) -> None:
    reported = asked(monkeypatch, tmp_path, body)
    assert why in reported
    assert "\n" not in reported


def test_an_answer_within_the_limits_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "from rankwatch_service.foreign_files import answer\nanswer(lambda asked: (asked[::-1], b'x' * 300_000))"
    (tmp_path / "honest_reader.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ForeignReader("honest_reader") as reader:
        for _ in range(3):
            assert reader.ask("a", "b") == (["b", "a"], b"x" * 300_000)


def test_the_limits_hold_in_the_reader_of_recordings(tmp_path: Path) -> None:
    path = table(tmp_path / "job.parquet", rows=10)
    with ForeignReader("rankwatch_service.replay.foreign") as reader:
        assert reader.ask("open", str(path), [])[0]["total"] == 10
        limits = Path(f"/proc/{reader._child.pid}/limits").read_text()
        assert f"Max address space         {foreign_files.memory_bytes()}" in limits
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "and only there"


def test_a_recording_whose_reader_ends_is_an_error_of_one_line_after_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "job.parquet", rows=100)
    ask = ForeignReader.ask

    def dying(self: ForeignReader, *question: object) -> object:
        if question == ("next", 0) and getattr(self, "asked", False):
            os.kill(self._child.pid, signal.SIGPROF)
            self._child.wait()
        self.asked = question[0] == "next"  # type: ignore[attr-defined]
        return ask(self, *question)

    monkeypatch.setattr(ForeignReader, "ask", dying)
    result = CliRunner().invoke(app, ["replay", str(path), "--json"])
    assert str(result.exception) == f"{path}: reading a part of it takes more than 60 s of processor time"
    assert json.loads(result.stdout.splitlines()[-1])["summary"]["rows"] == 100
