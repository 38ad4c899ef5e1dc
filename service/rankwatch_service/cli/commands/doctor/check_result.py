"""The result of one check of `rankwatch doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check; the verdict is ok, note (optional) or finding."""

    name: str
    verdict: str
    detail: str
