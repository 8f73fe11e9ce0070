from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave.core.patching import patch_method
from lightning_memsave.core.technique import Handle, Technique
from tests.cases import make_model
from tests.helpers import snapshot


def fail():
    raise ValueError("cannot be undone")


def test_undo_goes_on_where_one_function_fails():
    done: list[int] = []
    handle = Handle(None, ("a",), undo=[lambda: done.append(1), fail, lambda: done.append(2)])
    with pytest.raises(ValueError, match="cannot be undone"):
        handle.undo()
    assert done == [2, 1]
    handle.undo()
    assert done == [2, 1]


def test_leaving_the_context_does_not_hide_what_was_raised():
    with pytest.raises(KeyError) as raised, Handle(None, ("a",), undo=[fail]):
        raise KeyError("first")
    assert raised.value.__notes__ == ["Undoing it failed in part: ValueError: cannot be undone"]
    with pytest.raises(ValueError, match="cannot be undone"), Handle(None, ("a",), undo=[fail]):
        pass


def forward(self: Any, x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Failing(Technique[Any]):
    """Changes a module or an optimizer, and fails before it could say how to undo that."""

    name = argument = "failing"

    def check(self, target: Any) -> list[Any]:
        return []

    def _apply(self, target: Any) -> Handle[Any]:
        target.mark = 1
        if isinstance(target, nn.Module):
            target.register_state_dict_pre_hook(lambda *_: None)
            for module in target.children():
                patch_method(module, forward)
                module.register_forward_hook(lambda *_: None)
        else:
            target.register_step_post_hook(lambda *_: None)
        raise RuntimeError("half way")


def test_a_module_is_as_before_where_a_technique_fails_half_way():
    model = make_model("dropout")
    before = snapshot(model), len(model._state_dict_pre_hooks)
    with pytest.raises(RuntimeError, match="half way"):
        Failing().apply(model)
    assert (snapshot(model), len(model._state_dict_pre_hooks)) == before


def test_an_optimizer_is_as_before_where_a_technique_fails_half_way():
    optimizer = torch.optim.SGD(make_model("dropout").parameters(), 0.1)
    before = sorted(vars(optimizer))
    with pytest.raises(RuntimeError, match="half way"):
        Failing().apply(optimizer)
    assert sorted(vars(optimizer)) == before
    assert not optimizer._optimizer_step_post_hooks
