"""Puts the page together: one file without any reference to another one."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..blame import judge
from ._events import MAX_FAULTS, faults, pictures
from ._findings import Level, Verdict, verdicts
from ._read import Run
from ._svg import heat_map, losses, timeline
from ._tables import SLOT_HEADINGS, bars, facts, maps, missing, slot_rows
from ._text import breakable, clean
from ._waits import waiting

MAX_WARNINGS = 50


def render(run: Run) -> tuple[str, list[Verdict]]:
    """The page as HTML, and the verdicts that stand at its top."""
    judgements = [judge(dumps) for dumps in run.dumps.values()]
    waits = waiting(run)
    found = verdicts(run, judgements, waits)
    wrong = [fault for dumps in run.dumps.values() for fault in faults(dumps)]
    warnings = sorted(run.warnings.values(), key=lambda w: (-w.last, w.slot or ""))
    name = clean(run.directory.resolve().name or "run")
    context: dict[str, Any] = {
        "name": name,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "verdicts": found,
        "kinds": {level: level.name.lower() for level in Level},
        "losses": losses(run.losses),
        "maps": [{"title": chart.title, "drawn": heat_map(chart)} for chart in maps(run)],
        "slots": slot_rows(run),
        "slot_headings": SLOT_HEADINGS,
        "bars": bars(waits),
        "waits": waits,
        "pictures": [
            (picture, timeline(picture))
            for dumps, judgement in zip(run.dumps.values(), judgements, strict=True)
            for picture in pictures(dumps, judgement)
        ][:4],
        "judgements": judgements,
        "faults": wrong[:MAX_FAULTS],
        "more_faults": max(0, len(wrong) - MAX_FAULTS),
        "warnings": warnings[:MAX_WARNINGS],
        "more_warnings": max(0, len(warnings) - MAX_WARNINGS),
        "facts": facts(run, judgements),
        "missing": missing(run, judgements),
        "remarks": run.remarks[:20],
        "more_remarks": max(0, len(run.remarks) - 20),
        "sources": [clean(source) for source in run.found[:12]],
        "more_sources": max(0, len(run.found) - 12),
    }
    return _template(context), found


def _template(context: dict[str, Any]) -> str:
    here = files(__package__)
    script = (here / "page.js").read_text(encoding="utf-8")
    # The page runs this script and no other, whatever a name in the run may contain.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(clean=clean, breakable=breakable)
    page = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    return page.render(
        context,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),  # ours, and without any input
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
    )
