"""Suites of tests: `make test` runs the core, `make test-parts` what has a suite of its own.

A suite is a part of the product that most changes do not touch, and that is slow to test because it
starts servers, clusters, ranks or sandboxes. `pytest` without `--suite` runs all of them.
"""

CORE = "core"
"""Everything that no suite names."""

SUITES: dict[str, tuple[str, ...]] = {
    "ray": ("unit/runtime/ray/", "invariants/test_ray_", "e2e/test_ray_"),
    "ranks": (
        "unit/engine/test_fsdp.py",
        "unit/engine/test_training_engines.py",
        "unit/runtime/test_offline_ranks.py",
        "unit/checkpoint/test_sharded.py",
        "unit/checkpoint/test_beside.py",
    ),
    "serving": (
        "unit/serve/",
        "unit/peers/",
        "unit/rollout/servers/",
        "conformance/test_llama_cpp.py",
        "e2e/test_eval_endpoint.py",
        "e2e/test_serve.py",
        "e2e/test_server_engines.py",
    ),
    "studio": ("unit/web/",),
    "hostile": (
        "unit/sandbox/",
        "e2e/test_bad_places.py",
        "e2e/test_broken_models.py",
        "e2e/test_full_disk.py",
        "e2e/test_owners.py",
        "e2e/test_secrets.py",
        "e2e/test_trust.py",
    ),
}
"""Name of a suite -> beginnings of the paths of its files, below `tests/`."""


def suite_of(path: str) -> str:
    """The suite of a file of tests, by its path below `tests/`."""
    return next((name for name, starts in SUITES.items() if path.startswith(starts)), CORE)


def is_chosen(path: str, chosen: str | None) -> bool:
    """Whether `--suite` means this file: a name, `parts` (all but the core), or None (all)."""
    suite = suite_of(path)
    return chosen is None or chosen == suite or (chosen == "parts" and suite != CORE)
