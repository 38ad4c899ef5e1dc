"""Packs files into a ZIP file with a manifest, by which anyone can check that nothing is missing or was changed."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"


def packed(files: Mapping[str, bytes], made_unix_ns: int, version: str, left_out: Sequence[str]) -> bytes:
    """The ZIP file. The same files at the same time give the same bytes.

    Args:
        files: content by name.
        made_unix_ns: now.
        version: of rankwatch.
        left_out: sentences about what is not in the archive, and why.
    """
    made = datetime.fromtimestamp(made_unix_ns // 10**9, UTC)
    listed = [
        {"name": name, "bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in sorted(files.items())
    ]
    manifest = {
        "format": FORMAT,
        "rankwatch": version,
        "made_at": made.isoformat().replace("+00:00", "Z"),
        "files": listed,
        "left_out": list(left_out),
    }
    everything = {MANIFEST: (json.dumps(manifest, indent=2) + "\n").encode(), **files}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(everything.items()):
            entry = zipfile.ZipInfo(name, made.timetuple()[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return target.getvalue()
