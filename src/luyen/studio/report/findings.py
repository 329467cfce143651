"""What the doctor found, with evidence and what to try."""

from collections.abc import Sequence

from luyen.studio.doctor.all import RULES
from luyen.studio.doctor.findings import Finding
from luyen.studio.report.markup import Html, element, joined, number

_MOST = 12


def findings_section(findings: Sequence[Finding]) -> Html:
    """Every finding, the gravest first."""
    if not findings:
        return element("p", f"None of the {len(RULES)} rules has anything to say.")
    return joined(*(_one(finding) for finding in findings))


def _one(finding: Finding) -> Html:
    seen = finding.symptom
    head = element("b", f"{finding.severity} {finding.rule}", class_="kind")
    steps = ", ".join(map(str, seen.steps[:_MOST])) + (", ..." if len(seen.steps) > _MOST else "")
    numbers = "; ".join(f"{name} {number(value)}" for name, value in seen.numbers.items())
    evidence = {
        "Steps": steps,
        "Numbers": numbers,
        "Rollouts": "; ".join(seen.rollouts[:_MOST]),
        f"Try ({seen.experiment.stage})": seen.experiment.change,
        "Then": "; ".join(seen.experiment.then),
    }
    rows = [
        element("div", element("span", f"{label}: ", class_="dim"), words)
        for label, words in evidence.items()
        if words
    ]
    said = element("p", head, f" {finding.title}")
    return element(
        "div", said, element("p", seen.says), *rows, class_=f"finding {finding.severity}"
    )
