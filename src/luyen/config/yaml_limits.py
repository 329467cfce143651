"""How much a YAML text may hold once its aliases are written out.

An alias costs a few characters and stands for a whole block, so that a text of some hundred bytes
can stand for billions of values. All is counted from the parser's events, before anything is made.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (PyYAML leaves its events untyped.)

from typing import Any, final

import yaml

DEEPEST = 100
"""Levels of nesting that are read. The parser in C would run out of stack far beyond."""
MOST_VALUES = 100_000
"""Values, keys and blocks that are read, each as often as aliases repeat it."""
MOST_CHARACTERS = 8 * 2**20
"""Characters of all of them together."""
_WIDEST = 64
"""Bits of a whole number."""
_LONGEST = 100
"""Characters in which one may be written, in any base."""


@final
class BeyondLimits(yaml.MarkedYAMLError):
    """The text is YAML, and more than is read."""


@final
class _Sum:
    """What a text comes to, up to some event."""

    def __init__(self) -> None:
        self.values = self.characters = 0

    def add(self, values: int, characters: int, event: Any) -> None:
        """Count more; BeyondLimits where that is too much."""
        self.values += values
        self.characters += characters
        if self.values > MOST_VALUES:
            raise _error(f"it holds more than {MOST_VALUES:,} values, aliases written out", event)
        if self.characters > MOST_CHARACTERS:
            why = f"it holds more than {MOST_CHARACTERS:,} characters, aliases written out"
            raise _error(why, event)


@final
class _Block:
    """A block: where the sum stood when it began, later what it comes to, and how deep it is."""

    def __init__(self, anchor: str | None, values: int, characters: int, height: int = 0) -> None:
        self.anchor = anchor
        self.values = values
        self.characters = characters
        self.height = height


def require_bounded(text: str, loader: Any) -> None:
    """Raise BeyondLimits, with its line, where the text passes one of the limits."""
    total = _Sum()
    known: dict[str, _Block] = {}
    blocks: list[_Block] = []
    for event in yaml.parse(text, Loader=loader):
        match event:
            case yaml.CollectionStartEvent():
                blocks.append(_Block(event.anchor, total.values, total.characters))
                total.add(1, 0, event)
                _require_depth(len(blocks), event)
            case yaml.CollectionEndEvent():
                block = blocks.pop()
                block.values = total.values - block.values
                block.characters = total.characters - block.characters
                _close(blocks, block, known)
            case yaml.ScalarEvent():
                total.add(1, len(event.value), event)
                _close(blocks, _Block(event.anchor, 1, len(event.value), -1), known)
            case yaml.AliasEvent():
                if any(block.anchor == event.anchor for block in blocks):
                    raise _error("an alias stands inside the block that it names", event)
                if event.anchor in known:  # what has no anchor, the composer reports
                    named = known[event.anchor]
                    total.add(named.values, named.characters, event)
                    _require_depth(len(blocks) + named.height + 1, event)
                    _close(blocks, named, {})
            case _:
                pass


def _close(blocks: list[_Block], inner: _Block, known: dict[str, _Block]) -> None:
    if blocks:
        blocks[-1].height = max(blocks[-1].height, inner.height + 1)
    if inner.anchor is not None:
        known[inner.anchor] = inner


def _require_depth(depth: int, event: Any) -> None:
    if depth > DEEPEST:
        raise _error(f"nested more than {DEEPEST} levels deep", event)


def whole_number(loader: Any, node: yaml.ScalarNode) -> int:
    """The number that a node says; BeyondLimits where no field could hold it."""
    text = str(loader.construct_scalar(node))
    value = loader.construct_yaml_int(node) if len(text) <= _LONGEST else 1 << _WIDEST
    if value.bit_length() > _WIDEST:
        raise _error(f"a whole number of more than {_WIDEST} bits", node)
    return value


def _error(why: str, at: Any) -> BeyondLimits:
    return BeyondLimits(problem=why, problem_mark=at.start_mark)
