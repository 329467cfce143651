"""`luyen selftest`: what this machine promises, tried out."""

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from luyen.base.compat import SUPPORTED, is_supported, version_of
from luyen.base.exactness import has_mkl, is_promised
from luyen.cli.quiet import prepare
from luyen.config.machine import this_machine
from luyen.telemetry.manifest import collect

if TYPE_CHECKING:
    from luyen.train.proofs import Proof

_COLOURS = {"ok": "green", "note": "yellow", "failed": "red"}
_LENGTHS = (1, 5, 31, 32, 33, 63, 100, 255, 257, 300)
_QUESTIONS = ("12+34=", "What is the capital of France?", "Name three colours.")


def run_selftest(model: str | None, *, as_json: bool) -> int:
    """Try everything, print what was found; 1 when something that is promised fails."""
    prepare()
    facts = _facts()
    proofs: list[Proof] = []
    for proof in _proofs(model):
        proofs.append(proof)
        if not as_json:
            typer.echo(_line(proof))
    failed = [proof for proof in proofs if proof.state == "failed"]
    if as_json:
        shown = [{"name": p.name, "state": p.state, "detail": p.detail} for p in proofs]
        page = {"ok": not failed, "model": model, **facts, "proofs": shown}
        typer.echo(json.dumps(page, indent=2, ensure_ascii=False))
    else:
        notes = sum(proof.state == "note" for proof in proofs)
        typer.echo(f"{len(proofs)} checks: {len(failed)} failed, {notes} notes")
    return 1 if failed else 0


def _facts() -> dict[str, Any]:
    found = collect(seeds={}, datasets={})
    return {"hardware": found.hardware, "versions": found.versions, "settings": found.settings}


def _proofs(model: str | None) -> "Iterator[Proof]":
    yield from _machine()
    yield from _tiny_model()
    if model is not None:
        yield from _model(model)


def _machine() -> "Iterator[Proof]":
    """The machine, the versions, and what matrix products promise."""
    from luyen.train.proofs import Proof, random_numbers

    yield Proof(name="machine", state="ok", detail=this_machine().words())
    versions = collect(seeds={}, datasets={}).versions
    for package, (first, beyond) in SUPPORTED.items():
        version = version_of(package)
        good = version is not None and is_supported(package, version)
        span = f"{first[0]}.{first[1]} to below {beyond[0]}.{beyond[1]}"
        detail = f"{versions[package]} (supported: {span})"
        yield Proof(name=package, state="ok" if good else "failed", detail=detail)
    setting = f"MKL_CBWR={os.environ.get('MKL_CBWR', 'not set')}" if has_mkl() else "without MKL"
    strict = is_promised("float32")
    words = "exactness is promised in fp32" if strict else "exactness is not promised here"
    detail = f"{setting}: {words}"
    yield Proof(name="matrix products", state="ok" if strict else "note", detail=detail)
    yield random_numbers()


def _tiny_model() -> "Iterator[Proof]":
    """Trainer against sampler on random weights: lengths, batch sizes and threads."""
    from luyen.models.fresh import random_policy
    from luyen.train.proofs import exactness

    policy = random_policy()
    size = policy.head.vocabulary
    prompts = [[(7 * i + n) % size for i in range(n)] for n in _LENGTHS]
    for threads in sorted({1, min(4, this_machine().cpus)}):
        for rows in (1, 7, 64) if threads == 1 else (64,):
            yield exactness(policy, prompts, threads=threads, rows=rows, new=12)


def _model(path: str) -> "Iterator[Proof]":
    """A model of the user's: its template, its exactness, and plain transformers beside it."""
    import torch

    from luyen.data.render import Renderer
    from luyen.train.checkpointed import open_checkpoint
    from luyen.train.proofs import Proof, exactness, renderer_laws, same_answers

    opened = open_checkpoint(path)
    count = sum(p.numel() for p in opened.policy.parameters()) / 1e6
    dtype = str(next(opened.policy.parameters()).dtype).removeprefix("torch.")
    yield Proof(name="model", state="ok", detail=f"{opened.name}: {count:.1f}M parameters, {dtype}")
    renderer = Renderer(opened.tokenizer)
    yield from renderer_laws(renderer)
    prompts = [renderer.prompt_tokens([{"role": "user", "content": q}]) for q in _QUESTIONS]
    threads = torch.get_num_threads()
    yield exactness(opened.policy, prompts, threads=threads, rows=4)
    yield same_answers(opened.policy, prompts, opened.tokenizer.stop_ids)


def _line(proof: "Proof") -> str:
    label = typer.style(f"{proof.state:6s}", fg=_COLOURS[proof.state])
    return f"{label}  {proof.name}: {proof.detail}"
