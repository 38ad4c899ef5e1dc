"""What can be read of this host and its network ports, as JSON: a process of its own for `rankwatch doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from rankwatch.agent.host.files import missing_under
from rankwatch.agent.host.ports import NetworkPorts
from rankwatch.agent.host.resources import HostResources


class HostSurvey(msgspec.Struct, frozen=True):
    """A host, as JSON for `rankwatch doctor`."""

    missing: tuple[str, ...]
    """Of /proc and /sys, those that are not under the folder."""
    counters: tuple[str, ...]
    """Of the host, those that one reading has; there are no rates among them."""
    ports: tuple[str, ...]
    """Those in use."""


def survey(root: Path) -> HostSurvey:
    """Read everything once; `root` as for `HostSampler`."""
    counters = HostResources(root, Path("/")).read(0.0)
    return HostSurvey(tuple(missing_under(root)), tuple(counters), tuple(NetworkPorts(root).read(0.0)))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(survey(Path(sys.argv[1]))))
