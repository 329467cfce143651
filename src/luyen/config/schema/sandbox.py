"""`sandbox`: what must hold around code that a policy writes."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from luyen.config.schema.block import Block, as_tuple, key

Promises = Annotated[
    tuple[Literal["files", "network", "processes", "memory", "verdicts"], ...],
    BeforeValidator(as_tuple),
]


class Sandbox(Block):
    """Demands on the sandbox of the rule `code` and of the tool `python`."""

    require: Promises = key(
        (),
        "Promises without which the run is refused: files, network, processes, memory, if this "
        "machine cannot keep them; verdicts, if a test is judged where the program could forge it.",
    )
