"""Which format a file has: the one place that decides it, with its reason."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from luyen.base.errors import UserError
from luyen.base.suggest import near_names
from luyen.data.formats.forms import FORMS, Form, Format
from luyen.data.shapes import is_list, is_object

_WHERE = "columns"


def detect(columns: Iterable[str], first_rows: Sequence[Mapping[str, Any]]) -> Format:
    """The format of a file with these columns, judged by the columns that its first rows fill.

    Of the formats whose columns are all there, one that needs a subset of another's columns gives
    way, and so does one of lower rank. A UserError where none or more than one is left.

    Example:
        >>> found = detect(["prompt", "chosen", "rejected"],
        ...                [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
        >>> found.form.name, found.why
        ('preference', '`chosen` and `rejected` hold text; `prompt` holds text')
    """
    there = [c for c in columns if not first_rows or any(r.get(c) is not None for r in first_rows)]
    renamed = _renamed(there, first_rows)
    names = [*there, *renamed]
    fitting = [form for form in FORMS.values() if set(form.needs) <= set(names)]
    if not fitting or len({"chosen", "rejected"} & set(names)) == 1:
        raise _unknown(there)
    best = _best(fitting)
    if len(best) > 1:
        raise _ambiguous(there, best)
    [form] = best
    if form.name == "prompts" and "messages" in there and not _is_rl(there):
        raise _ambiguous(there, [form, FORMS["conversation"]])
    if form.name == "conversation":
        form = _who_is_asked(form, there, first_rows)
    own = {name: renamed[name] for name in form.needs if name in renamed}
    if form.name == "prompts" and "prompt" not in there:
        own = {"prompt": "messages"}
    return Format(form=form, why=_why(form, own, first_rows), columns=own)


def shape(value: Any) -> str:
    """What a value is, in words.

    Example:
        >>> shape([{"role": "user", "content": "1+1="}]), shape([{"from": "human", "value": "a"}])
        ('messages', 'messages with `from`')
    """
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "numbers"
    if is_object(value):
        return "one message" if "role" in value or "from" in value else "objects"
    if is_list(value):
        first = value[0] if value else None
        if is_object(first) and "role" in first:
            return "messages"
        if is_object(first) and "from" in first:
            return "messages with `from`"
        return f"lists of {shape(first)}"
    return "nothing"


def _renamed(there: Sequence[str], first_rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """`messages` under the name `conversations` where a format of two columns needs that."""
    if "messages" not in there or "conversations" in there:
        return {}
    chosen = next((r["chosen"] for r in first_rows if r.get("chosen") is not None), None)
    if "kto_tag" in there or is_object(chosen):
        return {"conversations": "messages"}
    return {}


def _best(fitting: Sequence[Form]) -> list[Form]:
    own = [f for f in fitting if not any(set(f.needs) < set(other.needs) for other in fitting)]
    highest = max(form.rank for form in own)
    return [form for form in own if form.rank == highest]


def _is_rl(there: Sequence[str]) -> bool:
    return "reward_model" in there or "data_source" in there


def _who_is_asked(
    form: Form, there: Sequence[str], first_rows: Sequence[Mapping[str, Any]]
) -> Form:
    """Conversations that all end before the assistant speaks are prompts."""
    if "prompt" in there and _is_rl(there):
        return FORMS["prompts"]
    talks = [row["messages"] for row in first_rows if is_list(row.get("messages"))]
    ends = [talk[-1] for talk in talks if talk and is_object(talk[-1])]
    if "prompt" in there and any(is_list(row.get("prompt")) for row in first_rows):
        raise _ambiguous(there, [FORMS["prompts"], form])
    is_open = bool(ends) and all(end.get("role") in ("user", "tool") for end in ends)
    return FORMS["prompts"] if is_open else form


def _why(form: Form, own: Mapping[str, str], first_rows: Sequence[Mapping[str, Any]]) -> str:
    def held(name: str) -> str:
        column = own.get(name, name)
        return next((shape(r[column]) for r in first_rows if r.get(column) is not None), "nothing")

    named = {name: held(name) for name in form.needs}
    said: list[str] = []
    for what in dict.fromkeys(named.values()):
        columns = [own.get(name, name) for name, holds in named.items() if holds == what]
        verb = "hold" if len(columns) > 1 else "holds"
        said.append(f"{_listed(columns)} {verb} {what}")
    besides = [name for name in form.may if any(r.get(name) is not None for r in first_rows)]
    said += [f"`{name}` holds {held(name)}" for name in besides]
    if form.name == "preference" and "prompt" not in besides:
        said.append("the prompt is what both begin with")
    if form.name == "prompts" and own:
        said.append("nobody has answered yet")
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _unknown(there: Sequence[str]) -> UserError:
    known = {name for form in FORMS.values() for name in form.needs}
    near = {name: near_names(name, known - set(there), most=1) for name in there}
    meant = [f"`{found[0]}` for `{name}`" for name, found in near.items() if found]
    looked = ", ".join(f"{form.name} ({' + '.join(form.needs)})" for form in FORMS.values())
    why = f"no format has these columns; looked for {looked}"
    fix = "rename the columns, or describe them in a dataset_info.json beside the file"
    return UserError(_WHERE, list(there), why, f"write {' and '.join(meant)}" if meant else fix)


def _ambiguous(there: Sequence[str], found: Sequence[Form]) -> UserError:
    both = " and ".join(f"`{form.name}` ({', '.join(form.needs)})" for form in found)
    names = " or ".join(form.name for form in found)
    return UserError(_WHERE, list(there), f"they fit {both}", f"name the one you mean: {names}")
