"""What is tried: each script with the faults that apply to it, and what has to be said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    step: int = 0
    """In which it comes, if not in that of the case."""


HANG = Fault("stop", "hang")
KILLED = Fault("kill", "rank_lost", shows="SIGKILL")
FAILED = Fault("fail", "rank_lost", shows="ZeroDivisionError: a bug of the script")
LEFT = Fault("leave", "rank_lost", shows="exit code 3")
SLOW = Fault("slow", "straggler")
NAN = Fault("nan", "nonfinite", shows="first in ")
NAN_FOR_GOOD = Fault("nan_for_good", "nonfinite", shows="first in ")
FLIP = Fault("flip", "corruption", names_rank=False)
SPIKE = Fault("spike", "loss_spike", names_rank=False, step=300)

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
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    untouched: bool = False
    """The script has no line for rankwatch: `rankwatch run` starts it."""
    loss_falls: bool = True
    """Else what the script minimizes lies around zero, and is no loss that is judged."""
    in_test: Sequence[Fault] = ()
    """`make test` tries these, not one: what depends on how the script trains, and in one case all."""

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.of or self.name}.py"


NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun's restarted ranks find the addresses of the killed ones in its store, and gloo never connects."""

CASES = (
    Case("ddp_accumulation", in_test=UNDER_DDP),
    Case("fsdp2", (*ENDS, SLOW, NAN)),
    Case("hf_trainer", in_test=(SLOW, NAN)),
    Case("lightning_trainer", in_test=(NAN,)),
    Case("fabric_loop", in_test=(NAN,)),
    Case("accelerate_loop", in_test=(NAN,)),
    Case("deepspeed_loop", (*ENDS, SLOW, NAN), in_test=(NAN,)),
    Case("megatron_loop", (*ENDS, SLOW, NAN), ranks=4, step=40, in_test=(NAN,)),
    Case("torchtitan_loop", (*ENDS, SLOW, NAN), in_test=(SLOW,)),
    Case("compiled"),
    Case("loader_workers"),
    Case("for_batch"),
    Case("gan", in_test=(NAN, FLIP)),
    Case("grad_scaler", (*ENDS, SLOW, NAN_FOR_GOOD, FLIP), in_test=(NAN_FOR_GOOD,)),
    Case("pp_dp", (*ENDS, NAN, FLIP), ranks=4, step=40),
    Case("tp_dp", (*ENDS, SLOW, NAN, FLIP), ranks=4, step=40),
    Case("rollouts", (*ENDS, NAN), step=20),
    Case("elastic", launcher=("--max-restarts=2",), environment=NEW_STORE),
    Case("ctrl_c", ENDS),
    Case("odd_ends", ENDS),
    Case("untouched_gpt", (*UNDER_DDP, SPIKE), untouched=True, in_test=(NAN, SPIKE, HANG)),
    Case("untouched_hf", (*UNDER_DDP, SPIKE), untouched=True, in_test=(NAN,)),
    Case("lightning_alone", (HANG, KILLED), torchrun=False, of="lightning_trainer"),
    Case("trl_sft", in_test=(NAN,)),
    Case("trl_grpo", in_test=(NAN,), loss_falls=False),
)


def rotated(case: Case) -> Fault:
    """The one fault with which `make test` tries a case: each case another one."""
    return case.faults[CASES.index(case) % len(case.faults)]


def tried(case: Case) -> Sequence[Fault]:
    """The faults with which `make test` tries a case."""
    return case.in_test or [rotated(case)]
