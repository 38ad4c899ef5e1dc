"""The end of what a rank prints is kept as it is printed, and read after its death, wherever it went."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from rankwatch import layout
from rankwatch.agent.rank_output import HUNG_LINES_MAX, RankOutput
from rankwatch.agent.ranks import LocalRank
from rankwatch.output.tail import TAIL_BYTES, OutputTail, kept_lines
from tests.support.ranks.recorders import UNIX_NS, a_recorder, local_rank

SCRIPT = """
    import os, sys
    from rankwatch.output.tail import keep_output
    keep_output(sys.argv[1])
"""


def run(path: Path, script: str, *, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(SCRIPT) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", program, str(path)], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


def texts(path: Path) -> list[str]:
    return [line.text for line in kept_lines(path)]


def test_what_is_printed_reaches_its_stream_and_the_file_also_of_a_process_that_is_killed(tmp_path):
    done = run(
        tmp_path / "a.output",
        """
        print("step 1", flush=True)
        print("half", end=" ", flush=True)
        sys.stderr.write("of a line\\n")
        print("lost", end="", flush=True)
        os.kill(os.getpid(), 9)
        """,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("step 1\nhalf lost", "of a line\n", -9)
    assert texts(tmp_path / "a.output") == ["step 1", "half of a line"]


def test_a_traceback_and_the_output_of_forked_processes_are_kept_with_their_times(tmp_path):
    done = run(
        tmp_path / "a.output",
        """
        if (child := os.fork()) == 0:
            print("from a worker")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        raise ValueError("bad batch")
        """,
    )
    lines = kept_lines(tmp_path / "a.output")
    assert done.returncode == 1
    assert lines[0].text == "from a worker"
    assert lines[-1].text == "ValueError: bad batch" == done.stderr.splitlines()[-1]
    assert all(line.unix_ns > 0 for line in lines)


def test_a_stream_that_the_script_has_put_before_it_is_kept_once(tmp_path):
    done = run(
        tmp_path / "a.output",
        """
        class Tee:
            def write(self, text):
                return sys.__stdout__.write(text)
            def flush(self):
                sys.__stdout__.flush()
        sys.stdout = Tee()
        print("once")
        """,
    )
    assert done.stdout == "once\n"
    assert texts(tmp_path / "a.output") == ["once"]


def test_the_streams_stay_what_they_are(tmp_path):
    done = run(
        tmp_path / "a.output",
        """
        keep_output(sys.argv[1])  # a second watch of this process
        print(type(sys.stdout).__name__, sys.stdout.fileno(), sys.stdout.isatty(), sys.stderr.write("\\N{SNOWMAN}"))
        """,
    )
    assert done.stdout == "TextIOWrapper 1 False 1\n"


def test_room_for_all_of_it_is_reserved_before_anything_is_written(tmp_path):
    OutputTail(str(tmp_path / "a.output"))
    assert os.stat(tmp_path / "a.output").st_blocks * 512 >= TAIL_BYTES


def test_only_the_end_is_kept_and_a_line_that_lost_its_beginning_is_left_out(tmp_path):
    tail = OutputTail(str(tmp_path / "a.output"))
    for number in range(20_000):
        tail.keep(f"line {number}\n")
    found = texts(tmp_path / "a.output")
    assert found[-1] == "line 19999"
    assert found == [f"line {number}" for number in range(20_000 - len(found), 20_000)]
    assert TAIL_BYTES * 0.9 < sum(len(line) + 1 for line in found) <= TAIL_BYTES
    tail.keep("x" * 3 * TAIL_BYTES + "\nend\n")
    assert texts(tmp_path / "a.output")[-1] == "end"


@pytest.mark.parametrize(
    "content", [b"", b"\0" * (TAIL_BYTES + 16), b"RNKWTAIL" + b"\xff" * (TAIL_BYTES + 8), b"RNKWTAIL"]
)
def test_a_file_that_is_damaged_or_of_something_else_has_no_harm_in_it(tmp_path, content):
    (tmp_path / "a.output").write_bytes(content)
    kept_lines(tmp_path / "a.output")
    assert kept_lines(tmp_path / "none") == []


@pytest.fixture
def ranks_that_write(tmp_path):
    """Ranks, each with a file that it declares."""
    with ExitStack() as stack:

        def make(*outputs: str) -> list[LocalRank]:
            recorders = [
                a_recorder(tmp_path, rank=number, local_rank=number, rank_log=str(tmp_path / output))
                for number, output in enumerate(outputs)
            ]
            return [stack.enter_context(local_rank(recorder)) for recorder in recorders]

        yield make


def test_a_rank_s_own_log_says_why_it_ended(tmp_path, ranks_that_write):
    (rank,) = ranks_that_write("0.err")
    (tmp_path / "0.err").write_text("step 1\nRuntimeError: CUDA error: an illegal memory access was encountered\n")
    output = RankOutput()
    output.meet(rank)
    reported = output.why_ended(rank, None, UNIX_NS)["output"]
    assert (reported["role"], reported["pattern"]) == ("root", "cuda_access")
    assert reported["lines"][0] == "step 1"
    assert output.last_lines(rank)[-1] == reported["line"]
    (tmp_path / "0.err").write_text("step 1\nconfiguration: no data for epoch 3\n")
    reported = output.why_ended(rank, None, UNIX_NS)["output"]
    assert reported == {"lines": ["step 1", "configuration: no data for epoch 3"], "files": [str(tmp_path / "0.err")]}
    output.forget(rank)
    assert output.why_ended(rank, None, UNIX_NS) == {}


def test_in_a_file_of_several_ranks_a_line_belongs_to_the_rank_that_it_names(tmp_path, ranks_that_write):
    ranks = ranks_that_write("all.err", "all.err", "all.err")
    output = RankOutput()
    (tmp_path / "all.err").write_text(
        "[rank1]: ValueError: bad batch\n2: RuntimeError: Connection reset by peer\n"
        "terminate called after throwing an instance of 'std::bad_alloc'\n"
    )
    for order, rank in zip((0, 1, 2), ranks, strict=True):
        rank.exit_order = order
        output.meet(rank)
    said = [output.why_ended(rank, None, UNIX_NS).get("output", {}).get("line") for rank in ranks]
    assert said == [
        "terminate called after throwing an instance of 'std::bad_alloc'",  # of nobody else: of the first that ended
        "ValueError: bad batch",
        "RuntimeError: Connection reset by peer",
    ]


def test_only_regular_files_are_read_and_of_a_rank_that_stands_still_the_last_lines(tmp_path, ranks_that_write):
    os.mkfifo(tmp_path / "pipe")
    blocked, rank = ranks_that_write("pipe", "1.log")
    (tmp_path / "1.log").write_text("".join(f"step {number}\n\n" for number in range(30)))
    output = RankOutput()
    output.meet(blocked)
    output.meet(rank)
    assert output.last_lines(blocked) == []
    assert output.last_lines(rank) == [f"step {number}" for number in range(30 - HUNG_LINES_MAX, 30)]
    assert layout.output_path("/r/a.ring") == "/r/a.output"
