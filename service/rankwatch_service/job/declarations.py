"""How often a job may declare that it has changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rankwatch_detectors.base import Occurrence

DECLARATIONS_MAX: Final = 32
"""Changes that a job may declare at once ..."""

DECLARATION_STEPS: Final = 256
"""... and one more after as many steps. With each a curve begins anew, and is not judged until it is learned."""

REMEMBERED_MAX: Final = 64
"""Changes that are known again when another rank declares them too."""


class Declarations:
    """The changes of one job. Memory: `REMEMBERED_MAX` texts."""

    def __init__(self) -> None:
        self._left = float(DECLARATIONS_MAX)
        self._step = 0
        self._known: dict[str, bool] = {}

    def allow(self, declared: Occurrence, last_step: int) -> bool:
        """Whether a change is heeded; one that several ranks declare counts once.

        Args:
            declared: the event.
            last_step: the newest step of the attempt; -1: none yet.
        """
        name = f"{declared.attempt} {declared.step} {declared.fields.get('what')}"[:1_000]
        if name in self._known:
            return self._known[name]
        if last_step >= 0:
            self._left = min(self._left + max(last_step - self._step, 0) / DECLARATION_STEPS, DECLARATIONS_MAX)
            self._step = last_step  # a rollback takes nothing away
        allowed = self._left >= 1.0
        self._left -= allowed
        self._known[name] = allowed
        if len(self._known) > REMEMBERED_MAX:
            del self._known[next(iter(self._known))]
        return allowed

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {"left": self._left, "step": self._step, "known": [[name, ok] for name, ok in self._known.items()]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Declarations:
        """The object that gave this state."""
        declarations = cls()
        declarations._left, declarations._step = state["left"], state["step"]
        declarations._known = dict(state["known"])
        return declarations
