from pathlib import Path

from rankwatch_service.demo.journal import JournalReader


def test_each_line_is_read_once_and_an_unfinished_one_waits(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path)
    file = tmp_path / "job-0-3"
    file.write_text("job-0.0 7 1000 42\njob-0.0 8 20")
    assert [(entry.rank, entry.step, entry.weights) for entry in reader.new_entries()] == [(3, 7, 42)]
    assert list(reader.new_entries()) == []
    with file.open("a") as more:
        more.write("00 43\n")
    assert [(entry.attempt, entry.step, entry.unix_ns) for entry in reader.new_entries()] == [("job-0.0", 8, 2000)]


def test_a_folder_that_is_not_there_yet_has_no_entries(tmp_path: Path) -> None:
    assert list(JournalReader(tmp_path / "later").new_entries()) == []
