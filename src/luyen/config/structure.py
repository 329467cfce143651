"""C: findings about the text of a configuration itself, before any rule looks at values."""

STRUCTURE: dict[str, str] = {
    "C001": "The file is valid YAML and holds keys and values.",
    "C002": "No key is written twice in one file.",
    "C003": "Files and includes can be read, and do not include each other in a circle.",
    "C004": "No value is left open as `???`.",
    "C005": "Every key exists; the nearest names are offered otherwise.",
    "C006": "Every value has the type of its key and lies within its limits.",
    "C007": "Keys that only verl has are refused with the nearest thing there is.",
    "C008": "Every `${...}` can be resolved.",
    "C009": "A key whose reader is not built yet stays at its default.",
    "C010": "A key with one possible value has that value; keys of verl among them.",
    "C011": "Overrides have the form key=value.",
    "C012": "Hydra settings are named and left aside.",
    "C013": "An artifact that is named was noted by a run, or is made by an earlier stage.",
    "C014": "A pipeline lists stages by name, each with keys of its own and a run directory.",
    "C015": "A path is meant from the file that names it; elsewhere it is found by luck.",
    "C016": "Other names for keys, stages and losses are read as ours; two names never disagree.",
    "C020": "No address has a mask in the place of its password, as in a run's config.yaml.",
}

MILDER: dict[str, str] = {"C012": "note", "C015": "note", "C016": "note"}
"""Findings that are no errors."""
