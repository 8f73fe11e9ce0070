"""Parameters that wait on the host together."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import counted_as, host_copies, mark_as
from lightning_memsave.techniques.offloading.copies import Copies
from lightning_memsave.techniques.offloading.host_memory import HostMemory

_Versions = tuple[int, list[tuple[int, int]]]


class Part:
    """Parameters of one block, or all that are in no block, on the host and on the device.

    Outside of a step's forward and backward passes a parameter is what it is without offloading,
    but in host memory: its ``data`` and its ``grad`` are ordinary tensors there. While the part is
    on the device, ``data`` is the copy there, possibly in another type.

    Args:
        params: Parameters with their values; frozen ones have neither gradient nor update.
        memory: Host memory.
        is_streamed: Free the copies on the device whenever the part leaves it.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], memory: HostMemory, *, is_streamed: bool = False
    ) -> None:
        self.params = tuple(params)
        self.is_streamed = is_streamed
        self.is_on_device = False
        self._memory = memory
        self._positions = {id(param): index for index, param in enumerate(self.params)}
        self._weights = memory.tensors_like(self.params)
        self._gradients: dict[int, Tensor] = {}
        self._received: set[int] = set()  # positions of the gradients since the part came
        self._kept: set[int] = set()  # those that are added to gradients from before
        self._dtypes = [param.dtype for param in self.params]
        self._to_send: list[Tensor] = []
        self._on_device: list[Tensor] = []
        self._sole_owners = 0
        self._num_changes = 0
        self._converted: _Versions | None = None
        self._sent: _Versions | None = None
        self._wait_for_copies: Callable[[], None] | None = None
        self._update: Future[None] | None = None
        self._adopt()

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._positions

    @property
    def is_updating(self) -> bool:
        """Whether an update runs in the background."""
        return self._update is not None and not self._update.done()

    def weight_of(self, param: Tensor) -> Tensor:
        """Return the weight on the host."""
        return self._weights[self._positions[id(param)]]

    def set_device_dtype(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        """Choose the type of the copy on the device.

        Args:
            param: One of the parameters.
            dtype: Such as ``torch.bfloat16``.
        """
        self._dtypes[self._positions[id(param)]] = dtype
        self._to_send, self._on_device, self._converted, self._sent = [], [], None, None

    def note_change(self) -> None:
        """Note that weights have changed on the host, as kernels do it that torch does not see."""
        self._num_changes += 1

    def begin_update(self, update: "Future[None]") -> None:
        """Let everybody who needs the weights wait for an update in the background."""
        self._update = update

    def wait(self) -> None:
        """Wait for the update in the background, and raise what it has raised."""
        update, self._update = self._update, None
        if update is not None:
            update.result()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def send(self, copies: Copies, device: torch.device) -> None:
        """Start to copy weights to the device if they have changed.

        Args:
            copies: Copies between host and device.
            device: The device.
        """
        self.wait()
        self._adopt()
        if self._on_device and self._versions() == self._sent:
            return
        if not self._on_device:
            with counted_as("parameter"):
                self._on_device = [
                    torch.empty_like(weight, dtype=dtype, device=device)
                    for weight, dtype in zip(self._weights, self._dtypes, strict=True)
                ]
            for copy in self._on_device:
                mark_as("parameter", copy)
            self._sole_owners = _num_owners(self._on_device)
        self.convert()
        self._wait_for_copies = copies.to_device(self._on_device, self._to_send)
        self._sent = self._versions()

    def enter(self, copies: Copies, device: torch.device) -> None:
        """Let the parameters be on the device.

        Args:
            copies: Copies between host and device.
            device: The device.
        """
        if self.is_on_device:
            return
        self.send(copies, device)
        if self._wait_for_copies is not None:
            self._wait_for_copies()
            self._wait_for_copies = None
        for param, copy in zip(self.params, self._on_device, strict=True):
            param.data = copy
        self.is_on_device = True

    def leave(self) -> None:
        """Let the parameters be on the host again."""
        if not self.is_on_device:
            return
        for param, weight in zip(self.params, self._weights, strict=True):
            param.data = weight
        self.is_on_device = False
        self.drop()

    def drop(self) -> None:
        """Free what `send` has brought to the device, if it is streamed and not in use.

        A block that is not recomputed keeps views of its weights for backward: to free and to bring
        back the rest would need more memory, not less.
        """
        if not self.is_streamed or self.is_on_device:
            return
        if _num_owners(self._on_device) > self._sole_owners:
            return
        if self._wait_for_copies is not None:  # memory must not be reused before they are done
            self._wait_for_copies()
            self._wait_for_copies = None
        self._on_device = []

    def show_gradients(self) -> None:
        """Let parameters on the host have the gradients that came."""
        for index in self._received:
            self.params[index].grad = self._gradients[index]
        self._received.clear()
        self._kept.clear()

    def keep_gradient(self, param: nn.Parameter) -> None:
        """Put the gradient from before aside, as autograd is about to add another one to it."""
        if param.grad is None:
            return
        index = self._positions[id(param)]
        if index in self._received:
            return
        gradient = self._gradient_memory()[index]
        if not _is_same(param.grad, gradient):
            with host_copies():
                gradient.copy_(param.grad)
        param.grad = None
        self._kept.add(index)

    def receive_gradient(self, param: nn.Parameter, copies: Copies) -> None:
        """Move a gradient to the host.

        Args:
            param: With a complete gradient on the device.
            copies: Copies between host and device.
        """
        assert param.grad is not None, "hooks run when there is a gradient"
        index = self._positions[id(param)]
        adds = index in self._received or index in self._kept
        copies.to_host(self._gradient_memory()[index], param.grad, adds=adds)
        param.grad = None
        self._received.add(index)

    def convert(self) -> None:
        """Convert weights that have changed to the types of the device."""
        versions = self._versions()
        if versions == self._converted:
            return
        if all(w.dtype is d for w, d in zip(self._weights, self._dtypes, strict=True)):
            self._to_send = self._weights
        else:
            if not self._to_send:
                self._to_send = self._memory.tensors_like(self._weights, self._dtypes)
            with host_copies():
                for converted, weight in zip(self._to_send, self._weights, strict=True):
                    converted.copy_(weight)
        self._converted = versions

    def release(self, device: torch.device) -> None:
        """Give the parameters memory of their own, as they had before.

        Args:
            device: Where they are from now on.
        """
        self.leave()
        self.show_gradients()
        for param, weight in zip(self.params, self._weights, strict=True):
            grad, param.grad = param.grad, None
            param.data = torch.empty_like(weight, device=device).copy_(weight)
            if grad is not None:
                param.grad = torch.empty_like(grad, device=device).copy_(grad)

    # Of frozen parameters from when they are trained on.
    def _gradient_memory(self) -> dict[int, Tensor]:
        trained = (index for index, param in enumerate(self.params) if param.requires_grad)
        missing = [index for index in trained if index not in self._gradients]
        if missing:
            made = self._memory.tensors_like([self._weights[index] for index in missing])
            self._gradients.update(zip(missing, made, strict=True))
        return self._gradients

    # Somebody may have given a parameter other data, as `Module.to` does.
    def _adopt(self) -> None:
        for param, weight in zip(self.params, self._weights, strict=True):
            if not _is_same(param, weight):
                weight.copy_(param.data)
                param.data = weight

    def _versions(self) -> _Versions:
        pairs = zip(self.params, self._weights, strict=True)
        return self._num_changes, [(p._version, w._version) for p, w in pairs]


def _num_owners(tensors: Sequence[Tensor]) -> int:
    count = torch._C._storage_Use_Count
    return sum(count(tensor.untyped_storage()._cdata) for tensor in tensors)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
