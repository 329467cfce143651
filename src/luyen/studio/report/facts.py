"""What a run ran on and with: versions, machine, inputs, digests, checkpoints, resumptions."""

from collections.abc import Mapping
from typing import Any

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.studio.doctor.read import RunRecord
from luyen.studio.report.markup import Child, Html, element, joined, missing, table


def digests_section(record: RunRecord) -> Html:
    """The head of the chain, which stands for everything the run did."""
    try:
        lines = read_digests(record.directory.digests)
    except UserError as error:
        return missing(f"No chain of digests: {error.why}.")
    if not lines:
        return missing("The chain of digests has no line yet.")
    last = lines[-1]
    return joined(
        element("p", f"{len(lines)} lines; the chain after step {last.step} is"),
        element("pre", last.chain),
        element("p", "A run with the same chain did the same in every step, bit for bit."),
    )


def checkpoints_section(record: RunRecord) -> Html:
    """The checkpoints that are there."""
    rows: list[tuple[Child, ...]] = []
    for step, page in record.checkpoints.items():
        sizes = [entry.get("bytes", 0) for entry in page.get("files", {}).values()]
        facts = ", ".join(f"{name} {value}" for name, value in page.get("facts", {}).items())
        rows.append((str(step), f"{sum(sizes) / 1e6:,.1f} MB", facts))
    if not rows:
        return missing("There is no checkpoint.")
    return table(("step", "size", "noted"), rows)


def resumptions_section(run: RunDirectory) -> Html:
    """Each time the run was taken up again."""
    try:
        entries = run.read_resumptions()
    except UserError as error:
        return missing(f"{run.resumptions.name}: {error.why}.")
    if not entries:
        return element("p", "The run was never resumed.")
    rows: list[tuple[Child, ...]] = [
        (
            entry["time"],
            "none" if entry["checkpoint"] is None else str(entry["checkpoint"]),
            "another" if entry["is_config_new"] else "the same",
            ", ".join(entry["changed"]) or "nothing",
            element("code", " ".join(entry["command"])),
        )
        for entry in entries
    ]
    head = ("time", "newest checkpoint", "configuration", "changed since the beginning", "command")
    return table(head, rows)


def facts_section(manifest: Mapping[str, Any]) -> Html:
    """Versions, machine and fingerprints, as the manifest has them."""
    blocks = ("versions", "hardware", "settings", "threads", "seeds", "datasets", "revision")
    rows: list[tuple[Child, ...]] = [
        (name, str(manifest[name])) for name in ("run_id", "created", "code") if name in manifest
    ]
    for block in blocks:
        held = manifest.get(block)
        if isinstance(held, Mapping):
            rows += [(f"{block}.{name}", str(value)) for name, value in held.items()]
    rows.append(("command", element("code", " ".join(map(str, manifest.get("command", []))))))
    return joined(table(("fact", "value"), rows), _files(manifest), _packages(manifest))


def _files(manifest: Mapping[str, Any]) -> Html:
    files = manifest.get("files")
    if files is None:
        return missing("The content of files that keys name was not recorded.")
    rows: list[tuple[Child, ...]] = [
        (name, entry["path"], element("code", entry["fingerprint"]))
        for name, entry in files.items()
    ]
    return joined(element("h3", "Content of named files"), table(("key", "path", "hash"), rows))


def _packages(manifest: Mapping[str, Any]) -> Html | None:
    packages = manifest.get("packages")
    if not packages:
        return None
    listed = ", ".join(f"{name} {version}" for name, version in packages.items())
    return element(
        "details", element("summary", f"{len(packages)} more packages"), element("p", listed)
    )
