"""The demo's output: a live panel in a terminal or one line for each event, and a table at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rankwatch_service.demo.script import SceneCheck, SceneResult

LINES_SHOWN = 10
"""Events shown on the live panel."""
STEPS_BETWEEN_LINES = 100
"""Steps between two lines of progress without a terminal."""
MARKS = {
    "waiting": ("·", "dim"),
    "armed": ("◌", "yellow"),
    "injected": ("●", "red"),
    "opened": ("●", "red"),
    "acting": ("●", "magenta"),
    "recovering": ("◐", "cyan"),
    "recovered": ("✔", "green"),
}


class DemoView:
    """Shows the demo while it runs, live if `console` is a terminal."""

    def __init__(self, console: Console, outcomes: Sequence[SceneResult]) -> None:
        self.console = console
        self._outcomes = outcomes
        self._lines: deque[str] = deque(maxlen=LINES_SHOWN)
        self._progress = ""
        self._printed_step = 0
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._panel, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def headline(self, text: str) -> None:
        """Print a text above everything else."""
        self.console.print(text)

    def event(self, text: str) -> None:
        """Show an event."""
        self._lines.append(text)
        if not self.console.is_terminal:
            self.console.print(text)

    def progress(self, job: Mapping[str, Any], attempt: str, step: int, step_time_s: float) -> None:
        """Show the progress of training. `job` is the job as the service reports it, empty before it knows the job."""
        loss = job.get("loss")
        shown = f"loss {loss:.3f}" if isinstance(loss, float) else f"loss {loss or '–'}"
        rate = f"{1 / step_time_s:.1f} steps/s" if step_time_s else "starting"
        self._progress = f"{attempt or 'launching'}   step {max(step, 0)}   {shown}   {rate}   {job.get('state', '')}"
        if not self.console.is_terminal and step >= self._printed_step + STEPS_BETWEEN_LINES:
            self._printed_step = step
            self.console.print(f"training: {self._progress}")
        self._printed_step = min(self._printed_step, max(step, 0))

    def _panel(self) -> Group:
        scenes = Table.grid(padding=(0, 2))
        for outcome in self._outcomes:
            mark, style = MARKS.get(outcome.state, ("✘", "bold red"))
            scenes.add_row(Text(mark, style), outcome.scene.title, Text(outcome.state, style))
        events = Text("\n".join(self._lines), style="dim")
        return Group("", Text(self._progress, style="bold"), "", scenes, "", events)


def table(outcomes: Sequence[SceneResult]) -> Table:
    """The results, one row for each fault."""
    result = Table(title="Injected faults and their results", title_justify="left", box=SIMPLE)
    for name in (
        "fault",
        "opened",
        "named",
        "found after",
        "webhook",
        "action",
        "applied at step",
        "resumed from",
        "recovered",
    ):
        result.add_column(name)
    for outcome in outcomes:
        incident = outcome.incident
        found = []
        if outcome.found_steps is not None:
            found.append("same step" if outcome.found_steps == 0 else f"{outcome.found_steps} steps")
        if outcome.found_s is not None:
            found.append(f"{outcome.found_s:.1f} s")
        applied = "" if outcome.applied_step is None else str(outcome.applied_step)
        if outcome.applied_s is not None:
            applied += f" ({outcome.applied_s:.2f} s)"
        result.add_row(
            f"{outcome.scene.title}, rank {outcome.scene.rank}",
            str(incident.get("kind", "nothing")),
            ", ".join(f"rank {rank}" for rank in incident.get("ranks", [])),
            ", ".join(found),
            "" if outcome.noticed_s is None else f"{outcome.noticed_s:.2f} s",
            outcome.scene.action,
            applied,
            "" if outcome.resumed_step is None else f"step {outcome.resumed_step}",
            "no" if outcome.recovered_s is None else f"after {outcome.recovered_s:.0f} s",
        )
    return result


def verdict(console: Console, results: Sequence[SceneCheck]) -> None:
    """Print every check and mark those that failed."""
    for check in results:
        mark = "[green]✔[/]" if check.right else "[bold red]✘[/]"
        console.print(
            f"{mark} {escape(check.what)}" + (f" [dim]({escape(check.measured)})[/]" if check.measured else "")
        )
