"""The files of a model by what they decide: weights, tokenizer, chat template, sizes, code."""

from importlib import resources
from pathlib import Path
from typing import TypeAlias

from luyen.base.paths import expanded
from luyen.config.hub import cached_revision

Part: TypeAlias = tuple[tuple[Path, ...], str | None]
"""Files on this machine, or the revision of the hub that stands for them."""
_BUILTIN = "builtin://"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece")


def model_parts(path: str, folder: Path) -> dict[str, Part]:
    """Part -> its files, for a directory or a `builtin://` name; for a hub id, its revision.

    Example:
        >>> sorted(model_parts("builtin://arithmetic", Path()))
        ['config', 'tokenizer', 'weights']
    """
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files("luyen") / "builtin")) / path.removeprefix(_BUILTIN)
    else:
        home = folder / expanded(path)
    if not home.is_dir():
        return {"revision": ((), cached_revision(path))}
    parts: dict[str, list[Path]] = {}
    for file in sorted(home.iterdir()):
        part = _part(file.name)
        if part is not None and file.is_file():
            parts.setdefault(part, []).append(file)
    return {part: (tuple(files), None) for part, files in parts.items()}


def _part(name: str) -> str | None:
    """What a file decides; None for one that decides nothing.

    Example:
        >>> _part("model-00001-of-00002.safetensors"), _part("README.md")
        ('weights', None)
    """
    if name.endswith(_WEIGHTS):
        return "weights"
    if name.startswith("chat_template") or name.endswith(".jinja"):
        return "template"
    if name.startswith(_TOKENIZER) or name.endswith((".model", ".tiktoken")):
        return "tokenizer"
    if name in ("config.json", "generation_config.json", "adapter_config.json"):
        return "config"
    return "code" if name.endswith(".py") else None
