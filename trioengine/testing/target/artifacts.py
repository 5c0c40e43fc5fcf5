"""The forms of a finding: its schedule as text and as a sequence diagram, a script, and lines of curl."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Iterable
from html import escape

from trioengine.testing.target import dialects, exchange, judge, machine, oracles, processes, program, standalone, wire
from trioengine.testing.target.exchange import GOLDEN_PROMPT, Event, Exchange, Target
from trioengine.testing.target.hunt import Found
from trioengine.testing.target.program import Step

_MODULES = (wire, dialects, program, oracles, exchange, judge, machine, processes, standalone)
_COLUMN, _ROW, _TOP = 150, 22, 50  # pixels


def schedule_text(log: Iterable[Event]) -> str:
    """Return a line for each event: seconds, lifeline, direction, text."""
    lines = (f"{event.at:8.3f}  {event.client:>9} {'->' if event.to_server else '<-'} {event.text}" for event in log)
    return "\n".join(lines)


def schedule_svg(log: list[Event]) -> str:
    """Draw a sequence diagram: a lifeline for each client, and the server's at the right."""
    events = [event for event in log if event.client != "program"]
    names = [*dict.fromkeys(event.client for event in events), "server"]
    at = {name: _COLUMN // 2 + _COLUMN * index for index, name in enumerate(names)}
    width, height = _COLUMN * len(names) + 300, _TOP + _ROW * (len(events) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        '<defs><marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
    ]
    for name in names:
        label = f"client {name}" if name.isdigit() else name
        parts.append(f'<text x="{at[name]}" y="20" text-anchor="middle" font-weight="bold">{escape(label)}</text>')
        parts.append(f'<line x1="{at[name]}" y1="28" x2="{at[name]}" y2="{height - 10}" stroke="#bbb"/>')
    for index, event in enumerate(events):
        parts += _arrow(event, at[event.client], at["server"], _TOP + _ROW * index)
    return "\n".join([*parts, "</svg>"])


def _arrow(event: Event, client: int, server: int, y: int) -> list[str]:
    begin, end = (client, server) if event.to_server else (server, client)
    colour = "#06c" if event.to_server else "#080"
    return [
        f'<line x1="{begin}" y1="{y}" x2="{end}" y2="{y}" stroke="{colour}" marker-end="url(#arrow)"/>',
        f'<text x="{server + 8}" y="{y + 4}">{event.at:.3f} s  {escape(event.text)}</text>',
    ]


def script(found: Found, target: Target) -> str:
    """Return a Python program without dependencies that runs the steps, and exits with 1 if the finding recurs."""
    about = "Reproduces a finding of `trioengine fuzz --target`, and exits with 1 if it recurs."
    usage = "Usage: python3 SCRIPT [HOST:PORT [PID]]. A key of the server is read from TARGET_API_KEY."
    steps = "".join(f"    {step!r},\n" for step in found.steps)
    parts = [
        f'#!/usr/bin/env python3\n"""{about}\n\n{usage}\n"""',
        "from __future__ import annotations",
        *(f"# ---- {module.__name__.rpartition('.')[2]}\n{_body(inspect.getsource(module))}" for module in _MODULES),
        f"# ---- the finding\n# {_one_line(str(found.finding))}\nTARGET = {target!r}\nSTEPS = [\n{steps}]",
        "if __name__ == '__main__':\n"
        f"    sys.exit(reproduce(TARGET, STEPS, {found.tag!r}, {found.finding.oracle!r}, sys.argv[1:]))",
    ]
    return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split()).encode("ascii", "replace").decode()


def _body(source: str) -> str:
    """Return a module's source without the imports of this package."""
    kept, skipping = [], False
    for line in source.splitlines():
        if line.startswith(("from trioengine", "from __future__")):
            skipping = line.endswith("(")
        elif skipping:
            skipping = line != ")"
        else:
            kept.append(line)
    return "\n".join(kept)


def curl_lines(found: Found, target: Target) -> list[str]:
    """Return the program as shell lines; a step that curl cannot make is a comment."""
    exchange = Exchange(target)
    lines: list[str] = []
    jobs: dict[int, str] = {}
    for step in found.steps:
        lines += _curl(step, exchange, jobs)
    body = exchange.body(GOLDEN_PROMPT, 1, stream=False).decode()
    lines += ["sleep 2", f"curl -m {target.deadline:g} {_url(target, exchange.route)} {_data(body)}  # the probe"]
    if target.dialect.metrics:
        lines.append(f"curl -s {_url(target, target.dialect.metrics)}")
    return lines


def _curl(step: Step, exchange: Exchange, jobs: dict[int, str]) -> list[str]:
    args, target = step.args, exchange.target
    if step.rule == "open":
        client = args["client"]
        jobs[client] = f"CLIENT{client}"
        prompt = GOLDEN_PROMPT if args["golden"] else f"Hello from client {client}"
        body = exchange.body(prompt, args["max_tokens"], stream=args["stream"], id=f"fz-{client}").decode()
        return [f"curl -sN {_url(target, exchange.route)} {_data(body)} & {jobs[client]}=$!"]
    if step.rule == "close" and args["client"] in jobs:
        return [f"kill ${jobs.pop(args['client'])}  # curl's close; the finding's was {args['how']}"]
    if step.rule == "burst":
        body = exchange.body("Hello", 64, stream=True).decode()
        line = f"curl -sN -m 0.5 {_url(target, exchange.route)} {_data(body)} &"
        return [f"for i in $(seq {args['count']}); do {line} done; wait"]
    if step.rule == "wait":
        return [f"sleep {args['milliseconds'] / 1000:g}"]
    if calls := target.dialect.calls.get(step.rule):
        call = calls[args.get("variant", 0) % len(calls)]
        text = (call.body or "").replace("{id}", f"fz-{args.get('client')}").replace("{model}", target.model)
        return [f"curl -s -X {call.method} {_url(target, call.path)} {_data(text) if text else ''}".rstrip()]
    return [f"# {step}: not possible with curl"]


def _url(target: Target, path: str) -> str:
    return shlex.quote(f"http://{target.host}{target.path}{path}")


def _data(body: str) -> str:
    return f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"


def page(verdict: str, found: list[Found], target: Target, *, scripted: bool = True) -> str:
    """Return one HTML page with everything about the findings; text from the server is escaped."""
    style = "body{font:15px sans-serif;max-width:70em;margin:2em auto}pre{background:#f4f4f4;padding:1em;overflow:auto}"
    sections = "".join(_section(each, target, scripted=scripted) for each in found)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>trioengine fuzz</title>'
        f"<style>{style}</style></head><body>\n<h1>{escape(verdict)}</h1>\n"
        f"<p>Server: {escape(target.host)}, dialect {escape(target.dialect.name)}, model {escape(target.model)}. "
        f"Deadline: {target.deadline:g} s.</p>\n{sections}</body></html>\n"
    )


def _section(found: Found, target: Target, *, scripted: bool) -> str:
    steps = "\n".join(map(str, found.steps))
    blocks = {"Schedule": schedule_text(found.log), "Evidence": json.dumps(found.evidence, indent=1)}
    if scripted:
        blocks |= {"curl": "\n".join(curl_lines(found, target)), "Script": script(found, target)}
    shown = "".join(
        f"<details><summary>{name}</summary><pre>{_xml(text)}</pre></details>\n" for name, text in blocks.items()
    )
    return (
        f"<h2>{_xml(found.finding.oracle)}: {_xml(oracles.ORACLES[found.finding.oracle])}</h2>\n"
        f"<p><b>{_xml(found.finding.message)}</b></p>\n<p>{_xml(rate(found))} Seed {found.seed}.</p>\n"
        f"<h3>Steps</h3><pre>{_xml(steps)}</pre>\n{schedule_svg(found.log)}\n{shown}"
    )


def _xml(text: str) -> str:
    """Escape a text, without the controls that XML does not have."""
    return escape("".join(char if char >= " " or char in "\n\t" else "\ufffd" for char in text))


def rate(found: Found) -> str:
    """Return how often the program failed when it was run again."""
    text = f"Failed in {found.failed} of {found.replays} runs."
    return text if found.recovered else f"{text} The server did not recover: start it again to replay the program."
