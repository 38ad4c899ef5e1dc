"""What is wrong with a file is said with its row and column; what is odd but sound is read."""

from __future__ import annotations

import bz2
import gzip
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rankwatch_service.replay import files
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import RowReader
from rankwatch_service.replay.sources import open_source
from rankwatch_service.simulate.files import write_job
from rankwatch_service.simulate.job import Job
from tests.support.recordings.outcome import replayed


def csv(tmp_path: Path, text: str, name: str = "job.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step,loss\n1,2.0\n2,abc\n3,1.0\n", "row 2, column loss: 'abc' is not a number"),
        ("step,loss\n1,2.0\nx,1\n", "row 2, column step: 'x' is not a number"),
        ("step,loss\n1,2.0\n2.5,1\n", "row 2, column step: 2.5 is not a whole number"),
        ("step,loss\n1,2.0\n,1\n", "row 2, column step: is empty"),
        ("step,rank,loss\n1,-1,2\n", "row 1, column rank: -1 is not a whole number"),
        ("iteration,loss\n1,2.0\n", "column step: missing; the file has iteration, loss"),
        ("step,loss\n1,2\n2,2\n5,2\n3,2\n", "row 4, column step: 3 after 5"),
        ("step,loss,kind\n1,2,train\n2,2,foo\n", "row 2, column kind: 'foo' is none of train, eval, checkpoint"),
        ("step,loss\n1,2\n2,2,3\n", "row 2: 3 fields, the header has 2"),
        ("step,loss,loss\n1,2,3\n", "column loss: stands twice"),
        (
            'step,loss,lr\n1,2,3\n2,"2,3\n3,2,3\n',
            "row 2: 2 fields, the header has 3: a quotation mark in it is not closed",
        ),
        ("step,loss\n", "there are no rows"),
        ("step,loss", "there are no rows"),
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ("step,loss\n1,2\nnan,2\n", "row 2, column step: nan is not a whole number"),
        ("step,nonfinite\n1,0\n2,soon\n", "row 2, column nonfinite: 'soon' is not a number"),
        ("step,nonfinite\n1,0\n2,0.5\n", "row 2, column nonfinite: 0.5 is not a whole number"),
        (f"step,loss\n1,2\n{2**53},2\n", "row 2, column step: 9.0072e+15 is not a whole number"),
        ("step,rank,loss\n1,131072,2\n", "row 1, column rank: 131072 is not a whole number from 0 to 131071"),
        ("step;loss\n1;2,5\n", "fields are separated by semicolons"),
        ("step\tloss\n1\t2\n", "fields are separated by tabs"),
        ('step,loss\n1,"2,5"\n', "row 1, column loss: '2,5' is not a number; decimals need a point"),
        ("time_s,step,loss\n1,1,2\n1.7e12,2,2\n", "row 2, column time_s: 1.7e+12 is too large for a time in seconds"),
        ('step,loss\n1,2\n2,"2\n3,2\n', "row 2, column loss: '2"),
        ("step,loss\n1,2\n2," + "7" * 6_000_000, "row 2: the line is longer than 4194304 bytes"),
    ],
)
def test_what_is_wrong_is_said_with_row_and_column(tmp_path: Path, text: str, said: str) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(ReplayError) as caught:
        replayed(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_text_far_down_in_a_large_file_is_named_by_its_row(tmp_path: Path) -> None:
    rows = 400_000
    lines = [f"{step},{step * 1e-3:.12f}" for step in range(rows)]
    lines[rows - 7] = f"{rows - 7},soon"
    with pytest.raises(ReplayError, match=rf"row {rows - 6}, column loss: 'soon'"):
        list(RowReader(open_source(csv(tmp_path, "step,loss\n" + "\n".join(lines) + "\n")), {}).rows())


def test_a_line_without_an_end_is_refused_before_it_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "endless.csv"
    with path.open("w") as file:
        file.write("step,loss\n1,2\n2,2\n3,")
        # Two gigabytes that take no room on the disk.
        file.truncate(2 * 1024**3)
    with pytest.raises(ReplayError, match="row 3: the line is longer than 4194304 bytes"):
        replayed(path)


def rows_before_what_is_wrong(path: Path) -> tuple[int, ReplayError]:
    count = 0
    try:
        for part in RowReader(open_source(path), {}).rows():
            count += len(part.records.step)
    except ReplayError as error:
        return count, error
    raise AssertionError(f"{path} was read to its end")


def test_a_packed_file_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    rows = b"".join(b"%d,%.9f\n" % (step, (step * 0.618) % 1) for step in range(9_000))
    path.write_bytes(gzip.compress(b"step,loss\n" + rows, mtime=0)[:-9_000])
    count, error = rows_before_what_is_wrong(path)
    assert "the file is truncated here" in str(error)
    assert 5_000 < count < 9_000
    assert error.row == count + 1


@pytest.mark.parametrize("sound", [1, 40_000, 150_000])
@pytest.mark.parametrize("wrong", ["1,2,3", "1,soon", "1,h\udcf6", '1,"'])
def test_all_rows_before_a_wrong_one_are_given(tmp_path: Path, sound: int, wrong: str) -> None:
    path = tmp_path / "job.csv"
    lines = "".join(f"{step},{step}.5\n" for step in range(sound))
    path.write_bytes(f"step,loss\n{lines}\n{wrong}\n1,2\n".encode(errors="surrogateescape"))
    count, error = rows_before_what_is_wrong(path)
    assert (count, error.row) == (sound, sound + 1)


CONTENT = b"step,loss\n1,2\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", bytes(range(256)) * 64, "neither CSV nor Parquet"),
        ("a.csv", bytes(100), "neither CSV nor Parquet"),
        ("a.csv", CONTENT.decode().encode("utf-16"), "is UTF-16; it must be UTF-8"),
        ("a.csv", b"PK\x03\x04rest", "is an archive or a workbook"),
        ("a.parquet", CONTENT, "no Parquet file"),
        ("a.parquet", b"", "no Parquet file"),
        ("a.csv", b"step,note\n1,a\n2,h\xf6\n", "row 2, column note: is not UTF-8"),
    ],
)
def test_what_is_no_file_of_ours_is_said_so(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=re.escape(said)):
        replayed(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mark.csv", b"\xef\xbb\xbf" + CONTENT),
        ("windows.csv", CONTENT.replace(b"\n", b"\r\n")),
        ("quoted.csv", b'"step","loss"\n"1","2"\n'),
        ("packed-without-saying-so.csv", gzip.compress(CONTENT, mtime=0)),
        ("packed.csv.bz2", bz2.compress(CONTENT)),
        ("plain-but-called.csv.gz", CONTENT),
        ("no-end.csv", CONTENT.strip()),
        ("spaces.csv", b'step , "loss"\n1, 2\n'),
        ("unnamed.csv", b",step,,loss\n0,1,7,2\n"),
    ],
)
def test_what_is_odd_but_sound_is_read(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    outcome = replayed(path)
    assert (outcome.rows, outcome.metrics, outcome.last_step) == (1, ["loss"], 1)


@pytest.mark.parametrize("called", ["table.csv", "table"])
def test_parquet_is_known_by_its_content(tmp_path: Path, called: str) -> None:
    path = tmp_path / called
    losses = pa.array([Decimal("1.5")] * 40)
    parquet.write_table(pa.table({"step": range(40), "loss": losses, "meta": [{"a": 1}] * 40}), path)
    outcome = replayed(path)
    assert (outcome.rows, outcome.metrics, outcome.left_out_columns) == (40, ["loss"], ["meta"])


@pytest.mark.parametrize("group_rows", [10_000, 10_000_000])
def test_no_more_of_a_parquet_file_is_held_than_is_being_read(tmp_path, monkeypatch, group_rows):
    path, rows = tmp_path / "job.parquet", 400_000
    numbers = np.random.default_rng(1).random(rows)
    table = pa.table({"step": np.arange(rows)} | {f"m{index}": numbers + index for index in range(9)})
    parquet.write_table(table, path, row_group_size=group_rows, compression="none", use_dictionary=False)
    del table, numbers
    monkeypatch.setattr(files, "BATCH_ROWS", 10_000)
    before = pa.total_allocated_bytes()
    held = max(pa.total_allocated_bytes() - before for _ in open_source(path).batches())
    assert path.stat().st_size > 30_000_000
    assert held < 12_000_000


def test_a_parquet_file_of_which_a_part_is_missing_or_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.parquet"
    parquet.write_table(pa.table({"step": range(1000), "loss": [1.0] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ReplayError, match="no Parquet file"):
        replayed(path)
    parquet.write_table(pa.table({"step": [[1]] * 4}), path)
    with pytest.raises(ReplayError, match="column step: of type list"):
        replayed(path)


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("host", pa.array([["a"]] * 4)),
        ("host", pa.array([b"\xff"] * 4)),
        ("attempt", pa.array([["a"]] * 4)),
        ("kind", pa.array([{"a": 1}] * 4)),
        ("fingerprint", pa.array([True, None, False, True])),
        ("fingerprint", pa.array([Decimal("1.5")] * 4)),
        ("fingerprint", pa.array([[1]] * 4)),
        ("nonfinite", pa.array([[1]] * 4)),
        ("nonfinite", pa.array([b"\xff"] * 4)),
    ],
)
def test_a_parquet_column_of_a_type_that_it_cannot_have_is_named(tmp_path: Path, column: str, cells: pa.Array) -> None:
    path = tmp_path / "job.parquet"
    parquet.write_table(pa.table({"step": range(4), column: cells}), path)
    with pytest.raises(ReplayError, match=rf"column {column}: of type "):
        replayed(path)


def test_a_text_of_a_parquet_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    wrong = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.int32([0, 1])), pa.py_buffer(b"\xff")])
    for column in ("host", "fingerprint", "loss", "nonfinite"):
        parquet.write_table(pa.table({"step": [0], column: wrong}), tmp_path / "job.parquet")
        with pytest.raises(ReplayError, match=f"column {column}: is not UTF-8"):
            replayed(tmp_path / "job.parquet")


@pytest.mark.parametrize("name", ["nonfinite", "nonfinite_first"])
@pytest.mark.parametrize(
    "cells",
    [
        pa.array(["0", "", "7"]),
        pa.array(["0.0", None, "7.0"]),
        pa.array([0.0, None, 7.0]),
        pa.array([0, None, 7], pa.uint8()),
        pa.array(["0", None, " 7"]).dictionary_encode(),
        pa.array(["False", None, "True"]),
        pa.array([False, None, True]),
    ],
)
def test_counts_are_read_as_the_numbers_that_they_are(tmp_path: Path, name: str, cells: pa.Array) -> None:
    path = tmp_path / "job.parquet"
    parquet.write_table(pa.table({"step": range(3), name: cells}), path)
    (rows,) = RowReader(open_source(path), {}).rows()
    exact = rows.records.exact[name]
    assert exact.present is not None
    last = 1 if str(cells[2]).lower() == "true" else 7
    assert (exact.values.tolist(), exact.present.tolist()) == ([0, 0, last], [True, False, True])


def test_a_parquet_file_in_which_bits_are_wrong_is_no_telemetry(tmp_path: Path) -> None:
    path = tmp_path / "job.parquet"
    write_job(Job(8, 200), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=r"job\.parquet, row 1: "):
        replayed(path)


def test_a_file_that_is_not_there_or_cannot_be_opened_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"nowhere\.csv: there is no such file"):
        replayed(tmp_path / "nowhere.csv")
    with pytest.raises(ReplayError, match="is a folder; name the files in it"):
        replayed(tmp_path)
    loop = tmp_path / "loop.csv"
    loop.symlink_to(loop)
    with pytest.raises(ReplayError, match=r"loop\.csv: "):
        replayed(loop)


def test_times_without_end_and_far_apart_take_no_time(tmp_path: Path) -> None:
    path = csv(tmp_path, "time_s,step,loss\n0,1,2\n9e10,2,2\ninf,3,2\n-1e11,4,2\n")
    assert replayed(path).rows == 4


def test_empty_fields_are_not_measured_and_nan_is_a_value(tmp_path: Path) -> None:
    rows = "".join(f"{step},{'' if step % 3 else 2.0}\n" for step in range(30))
    assert replayed(csv(tmp_path, "step,loss\n" + rows)).incidents == [[]]
    (incident,) = replayed(csv(tmp_path, "step,loss\n" + rows + "30,nan\n")).incidents[0]
    assert (str(incident.kind), incident.first.onset_step) == ("nonfinite", 30)


def test_mapped_columns_take_the_place_of_the_files_own(tmp_path: Path) -> None:
    path = csv(tmp_path, "it,step,raw\n" + "".join(f"{i},{100 - i},{2.0}\n" for i in range(50)))
    outcome = replayed(path, mapping="it=step,raw=loss")
    assert (outcome.first_step, outcome.last_step, outcome.metrics) == (0, 49, ["loss"])
    with pytest.raises(ReplayError, match="none to be read as 'grad_norm'"):
        replayed(path, mapping="norm=grad_norm,it=step")


def test_two_columns_on_one_name_are_refused(tmp_path: Path) -> None:
    path = csv(tmp_path, "global_step,worker,loss\n1,0,2\n")
    with pytest.raises(ReplayError, match="column worker: is to be read as 'step', and so is 'global_step'"):
        replayed(path, mapping="global_step=step,worker=step")


def test_texts_without_a_meaning_are_left_out_and_other_numbers_are_metrics(tmp_path: Path) -> None:
    outcome = replayed(csv(tmp_path, "step,gpu,note,power\n1,H100,,3\n2,H100,odd,4\n"))
    assert outcome.left_out_columns == ["gpu", "note"]
    assert outcome.metrics == ["power"]


def test_until_step_reads_no_further(tmp_path: Path) -> None:
    path = csv(tmp_path, "step,loss\n" + "".join(f"{i},2\n" for i in range(50)) + "50,broken\n")
    with pytest.raises(ReplayError):
        replayed(path)
    parts = csv(tmp_path, "step,loss\n" + "".join(f"{i},2\n" for i in range(50)), "whole.csv")
    outcome = replayed(parts, until_step=20)
    assert (outcome.rows, outcome.last_step) == (21, 20)


def test_files_of_one_rank_each_are_the_same_as_one_file(tmp_path: Path) -> None:
    head = "time_s,step,rank,busy_s,loss\n"
    lines = [[f"{step + rank / 100},{step},{rank},{1 + rank / 10},2\n" for step in range(40)] for rank in range(3)]
    alone = [csv(tmp_path, head + "".join(own), f"rank{rank}.csv") for rank, own in enumerate(lines)]
    together = csv(tmp_path, head + "".join("".join(of_step) for of_step in zip(*lines, strict=True)))
    apart, whole = replayed(*alone), replayed(together)
    assert (apart.rows, apart.frames, apart.ranks) == (whole.rows, whole.frames, whole.ranks) == (120, 40, 3)
    assert not apart.left_out


def test_a_restart_in_files_of_one_rank_each_is_one_restart(tmp_path: Path) -> None:
    head = "time_s,step,rank,attempt,busy_s\n"
    # The second rank is half a second later than the first, and so in two attempts at once with it.
    rows = [
        "".join(f"{step + rank / 2},{step},{rank},a.0,1\n" for step in range(40))
        + "".join(f"{step + 20 + rank / 2},{step},{rank},b.0,1\n" for step in range(20, 60))
        for rank in range(2)
    ]
    alone = [csv(tmp_path, head + own, f"rank{rank}.csv") for rank, own in enumerate(rows)]
    outcome = replayed(*alone)
    assert (outcome.rows, outcome.frames, outcome.last_step) == (160, 80, 59)
    assert not outcome.left_out


def test_rows_of_an_attempt_that_is_over_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = "".join(f"{step},first,2\n" for step in range(30)) + "".join(f"{step},next,2\n" for step in range(20, 50))
    outcome = replayed(csv(tmp_path, "step,attempt,loss\n" + rows + "30,first,9\n"))
    assert (outcome.rows, outcome.frames, outcome.last_step, outcome.incidents) == (60, 60, 49, [[]])
    assert outcome.left_out == {"old_attempt_rows": 1}


def test_ranks_one_after_the_other_in_one_file_are_refused(tmp_path: Path) -> None:
    rows = "".join(f"{step},{rank},1\n" for rank in range(2) for step in range(200))
    with pytest.raises(ReplayError, match="row 201, column step: 0 after 199"):
        replayed(csv(tmp_path, "step,rank,busy_s\n" + rows))
