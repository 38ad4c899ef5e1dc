"""How soon pages of the dashboard are painted, and how many bytes they take.

    python benchmarks/pages.py [--incidents 10000] [--ranks 4096] [--rounds 5] [--open 200]

A real api process on SQLite and a real Chromium, both on this machine. Half of the incidents are unresolved, of 40
jobs; the wide job has 2,000 steps. *Painted* is when the browser has drawn what people look for: the first row of a
list, the first steps of an incident, the heat map. *First visit*: nothing is in the browser's cache; *again*: the files
of the pages are. Bytes are those on the wire.

*Open pages* are home pages that are open somewhere, 50 to a person: each has an event stream, and asks for what that
page asks for, which is the totals after each change of an incident, and health and totals every 15 s. Meanwhile a
writer commits as a busy stream does: ten times a second, with the step of a job, and an incident every 5 s. Memory and
CPU time are those of both api processes; the line without pages has the same writer. Memory is proportional set size:
what they share counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2
import numpy as np
from playwright.sync_api import Browser, BrowserContext, sync_playwright
from sqlalchemy import Engine, insert

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.incidents.model import derived
from rankwatch_service.orders.commands import publish
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Attempt, Incident, Job
from tests.browser.conftest import FLAGS
from tests.support.service.api import api_process, cpu_seconds
from tests.support.values.incidents import incident_row

S: Final = 10**9
JOBS: Final = 40
STEPS: Final = 2_000
WIDE: Final = "wide"
HOST_RANKS: Final = 8
LIMIT_MS: Final = 60_000
OPEN_S: Final = 30.0
SETTLE_S: Final = 5.0
POLL_S: Final = 15.0
COMMITS_A_SECOND: Final = 10
SESSION_PAGES: Final = 50
"""Pages of one session: a person may have up to 64 open."""

# Keeps when the selector was first there and the frame with it had been drawn.
PAINTED: Final = """(() => {
  const look = () => {
    if (!document.querySelector(SELECTOR)) return requestAnimationFrame(look);
    requestAnimationFrame(() => setTimeout(() => (window.paintedMs = performance.now())));
  };
  requestAnimationFrame(look);
})()"""


def store(engine: Engine, incidents: int, ranks: int) -> str:
    """Fill the database; returns the id of one unresolved incident of the wide job."""
    now = time.time_ns()
    names = [WIDE, *(f"gpt-{n:02}" for n in range(1, JOBS))]
    seen = {"first_seen_unix_ns": now - 9_000 * S, "last_seen_unix_ns": now, "last_progress_unix_ns": now}
    row = {"state": "running", "attempt": "l.0", "step": STEPS - 1, "step_time_s": 0.25, "loss": 2.3, **seen}
    topology = {
        "ranks": [placed(rank) for rank in range(ranks)],
        "can": ["pause", "rollback", "rollback_memory", "rollback_disk", "stop"],
        "watched": "",
    }
    attempt = {"job": WIDE, "attempt": "l.0", "started_unix_ns": now - 9_000 * S, "number": 1, "first_step": 0}
    rows = [incident(n, names[n % JOBS], now) for n in range(incidents)]
    with write(engine) as connection:
        connection.execute(
            insert(Job), [row | {"name": name, "world_size": ranks, "ranks_reporting": ranks} for name in names]
        )
        connection.execute(insert(Attempt).values(**attempt, last_step=STEPS - 1, world_size=ranks, topology=topology))
        connection.execute(insert(Incident), rows)
    series = SeriesWriter(engine, SystemClock())
    rng = np.random.default_rng(1)
    everyone = np.ones(ranks, dtype=bool)
    for step in range(STEPS):
        values = {
            "step_time_s": 0.25 + 0.001 * rng.standard_normal(ranks),
            "busy_s": 0.2 + 0.001 * rng.standard_normal(ranks),
            "loss": np.full(ranks, 2 + 3 * np.exp(-step / 300)),
            "grad_norm": np.full(ranks, 1 + 0.05 * rng.standard_normal()),
        }
        series.add(WIDE, Frame("l.0", "steps", step, StepKind.TRAIN, 0.0, values, dict.fromkeys(values, everyone)))
    series.close(WIDE)
    return next(str(one["id"]) for one in rows if one["job"] == WIDE and one["state"] == "open")


def placed(rank: int) -> dict[str, object]:
    """A rank in the topology."""
    local = rank % HOST_RANKS
    groups = {"dp": rank // 32, "tp": local, "pp": rank // 8 % 4}
    device = {"device_uuid": f"GPU-{rank:012x}", "device_type": "cuda"}
    return {"rank": rank, "local_rank": local, "host": f"node-{rank // HOST_RANKS:04}", **device, **groups}


def incident(n: int, job: str, now: int) -> dict[str, object]:
    """One of many: each second is unresolved, each tenth of these acknowledged."""
    kinds = ("straggler", "hang", "nonfinite", "device_degraded", "slowdown")
    state = "resolved" if n // JOBS % 2 else "acknowledged" if n % 10 == 9 else "open"
    onset = now - (n + 1) * 20 * S
    times = {"onset_unix_ns": onset, "detected_unix_ns": onset + S, "updated_unix_ns": onset + S}
    who = {"ranks": [n % 512], "hosts": [f"node-{n % 512 // 8:04}"], "attempt": "l.0"}
    return incident_row(
        id=f"inc_{derived('bench', n)}", number=n + 1, job=job, episode=n + 1, kind=kinds[n % 5], state=state,
        severity=("critical", "warning", "warning", "info")[n % 4], scope=f"rank:{n % 512}",
        resolved_unix_ns=onset + 600 * S if state == "resolved" else None,
        acknowledged_by="ada@example.com" if state == "acknowledged" else None, **times, **who,
    )  # fmt: skip


def session(address: str, engine: Engine, person: str) -> str:
    """The cookie of a new session."""
    with write(engine) as connection:
        _, token = create_token(connection, TokenKind.API, person, [Scope.ADMIN], time.time_ns())
    answer = httpx2.post(f"{address}/api/v1/session", json={"token": token}, headers={"Origin": address})
    answer.raise_for_status()
    return answer.headers["set-cookie"].split(";")[0]


@dataclass
class PageLoad:
    """What one load of a page took."""

    painted_ms: float
    sizes: list[int] = field(default_factory=list)
    """Bytes on the wire of each response."""


def load(context: BrowserContext, address: str, path: str, selector: str) -> PageLoad:
    """Open a page, and wait until it is painted and no request is open."""
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    wire = context.new_cdp_session(page)
    wire.send("Network.enable")
    found = PageLoad(0.0)
    wire.on("Network.loadingFinished", lambda reported: found.sizes.append(int(reported["encodedDataLength"])))
    page.add_init_script(PAINTED.replace("SELECTOR", json.dumps(selector)))
    page.goto(address + path)
    deadline_s = time.monotonic() + LIMIT_MS / 1e3
    while (painted := page.evaluate("window.paintedMs")) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} has no {selector}")
        page.wait_for_timeout(20)
    page.wait_for_timeout(500)  # what comes after the paint belongs to the first load too
    found.painted_ms = painted
    page.close()
    return found


def loads(browser: Browser, address: str, cookie: str, incident_id: str, rounds: int) -> None:
    """Print the table of first visits and later ones."""
    pages = {
        "Home": ("/incidents", "tr.link"),
        "Incident": (f"/incidents/{incident_id}", ".steps li"),
        "Jobs": ("/jobs", "tr.link"),
        "Job": (f"/jobs/{WIDE}", "canvas.heat"),
    }
    name, value = cookie.split("=", 1)
    print("\n| page | first visit, ms | KB | requests | again, ms | KB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for title, (path, selector) in pages.items():
        first, again = [], []
        for _ in range(rounds):
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            context.add_cookies([{"name": name, "value": value, "url": address}])
            first.append(load(context, address, path, selector))
            again.append(load(context, address, path, selector))
            context.close()
        print(f"| {title} | {middle(first)} | {max(len(one.sizes) for one in first)} | {middle(again)} |")


def open_pages(address: str, engine: Engine, pid: int, pages: int) -> None:
    """Print what so many open home pages cost the api process."""
    cookies = [session(address, engine, f"person {n}") for n in range(-(-pages // SESSION_PAGES))]
    print("\n| open pages | memory, MB | CPU, % of a core | changes received, median s after the commit (largest) |")
    print("| ---: | ---: | ---: | ---: |")
    for count in (0, pages):
        delays_s, used_s, resident = asyncio.run(watch_home(address, engine, pid, cookies, count))
        late = f"{statistics.median(delays_s):.3f} ({max(delays_s):.3f})" if delays_s else "–"
        print(f"| {count} | {resident / 1e6:.0f} | {100 * used_s / OPEN_S:.0f} | {late} |")


async def watch_home(
    address: str, engine: Engine, pid: int, cookies: list[str], count: int
) -> tuple[list[float], float, int]:
    """Keep pages open for `OPEN_S`: delays of the changes they receive, CPU seconds and memory of the api processes."""
    delays_s: list[float] = []
    async with httpx2.AsyncClient(base_url=address, timeout=60.0, limits=httpx2.Limits(max_connections=None)) as client:
        own = [{"cookie": cookies[n // SESSION_PAGES]} for n in range(count)]
        tasks = [asyncio.create_task(home(client, headers, n, delays_s)) for n, headers in enumerate(own)]
        await asyncio.sleep(SETTLE_S)
        delays_s.clear()
        pids = [pid, *children_of(pid)]
        began_s = sum(map(cpu_seconds, pids))
        await asyncio.to_thread(commit_for, engine, OPEN_S)
        used_s, resident = sum(map(cpu_seconds, pids)) - began_s, sum(map(resident_bytes, pids))
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return delays_s, used_s, resident


def children_of(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text(encoding="ascii").split()]


def resident_bytes(pid: int) -> int:
    """Memory of a process; what it shares with another counts half."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").split()
    return int(rollup[rollup.index("Pss:") + 1]) * 1024


async def home(client: httpx2.AsyncClient, headers: dict[str, str], number: int, delays_s: list[float]) -> None:
    """One page: its stream, and what it asks for."""

    async def ask(*paths: str) -> None:
        for path in paths:
            (await client.get(f"/api/v1/{path}", headers=headers)).raise_for_status()

    async def poll() -> None:
        await asyncio.sleep(POLL_S * number / SESSION_PAGES % POLL_S)  # people open their pages at different times
        while True:
            await ask("health", "incidents/totals")
            await asyncio.sleep(POLL_S)

    polling = asyncio.create_task(poll())
    try:
        async with client.stream("GET", "/api/v1/events", headers=headers) as answer:
            answer.raise_for_status()
            topic = ""
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    topic = value
                elif name == "data" and topic in ("job", "incident"):
                    delays_s.append(time.time() - json.loads(value)["at_unix_ns"] / S)
                    if topic == "incident":
                        await ask("incidents/totals")
    finally:
        polling.cancel()


def commit_for(engine: Engine, seconds: float) -> None:
    """Commit ten times a second, as a busy stream does."""
    for number in range(round(seconds * COMMITS_A_SECOND)):
        began_s = time.monotonic()
        topic = "job" if number % (5 * COMMITS_A_SECOND) else "incident"
        with write(engine) as connection:
            reported = {"state": "running", "step": number}
            publish(connection, topic, WIDE, reported, time.time_ns())
        time.sleep(max(0.0, 1 / COMMITS_A_SECOND - (time.monotonic() - began_s)))


def middle(found: list[PageLoad]) -> str:
    """Median time and largest size, as cells of a table."""
    times = [one.painted_ms for one in found]
    size = max(sum(one.sizes) for one in found)
    return f"{statistics.median(times):.0f} ({min(times):.0f}-{max(times):.0f}) | {size / 1e3:.0f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incidents", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4_096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open", type=int, default=200, help="pages that people have open")
    options = parser.parse_args()
    print(f"CPython {platform.python_version()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="rankwatch-pages-") as name:
        folder = Path(name)
        engine = open_engine(f"sqlite:///{folder / 'rankwatch.db'}")
        upgrade(engine)
        incident_id = store(engine, options.incidents, options.ranks)
        with api_process(str(engine.url), folder) as (port, pid):
            address = f"http://127.0.0.1:{port}"
            cookie = session(address, engine, "first")
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
                print(f"Chromium {browser.version}; load of the machine (1 min): {os.getloadavg()[0]:.1f}")
                loads(browser, address, cookie, incident_id, options.rounds)
                browser.close()
            open_pages(address, engine, pid, options.open)
        engine.dispose()


if __name__ == "__main__":
    main()
