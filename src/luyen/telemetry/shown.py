"""What may reach a terminal: text, line breaks, and the few codes that we colour and redraw with.

Rows, policies and runs of strangers are printed. A terminal obeys what it is shown: some codes
write to the clipboard, rename windows or answer as if the user had typed, and marks of direction
make a name look like another one. All of these are written as escapes.
"""

import io
import re

_KEPT = r"\x1b\[(?:[0-9;]*m|[0-9]*[ABG]|[0-2]?[JK]|\?25[hl])"
"""Colours, lines up and down, the first column, erasing, the cursor on and off."""
_ODD = re.compile(
    rf"({_KEPT})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def shown(text: str) -> str:
    r"""The text with escapes, as JSON has them, for what a terminal would obey.

    Example:
        >>> shown("\x1b[31mred\x1b[0m \x1b]0;a title\x07")
        '\x1b[31mred\x1b[0m \\u001b]0;a title\\u0007'
    """
    return _ODD.sub(lambda odd: odd[1] or f"\\u{ord(odd[0]):04x}", text)


class ShownText(io.TextIOWrapper):
    """A stream that people read."""

    def write(self, s: str, /) -> int:
        """Write the text, harmless."""
        super().write(shown(s))
        return len(s)
