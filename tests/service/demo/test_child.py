import signal
import sys
import time

import pytest

from rankwatch_service.demo.services.child import ChildError, end, free_port, started

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_child_has_started_when_it_answers(tmp_path):
    log = tmp_path / "log"
    child = started(python(STUBBORN), log, lambda: log.read_text() == "up\n", 60.0)
    assert child.poll() is None
    end(child, 0.1)
    assert child.returncode == -signal.SIGKILL


def test_a_child_that_does_as_it_is_asked_is_not_killed(tmp_path):
    child = started(python("import time; time.sleep(60)"), tmp_path / "log", lambda: True, 60.0)
    end(child, 60.0)
    assert child.returncode == -signal.SIGTERM
    end(child, 60.0)


def test_the_last_words_of_a_child_that_ends_are_told(tmp_path):
    with pytest.raises(ChildError, match="no such option"):
        started(python("raise SystemExit('no such option')"), tmp_path / "log", lambda: False, 60.0)


def test_a_child_that_does_not_answer_in_time_is_ended(tmp_path):
    began_s = time.monotonic()
    with pytest.raises(ChildError):
        started(python("import time; time.sleep(60)"), tmp_path / "log", lambda: False, 0.2)
    assert time.monotonic() - began_s < 30


def test_a_port_that_was_free_is_told():
    assert 1024 <= free_port() <= 65535
