"""Gradients of the parameters of a part, which go to the host as backward makes them."""

import functools
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_memsave.core.memory import host_copies
from lightning_memsave.core.states import next_state
from lightning_memsave.techniques.flat_memory import shares_memory
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.copies import Copies


class Came(Enum):
    """What there is of a parameter's gradient on the host that the parameter does not have."""

    NOTHING = auto()
    OLDER = auto()  # the one from before, as autograd is about to make another one
    NEW = auto()  # the one that backward has made, added to an older one


_COMING = {
    Came.NOTHING: (Came.OLDER, Came.NEW),
    Came.OLDER: (Came.OLDER, Came.NEW),
    Came.NEW: (Came.NEW,),
}


class Gradients:
    def __init__(
        self,
        params: Sequence[nn.Parameter],
        memory: HostMemory,
        forms: Sequence[Tensor],
        *,
        leave_together: bool,
    ) -> None:
        self._params, self._memory, self._forms = params, memory, forms
        self._leave_together = leave_together
        self._positions = {id(param): index for index, param in enumerate(params)}
        self._on_host: dict[int, Tensor] = {}
        self._came: dict[int, Came] = {}  # by position; not in it: nothing
        self._missing: set[int] = set()  # positions of those whose hooks come without a gradient
        self._nodes: list[Any] = []

    @property
    def have_come(self) -> bool:
        """Whether gradients came, or were about to, that parameters do not have yet."""
        return bool(self._came)

    def adds_to(self, param: Tensor) -> bool:
        """Return whether a gradient is added to one that has come, or is from before."""
        return self._positions[id(param)] in self._came

    def use(self, param: Tensor, memory: Tensor) -> None:
        """Let the gradient of a parameter come to this memory."""
        self._on_host[self._positions[id(param)]] = memory

    def watch(self) -> None:
        """Put gradients from before aside when autograd is about to add others to them."""
        if self._nodes:
            return
        for param in self._params:
            if param.requires_grad:
                node = get_gradient_edge(param).node
                # It holds the parameter, but the parameter does not hold it.
                node.register_prehook(functools.partial(_put_aside, weakref.ref(self), param))
                self._nodes.append(node)  # lest it is made anew before a graph holds it

    def stop_watching(self) -> None:
        self._nodes.clear()

    def put_aside(self, param: nn.Parameter) -> None:
        """Put the gradient from before aside, as autograd is about to add another one to it."""
        index = self._positions[id(param)]
        if param.grad is None or self._came.get(index) is Came.NEW:
            return
        gradient = self._memory_of_all()[index]
        if not shares_memory(param.grad, gradient):
            with host_copies():
                gradient.copy_(param.grad)
        param.grad = None
        self._note(index, Came.OLDER)

    def miss(self, param: nn.Parameter) -> None:
        """Expect the hooks of a gradient that autograd will not make."""
        self._missing.add(self._positions[id(param)])

    def pop_missing(self, param: nn.Parameter) -> bool:
        """Return, once, whether hooks come without a gradient."""
        index = self._positions[id(param)]
        is_missing = index in self._missing
        self._missing.discard(index)
        return is_missing

    def receive(self, param: nn.Parameter, copies: Copies) -> None:
        index = self._positions[id(param)]
        assert param.grad is not None, "hooks without a gradient end before"
        copies.begin_group(self)
        copies.to_host(self._memory_of_all()[index], param.grad, adds=index in self._came)
        param.grad = None
        self._note(index, Came.NEW)
        num_new = sum(came is Came.NEW for came in self._came.values())
        if self._leave_together and num_new == sum(p.requires_grad for p in self._params):
            copies.begin_group(None)  # its weights leave, too

    def complete(self) -> dict[nn.Parameter, Tensor]:
        """Return all gradients where they come to on the host; none if others are to come."""
        trained = [index for index, p in enumerate(self._params) if p.requires_grad]
        if any(self._came.get(index) is not Came.NEW for index in trained):
            return {}
        return {self._params[index]: self._on_host[index] for index in trained}

    def _note(self, index: int, came: Came) -> None:
        self._came[index] = next_state(self._came.get(index, Came.NOTHING), came, _COMING)

    def show(self) -> None:
        for index, came in self._came.items():
            if came is Came.NEW:
                self._params[index].grad = self._on_host[index]
        self._came.clear()

    def forget(self) -> None:
        self._came.clear()

    def free(self) -> None:
        """Let go of the memory to which gradients come."""
        self._came.clear()
        self._on_host.clear()

    # Of frozen parameters from when they are trained on.
    def _memory_of_all(self) -> dict[int, Tensor]:
        trained = (index for index, param in enumerate(self._params) if param.requires_grad)
        missing = [index for index in trained if index not in self._on_host]
        if missing:
            made = self._memory.tensors_like([self._forms[index] for index in missing])
            self._on_host.update(zip(missing, made, strict=True))
        return self._on_host


# Of the node that accumulates a gradient: hooks of the parameter are also called by
# `torch.autograd.grad`, which accumulates none. They are called, too, for a parameter that was
# frozen since forward, or to which a function in the graph passes no gradient.
def _put_aside(
    gradients: "weakref.ref[Gradients]", param: nn.Parameter, made: tuple[Tensor | None]
) -> None:
    own = gradients()
    if own is None:
        return
    if made[0] is None or not param.requires_grad:
        own.miss(param)
    else:
        own.put_aside(param)
