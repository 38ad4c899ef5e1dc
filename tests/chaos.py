"""Ten minutes of 1,024 simulated ranks while something is killed every 20 s: `python -m tests.chaos` (or `make chaos`).

Apache Kafka, PostgreSQL, three streams, the api, the notifier and a receiver of webhooks, all real processes; one of
them at a time gets SIGKILL and is started again. Afterwards everything must be as if nothing had been: see
`tests/support/trials/trial.py`. Prints a table; the exit status is 0 if all of it holds.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.support.service.forms import FORMS, cluster_of
from tests.support.service.webhook_receiver import webhook_receiver
from tests.support.trials import trial
from tests.support.trials.fleet import sent
from tests.support.trials.trial import Trial, kills, rank_steps, reference

LAG_S = 30.0
"""Within so long of the last kill no record may wait any more."""
DOUBLED_A_KILL = 8
"""Webhooks under way to one receiver, which a kill of the notifier or its database may cut off before the record."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scenario", choices=("small", "large"), default="large")
    parser.add_argument("--form", choices=FORMS, default="kafka")
    parser.add_argument("--broker", choices=("apache", "noida", "tansu"), default="apache")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    parser.add_argument("--quiet", type=float, default=25.0, help="seconds without kills at the end")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    last_s = 0.0
    messages = 0
    for message in sent(options.scenario):
        last_s, messages = message.time_s, messages + 1
    reference(options.scenario)
    print(f"{messages} messages in {last_s:.0f} s of {options.scenario}; the reference is known", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="rankwatch-chaos-") as folder,
        webhook_receiver() as receiver,
        cluster_of(options.form, Path(folder), kind=options.broker) as cluster,
    ):
        cluster.start(receiver.url)
        acts = list(kills(cluster, options.seed, options.every, last_s - options.quiet))
        began_s = time.monotonic()
        came = trial.run(cluster, receiver, options.scenario, acts)
        lasted_s = time.monotonic() - began_s
        failed = ""
        try:
            cluster.end_roles()
            came.check(DOUBLED_A_KILL * sum(hits(came)[role] for role in ("notify", "postgresql")))
        except AssertionError as error:
            failed = str(error)
        total, right = rank_steps(cluster, options.scenario)
    reported = {
        "lasted": f"{lasted_s:.0f} s",
        "broker, database": f"{options.broker if options.form.startswith('kafka') else 'none'}, "
        f"{'SQLite' if options.form == 'sqlite' else 'PostgreSQL'}",
        "killed": ", ".join(f"{role} {count}" for role, count in sorted(hits(came).items())),
        "incidents found / expected": f"{len(came.found.incidents)} / {len(came.expected.incidents)}",
        "commands found / expected": f"{len(came.found.commands)} / {len(came.expected.commands)}",
        "notifications arrived / owed": f"{len(set(came.ids))} / {len(came.found.messages)}",
        "the same one again": str(came.doubled),
        "rank-steps as sent / sent": f"{right} / {total}",
        "no lag after the last kill": f"{came.caught_up_s:.1f} s",
        "all delivered after the end": f"{came.settle_s:.1f} s",
    }
    table = Table("what", "found")
    for what, found in reported.items():
        table.add_row(what, found)
    Console(width=120).print(table)
    failed = failed or (f"{total - right} rank-steps are not as they were sent" if right != total else "")
    failed = failed or ("records waited for too long" if came.caught_up_s > LAG_S else "")
    print(f"seed {options.seed}: {'FAILED: ' + failed if failed else 'everything is as if nothing had been'}")
    return 1 if failed else 0


def hits(came: Trial) -> Counter[str]:
    """How often each role was killed."""
    return Counter(act.split()[3].partition("-")[0] for act in came.acts if " kill " in act)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except pytest.skip.Exception as skipped:
        sys.exit(f"cannot run: {skipped}")
