"""What is tried: each script with the faults that apply to it, and what has to be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Fault:
    """A fault and what it is told as."""

    name: str
    kind: str
    names_rank: bool = True
    """After a collective all ranks hold the same, and of two replicas that differ nobody can know which is right."""
    shows: str = ""
    """Stands in what is said."""


HANG = Fault("stop", "hang")
KILLED = Fault("kill", "rank_lost", shows="SIGKILL")
FAILED = Fault("fail", "rank_lost", shows="ZeroDivisionError: a bug of the script")
LEFT = Fault("leave", "rank_lost", shows="'code': 3")
SLOW = Fault("slow", "straggler")
NAN = Fault("nan", "nonfinite", shows="first in ")
NAN_FOR_GOOD = Fault("nan_for_good", "nonfinite", shows="first in ")
NAN_ON_ALL = Fault("nan", "nonfinite", names_rank=False)
FLIP = Fault("flip", "corruption", names_rank=False)

ENDS = (HANG, KILLED, FAILED, LEFT)
UNDER_DDP = (*ENDS, SLOW, NAN, FLIP)


@dataclass(frozen=True)
class Case:
    """One script, and how it is started."""

    name: str
    faults: Sequence[Fault] = UNDER_DDP
    ranks: int = 2
    step: int = 50
    """In which the fault comes."""
    launcher: Sequence[str] = field(default=())
    """Options of torchrun."""
    torchrun: bool = True
    """Else the script is run as a program, and starts its ranks itself."""
    of: str = ""
    """The script, where it is another case's."""
    all_in_test: bool = False
    """`make test` tries all faults, not one."""

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.of or self.name}.py"


CASES = (
    Case("ddp_accumulation", all_in_test=True),
    Case("fsdp2", (*ENDS, SLOW, NAN_ON_ALL)),
    Case("hf_trainer"),
    Case("lightning_trainer"),
    Case("accelerate_loop", all_in_test=True),
    Case("compiled"),
    Case("loader_workers"),
    Case("for_batch"),
    Case("gan", all_in_test=True),
    Case("grad_scaler", (*ENDS, SLOW, NAN_FOR_GOOD, FLIP), all_in_test=True),
    Case("pp_dp", (*ENDS, NAN, FLIP), ranks=4, step=40),
    Case("tp_dp", (*ENDS, SLOW), ranks=4, step=40),
    Case("rollouts", (*ENDS, NAN), step=20),
    Case("elastic", launcher=("--max-restarts=2",)),
    Case("ctrl_c", ENDS),
    Case("odd_ends", ENDS),
    Case("lightning_alone", (HANG, KILLED), torchrun=False, of="lightning_trainer"),
)


def rotated(case: Case) -> Fault:
    """The one fault with which `make test` tries a case: each case another one."""
    return case.faults[CASES.index(case) % len(case.faults)]
