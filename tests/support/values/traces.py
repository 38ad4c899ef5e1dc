"""What a rank answers to a trace."""

from typing import Any

from rankwatch_service.policy.traces import TraceAnswer

SUMMARY: dict[str, Any] = {
    "step": 41,
    "step_times_s": [0.5, 0.25, 0.25],
    "on_device": True,
    "wall_s": 1.0,
    "idle_ratio": 0.125,
    "spans": 1_000,
    "kinds": {"matmul": 0.6, "collective": 0.3},
    "streams": [{"device": 0, "stream": 7, "count": 900, "time_s": 0.6}],
    "collectives": [{"group": "mesh_dp", "name": "allreduce", "count": 6, "bytes": 12_582_912, "time_s": 0.3}],
    "top": [{"name": "sm80_gemm", "kind": "matmul", "count": 90, "time_s": 0.6}],
    "left_out": 0,
}


def trace_fields(request: str = "cmd_1", **changes: Any) -> dict[str, Any]:
    """The fields of an event `trace`."""
    return {"request": request, **SUMMARY, **changes}


def trace_answer(command: str, rank: int, error: str = "", *, job: str = "j", step: int = 41) -> TraceAnswer:
    """As the stream hands it over; with an error there is no summary."""
    return TraceAnswer(job, command, rank, error, {} if error else SUMMARY | {"step": step}, 1)
