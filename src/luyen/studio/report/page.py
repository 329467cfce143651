"""The whole page, and the file it is written to."""

from pathlib import Path

from luyen import __version__
from luyen.base.errors import UserError
from luyen.base.files import write_whole
from luyen.base.rundir import RunDirectory
from luyen.studio.doctor.all import diagnose
from luyen.studio.doctor.read import RunRecord, read_run
from luyen.studio.report.facts import (
    checkpoints_section,
    digests_section,
    facts_section,
    resumptions_section,
)
from luyen.studio.report.findings import findings_section
from luyen.studio.report.markup import Html, element, joined
from luyen.studio.report.measures import (
    curves_section,
    parity_section,
    rewards_section,
    timing_section,
)
from luyen.studio.report.samples import samples_section
from luyen.studio.report.settings import plan_of, settings_section
from luyen.studio.report.style import sheet
from luyen.studio.report.verdict import verdict

FILE = "report.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page asks nothing of a network and runs nothing, whatever stands in it."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page about a run; a UserError where there is no run or its manifest is damaged."""
    record = read_run(root)
    place = out or record.directory.root / FILE
    text = page(record)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, text)
    except OSError as error:
        why = f"it cannot be written: {error.strerror or error}"
        raise UserError("--out", str(place), why, "give another file") from error
    return place


def page(record: RunRecord) -> str:
    """The page as text."""
    findings = diagnose(record)
    plan = plan_of(record)
    sections = {
        "Curves": curves_section(record),
        "Findings": findings_section(findings),
        "Plan": settings_section(record),
        "Reward": rewards_section(record),
        "Parity": parity_section(record),
        "Time": timing_section(record),
        "Samples": samples_section(record),
        "Digests": digests_section(record),
        "Checkpoints": checkpoints_section(record),
        "Resumptions": resumptions_section(record.directory),
        "Facts": facts_section(record.manifest),
    }
    total = plan.total_steps if plan is not None else None
    return _document(record.directory, joined(verdict(record, findings, total=total)), sections)


def _document(run: RunDirectory, top: Html, sections: dict[str, Html]) -> str:
    name = "/".join(run.root.resolve().parts[-2:])
    links = [element("a", title, href=f"#{title.lower()}") for title in sections]
    body = [
        element("section", element("h2", title), inner, id=title.lower())
        for title, inner in sections.items()
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{name}: a run of Luyen"),
        element("style", Html(sheet())),
    )
    made = element("p", f"Made by Luyen {__version__} from {run.root}.", class_="dim")
    inner = element("body", element("h1", name), made, top, element("nav", *links), *body)
    return f"<!doctype html>\n{element('html', head, inner, lang='en')}\n"
