"""Rooms of the right size: how many files there are, how long, and what their names are made of.

`test_budget` bounds a file and a function from above. Here the tree as a whole is measured, so that
a bound on length is not met by splitting one idea into fragments.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import PurePosixPath
from statistics import mean, median

from tests.architecture.tree import nodes, parsed, sources

LEAST_MEAN = 150
LEAST_MEDIAN = 130
SHORT, MOST_SHORT = 60, 60
MOST_IN_A_FOLDER = 25
MOST_SINGLE_IMPORTERS = 80
MOST_PRIVATE_WORDS = 60
MOST_PRONOUNS = 60
"""Upper bounds of what is left; they only ever go down."""

PRIVATE = re.compile(
    "draws?|drawn|drew|asked|asking|told|held|crew|mailbox|patience|pulse|lesson|nursery|zygote|"
    "seats?|surroundings|openings|resident|steady|meanwhile|hurry|settle|knobs?|walls|seals?|"
    "beside|elsewhere|leftovers",
    re.IGNORECASE,
)
PRONOUNS = re.compile(
    r"\b(nobody|whoever|somebody|others|anew|beside|mend|mended|meanwhile)\b", re.IGNORECASE
)
WORDS = re.compile(r"_|(?<=[a-z])(?=[A-Z])")

FILES = dict(sources("src/luyen"))
MODULES = {p: t for p, t in FILES.items() if not p.endswith(("__init__.py", "__main__.py"))}


def dotted(path: str) -> str:
    """The module that a file is."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def importers() -> dict[str, set[str]]:
    """Module -> the modules that import it or something from it."""
    names = {dotted(path) for path in FILES}
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in FILES.items():
        for node in nodes(text):
            wanted: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                wanted = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            for name in wanted:
                if name in names and name != dotted(path):
                    found[name].add(dotted(path))
    return found


def identifiers(text: str) -> list[str]:
    """Every name that the file defines or uses."""
    found: list[str] = []
    for node in nodes(text):
        for name in ("name", "attr", "id", "arg"):
            value = vars(node).get(name)
            if isinstance(value, str):
                found.append(value)
    return found


def private_words(text: str) -> list[str]:
    """The private words in the identifiers of a file."""
    parts = (part for name in identifiers(text) for part in WORDS.split(name))
    return [part for part in parts if PRIVATE.fullmatch(part)]


def test_ideas_are_not_split_into_fragments():
    lengths = [text.count("\n") for text in MODULES.values()]
    assert mean(lengths) >= LEAST_MEAN
    assert median(lengths) >= LEAST_MEDIAN
    assert sum(length < SHORT for length in lengths) <= MOST_SHORT


def test_few_modules_serve_one_other_alone():
    users = importers()
    alone = [
        path
        for path in MODULES
        if len(users[dotted(path)]) == 1
        and next(iter(users[dotted(path)])).split(".")[1:2] == dotted(path).split(".")[1:2]
    ]
    assert len(alone) <= MOST_SINGLE_IMPORTERS, sorted(alone)


def test_a_folder_fits_on_a_screen():
    folders = Counter(str(PurePosixPath(path).parent) for path in MODULES)
    assert {f: n for f, n in folders.items() if n > MOST_IN_A_FOLDER} == {}


def test_a_public_class_name_means_one_thing():
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in FILES.items():
        for node in parsed(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_and_sentences_are_the_fields():
    words = Counter(word.lower() for text in FILES.values() for word in private_words(text))
    pronouns = Counter(word.lower() for text in FILES.values() for word in PRONOUNS.findall(text))
    assert words.total() <= MOST_PRIVATE_WORDS, words
    assert pronouns.total() <= MOST_PRONOUNS, pronouns


def test_private_words_are_found_inside_longer_names():
    assert private_words("def ask(held_weights, drawnTokens, withheld): ...") == ["held", "drawn"]
