"""Sums up what a profiler recorded: time by kind of kernel, by stream, by collective and group, and the top kernels.

Where a device did the work, its kernels count, else the operations of the host by the time that is their own. Times of
different streams and threads overlap, and so does a collective with what it hides behind.

Records some steps with torch's profiler: what the host calls and, on an accelerator, its kernels.

Starting and stopping waits for the device, which nothing else of rankwatch does. The profiler is one of a process, so
the script's own goes first: ours does not start while that one records or warms up, and ends when that one starts. On
NVIDIA devices CUPTI stays attached afterwards, unless the process was started with TEARDOWN_CUPTI=1.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from threading import get_ident
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile

TOP: Final = 10
"""Kernels or operations named."""
STREAMS_MAX: Final = 16
"""Streams named, the busiest first."""
COLLECTIVES_MAX: Final = 32
"""Pairs of group and collective named, the longest first."""
NAME_CHARACTERS_MAX: Final = 120
"""Longest name: names of templates fill pages."""

OPTIMIZER: Final = "Optimizer.step#"
"""Begin of the name of torch's mark around an optimizer's step."""
COMMUNICATION: Final = "record_param_comms"
"""Torch's mark around a collective of NCCL, with what it is about."""

_KINDS: Final = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("collective", r"^nccl|ncclKernel|ncclDevKernel|^gloo:|^c10d::|^mpi:|_c10d_functional|record_param_comms"),
        ("memory copy", r"memcpy|memset|copy_|copy_kernel|::_?to(_copy)?$|::clone|::contiguous|CatArrayBatched|::cat$"),
        ("attention", r"flash|fmha|attention|sdpa"),
        ("convolution", r"conv|fprop|dgrad|wgrad|implicit_gemm|winograd"),
        ("matmul", r"gemm|gemv|wgmma|nvjet|cutlass|cublas|triton_tem|::(add)?(b?mm|mv|dot)$|::(baddbmm|linear|matmul)"),
        ("optimizer", r"multi_tensor_apply|adam|sgd|lamb|::_fused_|optimizer"),
        (
            "reduction",
            r"reduce|triton_(red|per)|softmax|norm(?!al)|::(sum|mean|max|min|any|all|cumsum|logsumexp)|argm(ax|in)|loss",
        ),
        (
            "elementwise",
            r"elementwise|triton_poi|relu|gelu|silu|sigmoid|tanh|dropout|embedding|index|fill|zero_|normal_|bernoulli"
            r"|::(add|sub|mul|div|neg|exp|log|pow|r?sqrt|abs|clamp|where|masked|eq|ne|lt|gt|le|ge)",
        ),
    )
)
OTHER: Final = "other"
DTYPE_BYTES: Final = {
    "bool": 1, "byte": 1, "char": 1, "short": 2, "half": 2, "bfloat16": 2, "int": 4, "float": 4, "long": 8,
    "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
"""Bytes of a value by torch's names of types; those of 8 bits not named here have one."""


class TraceSpan(NamedTuple):
    """One thing that the profiler recorded. Times are Unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    on_device: bool = False
    device: int = 0
    lane: int = 0
    """The stream on a device, the thread on the host."""
    is_async: bool = False
    """Whether it runs beside what its thread calls, as an asynchronous collective does."""
    number: int = 0
    """The number by which a kernel names the operation that launched it, in `launched_by`."""
    launched_by: int = 0
    shapes: Sequence[Sequence[int]] = ()
    dtype: str = ""
    about: Mapping[str, str] = {}
    """The arguments of a collective as torch records them."""


class CollectiveStart(NamedTuple):
    """A collective that torch's flight recorder noted when it was called."""

    name: str
    group: str
    shapes: Sequence[Sequence[int]]
    size_bytes: int


def kind_of(name: str) -> str:
    """The kind of a kernel or an operation, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHER)


def summed_up(
    spans: Sequence[TraceSpan], windows: Sequence[tuple[int, int]], flight: Iterable[CollectiveStart] = ()
) -> dict[str, Any]:
    """The summary of a trace, JSON types; see `rankwatch_service.policy.traces.TraceSummary`.

    Args:
        spans: everything that was recorded.
        windows: begin and end of each recorded step, Unix nanoseconds.
        flight: collectives called within them, oldest first, of the backends that do not describe them by themselves.
    """
    host = [span for span in spans if not span.on_device]
    kernels = [span for span in spans if span.on_device]
    own_ns, of_optimizer = _own_times(host)
    if kernels:
        work = [
            (span.name, _kind(span.name, in_optimizer=span.launched_by in of_optimizer), span.end_ns - span.start_ns)
            for span in kernels
        ]
    else:
        work = [
            (span.name, _kind(span.name, in_optimizer=span.number in of_optimizer), ns)
            for span, ns in own_ns
            if span.name != COMMUNICATION
        ]
        work += [(span.name, kind_of(span.name), span.end_ns - span.start_ns) for span in host if span.is_async]
    lanes: dict[tuple[int, int], list[TraceSpan]] = defaultdict(list)
    for span in kernels:
        lanes[span.device, span.lane].append(span)
    streams = sorted(
        (
            {"device": key[0], "stream": key[1], "count": len(of), "time_s": _union_ns(of) * 1e-9}
            for key, of in lanes.items()
        ),
        key=lambda row: -row["time_s"],
    )
    collectives = _collectives(host, kernels, flight)
    wall_ns = max(1, sum(end_ns - begin_ns for begin_ns, end_ns in windows))
    ran_ns = sum(_union_ns(_clipped(kernels, *window)) for window in windows)
    return {
        "on_device": bool(kernels),
        "step_times_s": [(end_ns - begin_ns) * 1e-9 for begin_ns, end_ns in windows],
        "wall_s": wall_ns * 1e-9,
        "idle_ratio": 1 - ran_ns / wall_ns if kernels else None,
        "spans": len(spans),
        "kinds": _kinds(work),
        "streams": streams[:STREAMS_MAX],
        "collectives": collectives[:COLLECTIVES_MAX],
        "top": _top(work),
        "left_out": max(0, len(streams) - STREAMS_MAX) + max(0, len(collectives) - COLLECTIVES_MAX),
    }


def _kind(name: str, *, in_optimizer: bool) -> str:
    return "optimizer" if in_optimizer else kind_of(name)


def _own_times(host: Iterable[TraceSpan]) -> tuple[list[tuple[TraceSpan, int]], set[int]]:
    """Spans of the host with the time that none within them has, and the numbers of those in an optimizer's step."""
    threads: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in host:
        if not span.is_async:
            threads[span.lane].append(span)
    own: list[tuple[TraceSpan, int]] = []
    of_optimizer: set[int] = set()
    for spans in threads.values():
        spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
        open_: list[list[Any]] = []  # span, its own time so far, whether it is in an optimizer's step
        for span in spans:
            while open_ and open_[-1][0].end_ns <= span.start_ns:
                own.append((open_[-1][0], open_.pop()[1]))
            length = span.end_ns - span.start_ns
            inside = bool(open_ and open_[-1][2]) or span.name.startswith(OPTIMIZER)
            if open_:
                open_[-1][1] -= length
            if inside and span.number:
                of_optimizer.add(span.number)
            open_.append([span, length, inside])
        own += [(span, ns) for span, ns, _ in open_]
    return [(span, max(0, ns)) for span, ns in own], of_optimizer


def _collectives(
    host: Sequence[TraceSpan], kernels: Sequence[TraceSpan], flight: Iterable[CollectiveStart]
) -> list[dict[str, Any]]:
    """Count, bytes and time of the collectives by group and name, the longest first."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    ran_ns: dict[int, int] = defaultdict(int)
    for span in kernels:
        if kind_of(span.name) == "collective":
            ran_ns[span.launched_by] += span.end_ns - span.start_ns
    for span in host:
        if span.name == COMMUNICATION and (about := {name: text.strip('"') for name, text in span.about.items()}):
            group = _named(about.get("Process Group Name", ""), about.get("Process Group Description", ""))
            _add(rows[group, about.get("Collective name", "")], _described_bytes(about), ran_ns.get(span.number, 0))
    called = list(flight)
    for span in sorted((span for span in host if span.is_async), key=lambda span: span.start_ns):
        # A flight recorder has no times: the first call of the same name and shapes is taken for this one.
        same = (entry for entry in called if (entry.name, entry.shapes) == (span.name, span.shapes))
        entry = next(same, None)
        if entry is not None:
            called.remove(entry)
        name = span.name.partition(":")[2] or span.name
        size = entry.size_bytes if entry is not None else _bytes(span.shapes, span.dtype)
        _add(rows[entry.group if entry is not None else "", name], size, span.end_ns - span.start_ns)
    found = [
        {
            "group": group[:NAME_CHARACTERS_MAX],
            "name": name[:NAME_CHARACTERS_MAX],
            "count": int(count),
            "bytes": int(size),
            "time_s": ns * 1e-9,
        }
        for (group, name), (count, size, ns) in rows.items()
    ]
    return sorted(found, key=lambda row: (-row["time_s"], row["group"], row["name"]))


def _add(row: list[float], size: int, ns: int) -> None:
    row[0] += 1
    row[1] += size
    row[2] += ns


def _described_bytes(about: Mapping[str, str]) -> int:
    counts = [int(text) for name in ("In msg nelems", "Out msg nelems") if (text := about.get(name, "")).isdecimal()]
    return max(counts, default=0) * _dtype_bytes(about.get("dtype", ""))


def _bytes(shapes: Sequence[Sequence[int]], dtype: str) -> int:
    total = 0
    for shape in shapes:
        values = 1
        for length in shape:
            values *= length
        total += values
    return total * _dtype_bytes(dtype)


def _dtype_bytes(dtype: str) -> int:
    return DTYPE_BYTES.get(dtype.lower().removeprefix("c10::"), 1)


def sized(name: str, group: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> CollectiveStart:
    """An entry of the flight recorder."""
    size = sum(_bytes([shape], dtype) for shape, dtype in zip(shapes, dtypes, strict=False))
    return CollectiveStart(name, _named(*(*group, "", "")[:2]), shapes, size)


def _named(name: str, description: str) -> str:
    return description if description and description != "undefined" else name


def _kinds(work: Iterable[tuple[str, str, int]]) -> dict[str, float]:
    """Seconds by kind, the longest first."""
    total: dict[str, int] = defaultdict(int)
    for _, kind, ns in work:
        total[kind] += ns
    return {kind: ns * 1e-9 for kind, ns in sorted(total.items(), key=lambda item: -item[1])}


def _top(work: Iterable[tuple[str, str, int]]) -> list[dict[str, Any]]:
    total: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for name, kind, ns in work:
        row = total[name, kind]
        row[0] += 1
        row[1] += ns
    longest = sorted(total.items(), key=lambda item: -item[1][1])[:TOP]
    return [
        {"name": name[:NAME_CHARACTERS_MAX], "kind": kind, "count": count, "time_s": ns * 1e-9}
        for (name, kind), (count, ns) in longest
    ]


def _clipped(spans: Iterable[TraceSpan], begin_ns: int, end_ns: int) -> list[TraceSpan]:
    return [
        span._replace(start_ns=max(span.start_ns, begin_ns), end_ns=min(span.end_ns, end_ns))
        for span in spans
        if span.end_ns > begin_ns and span.start_ns < end_ns
    ]


def _union_ns(spans: Iterable[TraceSpan]) -> int:
    """Time in which at least one of them ran."""
    total, until_ns = 0, 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        total += max(0, span.end_ns - max(span.start_ns, until_ns))
        until_ns = max(until_ns, span.end_ns)
    return total


SPANS_MAX: Final = 1_000_000
"""Most recorded spans that are summed up: about 10 s of a thread beside the training thread."""

_STARTS: Final = ("_prepare_profiler", "_enable_profiler")
"""What every profiler of torch calls to start."""


class StepProfiler:
    """Records steps of this process, each by itself. Implements `rankwatch.loop.tracer.Profiler`."""

    def __init__(self) -> None:
        self.ended_by = ""
        self._thread = 0
        self._originals: dict[str, Any] = {}
        self._profile: profile | None = None
        self._begin_ns = 0
        self._recorded: list[Any] = []
        self._windows: list[tuple[int, int]] = []
        self._flight: list[CollectiveStart] = []

    def start(self) -> None:
        """See `Profiler.start`."""
        if why := _obstacle():
            raise ValueError(why)
        self._thread = get_ident()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _has_cuda() else [])]
        starting = profile(activities=activities, record_shapes=True)
        _synchronize()
        starting.start()
        self._profile = starting
        self._begin_ns = time.time_ns()
        for name in _STARTS:
            self._originals[name] = original = getattr(torch_profiler, name)
            setattr(torch_profiler, name, self._giving_way_to(original))

    def stop(self) -> None:
        """See `Profiler.stop`."""
        assert self._profile is not None
        _synchronize()
        window = self._begin_ns, time.time_ns()
        recorded = self._profile.profiler
        self.discard()
        self._recorded.append(recorded)
        self._windows.append(window)
        self._flight += _gloo_calls(window)

    def discard(self) -> None:
        """See `Profiler.discard`."""
        for name, original in self._originals.items():
            setattr(torch_profiler, name, original)
        self._originals = {}
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def summary(self) -> dict[str, Any]:
        """See `Profiler.summary`."""
        spans: list[TraceSpan] = []
        count = 0
        while self._recorded:
            events = self._recorded.pop(0).kineto_results.events()
            count += len(events)
            if count > SPANS_MAX:
                raise ValueError(f"more than {SPANS_MAX} spans were recorded: trace fewer steps")
            spans += [_span(event) for event in events if not _is_mark_on_device(event)]
        summary = summed_up(spans, self._windows, self._flight)
        if _has_cuda() and not summary["on_device"]:
            summary["error"] = "no kernel was recorded: another tool may hold CUPTI"
        return summary

    def _giving_way_to(self, original: Any) -> Any:
        @wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            if not self.ended_by:
                self.ended_by = "a profiler of the script's own started"
                if get_ident() == self._thread:  # another thread cannot end it; its owner does so at the step's end
                    self.discard()
            return original(*args, **kwargs)

        return start


def _obstacle() -> str:
    """Why no profiler can be started now; empty if one can."""
    if torch_profiler._is_profiler_enabled or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return "a profiler of the script's own runs"
    # One that warms up holds the profiler of the process as well, but torch does not say so.
    prepared = (one for one in gc.get_objects() if type(one) is torch_profiler.profile and one.enabled)
    if any(one.entered and one.kineto_results is None for one in prepared):
        return "a profiler of the script's own warms up"
    if _has_cuda() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def _has_cuda() -> bool:
    """Whether this process uses a device; one that trains on its host must not wake it up."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _synchronize() -> None:
    if _has_cuda():
        torch.cuda.synchronize()


def _is_mark_on_device(event: Any) -> bool:
    """Whether it is torch's copy of a mark of the host on the device, which covers kernels."""
    return _on_device(event) and bool(event.is_user_annotation())


def _on_device(event: Any) -> bool:
    return bool(event.device_type() != torch._C._autograd.DeviceType.CPU)


def _span(event: Any) -> TraceSpan:
    name, begin_ns = event.name(), event.start_ns()
    on_device, is_async = _on_device(event), event.is_async()
    return TraceSpan(
        name=name,
        start_ns=begin_ns,
        end_ns=begin_ns + event.duration_ns(),
        on_device=on_device,
        device=event.device_index(),
        lane=event.device_resource_id() if on_device else event.start_thread_id(),
        is_async=is_async and not on_device,
        number=event.correlation_id(),
        launched_by=event.linked_correlation_id(),
        shapes=event.shapes() if is_async else (),
        dtype=next(iter(event.dtypes()), "") if is_async else "",
        about=event.extra_meta() if name == "record_param_comms" and hasattr(event, "extra_meta") else {},
    )


def _gloo_calls(window: tuple[int, int]) -> list[CollectiveStart]:
    """Calls of gloo within the window, which torch's flight recorder knows the group of and its profiler does not."""
    if not torch.distributed.is_available():
        return []
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(True, False)).get("entries", ())
    return [
        sized(one["profiling_name"], one["process_group"], one["input_sizes"], one["input_dtypes"])
        for one in entries
        if window[0] <= one["time_created_ns"] <= window[1] and one["profiling_name"].startswith("gloo:")
    ]
