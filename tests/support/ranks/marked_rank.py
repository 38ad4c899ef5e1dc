"""A rank whose steps end within the mark that torch sets around an optimizer's step: prints how many were traced."""

import json
import tempfile
import threading
from pathlib import Path

import torch
from torch.profiler import record_function

from rankwatch import layout
from rankwatch.layout import Directive
from rankwatch.loop.tracer import STEPS_MAX
from tests.support.ranks.recorders import Rank


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(Path(folder))
        rank._put(Directive("", "l.0", "closed", trace="cmd_1", trace_steps=STEPS_MAX))
        model = torch.nn.Linear(4, 4)
        rank.watch.begin()
        for _ in range(2 * STEPS_MAX + 1):
            with record_function("Optimizer.step#SGD.step"):
                for _ in range(50):
                    model(torch.ones(2, 4))
                rank.watch.end()
                rank.watch.begin()
            for _ in range(50):
                model(torch.ones(2, 4))
        for thread in threading.enumerate():
            if thread.name == "rankwatch trace":
                thread.join()
        answer = json.loads(Path(layout.trace_path(str(rank.recorder.path))).read_text())
        print(len(answer["step_times_s"]), "steps")


if __name__ == "__main__":
    main()
