"""Refuse to start what this version cannot carry out."""

from luyen.base.errors import UserError
from luyen.config.check import Report
from luyen.config.rules.rule import value_at
from luyen.config.rules.unbuilt import unbuilt


def refuse_unbuilt(report: Report) -> None:
    """Raise a UserError for the first setting that the loop would silently ignore."""
    for finding in unbuilt(report.config, report.plan.where):
        value = value_at(report.config, finding.field)
        raise UserError(finding.field, value, finding.why, finding.fix)
