import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch import layout
from rankwatch.layout import Answer, Cell, Directive

AREA = 1_024


def a_cell() -> tuple[bytearray, Cell]:
    memory = bytearray(AREA)
    return memory, Cell(memoryview(memory), 0, AREA)


def test_regions_do_not_overlap_and_the_file_is_two_megabytes():
    assert layout.FILE_BYTES == 2 * 1024 * 1024
    assert layout.PROGRESS_OFFSET + 8 * layout.PROGRESS_WORDS <= layout.ANSWER_OFFSET
    names_bytes = layout.NAMES_MAX * layout.NAME_ROW_BYTES
    assert layout.METRICS_OFFSET + names_bytes <= layout.PHASES_OFFSET
    assert layout.PHASES_OFFSET + names_bytes <= layout.IDENTITY_OFFSET < layout.RING_OFFSET
    assert layout.RING_OFFSET + layout.RING_ENTRIES * layout.ENTRY_BYTES == layout.FILE_BYTES
    assert layout.RING_ENTRIES >= 4_096


def test_parts_of_an_entry_do_not_overlap():
    assert layout.ENTRY.size <= layout.PHASE_INDEX_OFFSET
    assert layout.PHASE_INDEX_OFFSET + layout.PHASES_PER_STEP_MAX <= layout.PHASE_TIMES_OFFSET
    assert layout.PHASE_TIMES_OFFSET + 4 * layout.PHASES_PER_STEP_MAX <= layout.VALUES_OFFSET
    assert layout.VALUES_OFFSET + 8 * layout.PAGE_VALUES == layout.ENTRY_BYTES
    assert layout.NOTE_OFFSET + layout.NOTE_PART_BYTES == layout.ENTRY_BYTES


def test_a_cell_that_was_never_written_is_empty():
    assert a_cell()[1].read() is None


def test_a_cell_gives_back_the_newest_content_and_counts_writes():
    _, cell = a_cell()
    for number in range(1, 6):
        cell.write(b"x" * number)
        assert cell.read() == (number, b"x" * number)


@given(st.integers(0, AREA - 1), st.integers(1, 255))
def test_whatever_byte_of_the_newest_copy_is_torn_the_older_one_is_read_and_never_a_mixture(at, flip):
    memory, cell = a_cell()
    cell.write(b"older" * 20)
    cell.write(b"newer" * 20)
    if at >= 8:  # the first word says which is newest, and is written by one store
        memory[at] ^= flip
    assert cell.read() in [(1, b"older" * 20), (2, b"newer" * 20)]


def test_a_write_that_was_cut_off_leaves_the_content_before_it():
    memory, cell = a_cell()
    cell.write(b"first")
    cell.write(b"second")
    before = bytes(memory)
    cell.write(b"third")
    after = bytes(memory)
    for cut in range(8, AREA):  # all but the word, which is stored last
        memory[:] = before[:8] + after[8:cut] + before[cut:]
        assert cell.read() == (2, b"second")


def test_content_that_does_not_fit_is_refused_and_the_old_one_stays():
    _, cell = a_cell()
    cell.write(b"a" * cell.capacity_bytes)
    with pytest.raises(ValueError, match="do not fit"):
        cell.write(b"b" * (cell.capacity_bytes + 1))
    assert cell.read() == (1, b"a" * cell.capacity_bytes)


def test_directives_and_answers_survive_their_cells():
    directive = Directive("o1", "l.0", "do", "rollback", 7, 120.0, "memory:l.0:5", "/ü/x", 5, 1)
    assert layout.decode_directive(layout.encode_directive(directive)) == directive
    answer = Answer("o1", "done", 5, 1, -(2**63), "memory:l.0:5")
    assert layout.decode_answer(layout.encode_answer(answer)) == answer


def test_a_directive_of_a_newer_agent_is_read_without_its_new_fields():
    payload = b'{"order":"o","attempt":"a","phase":"hold","tomorrow":1}'
    assert layout.decode_directive(payload) == Directive("o", "a", "hold")


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"\xff\xfe", b"1"])
def test_what_is_no_directive_is_a_value_error(payload):
    with pytest.raises(ValueError):
        layout.decode_directive(payload)


@pytest.mark.parametrize("letter", ["e", "é", "😀", "\n", '"', "\udc80"])
def test_the_longest_answer_fits_its_cell(letter):
    cell = layout.answer_cell(memoryview(bytearray(layout.FILE_BYTES)))
    cell.write(layout.encode_answer(Answer("o" * 64, "released", 2**47, 65_535, -(2**63), letter * 5_000)))
    answer = layout.decode_answer(cell.read()[1])
    assert (answer.answer, len(answer.detail)) == ("released", layout.DETAIL_CHARACTERS_MAX)


def test_jobs_whose_names_look_alike_get_different_files():
    stems = {layout.file_stem(name) for name in ("a/b", "a_b", "a b", "a" * 300, "a" * 301, "")}
    assert len(stems) == 6
    assert all("/" not in stem and len(stem) < 64 for stem in stems)
