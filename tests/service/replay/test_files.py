"""What is wrong with a file is said with its row and column; what is odd but sound is read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_service.replay.layout import ReplayError, parse_mapping
from rankwatch_service.replay.rows import RowReader
from rankwatch_service.replay.run import Outcome, replay
from rankwatch_service.replay.sources import open_source


def replayed(*paths: Path, mapping: str = "", until_step: int | None = None) -> Outcome:
    sources = [open_source(path) for path in paths]
    return replay(
        sources,
        parse_mapping(mapping),
        [CatalogueConfig()],
        job="test",
        until_step=until_step,
        progress=lambda done, total: None,
    )


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
        ("step,loss\n", "there are no rows"),
        ("", "the file is empty"),
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
    with pytest.raises(ReplayError, match="row 3: at or after this row a line is longer than 4194304 bytes"):
        replayed(path)


@pytest.mark.parametrize("name", ["cut.parquet", "cut.csv.gz"])
def test_a_file_that_is_cut_off_is_an_error_and_no_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"step,loss\n" + b"1,2\n" * 10_000)[:-20])
    else:
        parquet.write_table(pa.table({"step": range(1000), "loss": [1.0] * 1000}), path)
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ReplayError, match=name):
        replayed(path)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="there is no such file"):
        replayed(tmp_path / "nowhere.csv")


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


def test_ranks_one_after_the_other_in_one_file_are_refused(tmp_path: Path) -> None:
    rows = "".join(f"{step},{rank},1\n" for rank in range(2) for step in range(200))
    with pytest.raises(ReplayError, match="row 201, column step: 0 after 199"):
        replayed(csv(tmp_path, "step,rank,busy_s\n" + rows))


def test_a_restart_repeats_steps_under_another_attempt(tmp_path: Path) -> None:
    rows = "".join(f"{step},first,2\n" for step in range(30)) + "".join(f"{step},second,2\n" for step in range(20, 50))
    outcome = replayed(csv(tmp_path, "step,attempt,loss\n" + rows))
    assert (outcome.frames, outcome.last_step, outcome.incidents) == (60, 49, [[]])
