"""Where a rank stands, read from what faulthandler writes."""

import faulthandler
import re
import tempfile
import threading

import pytest

from rankwatch.agent.hang_stacks import PLACE_CHARS_MAX, StackPlace, place_of

TRAINING = """Current thread 0x00007f0000000010 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/home/me/train.py", line 41 in train
  File "/home/me/train.py", line 60 in <module>
"""
LOGGER = """Thread 0x00007f0000000020 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

"""
ENGINE = """Thread 0x00007f0000000030 (most recent call first):
  File "/home/me/hooks.py", line 7 in after_backward

"""


def place(stack: str, thread: int = 0x7F0000000010) -> StackPlace:
    found = place_of(stack, thread)
    assert found is not None
    return found


def test_the_place_is_told_by_the_innermost_frame_and_that_of_the_jobs_own_code() -> None:
    assert place(TRAINING).text == "all_reduce (distributed_c10d.py:2810), from train (train.py:41)"
    own = TRAINING.replace("/usr/lib/python3.11/site-packages/torch", "/home/me")
    assert place(own).text == "all_reduce (distributed_c10d.py:2810)"
    assert place(own.replace("in all_reduce", "in " + "x" * 500)).text[-1] == "x"
    assert len(place(own.replace("in all_reduce", "in " + "x" * 500)).text) == PLACE_CHARS_MAX


@pytest.mark.parametrize(
    "same",
    [
        TRAINING.replace("7f0000000010", "7fabcdef0010"),
        LOGGER + TRAINING,
        LOGGER + LOGGER.replace("20 (", "21 (").replace("171", "180") + TRAINING,
    ],
    ids=["another address", "a logger", "two loggers"],
)
def test_addresses_and_threads_that_serve_make_no_difference(same: str) -> None:
    number = int(re.findall(r"0x(\w+)", same)[-1], 16)
    assert place(same, number) == place(TRAINING)


@pytest.mark.parametrize(
    "other",
    [TRAINING.replace("41", "42"), TRAINING.replace("in train\n", "in evaluate\n"), ENGINE + TRAINING],
    ids=["line", "function", "Python code that autograd runs"],
)
def test_another_frame_is_another_place(other: str) -> None:
    assert place(other).digest != place(TRAINING).digest


def test_a_thread_of_python_counts_if_it_is_the_one_that_trains() -> None:
    idle = TRAINING.replace("Current thread", "Thread")
    assert place(LOGGER + idle, 0x7F0000000020).text == "get (queue.py:171)"
    assert place(LOGGER + idle, 1).text == place(TRAINING).text, "else the oldest thread, which is listed last"


@pytest.mark.parametrize("text", ["", "no stack\n", "Thread 0x10 (most recent call first):\n  <no Python frame>\n"])
def test_a_text_without_frames_is_no_place(text: str) -> None:
    assert place_of(text, 0x10) is None


def test_what_this_python_writes_is_understood() -> None:
    met, over = threading.Event(), threading.Event()

    def wait() -> None:
        met.set()
        over.wait()

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    met.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    over.set()
    for thread in threads:
        thread.join()
    here = threading.get_ident()
    assert place(text, here).text.startswith("test_what_this_python_writes_is_understood (test_stack_text.py:")
    assert "from wait (test_stack_text.py:" in place(text, threads[0].ident or 0).text
