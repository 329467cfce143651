"""`luyen selftest`: what this machine promises, tested; with --sandbox, attacks on the sandbox."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luyen.base.process_setup import SUPPORTED, has_mkl, is_promised, is_supported, version_of
from luyen.cli.common import prepare
from luyen.telemetry.manifest import collect

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

if TYPE_CHECKING:
    from luyen.studio.selftest import SelfTestResult


_COLOURS = {"ok": "green", "note": "yellow", "failed": "red"}
_LENGTHS = (1, 5, 31, 32, 33, 63, 100, 255, 257, 300)
_QUESTIONS = ("12+34=", "What is the capital of France?", "Name three colours.")


def run_selftest(model: str | None, *, as_json: bool) -> int:
    """Run all self-tests and print the results; 1 when a guarantee is broken."""
    prepare()
    facts = _facts()
    proofs: list[SelfTestResult] = []
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


def _proofs(model: str | None) -> "Iterator[SelfTestResult]":
    yield from _machine()
    yield from _tiny_model()
    if model is not None:
        yield from _model(model)


def _machine() -> "Iterator[SelfTestResult]":
    """Machine, versions, and the guarantees of matrix products."""
    from luyen.config.machine import this_machine
    from luyen.studio.selftest import SelfTestResult, random_numbers

    yield SelfTestResult(name="machine", state="ok", detail=this_machine().words())
    versions = collect(seeds={}, datasets={}).versions
    for package, (first, beyond) in SUPPORTED.items():
        version = version_of(package)
        good = version is not None and is_supported(package, version)
        span = f"{first[0]}.{first[1]} to below {beyond[0]}.{beyond[1]}"
        detail = f"{versions[package]} (supported: {span})"
        yield SelfTestResult(name=package, state="ok" if good else "failed", detail=detail)
    setting = f"MKL_CBWR={os.environ.get('MKL_CBWR', 'not set')}" if has_mkl() else "without MKL"
    strict = is_promised("float32")
    words = "exactness is promised in fp32" if strict else "exactness is not promised here"
    detail = f"{setting}: {words}"
    yield SelfTestResult(name="matrix products", state="ok" if strict else "note", detail=detail)
    yield random_numbers()


def _tiny_model() -> "Iterator[SelfTestResult]":
    """Trainer against sampler on random weights: lengths, batch sizes and threads."""
    from luyen.config.machine import this_machine
    from luyen.models.random_policy import random_policy
    from luyen.studio.selftest import exactness

    policy = random_policy()
    size = policy.head.vocabulary
    prompts = [[(7 * i + n) % size for i in range(n)] for n in _LENGTHS]
    for threads in sorted({1, min(4, this_machine().cpus)}):
        for rows in (1, 7, 64) if threads == 1 else (64,):
            yield exactness(policy, prompts, threads=threads, rows=rows, new=12)


def _model(path: str) -> "Iterator[SelfTestResult]":
    """A model of the user: chat template, exactness, and comparison with plain transformers."""
    import torch

    from luyen.data.render import Renderer
    from luyen.pipeline.policy_loading import open_checkpoint
    from luyen.studio.selftest import SelfTestResult, exactness, renderer_laws, same_answers

    opened = open_checkpoint(path)
    count = sum(p.numel() for p in opened.policy.parameters()) / 1e6
    dtype = str(next(opened.policy.parameters()).dtype).removeprefix("torch.")
    yield SelfTestResult(
        name="model", state="ok", detail=f"{opened.name}: {count:.1f}M parameters, {dtype}"
    )
    renderer = Renderer(opened.tokenizer)
    yield from renderer_laws(renderer)
    prompts = [renderer.prompt_tokens([{"role": "user", "content": q}]) for q in _QUESTIONS]
    threads = torch.get_num_threads()
    yield exactness(opened.policy, prompts, threads=threads, rows=4)
    yield same_answers(opened.policy, prompts, opened.tokenizer.stop_ids)


def _line(proof: "SelfTestResult") -> str:
    label = typer.style(f"{proof.state:6s}", fg=_COLOURS[proof.state])
    return f"{label}  {proof.name}: {proof.detail}"


# `luyen selftest --sandbox`: the isolation layers of this machine, and attacks on them.

_ATTACK_COLOURS = {"kept": "green", "not kept": "yellow", "held": "green", "BROKEN": "red"}


def run_sandbox_selftest(*, as_json: bool) -> int:
    """Print isolation layers, promises and attacks; 1 when an attack breaks a kept promise."""
    from luyen.sandbox.attacks import ATTACKS, breaches, target
    from luyen.sandbox.launch import ISOLATION, available, missing

    layers, lost = available(), set(missing())
    if not as_json:
        typer.echo(f"isolation: {', '.join(layers)}")
        for promise in ISOLATION:
            _attack_line("not kept" if promise in lost else "kept", promise)
    found: list[dict[str, Any]] = []
    for attack in ATTACKS:
        with target() as outside:
            got = asyncio.run(breaches(attack, outside))
        found.append({"attack": attack.name, "promise": attack.promise, "breaches": got})
        if not as_json:
            _attack_line("BROKEN" if got else "held", f"{attack.promise}: {attack.name}")
            for line in got:
                typer.echo(f"           {line}")
    broken = [one for one in found if one["breaches"] and one["promise"] not in lost]
    if as_json:
        page = {"ok": not broken, "walls": layers, "missing": sorted(lost), "attacks": found}
        typer.echo(json.dumps(page, indent=2))
    else:
        through = sum(bool(one["breaches"]) for one in found)
        typer.echo(f"{len(found)} attacks: {through} got through, {len(lost)} promises not kept")
    return 1 if broken else 0


def _attack_line(state: str, text: str) -> None:
    typer.echo(f"{typer.style(f'{state:9s}', fg=_ATTACK_COLOURS[state])}  {text}")


def selftest(
    model: Annotated[
        str | None, typer.Argument(help="A model to try as well.", metavar="[MODEL]")
    ] = None,
    sandbox: Annotated[
        bool,
        typer.Option(
            "--sandbox", help="Attack the sandbox instead, and print which isolation layers hold."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Try out what is promised here: versions, random numbers, exactness; or the sandbox.

    With a model also its chat template, and the embedded engine against plain transformers. Exit
    code 1 when something that is promised fails.
    """
    if sandbox:
        raise typer.Exit(run_sandbox_selftest(as_json=as_json))
    raise typer.Exit(run_selftest(model, as_json=as_json))
