"""The thresholds of detectors that people may change while a job runs, their ranges, and the profiles.

All other figures are constants of the detectors' configurations. A setting is listed only if a detector with another
value can go on from the snapshot of the one before: it decides what is reported and not how the state is laid out, so
no baseline begins anew. Its name is its path in `CatalogueConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rankwatch_detectors.catalogue import CatalogueConfig

_OF_METRICS: Final = frozenset(("straggler", "slowdown", "loss"))
"""Detectors with a setting that judge step metrics alone."""


class Profile(StrEnum):
    """A value for every setting: `standard` has the defaults, `quiet` reports less, `sensitive` more."""

    QUIET = "quiet"
    STANDARD = "standard"
    SENSITIVE = "sensitive"


@dataclass(frozen=True, slots=True)
class TunableSetting:
    """One setting: what it means, in which range it may be, and its values in the profiles."""

    name: str
    unit: str
    low: float
    high: float
    quiet: float
    sensitive: float
    meaning: str

    @property
    def default(self) -> float:
        """Its value in the profile `standard`."""
        value: float = _value(CatalogueConfig(), self.name)
        return value

    @property
    def previewable(self) -> bool:
        """Whether a replay of stored series shows what another value changes."""
        return self.name.partition(".")[0] in _OF_METRICS

    def of(self, profile: Profile) -> float:
        """Its value in a profile."""
        values = {Profile.QUIET: self.quiet, Profile.SENSITIVE: self.sensitive}
        return values.get(profile, self.default)

    def checked(self, value: Any) -> float:
        """The value.

        Raises:
            ValueError: it is not a number in the range; the text says which are.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise ValueError(
                f"{self.name} must be a number from {self.low:g} to {self.high:g} ({self.unit}), not {value!r}"
            )
        return float(value)


_RATIO: Final = "ratio to the usual value"
_SECONDS: Final = "seconds"
_STEPS: Final = "usual steps"
_LOST: Final = "Silence of a host until it is reported; three times as long while all hosts are silent."

SETTINGS: Final[Mapping[str, TunableSetting]] = {
    setting.name: setting
    for setting in (
        TunableSetting(
            "straggler.wall.ratio_min", _RATIO, 1.005, 5, 1.05, 1.015, "Least delay that is reported, by wall time."
        ),
        TunableSetting("slowdown.ratio_min", _RATIO, 1.005, 5, 1.08, 1.02, "Least slowdown that is reported."),
        TunableSetting(
            "loss.level.ratio_jump", "ratio to the level", 1.05, 1000, 3, 1.7, "Loss that is reported at once."
        ),
        TunableSetting("hang.steps", _STEPS, 1, 1000, 6, 2.5, "A standstill in a step is reported after so many."),
        TunableSetting("hang.floor_s", _SECONDS, 2, 3_600, 15, 4, "No standstill is reported earlier."),
        TunableSetting("rank_lost.silent_s", _SECONDS, 3, 3_600, 30, 8, "Silence that counts as absence."),
        TunableSetting("telemetry_lost.silent_s", _SECONDS, 3, 3_600, 60, 8, _LOST),
        TunableSetting(
            "checkpoint_overdue.factor", "usual gaps", 1.1, 100, 5, 2, "Gaps after which a save is overdue."
        ),
    )
}
"""By name, in the order in which people read them."""


def checked(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings as they will be used.

    Raises:
        ValueError: a setting does not exist, or its value is out of its range; the text says what is allowed.
    """
    for name in settings:
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name!r}; {_allowed(name)}")
    return {name: SETTINGS[name].checked(value) for name, value in settings.items()}


def profile_of(name: Any) -> Profile:
    """The profile of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in list(Profile):
        raise ValueError(f"there is no profile {name!r}; there are {', '.join(Profile)}")
    return Profile(name)


def config_of(profile: Profile, settings: Mapping[str, float]) -> CatalogueConfig:
    """The configuration of a profile with some settings of their own.

    Args:
        profile: gives every setting that is not in `settings`.
        settings: by name, as `checked` gave them.
    """
    config = CatalogueConfig()
    for name, setting in SETTINGS.items():
        value = settings.get(name, setting.of(profile))
        if value != setting.default:
            config = _with(config, name.split("."), value)
    return config


def _allowed(name: str) -> str:
    detectors = list(dict.fromkeys(one.partition(".")[0] for one in SETTINGS))
    detector = name.partition(".")[0]
    if detector not in detectors:
        return f"the detectors with settings are {', '.join(detectors)}"
    return f"{detector} has {', '.join(one for one in SETTINGS if one.partition('.')[0] == detector)}"


def _value(config: CatalogueConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _with(config: Any, path: Sequence[str], value: float) -> Any:
    first, *rest = path
    return dataclasses.replace(config, **{first: _with(getattr(config, first), rest, value) if rest else value})
