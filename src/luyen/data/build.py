"""Builds the data of a run from the `data` block: rows, filters, sampler, renderer."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt
from luyen.config.dataset_facts import share_names
from luyen.config.schema.data import DataConfig
from luyen.data.filters import (
    drop_duplicates,
    drop_empty,
    drop_overlong,
    truncate,
)
from luyen.data.messages import find_markers
from luyen.data.render import Renderer
from luyen.data.rows import columns_of
from luyen.data.samplers import Sampler, samplers
from luyen.data.samplers.custom import load_sampler_class, make_sampler
from luyen.data.samplers.orders import Mixture
from luyen.data.sources import Dataset, Offered, load_dataset, with_tools
from luyen.data.tokenizer import Tokenizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainData:
    """Everything a loop needs from the data layer.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> data = DataConfig(train_files=("arithmetic://sum?size=8",))
        >>> found = build_data(data, tokenizer=load_tokenizer("builtin://arithmetic"))
        >>> [found.train.prompts[i].data_source for i in found.sampler.take(0, 2)]
        ['arithmetic/sum', 'arithmetic/sum']
    """

    train: Dataset
    """The training rows."""
    validation: Dataset | None
    """What is measured on; None when no files are named."""
    sampler: Sampler
    """The order of the training rows."""
    renderer: Renderer
    """How messages become tokens."""
    num_leaked: int
    """Validation prompts that are also trained on."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Prompt -> name of its file in metrics; empty: no shares are recorded."""

    def shares(self, uids: Iterable[str]) -> dict[str, float]:
        """Metrics `data/share/NAME` of prompts that were taken; empty without `names`."""
        taken = Counter(self.names[uid] for uid in uids if uid in self.names)
        total = taken.total()
        names = sorted(set(self.names.values())) if total else ()
        return {f"data/share/{name}": taken[name] / total for name in names}

    def notes(self) -> list[str]:
        """What the user should know about the rows, one line each."""
        lines: list[str] = []
        for name, dataset in (("training", self.train), ("validation", self.validation)):
            if dataset is None:
                continue
            changed = [f"{n} {what}" for what, n in dataset.counts.items() if what != "read"]
            kept = f"{len(dataset.prompts)} of {dataset.counts['read']} {name} rows"
            lines.append(f"{kept} ({', '.join(changed)})" if changed else kept)
            lines += [f"{name} rows hold a template marker: {found}" for found in dataset.markers]
        lines += self.renderer.tokenizer.remarks()
        if self.num_leaked:
            lines.append(f"{self.num_leaked} validation prompts are also trained on")
        return lines


def build_data(
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    seed: int = 0,
    offered: Offered | None = None,
) -> TrainData:
    """Rows loaded, checked and filtered, with the sampler and the renderer the block asks for.

    Rows are prompts that the assistant answers. `seed` is the run's; the block may have its own.
    Validation rows keep their order and their duplicates. `offered` says which tools a prompt
    gets: rows only choose.
    """
    renderer = Renderer(tokenizer, template_kwargs=data.apply_chat_template_kwargs)
    columns = columns_of(data)
    train = load_dataset(
        data.train_files,
        columns,
        most=data.train_max_samples,
        most_of=data.train_file_samples,
    )
    train = with_tools(train, offered) if offered is not None else train
    train = drop_duplicates(train) if data.filter_duplicates else train
    train = _prepared(train, data, renderer, "data.train_files")
    validation = None
    if data.val_files:
        validation = load_dataset(
            data.val_files, columns, most=data.val_max_samples, field="data.val_files"
        )
        validation = with_tools(validation, offered) if offered is not None else validation
        validation = _prepared(validation, data, renderer, "data.val_files")
    return TrainData(
        train=train,
        validation=validation,
        sampler=build_sampler(data, train, seed=seed),
        renderer=renderer,
        num_leaked=num_leaked(train, validation),
        names=prompt_names(data, train),
    )


def num_leaked(train: Dataset, validation: Dataset | None) -> int:
    """Validation prompts that are also trained on."""
    if validation is None:
        return 0
    measured = Counter(prompt.uid for prompt in validation.prompts)
    known = {prompt.uid for prompt in train.prompts if prompt.uid in measured}
    return sum(measured[uid] for uid in known)


def prompt_names(data: DataConfig, dataset: Dataset) -> dict[str, str]:
    """Prompt -> name of its file in metrics; empty where no file has a weight or a name.

    A prompt of several files has the names of all of them: which one gave it is not known.
    """
    if not data.train_weights and not data.train_names:
        return {}
    files: dict[str, dict[int, None]] = {}
    for prompt, file in zip(dataset.prompts, dataset.files, strict=True):
        files.setdefault(prompt.uid, {})[file] = None
    names = share_names(data)
    return {uid: "+".join(names[file] for file in sorted(found)) for uid, found in files.items()}


def load_prompts(files: Sequence[str], data: DataConfig, *, most: int) -> Sequence[Prompt]:
    """Rows as prompts in their order, however long they are: no tokenizer measures them.

    `most`: at most so many rows; -1: all.
    """
    dataset = drop_empty(load_dataset(files, columns_of(data), most=most, field="data.val_files"))
    _check_who_speaks(dataset)
    if not dataset.prompts:
        fix = "give rows that have a prompt"
        raise UserError("data.val_files", _addresses(dataset), "no row is left", fix)
    return dataset.prompts


def build_sampler(data: DataConfig, dataset: Dataset, *, seed: int = 0) -> Sampler:
    """The sampler that the block names, over the rows that are left; with weights, a mixture."""
    sampler = data.sampler
    if data.train_weights:
        own = data.seed if data.seed is not None else seed
        return Mixture(dataset.files, weights=data.train_weights, seed=own)
    if sampler.class_path is not None and sampler.class_name is not None:
        make: Callable[..., Any] = load_sampler_class(sampler.class_path, sampler.class_name)
    else:
        make = samplers.get(sampler.name)
    given = {"seed": data.seed if data.seed is not None else seed, **sampler.kwargs}
    parameters = inspect.signature(make).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    unknown = [name for name in given if name not in parameters and not takes_all]
    if unknown:
        why = "the sampler takes no such argument"
        fix = did_you_mean(unknown[0], known)
        raise UserError(f"data.sampler.kwargs.{unknown[0]}", given[unknown[0]], why, fix)
    missing = [n for n in known if parameters[n].default is inspect.Parameter.empty]
    for name in missing:
        if name not in given:
            why = "the sampler needs it"
            raise UserError(f"data.sampler.kwargs.{name}", None, why, "give it a value")
    return make_sampler(make, sampler.class_name or sampler.name, dataset.prompts, **given)


def _prepared(dataset: Dataset, data: DataConfig, renderer: Renderer, field: str) -> Dataset:
    dataset = drop_empty(dataset)
    _check_who_speaks(dataset)
    check_tools_are_rendered(dataset, renderer)
    if data.filter_overlong_prompts:
        dataset = drop_overlong(dataset, renderer, max_prompt_length=data.max_prompt_length)
    else:
        dataset = truncate(
            dataset,
            renderer,
            max_prompt_length=data.max_prompt_length,
            truncation=data.truncation,
        )
    if not dataset.prompts:
        said = ", ".join(f"{n} {what}" for what, n in dataset.counts.items())
        fix = "give rows that have a prompt"
        if dataset.counts.get("overlong"):
            fix = f"raise data.max_prompt_length, which is {data.max_prompt_length}"
        raise UserError(field, _addresses(dataset), f"no row is left: {said}", fix)
    special = renderer.tokenizer.special_tokens
    found = find_markers(dataset.prompts, dataset.origins, special)
    return replace(dataset, markers=found)


def _check_who_speaks(dataset: Dataset) -> None:
    for prompt, origin in zip(dataset.prompts, dataset.origins, strict=True):
        roles = [message["role"] for message in prompt.messages]
        if roles[-1] == "assistant":
            why = "the assistant has answered already; a prompt ends where it should speak"
            raise UserError(f"{origin}: messages", roles, why, "drop the last message")


def check_tools_are_rendered(dataset: Dataset, renderer: Renderer) -> None:
    """A template without a place for tools would hide them from the policy without a word."""
    pairs = zip(dataset.prompts, dataset.origins, strict=True)
    prompt, origin = next((pair for pair in pairs if pair[0].tools), (None, ""))
    if prompt is None:
        return
    if renderer.text(prompt.messages, prompt.tools) == renderer.text(prompt.messages):
        why = "the chat template has no place for tools, so the policy would never see them"
        fix = "use a tokenizer whose template takes tools, or drop the column"
        raise UserError(f"{origin}: tools", renderer.tokenizer.path, why, fix)


def _addresses(dataset: Dataset) -> Sequence[str]:
    return [source.address for source in dataset.sources]
