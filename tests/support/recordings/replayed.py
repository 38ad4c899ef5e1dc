"""What a replay of files finds."""

from pathlib import Path

from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_service.replay.layout import parse_mapping
from rankwatch_service.replay.run import ReplayResult, replay
from rankwatch_service.replay.sources import open_source


def replayed(*paths: Path, mapping: str = "", until_step: int | None = None) -> ReplayResult:
    """The outcome with the usual settings; raises what is wrong with a file."""
    outcome = replay(
        [open_source(path) for path in paths],
        parse_mapping(mapping),
        [CatalogueConfig()],
        job="gpt",
        until_step=until_step,
        progress=lambda done, total: None,
    )
    if outcome.broken is not None:
        raise outcome.broken
    return outcome
