"""The pages' files: own modules and styles, and plotly.js out of the installed plotly package.

Files are served under the hash of all of them, so that browsers may keep them for ever and an upgrade is seen at once.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Final

from starlette.responses import Response

TYPES: Final[Mapping[str, str]] = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}

KEEP_FOR_EVER: Final = "public, max-age=31536000, immutable"

PLOTLY: Final = "plotly.min.js"

# plotly.js adds the styles of its maps to the page when it is loaded, unless an element with this id is there. Our
# policy forbids inline styles, and no page shows a map. The id is a hash that changes with its version.
_MAP_STYLE: Final = re.compile(rb'document\.getElementById\("([0-9a-f]{64})"\)')


class Assets:
    """All files of the dashboard, read once, so that they stay those of this version; compressed at their first use."""

    def __init__(self) -> None:
        folder = files(__package__) / "static"
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if suffix(entry.name) in TYPES}
        self._files[PLOTLY] = (files("plotly") / "package_data" / PLOTLY).read_bytes()
        self._shell = (folder / "page.html").read_text(encoding="utf-8")
        self._gzipped: dict[str, bytes] = {}
        found = _MAP_STYLE.search(self._files[PLOTLY])
        self._map_style = found[1].decode() if found else "plotly-map-style"
        digest = sha256(self._shell.encode())
        for name, content in sorted(self._files.items()):
            digest.update(name.encode() + content)
        self.version = digest.hexdigest()[:12]

    def page(self, module: str, title: str) -> bytes:
        """One page: the shell that loads a module."""
        return (
            self._shell.replace("{{version}}", self.version)
            .replace("{{map_style}}", self._map_style)
            .replace("{{module}}", module)
            .replace("{{title}}", escape(title))
            .encode()
        )

    def file(self, version: str, name: str, headers: Mapping[str, str]) -> Response:
        """Answer a request for one file; 404 for one that is none of ours."""
        if name not in self._files:
            return Response("there is no such file\n", 404, media_type="text/plain")
        answer_headers = {
            "Cache-Control": KEEP_FOR_EVER if version == self.version else "no-cache",
            "Vary": "Accept-Encoding",
        }
        if "gzip" not in headers.get("accept-encoding", ""):
            return Response(self._files[name], media_type=TYPES[suffix(name)], headers=answer_headers)
        if name not in self._gzipped:
            # Two requests at once do it twice and store the same bytes.
            self._gzipped[name] = gzip.compress(self._files[name], 6, mtime=0)
        answer_headers["Content-Encoding"] = "gzip"
        return Response(self._gzipped[name], media_type=TYPES[suffix(name)], headers=answer_headers)


def suffix(name: str) -> str:
    """The end of a file's name, from its last dot on."""
    return name[name.rfind(".") :]
