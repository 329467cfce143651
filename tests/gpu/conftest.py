"""Where GPU tests run: on CUDA, or in triton's interpreter, or not at all."""

import importlib.util
import os
from typing import Any

import pytest
import torch


def place() -> str | None:
    """`cuda`, or `cpu` where triton interprets, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the tensors of a test."""
    found = place()
    if found is None:
        pytest.skip("needs triton, and CUDA or TRITON_INTERPRET=1")
    if found == "cpu":
        allow_loops(monkeypatch)
        steady_products(monkeypatch)
    return found


def allow_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter use a loaded number as a loop bound, which newer numpy refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def steady_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply row by row: the rounding of numpy's product follows its size."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.data.ndim != 2:
            return plain(builder, a, b, d, *rest)
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = d.data.copy()
        for step in range(left.shape[1]):
            total += left[:, step, None] * right[step]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
