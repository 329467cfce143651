"""What a docstring in Google's style says about a function and its arguments."""

import inspect
import re

_SECTION = re.compile(r"^(Args|Arguments|Returns?|Yields?|Raises|Examples?|Notes?|Attributes):\s*$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and what `Args:` says about each argument.

    Example:
        >>> read_docstring('''Weather of a city.
        ...
        ...     Args:
        ...         city: Its name,
        ...             in English.
        ... ''')
        ('Weather of a city.', {'city': 'Its name, in English.'})
    """
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(text).splitlines():
        heading = _SECTION.match(line)
        if heading is not None:
            current = "Args" if heading[1] == "Arguments" else heading[1]
            sections.setdefault(current, [])
        else:
            sections[current].append(line)
    return _paragraphs(sections[""]), _entries(sections.get("Args", []))


def _paragraphs(lines: list[str]) -> str:
    """Lines of one paragraph joined by spaces; paragraphs stay apart."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "\n\n".join(" ".join(block.split()) for block in blocks)


def _entries(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name, depth = "", None
    for line in inspect.cleandoc("\n" + "\n".join(lines)).splitlines():
        entry = _ENTRY.match(line)
        indent = len(line) - len(line.lstrip())
        if entry is not None and (depth is None or indent <= depth):
            name, depth = entry[1], indent
            found[name] = entry[2].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
