"""Forty ways in which jobs die, as their ranks print them: the rank that had the first error is named, with its error.

The texts are written after reports of people, in our own words and numbers. Hosts' clocks differ by up to two seconds,
and the ends arrive in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.output.errors import LINE_CHARACTERS_MAX, LINES_MAX, Weight, reason
from rankwatch.output.tail import PrintedLine
from tests.detectors.test_ends import SIGABRT, SIGINT, SIGKILL, SIGTERM, Ends

SIGBUS, SIGSEGV = 7, 11

TRACE = 'Traceback (most recent call last):\n  File "/job/train.py", line 88, in main\n    loss.backward()\n'
PEER = (
    TRACE + "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:41002"
)
RESET = TRACE + "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
STORE = TRACE + "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout_dump"
WATCHDOG = (
    "[rank{rank}]:[E904 11:02:33 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4182, OpType=ALLREDUCE, NumelIn=7087872, Timeout(ms)=600000) ran for 600021 milliseconds\n"
    "[rank{rank}]:[E904 11:02:33 ProcessGroupNCCL.cpp:1785] [Rank {rank}] To avoid data inconsistency, we are taking "
    "the entire process down.\nterminate called after throwing an instance of 'c10::DistBackendError'"
)
REMOTE = (
    TRACE
    + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2114, remote process exited or there "
    "was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error"
)
ASKED = "W1128 10:02:01 torch/distributed/elastic: received death signal, shutting down"
CUDA_ABORT = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: {}\n"


@dataclass(frozen=True)
class Failure:
    """How the ranks of a job end."""

    prints: str
    """What the rank with the first error prints last."""
    error: str
    """Part of the first error that people read; "": it stays unknown."""
    ends: dict[str, Any] = field(default_factory=lambda: {"code": 1})
    others: str = PEER
    others_end: dict[str, Any] = field(default_factory=lambda: {"code": 1})
    ranks: int = 8
    hosts: int = 2
    culprit: int = 5
    after_s: float = 1.0
    """When the others begin to end."""
    named: bool = True
    """False: the rank cannot be known either."""


ABORTS = {"code": None, "signal": SIGABRT}
KILLED = {"code": None, "signal": SIGKILL}

FAILURES = {
    "cuda out of memory": Failure(
        TRACE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has 79 GiB",
        "CUDA out of memory",
    ),
    "cuda out of memory in a job of nccl": Failure(
        TRACE + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB",
        "CUDA out of memory",
        others=REMOTE,
        ranks=64,
        hosts=8,
        culprit=17,
    ),
    "illegal memory access": Failure(
        TRACE + "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
        "reported asynchronously.",
        "illegal memory access",
        others=WATCHDOG,
        others_end=ABORTS,
        after_s=600.0,
        ranks=64,
        hosts=8,
        culprit=17,
    ),
    "illegal access seen by the watchdog": Failure(
        "[rank5]:[E904 ProcessGroupNCCL.cpp:1446] [PG 0 Rank 5] Process group watchdog thread terminated with "
        "exception: "
        "CUDA error: an illegal memory access was encountered\n"
        + CUDA_ABORT.format("an illegal memory access was encountered"),
        "illegal memory access",
        ABORTS,
        others=WATCHDOG,
        others_end=ABORTS,
        after_s=5.0,
    ),
    "device-side assert": Failure(
        "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [31,0,0], thread: "
        "[12,0,0] Assertion "
        "`srcIndex < srcSelectDimSize` failed.\n" + TRACE + "RuntimeError: CUDA error: device-side assert triggered",
        "ssert",
    ),
    "uncorrectable ECC error": Failure(
        CUDA_ABORT.format("uncorrectable ECC error encountered"), "ECC", ABORTS, others=REMOTE, ranks=16, culprit=11
    ),
    "a device that fell off the bus": Failure(
        TRACE + "RuntimeError: Unable to determine the device handle for GPU0000:5D:00.0: GPU is lost.", "GPU is lost"
    ),
    "cublas": Failure(
        TRACE + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "CUBLAS_STATUS",
    ),
    "cudnn": Failure(TRACE + "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS"),
    "no kernel image": Failure(
        TRACE + "RuntimeError: CUDA error: no kernel image is available for execution on the device", "no kernel image"
    ),
    "nccl: two ranks on one device": Failure(
        TRACE + "torch.distributed.DistBackendError: ncclInvalidUsage: Duplicate GPU detected : rank 5 and rank 4",
        "Duplicate GPU",
    ),
    "nccl: shared memory": Failure(
        "node-1:311:402 [5] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-8f to 9637892 "
        "bytes: No space "
        "left on device\n" + TRACE + "torch.distributed.DistBackendError: NCCL error: unhandled system error",
        "No space left on device",
    ),
    "host memory: the kernel's OOM killer in the log": Failure(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=88121.0. Some of the step tasks have been OOM Killed.",
        "oom_kill",
        KILLED,
    ),
    "host memory: a silent SIGKILL": Failure("step 1200 loss 2.31", "", KILLED),
    "host memory: an error of Python": Failure(
        TRACE + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 30 GiB\nMemoryError",
        "Unable to allocate",
    ),
    "host memory: std::bad_alloc": Failure(
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "std::bad_alloc",
        ABORTS,
    ),
    "a loader worker that was killed": Failure(
        TRACE + "RuntimeError: DataLoader worker (pid 7191) is killed by signal: Killed.", "DataLoader worker"
    ),
    "an error in a loader worker": Failure(
        TRACE
        + "ValueError: Caught ValueError in DataLoader worker process 3.\nOriginal "
        + TRACE
        + "ValueError: bad image",
        "bad image",
    ),
    "shared memory of a container": Failure(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "insufficient shared memory",
    ),
    "bus error": Failure("Bus error (core dumped)", "Bus error", {"code": None, "signal": SIGBUS}),
    "segmentation fault": Failure(
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):",
        "Segmentation fault",
        {"code": None, "signal": SIGSEGV},
    ),
    "a corrupted heap": Failure("double free or corruption (!prev)", "double free", ABORTS),
    "disk full": Failure(TRACE + "OSError: [Errno 28] No space left on device: '/ckpt/step-4000'", "No space left"),
    "disk quota": Failure(TRACE + "OSError: [Errno 122] Disk quota exceeded", "quota exceeded"),
    "a file that is gone": Failure(
        TRACE + "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-0417.bin'", "shard-0417.bin"
    ),
    "a stale file handle": Failure(TRACE + "OSError: [Errno 116] Stale file handle: '/nfs/data'", "Stale file handle"),
    "an import": Failure(TRACE + "ModuleNotFoundError: No module named 'flash_attn'", "flash_attn"),
    "a missing library": Failure(
        TRACE + "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "libcudart"
    ),
    "an exception of the script": Failure(TRACE + "KeyError: 'input_ids'", "KeyError: 'input_ids'"),
    "an exception behind a prefix": Failure(
        "\n".join(f"[rank5]: {line}" for line in (TRACE + "ValueError: too many values to unpack").splitlines()),
        "ValueError: too many values to unpack",
        ranks=2,
        hosts=1,
        culprit=1,
    ),
    "an assertion in C++": Failure(
        TRACE + "RuntimeError: base.is_contiguous() INTERNAL ASSERT FAILED at 'reducer.cpp':340, please report a bug",
        "INTERNAL ASSERT FAILED",
    ),
    "an error of a hub": Failure(
        TRACE + "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub.example/api", "401"
    ),
    "a loss scale at its minimum": Failure(
        TRACE + "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "loss scale already at minimum",
    ),
    "an error while a peer's loss is reported": Failure(
        TRACE + "RuntimeError: CUDA error: an illegal memory access was encountered\n\nDuring handling of it, "
        "another exception occurred:\n" + PEER,
        "illegal memory access",
    ),
    "of a thousand ranks": Failure(
        TRACE + "RuntimeError: CUDA error: an illegal memory access was encountered",
        "illegal memory access",
        others=REMOTE,
        ranks=1_000,
        hosts=125,
        culprit=417,
    ),
    "a store that nobody serves any more": Failure(
        TRACE + "ValueError: cannot reshape array of size 12", "reshape", others=STORE, culprit=0, ranks=16
    ),
    "a service that timed out": Failure(
        TRACE + "TimeoutError: object store: reading shard-00017.tar timed out after 60 s",
        "shard-00017.tar",
        others_end=ABORTS,
    ),
    "a network that broke": Failure(REMOTE, "", others=REMOTE, after_s=0.0, named=False),
    "peers that wait in vain for one that hangs": Failure(
        WATCHDOG, "", ABORTS, others=WATCHDOG, others_end=ABORTS, after_s=0.0, named=False
    ),
    "Ctrl-C": Failure(
        TRACE + "KeyboardInterrupt",
        "",
        {"code": None, "signal": SIGINT},
        others=TRACE + "KeyboardInterrupt",
        named=False,
    ),
    "a time limit": Failure(
        "slurmstepd: error: *** JOB 88121 ON node-1 CANCELLED AT 2026-03-02T10:00:12 DUE TO TIME LIMIT ***",
        "",
        {"code": None, "signal": SIGTERM},
        others=ASKED,
        others_end={"code": None, "signal": SIGTERM},
        named=False,
    ),
    "an exit without a word": Failure("step 80 loss 2.2\nstep 81 loss 2.2", "", {"code": 3}),
}


def printed(text: str, rank: int) -> list[PrintedLine]:
    return [PrintedLine(0, line) for line in text.replace("{rank}", str(rank)).splitlines()]


def output_of(text: str, rank: int, number: int | None) -> dict[str, Any]:
    found = reason(printed(text, rank), number)
    if found is None:
        return {}
    certain = found.pattern.weight is Weight.CERTAIN
    reported = {"line": found.line, "role": str(found.pattern.role), "certain": certain, "where": found.where}
    return {"output": reported | {"lines": [*found.lines]}}


def noted_error(text: str) -> str:
    """The exception that Python's hook notes of such a text; "": none."""
    trace = text.replace("[rank5]: ", "").partition("Traceback")[2]
    line = next((line for line in trace.splitlines()[1:] if line[:1].strip() and ": " in line), "")
    line = text.splitlines()[-1] if ": Caught " in line else line
    kind, _, message = line.partition(": ")
    return f"{kind.rpartition('.')[2]}: {message}" if line else ""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAILURES)
def test_the_first_error_is_that_of_the_first_rank(name, seed):
    """In the last of three runs the exceptions of Python are noted as well."""
    failure, chance = FAILURES[name], random.Random(f"{name} {seed}")
    clock_s = [chance.uniform(-2.0, 2.0) for _ in range(failure.hosts)]
    job = Ends(ranks=failure.ranks, hosts=failure.hosts)
    ends = []
    for rank in range(failure.ranks):
        host = rank * failure.hosts // failure.ranks
        is_first = rank == failure.culprit
        status = {"code": None, "signal": None} | (failure.ends if is_first else failure.others_end)
        text = failure.prints if is_first else failure.others
        after_s = 0.0 if is_first else failure.after_s + chance.uniform(0.2, 1.0)
        fields = status | output_of(text, rank, status["signal"])
        if seed == 2:
            fields["error"] = noted_error(text)
        ends.append((rank, 6.0 + after_s + clock_s[host], fields))
    order: dict[int, int] = {}
    for rank, _, fields in sorted(ends, key=lambda one: one[1]):
        host = rank * failure.hosts // failure.ranks
        fields["exit_order"] = order[host] = order.get(host, -1) + 1
    chance.shuffle(ends)
    findings = []
    for rank, at_s, fields in ends:
        findings += job.exit(rank, at_s, **fields)
    findings += job.stand(10)
    last = findings[-1]
    if failure.named:
        assert last.ranks[0] == failure.culprit
    assert failure.error in last.evidence.get("first_error", "")
    assert bool(failure.error) is bool(last.evidence.get("first_error"))
    if failure.error:
        assert f"rank {failure.culprit} on host-" in last.evidence["first_error"]
        assert failure.error in last.summary
        assert f"{failure.ranks - 1} other" in last.summary


def test_lines_that_say_nothing_of_an_end_choose_nothing():
    for text in (
        "step 120 loss 2.31 error_rate 0.12 time 0.31 s",
        "UserWarning: FileNotFoundError while reading the cache, retrying",
        "Epoch 3: 100%|##########| 120/120 [00:31<00:00, loss=0.8]",
        "wandb: Network error (ConnectTimeout), entering retry loop.",
        "INFO checkpoint saved, memory 31 GB, killed 0 workers",
    ):
        assert reason(printed(text, 0)) is None, text


def test_an_error_that_was_printed_long_before_the_end_did_not_cause_it():
    old = [PrintedLine(1_000_000_000, "ValueError: a batch was skipped"), PrintedLine(700_000_000_000, "step 9000")]
    assert reason(old) is None


def test_an_error_after_which_training_went_on_did_not_end_it():
    steps = "\n".join(f"step {number} loss 2.{number}" for number in range(20))
    assert reason(printed(f"{steps}\nCUDA out of memory, a smaller batch is taken\n{steps}", 0)) is None
    assert reason(printed(f"{steps}\nValueError: bad\nstep 21 loss 2.3", 0)) is not None


def test_an_error_that_a_rank_went_on_after_makes_it_no_cause_of_a_lost_peer():
    job = Ends(ranks=2)
    caught = output_of("ValueError: a bad sample was left out", 0, None)
    findings = job.raises(0, "RuntimeError: Connection closed by peer") + job.exit(0, code=1, **caught)
    findings += job.exit(1, **KILLED) + job.stand(10)
    assert findings[-1].ranks == (1,)
    assert "first_error" not in findings[-1].evidence


def test_no_more_than_twenty_lines_are_chosen_and_none_has_a_secret():
    text = [f"line {number}" for number in range(60)]
    text += ["HF_TOKEN=hf_aaaaaaaaaaaaaaaaaaaaaaaa https://me:word@host/x", "tokens: 512", "ValueError: bad"]
    text += ["after"] * 60
    found = reason([PrintedLine(0, line) for line in text])
    assert found is not None
    assert len(found.lines) == LINES_MAX
    assert "HF_TOKEN=*** https://***@host/x" in found.lines
    assert "tokens: 512" in found.lines


@given(st.lists(st.text() | st.sampled_from([one.prints for one in FAILURES.values()]), max_size=30))
def test_whatever_is_printed_the_chosen_lines_are_short_and_printable(texts):
    found = reason([PrintedLine(0, text) for text in texts])
    if found is not None:
        assert len(found.lines) <= LINES_MAX
        for line in (found.line, found.where, *found.lines):
            assert len(line) <= LINE_CHARACTERS_MAX
            assert line.replace("\t", "").isprintable()
