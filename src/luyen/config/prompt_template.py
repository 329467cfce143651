"""The text of `data.prompt_template`: which columns it names, and what it says with them filled in.

`{name}` is a column and `{{name}}` is `{name}` as it stands. Braces around anything but a name stay
as they are, so that `\\boxed{}` needs no care.
"""

import re
from collections.abc import Callable

PROMPT = "prompt"
"""The name under which every template can name the text of the prompt."""
_NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def names_in(template: str) -> list[str]:
    """Columns that a template names.

    Example:
        >>> names_in("{question} Put it into \\\\boxed{}, as {{this}}.")
        ['question']
    """
    return [found[2] for found in _NAME.finditer(template) if found[2] is not None]


def filled(template: str, value_of: Callable[[str], str]) -> str:
    """The template with the text of each column that it names.

    Example:
        >>> filled("{a} is {{a}}, \\\\boxed{}", str.upper)
        'A is {a}, \\\\boxed{}'
    """
    return _NAME.sub(lambda found: value_of(found[2]) if found[2] else f"{{{found[1]}}}", template)
