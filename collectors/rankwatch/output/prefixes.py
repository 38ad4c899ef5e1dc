"""What launchers put before the lines of a log: which process wrote them. Pure."""

from __future__ import annotations

import re
from typing import Final

_LABEL: Final = re.compile(
    r"""\s*(?:(\[[\w.-]*\d+\]:            # torchrun: [rank0]:  [default0]:
      |\[\d+,\d+\]<std(?:out|err)>:       # mpirun
      |\d+:(?=\ )(?!\s[-.\dna]+,)           # srun --label
      |\[pod/[\w./-]+\]                   # kubectl logs --prefix
      |[\w.-]+-\d+\s+\|(?=\s)             # docker compose
      |(?:\d+(?:\.\d+){3}|ip-\d[\d-]*|(?:worker|node|host|gpu)[\w.]*-?\d+):(?=\s)  # pdsh
      |\([\w.]*\s*pid=\d+[^)]{0,80}\)     # Ray
      |\[?[Rr]ank[ =:_]?\d+\]?:?(?=\s))   # loops of one's own
      |\S{20,40}\s(?:stdout|stderr)\s[FP](?=\s))""",  # a container's log, of which nothing names a rank
    re.VERBOSE,
)
_OF_RANK: Final = re.compile(
    r"\[?rank[ =:_]?(?P<rank>\d+)\]?:?|(?P<task>\d+):|\[\d+,(?P<mpi>\d+)\]<std\w+>:|\[default(?P<local>\d+)\]:", re.I
)
_IN_LINE: Final = re.compile(r"\[[^\]]{0,80}\bRank (\d+)\]")


def labelled(text: str) -> tuple[str, int]:
    """The label of a line, "" if nothing names its writer, and how many characters its prefixes take."""
    label, length = "", 0
    while (found := _LABEL.match(text, length)) is not None:
        label, length = found[1] or label, found.end()
    return label.strip(), length


def without_prefix(text: str) -> str:
    """A line as its process wrote it."""
    length = labelled(text)[1]
    return text[length:].removeprefix(" ") if length else text


def names_rank(text: str) -> tuple[str, int] | None:
    """The rank that a line names: "default" and its number on its host, else "" and its number; None: it names none."""
    if (found := _OF_RANK.fullmatch(labelled(text)[0])) is not None:
        return ("default" if found["local"] else "", int(found[found.lastgroup or 0]))
    inside = _IN_LINE.search(text)
    return None if inside is None else ("", int(inside[1]))
