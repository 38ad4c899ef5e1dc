"""Tunings: the profile and the settings that detectors have in jobs whose names match a pattern.

They are one list, replaced as a whole under the next version. The first that matches a job decides; where none does,
every setting has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_detectors.tuning import Profile, checked, config_of, profile_of
from rankwatch_service.names import NAME_CHARS_MAX, matches

TUNINGS_MAX: Final = 100
"""Tunings in force at a time: each state of a job that is saved has all of them, 4 KB each at most."""

_FIELDS: Final = ("jobs", "profile", "settings")


class Tuning(msgspec.Struct, frozen=True):
    """What holds for the jobs of one pattern."""

    jobs: str = "*"
    """Pattern of names, see `job_pattern`."""
    profile: Profile = Profile.STANDARD
    settings: dict[str, float] = {}
    """Settings of their own, by name; the profile gives all others."""

    @property
    def is_default(self) -> bool:
        """Whether it changes no setting."""
        return self.has_settings_of(DEFAULT)

    def has_settings_of(self, other: Tuning) -> bool:
        """Whether both give every setting the same value, be it for other jobs."""
        return (self.profile, self.settings) == (other.profile, other.settings)

    @property
    def config(self) -> CatalogueConfig:
        """The configuration of the detectors."""
        return config_of(self.profile, self.settings)


DEFAULT: Final = Tuning()


class TuningSet(msgspec.Struct, frozen=True, tag="tuning", tag_field="record"):
    """All tunings; a control record of this is appended whenever any of them changes."""

    version: int = 0
    """0: nobody has set any."""
    tunings: tuple[Tuning, ...] = ()

    def of(self, job: str) -> Tuning:
        """The tuning of a job."""
        return next((tuning for tuning in self.tunings if matches(tuning.jobs, job)), DEFAULT)


def read_tuning(document: Any) -> Tuning:
    """A tuning from JSON or TOML.

    Raises:
        ValueError: it is not one; the text says what is allowed.
    """
    if not isinstance(document, Mapping) or not document.keys() <= set(_FIELDS):
        raise ValueError(f"a tuning is an object with {', '.join(_FIELDS)}, not {document!r}"[:500])
    jobs, settings = document.get("jobs", "*"), document.get("settings", {})
    if not isinstance(jobs, str) or not 0 < len(jobs) <= NAME_CHARS_MAX:
        raise ValueError(f"jobs must be a pattern of 1 to {NAME_CHARS_MAX} characters, not {jobs!r}"[:500])
    if not isinstance(settings, Mapping):
        raise ValueError(f"settings must be an object of numbers by name, not {settings!r}"[:500])  # noqa: TRY004
    return Tuning(jobs, profile_of(document.get("profile", Profile.STANDARD)), checked(settings))


def read_tunings(document: Any) -> tuple[Tuning, ...]:
    """A list of tunings from JSON or TOML.

    Raises:
        ValueError: it is not one, or has more than `TUNINGS_MAX`; the text says what is allowed.
    """
    if not isinstance(document, list):
        raise ValueError("tunings must be a list")  # noqa: TRY004 - a value of the user's, not a type
    if len(document) > TUNINGS_MAX:
        raise ValueError(f"there may be {TUNINGS_MAX} tunings, not {len(document)}")
    return tuple(read_tuning(one) for one in document)
