"""Records some steps with torch's profiler: what the host calls and, on an accelerator, its kernels.

Starting and stopping waits for the device, which nothing else of rankwatch does. The profiler is one of a process, so
the script's own goes first: ours does not start while that one records or warms up, and ends when that one starts. On
NVIDIA devices CUPTI stays attached afterwards, unless the process was started with TEARDOWN_CUPTI=1.
"""

from __future__ import annotations

import gc
import json
import time
from functools import wraps
from threading import get_ident
from typing import Any, Final

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile

from rankwatch.torch_probe.trace.summary import CollectiveStart, TraceSpan, sized, summed_up

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
