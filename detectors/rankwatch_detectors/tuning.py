"""The settings of detectors that people may change while a job runs, their ranges, and the profiles.

A setting is listed only if a detector with another value can go on from the snapshot of the one before: it decides what
is told and not how the state is laid out, so no baseline begins anew. Its name is its path in `CatalogueConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rankwatch_detectors.base import Kind
from rankwatch_detectors.catalogue import CatalogueConfig

PREVIEWABLE: Final = frozenset(
    (
        Kind.NONFINITE,
        Kind.LOSS_SPIKE,
        Kind.LOSS_DIVERGENCE,
        Kind.GRAD_NORM,
        Kind.CORRUPTION,
        Kind.STRAGGLER,
        Kind.SLOWDOWN,
    )
)
"""Kinds that step metrics decide, so that a replay of stored series finds them. `hang`, `rank_lost` and
`telemetry_lost` depend on when somebody was heard of, others on events and counters of devices."""

_OF_METRICS: Final = frozenset(
    ("straggler", "slowdown", "stage", "own_past", "local_norm", "loss", "grad_norm", "nonfinite")
)
"""Detectors of these kinds."""


class Profile(StrEnum):
    """A value for every setting: `standard` has the defaults, `quiet` tells less, `sensitive` more."""

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
        """The value, of the type of the default.

        Raises:
            ValueError: it is not a number in the range; the text says which are.
        """
        whole = isinstance(self.default, int)
        allowed = f"{'a whole number' if whole else 'a number'} from {self.low:g} to {self.high:g} ({self.unit})"
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise ValueError(f"{self.name} must be {allowed}, not {value!r}")
        if whole and value != int(value):
            raise ValueError(f"{self.name} must be {allowed}, not {value!r}")
        return int(value) if whole else float(value)


_BUDGET: Final = "false incidents per job-week"
_RATIO: Final = "ratio to the usual value"
_LEVEL: Final = "ratio to the level"
_SIGMAS: Final = "robust sigmas"
_SHARE: Final = "share of the usual value"
_SECONDS: Final = "seconds"
_STEPS: Final = "usual steps"

SETTINGS: Final[Mapping[str, TunableSetting]] = {
    setting.name: setting
    for setting in (
        TunableSetting("straggler.budget", _BUDGET, 0.001, 1000, 0.1, 10, "False stragglers that are accepted."),
        TunableSetting("straggler.wall.ratio_min", _RATIO, 1.005, 5, 1.05, 1.015, "Least delay told, by wall time."),
        TunableSetting("straggler.cpu.ratio_min", _RATIO, 1.02, 5, 1.4, 1.15, "Least delay told, by CPU time."),
        TunableSetting("straggler.host.ratio_min", _RATIO, 1.02, 5, 1.5, 1.2, "Least delay told on shared cores."),
        TunableSetting(
            "straggler.places.witness.ratio_min", _RATIO, 1.005, 5, 1.03, 1.01, "Least delay of a host or switch told."
        ),
        TunableSetting("slowdown.budget", _BUDGET, 0.001, 1000, 0.1, 10, "False slowdowns that are accepted."),
        TunableSetting("slowdown.ratio_min", _RATIO, 1.005, 5, 1.08, 1.02, "Least slowdown told."),
        TunableSetting(
            "slowdown.bare_ratio_min", _RATIO, 1.005, 5, 1.1, 1.03, "The same if only the step time is known."
        ),
        TunableSetting("slowdown.mild_ratio", _RATIO, 1.005, 5, 1.1, 1.03, "A slowdown below it is for information."),
        TunableSetting("slowdown.brief_s", _SECONDS, 0, 86_400, 1_800, 300, "How long a slowdown may pass by itself."),
        TunableSetting("stage.budget", _BUDGET, 0.001, 1000, 0.05, 5, "False slow stages that are accepted."),
        TunableSetting("stage.witness.ratio_min", _RATIO, 1.005, 5, 1.08, 1.03, "Least delay of a stage told."),
        TunableSetting("own_past.sigmas", _SIGMAS, 3, 50, 8, 4.5, "How far a rank at its own pace must leave it."),
        TunableSetting("own_past.blocks.ratio_min", _RATIO, 1.02, 10, 1.5, 1.15, "Least delay of such a rank told."),
        TunableSetting("local_norm.budget", _BUDGET, 0.001, 1000, 0.05, 5, "False corruptions that are accepted."),
        TunableSetting("local_norm.witness.ratio_min", _RATIO, 1.05, 10, 1.5, 1.2, "Least ratio of a norm told."),
        TunableSetting("loss.level.jump_sigmas", _SIGMAS, 4, 1000, 20, 10, "A loss this far out is told at once."),
        TunableSetting("loss.level.ratio_jump", _LEVEL, 1.05, 1000, 3, 1.7, "So is a loss of this many times it."),
        TunableSetting("loss.level.drift_limit", _SIGMAS, 3, 1000, 15, 7, "Sum at which a shift of the loss is told."),
        TunableSetting("loss.mild_ratio", _LEVEL, 1.01, 1000, 2, 1.3, "A divergence below it is for information."),
        TunableSetting("grad_norm.level.jump_sigmas", _SIGMAS, 4, 1000, 20, 10, "A norm this far out is told at once."),
        TunableSetting("grad_norm.level.ratio_jump", _LEVEL, 1.05, 1000, 30, 6, "So is a norm of this many times it."),
        TunableSetting(
            "grad_norm.level.drift_limit", _SIGMAS, 3, 1000, 15, 7, "Sum at which a shift of the norm is told."
        ),
        TunableSetting("grad_norm.mild_ratio", _LEVEL, 1.01, 1000, 8, 3, "A jump below it is for information."),
        TunableSetting(
            "nonfinite.skips_max", "steps", 1, 100_000, 50, 10, "Skipped updates in a row until it is told."
        ),
        TunableSetting("hang.steps", _STEPS, 1, 1000, 6, 2.5, "A standstill in a step is told after so many."),
        TunableSetting("hang.critical_steps", _STEPS, 1, 1000, 9, 4, "A standstill is critical after so many."),
        TunableSetting("hang.floor_s", _SECONDS, 2, 3_600, 15, 4, "No standstill is told earlier."),
        TunableSetting("hang.prompt_s", _SECONDS, 2, 3_600, 30, 6, "A standstill is told then, if steps allow it."),
        TunableSetting("hang.pause_s", _SECONDS, 5, 86_400, 180, 45, "A pause outside of steps up to this is usual."),
        TunableSetting(
            "hang.pause_unknown_s", _SECONDS, 10, 86_400, 1_800, 600, "A pause is critical then, if none is known."
        ),
        TunableSetting(
            "hang.first_step_s", _SECONDS, 60, 86_400, 3_600, 1_200, "What a first attempt has for its first step."
        ),
        TunableSetting("rank_lost.goes_on_s", _SECONDS, 1, 3_600, 15, 3, "Work of others after which an end is early."),
        TunableSetting("rank_lost.silent_s", _SECONDS, 3, 3_600, 30, 8, "Silence that counts as absence."),
        TunableSetting(
            "telemetry_lost.silent_s",
            _SECONDS,
            3,
            3_600,
            60,
            8,
            "Silence of a host until it is told; three times as long while none is heard.",
        ),
        TunableSetting("telemetry_lost.gaps_min", "messages", 1, 100_000, 50, 5, "Lost messages until they are told."),
        TunableSetting("device_degraded.often", "minutes", 1, 1_440, 20, 3, "Minutes of throttling until a warning."),
        TunableSetting("device_degraded.counters.power", _SHARE, 0.05, 0.9, 0.6, 0.8, "Power below it is told."),
        TunableSetting("device_degraded.counters.clock", _SHARE, 0.05, 0.9, 0.7, 0.88, "A clock below it is told."),
        TunableSetting("device_fault.quiet_s", _SECONDS, 10, 86_400, 600, 120, "Quiet after which an error is over."),
        TunableSetting(
            "network_degraded.counters.retransmissions_per_s", "per second", 0.1, 1e6, 50, 5, "Rate that is told."
        ),
        TunableSetting("host_degraded.counters.of_usual", _RATIO, 1, 100, 4, 1.5, "Pressure above it is told."),
        TunableSetting(
            "checkpoint_failed.wait_s", _SECONDS, 10, 86_400, 600, 60, "How long a failed save may recover."
        ),
        TunableSetting(
            "restore_failed.load_s", _SECONDS, 10, 86_400, 1_800, 600, "How long a failed load may recover."
        ),
        TunableSetting(
            "checkpoint_overdue.factor", "usual gaps", 1.1, 100, 5, 2, "Gaps after which a save is overdue."
        ),
        TunableSetting(
            "checkpoint_overdue.seconds_min", _SECONDS, 10, 604_800, 1_800, 300, "No save is overdue earlier."
        ),
        TunableSetting("restart_loop.launches", "launches", 2, 100, 5, 2, "Launches in a row without progress."),
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
        settings: by name, as `checked` gave them; those of another version that do not exist here change nothing.
    """
    config = CatalogueConfig()
    for name, setting in SETTINGS.items():
        value = settings.get(name, setting.of(profile))
        if value != setting.default:
            config = _with(config, name.split("."), type(setting.default)(value))
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
