"""The page of an incident archive: what a person needs to know, in one file that every browser opens offline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from rankwatch_service.incidents.lost_time import cost_unit

STYLE: Final = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#161b26}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.3em .6em;border-bottom:1px solid #dde1e8;"
    "text-align:left;vertical-align:top;overflow-wrap:anywhere}th{white-space:nowrap}"
    "pre{padding:.8em;background:#eef0f4;overflow:auto}"
)


def page(incident: Mapping[str, Any], commands: Sequence[Mapping[str, Any]]) -> str:
    """The HTML. Everything that somebody wrote or measured is text in it.

    Args:
        incident: as REST shows it, with its explanations as `why`.
        commands: those that respond to it.
    """
    title = f"{incident['kind']} in {incident['job']}: {incident['short_id']}"
    evidence = {name: value for name, value in incident["evidence"].items() if name != "stacks"}
    sections = [
        ("What it is", _facts(incident)),
        ("What to do", _list(incident["first_steps"] if incident["state"] != "resolved" else ())),
        ("Why it was opened", _list(f"{one['why']} {one['why_not_earlier']}" for one in incident["why"])),
        ("Evidence", _table((), ((name, _shown(value)) for name, value in evidence.items() if value is not None))),
        ("Consequences", _list(one["summary"] for one in incident["consequences"])),
        ("Changes before the onset", _list(_change(one) for one in incident["changes_before"])),
        ("History", _table(("When", "What", "Who", "Text"), map(_transition, incident["history"]))),
        ("Commands", _table(("When", "Action", "State", "Who", "Reason", "Result"), map(_command, commands))),
        ("Notifications", _table(("When", "Receiver", "State", "Error"), map(_sent, incident["notifications"]))),
    ]
    body = "".join(f"<h2>{escape(name)}</h2>\n{text}\n" for name, text in sections if text)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"<p>{escape(incident['summary'])}</p>\n{body}</body></html>\n"
    )


def _facts(incident: Mapping[str, Any]) -> str:
    suggested = incident["suggestion"]
    unit = cost_unit(incident["accelerated"])
    return _table(
        (),
        [
            ("Severity, state", f"{incident['severity']}, {_state(incident)}"),
            ("Owner", incident["acknowledged_by"] or "none"),
            ("Job, attempt", f"{incident['job']}, {incident['attempt']}"),
            ("Ranks", _shown(incident["ranks"]) or "whole job"),
            ("Hosts", _shown(incident["hosts"])),
            ("Devices", _shown(incident["devices"])),
            ("Began", f"step {_shown(incident['onset_step'])}, {_time(incident['onset_unix_ns'])}"),
            ("Detected", f"step {_shown(incident['detected_step'])}, {_time(incident['detected_unix_ns'])}"),
            ("Resolved", f"step {_shown(incident['resolved_step'])}, {_time(incident['resolved_unix_ns'])}"),
            ("Cost", f"{incident['impact_gpu_hours_per_hour']} {unit} per hour"),
            ("Impact", incident["impact"]),
            ("Normal", incident["normal"]),
            ("Confidence", str(incident["confidence"])),
            ("Suggested", f"{suggested['action']}: {suggested['reason']}" if suggested else "nothing"),
            ("Last good checkpoint", incident["checkpoint"] or "none"),
        ],
    )


def _state(incident: Mapping[str, Any]) -> str:
    """The state, as pages and commands show it."""
    over = incident["state"] == "resolved"
    return "job ended" if over and incident["evidence"].get("ended_with_job") else str(incident["state"])


def _transition(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (_time(one["at_unix_ns"]), one["what"], one["actor"], one["text"])


def _command(one: Mapping[str, Any]) -> tuple[str, ...]:
    who = f"{one['requested_by']}, approved by {one['approved_by']}" if one["approved_by"] else one["requested_by"]
    return (_time(one["requested_unix_ns"]), one["action"], one["state"], who, one["reason"], one["result"])


def _sent(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (_time(one["created_unix_ns"]), one["receiver"], one["state"], one["error"])


def _change(one: Mapping[str, Any]) -> str:
    return f"{_time(one.get('unix_ns'))}: {one.get('what')} (step {_shown(one.get('step'))})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Without heads, the first cell of each row is its head."""
    cell = "td" if heads else "th"
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for tag, text in zip([cell] + ["td"] * 9, row, strict=False))
        for row in rows
    ]
    top = "<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>\n" if heads else ""
    return f"<table>{top}{chr(10).join(line + '</tr>' for line in lines)}</table>" if lines else ""


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ol>{items}</ol>" if items else ""


def _shown(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _time(unix_ns: int | None) -> str:
    """In UTC, to the second."""
    return "–" if unix_ns is None else datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
