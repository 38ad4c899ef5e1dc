"""The files of the pages: our modules and styles.

The path of each file contains the hash of all files, so that browsers can cache them for ever and load all of them anew
after an upgrade.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, normpath
from typing import Any, Final

from starlette.responses import Response

from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.notify.receiver_types.table import RECEIVER_TYPES
from rankwatch_service.policy.actions import ACTIONS

TYPES: Final[Mapping[str, str]] = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

CACHE_FOR_EVER: Final = "public, max-age=31536000, immutable"

_IMPORTED: Final = re.compile(r'^(?:import|export|}) [^"\n]*"(\.[^"\n]+\.js)";', re.MULTILINE)


def actions() -> dict[str, dict[str, Any]]:
    """The table of actions, for pages."""
    fields = ("name", "icon", "does", "undo", "is_costly", "may_be_automatic")
    return {action: {name: getattr(traits, name) for name in fields} for action, traits in ACTIONS.items()}


class Assets:
    """All files of the dashboard. Read at the start, so that an upgrade on disk does not mix versions."""

    def __init__(self) -> None:
        folder = files(__package__) / "static"
        self._files = dict(_files(folder))
        kinds = {kind: {"label": row.label, "chart": row.chart} for kind, row in KINDS.items()}
        shell = (folder / "page.html").read_text(encoding="utf-8")
        types = {name: [one.label, one.example, one.key_help] for name, one in RECEIVER_TYPES.items()}
        for name, table in {"kinds": kinds, "actions": actions(), "receiver_types": types}.items():
            shell = shell.replace(f"{{{{{name}}}}}", escape(json.dumps(table)))
        self._shell = shell
        self._gzipped: dict[str, bytes] = {}
        self._imports = {
            name: {normpath(f"{dirname(name)}/{imported}") for imported in _IMPORTED.findall(content.decode())}
            for name, content in self._files.items()
            if suffix(name) == ".js"
        }
        digest = sha256(self._shell.encode())
        for name, content in sorted(self._files.items()):
            digest.update(name.encode() + content)
        self.version = digest.hexdigest()[:12]

    def page(self, module: str, title: str, facts: Mapping[str, str] | None = None) -> bytes:
        """The HTML of a page, which loads `pages/MODULE.js`, and finds these facts in its <meta> elements."""
        meta = "\n".join(f'<meta name="{name}" content="{escape(text)}">' for name, text in (facts or {}).items())
        return (
            self._shell.replace("{{modules}}", "\n".join(self._preloads(f"pages/{module}.js")))
            .replace("{{version}}", self.version)
            .replace("{{module}}", module)
            .replace("{{title}}", escape(title))
            .replace("{{facts}}", meta)
            .encode()
        )

    def _preloads(self, page: str) -> Iterator[str]:
        """Links to all modules that a page's module imports, directly or not: browsers load them at once, where they
        would else find them one level after the other.
        """
        found, todo = {page}, [page]
        while todo:
            imported = self._imports[todo.pop()]
            todo += sorted(imported - found)
            found |= imported
        return (f'<link rel="modulepreload" href="/static/{{{{version}}}}/{name}">' for name in sorted(found - {page}))

    def file(self, version: str, name: str, headers: Mapping[str, str]) -> Response:
        """Respond to a request for a file, named by its path below `static/`; 404 if there is none."""
        if name not in self._files:
            return Response("there is no such file\n", 404, media_type="text/plain")
        answer_headers = {
            "Cache-Control": CACHE_FOR_EVER if version == self.version else "no-cache",
            "Vary": "Accept-Encoding",
        }
        if "gzip" not in headers.get("accept-encoding", ""):
            return Response(self._files[name], media_type=TYPES[suffix(name)], headers=answer_headers)
        if name not in self._gzipped:
            # Two requests at the same time compress it twice, and store the same bytes.
            self._gzipped[name] = gzip.compress(self._files[name], 6, mtime=0)
        answer_headers["Content-Encoding"] = "gzip"
        return Response(self._gzipped[name], media_type=TYPES[suffix(name)], headers=answer_headers)


@cache
def assets() -> Assets:
    """The same for every application of a process."""
    return Assets()


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Path and content of every file below a folder that is of one of our `TYPES`."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif suffix(entry.name) in TYPES:
            yield prefix + entry.name, entry.read_bytes()


def suffix(name: str) -> str:
    """The end of a file's name, from its last dot."""
    return name[name.rfind(".") :]
