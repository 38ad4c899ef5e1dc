"""Settings of the detectors: a profile, a TOML or JSON file, or `detector.setting=value`."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_detectors.tuning import Profile, config_of
from rankwatch_service.tuning import TuningSet, read_tuning, read_tunings


def read_config(text: str, job: str = "") -> CatalogueConfig:
    """The configuration that a text names.

    Args:
        text: `default`, a profile, a .toml or .json file, or `straggler.budget=0.1,hang.floor_s=9`. A file has a
            tuning, a list of tunings, or tables of detectors.
        job: decides which tuning of a list holds.

    Raises:
        ValueError: no such file or setting, or a value of another type; the text says which.
    """
    if text == "default":
        return CatalogueConfig()
    if text in list(Profile):
        return config_of(Profile(text), {})
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        return configured(_pairs(text))
    try:
        content = path.read_text(encoding="utf-8")
        changes = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
    except (OSError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from error
    if not isinstance(changes, dict):
        raise ValueError(f"{text}: it must be a table of detectors")  # noqa: TRY004 - a value of the user's, not a type
    try:
        if changes.keys() == {"tunings"}:
            return TuningSet(tunings=read_tunings(changes["tunings"])).of(job).config
        if changes.keys() & {"jobs", "profile", "settings"}:
            return read_tuning(changes).config
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    return configured(changes)


def configured(changes: Mapping[str, Any]) -> CatalogueConfig:
    """The defaults with the changes of nested mappings.

    Raises:
        ValueError: no such setting, or a value of another type.
    """
    changed = _changed(CatalogueConfig(), changes, "")
    assert isinstance(changed, CatalogueConfig)
    return changed


def _changed(config: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    types = typing.get_type_hints(type(config))
    values = {}
    for name, value in changes.items():
        if name not in types:
            raise ValueError(f"there is no setting {prefix}{name}; there are {', '.join(sorted(types))}")
        if dataclasses.is_dataclass(types[name]) and isinstance(value, Mapping):
            values[name] = _changed(getattr(config, name), value, f"{prefix}{name}.")
            continue
        try:
            values[name] = msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{prefix}{name}: {error}") from error
        if name == "budget" and not 0 < values[name] < math.inf:
            raise ValueError(f"{prefix}{name}: {value} is not a finite number above 0")
    return dataclasses.replace(config, **values)


def _pairs(text: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is neither a .toml or .json file nor DETECTOR.SETTING=VALUE")
        *path, last = name.strip().split(".")
        table = changes
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ValueError(f"{name.strip()}: {part} has a value already")  # noqa: TRY004 - a value of the user's
        try:
            table[last] = json.loads(value)
        except ValueError:
            table[last] = value.strip()
    return changes
