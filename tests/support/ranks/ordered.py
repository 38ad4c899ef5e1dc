"""A training process of its own rank: what it records, and orders to it as the host's agent writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rankwatch import layout
from rankwatch.layout import Directive
from rankwatch.reader import RingReader, StepEntry

WITHIN_S = 60.0
STEP_S = 0.005
"""Added to each step of a training that is given an order, so that it arrives in time."""
MARGIN_STEPS = 50


class Recorded:
    """What this process has recorded, and the way to order something of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {
            "job": "j",
            "agent": False,
            "stack_signal": None,
            "env": {"RANKWATCH_DIR": str(folder), "RANKWATCH_LAUNCH": "l"},
        }
        self._pool = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def entries(self) -> list[Any]:
        entries = []
        for path in sorted(self.folder.glob("*.ring")):
            reader = RingReader(str(path))
            entries += reader.poll().entries
            reader.close()
        return entries

    @property
    def steps(self) -> list[StepEntry]:
        return [entry for entry in self.entries if isinstance(entry, StepEntry)]

    def values(self, name: str) -> list[Any]:
        return [step.values.get(name) for step in self.steps]

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [{"step": one.step, **one.fields} for one in self.entries if getattr(one, "kind", None) == kind]

    def relaunched(self, location: Path, step: int) -> None:
        """From now on this is a relaunch, for which a checkpoint is advised."""
        advice = {"job": "j", "checkpoint": f"local:l.0:{step}", "location": str(location), "step": step}
        Path(layout.resume_path(str(self.folder), "j")).write_text(json.dumps(advice))
        self.options["env"] |= {"TORCHELASTIC_RESTART_COUNT": "1"}

    def order(self, action: str, after_step: int, **fields: Any) -> Future[str]:
        """Hold, do, go, as soon as a step has ended; the result is what the rank answered when it had done it."""
        return self._pool.submit(self._order, action, after_step, fields)

    def _order(self, action: str, after_step: int, fields: dict[str, Any]) -> str:
        path = until(lambda: next(iter(self.folder.glob("*.ring")), None))
        reader = until(lambda: opened(path))
        until(lambda: reader.progress().step > after_step)
        hold_step = reader.progress().step + MARGIN_STEPS
        directive = Directive("o", "l.0", "hold", action, hold_step, lease_s=WITHIN_S, **fields)
        detail = ""
        for phase, answer in (("hold", "held"), ("do", "done"), ("go", "went")):
            reader.directives.write(directive._replace(phase=phase))
            if (phase, action) == ("go", "stop"):
                break
            until(lambda answer=answer: reader.progress().answer.answer in (answer, "failed", "passed"))
            detail = reader.progress().answer.detail if phase == "do" else detail
            assert reader.progress().answer.answer == answer, reader.progress().answer
        reader.close()
        return detail


def opened(path: Path) -> RingReader | None:
    try:
        return RingReader(str(path), writable=True)
    except ValueError:
        return None  # it is still being made


def until(condition: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)
    return found
