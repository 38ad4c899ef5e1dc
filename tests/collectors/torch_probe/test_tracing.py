"""The profiler of a trace beside the script's own, and what its summary says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import profile, schedule

from rankwatch import layout
from rankwatch.torch_probe import tracing
from rankwatch.torch_probe.tracing import (
    COLLECTIVES_MAX,
    STREAMS_MAX,
    TOP,
    StepProfiler,
    TraceSpan,
    kind_of,
    sized,
    summed_up,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Afterwards torch is as it was."""
    before = (torch_profiler._prepare_profiler, torch_profiler._enable_profiler)
    yield
    assert (torch_profiler._prepare_profiler, torch_profiler._enable_profiler) == before
    assert not torch.autograd._profiler_enabled()


def work() -> None:
    torch.relu(torch.randn(8, 8) @ torch.randn(8, 8))


def recording() -> StepProfiler:
    ours = StepProfiler()
    ours.start()
    return ours


def test_what_ran_in_the_recorded_steps_is_summed_up():
    work()
    ours = recording()
    work()
    ours.stop()
    work()
    ours.start()
    work()
    ours.stop()
    work()
    summary = ours.summary()
    calls = {row["name"]: row["count"] for row in summary["top"]}
    assert (calls["aten::mm"], calls["aten::relu"], len(summary["step_times_s"])) == (2, 2, 2)
    assert summary["kinds"]["matmul"] > 0


def test_a_discarded_step_is_no_part_of_the_summary():
    ours = recording()
    work()
    ours.discard()
    ours.start()
    ours.stop()
    assert len(ours.summary()["step_times_s"]) == 1
    assert "aten::mm" not in {row["name"] for row in ours.summary()["top"]}


def test_more_spans_than_the_limit_are_not_summed_up(monkeypatch):
    monkeypatch.setattr(tracing, "SPANS_MAX", 8)
    ours = recording()
    work()
    ours.stop()
    ours.start()
    work()
    ours.stop()
    with pytest.raises(ValueError, match="more than 8 spans were recorded"):
        ours.summary()


def test_a_boundary_between_steps_may_lie_within_a_mark():
    """Torch crashes if a mark that one recording has seen begin ends in the next."""
    command = [sys.executable, "-m", "tests.support.ranks.marked_rank"]
    environment = os.environ | {"MALLOC_PERTURB_": "165"}
    folder = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "10 steps\n"), done.stderr


def test_it_does_not_start_while_the_scripts_profiler_runs():
    with profile() as theirs:
        with pytest.raises(ValueError, match="a profiler of the script's own runs"):
            recording()
        work()
    assert any(event.name == "aten::mm" for event in theirs.events())


def test_it_does_not_start_while_the_scripts_profiler_warms_up():
    theirs = profile(schedule=schedule(wait=0, warmup=2, active=1))
    theirs.start()
    with pytest.raises(ValueError, match="warms up"):
        recording()
    theirs.stop()
    recording().discard()


@pytest.mark.parametrize("make", [profile, torch_profiler.profile])
def test_it_ends_before_the_scripts_profiler_starts_which_records_everything(make):
    ours = recording()
    with make() as theirs:
        work()
    assert ours.ended_by == "a profiler of the script's own started"
    events = theirs.events() if make is profile else theirs.function_events
    assert any(event.name == "aten::mm" for event in events)
    ours.discard()


def test_it_does_not_start_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph"):
        recording()


MS = 1_000_000


def kernel(name: str, begin_ms: float, end_ms: float, stream: int = 7, by: int = 0) -> TraceSpan:
    return TraceSpan(name, int(begin_ms * MS), int(end_ms * MS), on_device=True, lane=stream, launched_by=by)


def op(name: str, begin_ms: float, end_ms: float, number: int = 0, **more: object) -> TraceSpan:
    return TraceSpan(name, int(begin_ms * MS), int(end_ms * MS), number=number, **more)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matmul"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("aten::addmm", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "attention"),
        ("cutlass_tensorop_s16816fprop_optimized_bf16_128x128", "convolution"),
        ("aten::mkldnn_convolution", "convolution"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("gloo:all_reduce", "collective"),
        ("Memcpy HtoD (Pageable -> Device)", "memory copy"),
        ("void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", "elementwise"),
        ("triton_poi_fused_add_mul_0", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("aten::native_layer_norm", "reduction"),
        ("aten::normal_", "elementwise"),
        ("cudaLaunchKernel", "other"),
    ],
)
def test_the_kind_of_a_kernel_is_known_by_its_name(name, kind):
    assert kind_of(name) == kind


def test_kernels_count_by_kind_and_stream_and_the_rest_of_the_time_the_device_was_idle():
    spans = [
        op("aten::addmm", 0, 90, number=1),
        kernel("sm80_gemm", 10, 30, by=1),
        kernel("sm80_gemm", 40, 60),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 50, 80, stream=20),
    ]
    summary = summed_up(spans, [(0, 100 * MS)])
    assert summary["on_device"]
    assert summary["kinds"] == pytest.approx({"matmul": 0.040, "collective": 0.030})
    assert summary["idle_ratio"] == pytest.approx(0.4)  # 10 to 30 and 40 to 80 of 100
    rows = [(row["stream"], row["count"], round(row["time_s"], 6)) for row in summary["streams"]]
    assert rows == [(7, 2, 0.040), (20, 1, 0.030)]
    assert [(row["name"], row["count"]) for row in summary["top"]] == [
        ("sm80_gemm", 2),
        ("ncclDevKernel_AllReduce_Sum_f32", 1),
    ]


def test_without_a_device_operations_count_by_the_time_that_is_their_own():
    spans = [
        op("aten::linear", 0, 100),
        op("aten::addmm", 10, 90),
        op("aten::relu", 100, 120),
        op("aten::relu", 0, 5, lane=2),
    ]
    summary = summed_up(spans, [(0, 200 * MS)])
    assert (summary["on_device"], summary["idle_ratio"], summary["streams"]) == (False, None, [])
    assert summary["kinds"] == pytest.approx({"matmul": 0.100, "elementwise": 0.025})
    assert summary["top"][0] == {"name": "aten::addmm", "kind": "matmul", "count": 1, "time_s": pytest.approx(0.080)}


def test_time_between_steps_counts_neither_as_theirs_nor_as_idle():
    spans = [kernel("sm80_gemm", 0, 80), kernel("sm80_gemm", 1_000, 1_040)]
    summary = summed_up(spans, [(0, 100 * MS), (1_000 * MS, 1_060 * MS)])
    assert summary["step_times_s"] == pytest.approx([0.100, 0.060])
    assert (summary["wall_s"], summary["idle_ratio"]) == pytest.approx((0.160, 0.25))


def test_what_an_optimizer_calls_and_launches_is_of_the_optimizer():
    called = [op("Optimizer.step#Adam.step", 0, 50), op("aten::add_", 10, 40, number=5)]
    assert summed_up(called, [(0, 100 * MS)])["kinds"] == pytest.approx({"optimizer": 0.050})
    launched = [*called, kernel("vectorized_elementwise_kernel", 60, 70, by=5)]
    assert summed_up(launched, [(0, 100 * MS)])["kinds"] == pytest.approx({"optimizer": 0.010})


def test_collectives_of_nccl_are_reported_by_the_group_that_torch_names_and_timed_by_their_kernels():
    about = {"Collective name": '"allreduce"', "dtype": '"BFloat16"', "In msg nelems": "1000", "Out msg nelems": "1000"}
    data = about | {"Process Group Name": '"3"', "Process Group Description": '"mesh_dp"'}
    tensor = about | {"Process Group Name": '"4"', "Process Group Description": '"undefined"'}
    spans = [
        op("record_param_comms", 0, 1, number=1, about=data),
        op("record_param_comms", 2, 3, number=2, about=data),
        op("record_param_comms", 4, 5, number=3, about=tensor),
        kernel("ncclDevKernel_AllReduce_Sum_bf16", 1, 11, by=1),
        kernel("ncclDevKernel_AllReduce_Sum_bf16", 12, 32, by=2),
        kernel("ncclDevKernel_AllReduce_Sum_bf16", 33, 34, by=3),
    ]
    found = summed_up(spans, [(0, 100 * MS)])["collectives"]
    assert found == [
        {"group": "mesh_dp", "name": "allreduce", "count": 2, "bytes": 4000, "time_s": pytest.approx(0.030)},
        {"group": "4", "name": "allreduce", "count": 1, "bytes": 2000, "time_s": pytest.approx(0.001)},
    ]


def test_collectives_of_gloo_are_reported_by_the_group_of_the_flight_recorder():
    flight = [
        sized("gloo:all_reduce", ["0", "default_pg"], [[8]], ["Float"]),
        sized("gloo:all_reduce", ["1", "undefined"], [[2]], ["Long"]),
        sized("gloo:all_reduce", ["0", "default_pg"], [[8]], ["Float"]),
    ]
    spans = [
        op("gloo:all_reduce", 5, 15, is_async=True, shapes=[[2]], dtype="long int"),
        op("gloo:all_reduce", 0, 10, is_async=True, shapes=[[8]], dtype="float"),
        op("gloo:all_reduce", 20, 40, is_async=True, shapes=[[8]], dtype="float"),
        op("gloo:broadcast", 50, 51, is_async=True, shapes=[[3]], dtype="float"),
    ]
    summary = summed_up(spans, [(0, 100 * MS)], flight)
    rows = [(row["group"], row["name"], row["count"], row["bytes"]) for row in summary["collectives"]]
    assert rows == [("default_pg", "all_reduce", 2, 64), ("1", "all_reduce", 1, 16), ("", "broadcast", 1, 12)]
    assert summary["kinds"] == pytest.approx({"collective": 0.041})


def test_a_summary_is_bounded_whatever_was_recorded():
    spans = [kernel(f"{number}" * 300, number, number + 1, stream=number) for number in range(100)]
    for number in range(100):
        about = {"Process Group Name": f"{number}" * 300, "Collective name": "x" * 300}
        spans.append(op("record_param_comms", number, number + 0.5, number=number, about=about))
    summary = summed_up(spans, [(0, 100 * MS)])
    assert len(summary["streams"]) == STREAMS_MAX
    assert len(summary["collectives"]) == COLLECTIVES_MAX
    assert len(summary["top"]) == TOP
    assert summary["left_out"] == 100 - STREAMS_MAX + 100 - COLLECTIVES_MAX
    assert len(json.dumps(summary)) < layout.TRACE_BYTES_MAX / 4


def test_nothing_recorded_is_a_summary_too():
    summary = summed_up([], [(0, 0)])
    assert (summary["kinds"], summary["spans"]) == ({}, 0)
