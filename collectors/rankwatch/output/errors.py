"""The lines in a rank's output that say why it ended: patterns with their roles, and the choice among many lines. Pure.

A root says what went wrong in this process. A cascade says that a peer was lost, or waited for in vain: its root is
elsewhere. A teardown says that somebody asked the process to end. The first of them counts, unless another one is
certain. What no pattern knows stays unknown.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from rankwatch.output.prefixes import names_rank, without_prefix
from rankwatch.output.tail import PrintedLine
from rankwatch.terminal import printable

LINES_MAX: Final = 20
"""Lines of one rank that leave its host."""
LINE_CHARACTERS_MAX: Final = 240
BEFORE: Final = 11
"""Lines before the one that was chosen: of a traceback, the innermost calls."""
FRAMES_MAX: Final = 200
"""Lines above it in which its traceback is looked for."""
RECENT_S: Final = 30.0
"""An error that was printed longer before the end than this did not bring it: the process went on."""
RECENT_LINES: Final = 400
"""The same, where it is not known when lines were printed."""
PROGRESS_LINES: Final = 3
"""After an error that ends a process, fewer lines than this tell of steps, which other threads may have buffered."""


class LineRole(StrEnum):
    """Which process a line names as the cause of the end."""

    ROOT = "root"
    CASCADE = "cascade"
    TEARDOWN = "teardown"


class Weight(IntEnum):
    """How informative a line is compared with others."""

    WEAK = 1
    """Used only if nothing else was printed: a process may print it whatever the reason of its end."""
    USUAL = 2
    """If it came first."""
    CERTAIN = 3
    """Counts also after a cascade: no lost peer causes it."""


class Pattern(NamedTuple):
    """A kind of line, and its role."""

    name: str
    role: LineRole
    weight: Weight
    form: re.Pattern[str]


def _of(role: LineRole, weight: Weight, **forms: str | Sequence[str]) -> list[Pattern]:
    texts = {name: form if isinstance(form, str) else "|".join(form) for name, form in forms.items()}
    return [Pattern(name, role, weight, re.compile(text)) for name, text in texts.items()]


PATTERNS: Final[Sequence[Pattern]] = (
    *_of(
        LineRole.TEARDOWN,
        Weight.USUAL,
        interrupted=(r"^KeyboardInterrupt\b", r"(?i:\b(?:received|caught) .{0,20}SIGINT|SIGINT .{0,20}received)"),
        terminated=(r"(?i:\b(?:received|caught) .{0,30}(?:SIGTERM|signal 15)|SIGTERM .{0,20}received)",),
        time_limit=(r"DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)", r"(?i:time limit .{0,20}(?:reached|exceeded))"),
        cancelled=r"\*\*\* (?:JOB|STEP) .{0,60} CANCELLED AT",
        killed=r"^(?:.{1,80}: line \d+: +\d+ )?Killed\b",
    ),
    *_of(
        LineRole.TEARDOWN,
        Weight.WEAK,
        exit_status=(
            r"exitcode: +-?[1-9]|return code = -?[1-9]|non-zero exit code|exit code [1-9]|exited on signal [1-9]|"
            r"srun: error: .{0,60}: (?:Killed|Out Of Memory|Segmentation fault|Aborted)",
        ),
        launcher=(r"closing signal SIG", "ChildFailedError", "srun: (?:error|Job step)", "death signal"),
    ),
    *_of(
        LineRole.CASCADE,
        Weight.USUAL,
        nccl_watchdog=(
            r"[Cc]ollective operation timeout",
            r"NCCL operations have failed or timed out",
            r"(?:taking|tearing) the entire process down",
            r"(?i:heartbeat monitor .{0,60}timed out)",
        ),
        nccl_peer=(
            r"ncclRemoteError",
            r"remote process exited or there was a network error",
            r"NCCL WARN .{0,120}(?:[Cc]onnection (?:closed|refused|reset)|[Tt]imed? ?out|error 12\b)",
            r"NCCL communicator was aborted",
        ),
        gloo=(r"gloo/transport.{0,240}(?:[Cc]onnection|[Tt]imed out|[Bb]roken pipe)", r"pair closure"),
        store=(
            r"DistStoreError|DistNetworkError",
            r"TCPStore.{0,160}(?:fail|closed|[Tt]imed? ?out|[Bb]roken pipe|reset)",
            r"[Ff]ailed to (?:recv|send), got 0 bytes",
            r"client socket has (?:timed out|failed)",
        ),
        mpi_peer=(
            r"lost communication with",
            r"PMIX_ERR_(?:UNREACH|LOST)",
            r"UCX\s+ERROR",
            r"MPI_ERR_(?:PROC_FAILED|REVOKED)",
        ),
        peer=(
            r"[Cc]onnection (?:closed|reset) by (?:remote )?peer",
            r"(?:ConnectionResetError|BrokenPipeError|ConnectionAbortedError)\b",
        ),
    ),
    *_of(
        LineRole.ROOT,
        Weight.CERTAIN,
        cuda_memory=(
            r"(?:CUDA|HIP|XPU) (?:[Ee]rror: )?out of memory|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating",
            r"OutOfMemoryError\b",
            r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
        ),
        cuda_access=(
            r"illegal memory access",
            r"cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS",
            r"misaligned address",
        ),
        cuda_assert=(r"device-side assert", r"\.cu:\d+: .{0,240}Assertion"),
        cuda_ecc=(r"uncorrectable (?:ECC|NVLink) error", r"cudaErrorECCUncorrectable", r"(?i:double.bit ECC)"),
        cuda_device=(
            r"no CUDA-capable device",
            r"GPU is lost|fallen off the bus",
            r"no kernel image is available",
            r"(?:CUDA|HIP) [Ee]rror: (?!unspecified launch failure)",
            r"CUDNN_STATUS_[A-Z_]*(?:FAILED|ERROR)|CUBLAS_STATUS_(?!ALLOC)[A-Z_]+",
        ),
        nccl_own=(
            r"ncclUnhandledCudaError|ncclInvalid(?:Usage|Argument)",
            r"Duplicate GPU detected",
            r"NCCL WARN .{0,120}(?:No space left|Cuda failure)",
            r"Detected mismatch between collectives",
        ),
        oom_killer=(
            r"[Oo]ut of memory: Killed process",
            r"(?i:\boom[-_ ]?kill)",
            r"cgroup out of memory",
            r"Exceeded job memory limit",
        ),
        host_memory=(r"^.{0,60}MemoryError\b", r"Cannot allocate memory", r"std::bad_alloc", r"DefaultCPUAllocator: "),
        shared_memory=(r"\b[Bb]us error\b", r"insufficient shared memory"),
        loader_worker=(r"DataLoader worker .{0,60}(?:killed|exited unexpectedly)", r"in DataLoader worker process"),
        disk_full=(r"No space left on device", r"[Dd]isk quota exceeded"),
        segfault=(
            r"Segmentation fault|segfault at",
            r"double free|corrupted (?:size|unsorted)|malloc\(\): |free\(\): invalid",
        ),
        illegal_instruction=(r"Illegal instruction", r"Floating point exception"),
    ),
    *_of(
        LineRole.ROOT,
        Weight.USUAL,
        file_system=(r"Stale file handle", r"Input/output error", r"Read-only file system", r"Too many open files"),
        no_file=(r"^.{0,40}(?:FileNotFoundError|IsADirectoryError|NotADirectoryError)\b",),
        denied=(r"^.{0,40}PermissionError\b", r"Permission denied", r"40[13] Client Error", r"GatedRepoError"),
        imports=(
            r"^.{0,40}(?:ModuleNotFoundError|ImportError)\b",
            r"cannot open shared object file|undefined symbol: |version `GLIBC\w*' not found",
        ),
        assertion=(
            r"INTERNAL ASSERT FAILED",
            r"^.{0,40}AssertionError\b",
            r"Check failed: ",
            r"Assertion .{0,160} failed",
        ),
        launch_failure=r"unspecified launch failure",
        diverged=(
            r"(?i:\bloss is .?(?:nan|inf\w*)\W{1,4}(?:stop|exit|abort|terminat))",
            r"Model diverged with loss = NaN|NanLossDuringTrainingError",
        ),
        numbers=(
            r"(?i:\b(?:loss|grad\w*) .{0,20}(?:is|was|became) (?:nan|inf|not finite)\b)",
            r"FloatingPointError\b",
            r"[Cc]urrent loss scale already at minimum",
        ),
        download=(
            r"(?:HTTPError|ReadTimeout|ConnectTimeout|MaxRetryError|SSLError|NameResolutionError|ClientError): ",
        ),
        fatal=r"Fatal Python error: (?!Aborted)",
        python=r"^(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Failure|Fault|Timeout)(?:: .*)?$",
    ),
    *_of(
        LineRole.ROOT,
        Weight.WEAK,
        aborted=(r"terminate called (?:after|without)", r"core dumped", r"Aborted \(", r"Fatal Python error: Aborted"),
    ),
)
"""A line has the role of the first that it fits."""

_PROGRESS: Final = re.compile(r"(?i)\b(?:step|iter(?:ation)?|epoch|loss)\b\W{0,3}\d|\d(?:it/s|s/it)")
_HINT: Final = re.compile(
    r"(?i)error|exception|fail|exit|code|exhausted|oom|check|fault|time|kill|abort|interrupt|sig(?:int|term)|signal|"
    r"cancel|cuda|cudnn|nccl|memory|connection|address|assert|worker|space|quota|denied|file|shared object|symbol|"
    r"glibc|corrupt|malloc|free\(|bad_alloc|double|dumped|instruction|lost|fallen|mismatch|duplicate|loss|grad|pair|"
    r"process down|ucx|terminate"
)
"""A word of each pattern, so that ordinary lines are tried once."""
_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_INSTALLED: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")
_LOST_PEER: Final = re.compile(
    r"(?i)nccl (?:error|operations)|gloo|c10d|tcpstore|remote process|connection (?:closed|reset) by|wait timeout"
)
"""What a Python exception of torch says that has lost a peer."""
_NOT_OVER: Final = re.compile(
    r"(?i)\b(?:(?<!NCCL )warn(?:ing)?|deprecat\w*|retry(?:ing)?|ignor(?:ed|ing)|attempt \d+ of)\b"
)
"""A line that says that the program goes on."""
_KILLERS: Final = ("oom_killer",)
"""What explains that a signal ended the process which it cannot have sent itself."""

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
_SECRETS: Final = (
    (re.compile(r"(?i)\b([\w-]*(?:token(?![is])|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|authorization|credential)[\w-]*"
                r"[\"']?\s*[=:]\s*(?:(?:bearer|basic)\s+)?)[\"']?[^\s\"',;&]+"), r"\1***"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 ***"),
    (re.compile(r"(\w+://)[^/\s@]+@"), r"\1***@"),
    (re.compile(r"\b(?:hf_|sk-|gh[po]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)[A-Za-z0-9_.-]{12,}"), "***"),
    (re.compile(r"([?&](?:X-Amz-[\w-]+|sig|signature|key)=)[^&\s]+", re.IGNORECASE), r"\1***"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why a rank ended, by its output."""

    line: str
    """What went wrong, as one line."""
    pattern: Pattern
    where: str
    """The innermost call of the job's own code in the traceback above it, as `train.py:40 in step`; "": none."""
    unix_ns: int
    """When it was printed; 0: not known."""
    lines: tuple[str, ...]
    """This line and some around it, at most `LINES_MAX`."""


def reason(
    lines: Sequence[PrintedLine], number: int | None = None, ended_unix_ns: int | None = None
) -> EndReason | None:
    """Choose the line that says why a process ended.

    Args:
        lines: the end of its output, oldest first.
        number: the signal that ended it; None: none. Of a process that others have killed only what says so counts.
        ended_unix_ns: when it ended; None: with its last line.
    """
    recent = _after_progress(_recent(lines, ended_unix_ns))
    found = [(at, pattern) for at, line in enumerate(recent) if (pattern := pattern_of(line.text)) is not None]
    if number in (signal.SIGKILL, signal.SIGTERM):
        found = [one for one in found if one[1].role is not LineRole.ROOT or one[1].name in _KILLERS]
    chosen = _chosen(found)
    if chosen is None:
        return None
    at, pattern = chosen
    if "Caught " in recent[at].text:  # by torch, in a worker whose traceback follows: its last line is the cause
        at = max([at, *(later for later, one in found if later > at and one.role is LineRole.ROOT)])
    first = max(0, at - BEFORE)
    shown = tuple(shown_line(_unprefixed(line.text)) for line in recent[first : first + LINES_MAX])
    where = _where(recent[max(0, at - FRAMES_MAX) : at])
    return EndReason(said(recent[at].text), pattern, where, recent[at].unix_ns, shown)


def _where(above: Sequence[PrintedLine]) -> str:
    for line in reversed(above):
        frame = _FRAME.search(line.text)
        if frame and not any(part in frame["file"] for part in _INSTALLED):
            return shown_line(f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['function']}")
        if "Traceback (most recent call last)" in line.text:
            break
    return ""


def _chosen(found: Sequence[tuple[int, Pattern]]) -> tuple[int, Pattern] | None:
    """What was printed after a request to end is its consequence; before it the first line counts, or a certain one."""
    usual = [one for one in found if one[1].weight > Weight.WEAK]
    asked = next((number for number, (_, pattern) in enumerate(usual) if pattern.role is LineRole.TEARDOWN), None)
    before = usual if asked is None else usual[: asked or 1]
    certain = [one for one in before if one[1].weight is Weight.CERTAIN]
    return next(iter([*certain, *before, *found]), None)


def pattern_of(text: str) -> Pattern | None:
    """The pattern that a line fits; None if it says nothing of an end."""
    if _HINT.search(text, 0, 4 * LINE_CHARACTERS_MAX) is None:
        return None
    plain = _unprefixed(text[: 4 * LINE_CHARACTERS_MAX]).rstrip()
    for pattern in PATTERNS:
        if pattern.form.search(plain):
            if pattern.name in ("python", "download") and _LOST_PEER.search(plain):
                return _BY_NAME["peer"]
            if _NOT_OVER.search(plain) and pattern.role is LineRole.ROOT:
                return None
            return pattern
    return None


_BY_NAME: Final = {pattern.name: pattern for pattern in PATTERNS}


def _recent(lines: Sequence[PrintedLine], ended_unix_ns: int | None) -> Sequence[PrintedLine]:
    end_ns = max((line.unix_ns for line in lines), default=0) if ended_unix_ns is None else ended_unix_ns
    return [line for line in lines if line.unix_ns == 0 or end_ns - line.unix_ns <= RECENT_S * 1e9][-RECENT_LINES:]


def _after_progress(lines: Sequence[PrintedLine]) -> Sequence[PrintedLine]:
    """The lines from the last but `PROGRESS_LINES` that tell of a step on: after an earlier error training went on."""
    steps = [at for at, line in enumerate(lines) if _PROGRESS.search(line.text, 0, LINE_CHARACTERS_MAX)]
    return lines[steps[-PROGRESS_LINES] :] if len(steps) >= PROGRESS_LINES else lines


def of_rank(lines: Sequence[PrintedLine], rank: int, local_rank: int) -> list[PrintedLine]:
    """The lines that name this rank, in a file to which several write."""
    return [line for line in lines if _names(line) in (("", rank), ("default", local_rank))]


def of_nobody(lines: Sequence[PrintedLine]) -> list[PrintedLine]:
    """The lines that name no rank, in a file to which several write."""
    return [line for line in lines if _names(line) is None]


def _names(line: PrintedLine) -> tuple[str, int] | None:
    return names_rank(_ESCAPES.sub("", line.text[: 4 * LINE_CHARACTERS_MAX]))


def said(text: str) -> str:
    """The text of a line, without the prefix that names its rank."""
    return shown_line(_unprefixed(text).strip().removeprefix("what():").lstrip())


def _unprefixed(text: str) -> str:
    return without_prefix(_ESCAPES.sub("", text[: 8 * LINE_CHARACTERS_MAX]))


def shown_line(text: str) -> str:
    """A line as it leaves the host: without escape sequences and secrets, and cut."""
    plain = printable(_ESCAPES.sub("", text[: 8 * LINE_CHARACTERS_MAX])).replace("\n", " ").rstrip()
    for form, by in _SECRETS:
        plain = form.sub(by, plain)
    return plain if len(plain) <= LINE_CHARACTERS_MAX else plain[: LINE_CHARACTERS_MAX - 1] + "…"
