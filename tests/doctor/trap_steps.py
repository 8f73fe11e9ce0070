"""LightningModules whose steps have traps, and others that look nearly like them."""

import gc
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as in users' projects


class Lit(pl.LightningModule):
    """A project without traps, on which the others build."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.losses: list[Any] = []
        self.total: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self.log("loss", loss)
        return loss

    def _shared_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class KeptLoss(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self.losses.append({"loss": loss})  # trap
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.clear()


class SummedLoss(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self._add(loss)
        return {"loss": loss}

    def _add(self, value: Tensor) -> None:
        self.total = self.total + value  # trap


class Bank(nn.Module):
    """It keeps what it is given, without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        self.kept.append(value.detach())


class KeptAfterNoGrad(KeptLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.losses.append(self(batch[0]))
        loss = self._shared_step(batch)
        self.losses.append(loss)  # trap
        return loss


class KeptOutput(Lit):
    """The loss comes from a function that is not followed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = step_of(self, batch)
        self.losses.append(output)  # trap
        return output

    def on_train_epoch_end(self) -> None:
        self.losses.clear()


def step_of(module: Lit, batch: Any) -> dict[str, Any]:
    return {"loss": F.cross_entropy(module(batch[0]), batch[1]), "name": "step"}


class Meter:
    """It is no list, and keeps no graph."""

    def __init__(self) -> None:
        self.total = 0.0

    def append(self, value: Tensor) -> None:
        self.total += float(value.detach())


class PerhapsDetached(Lit):
    """Whether the values have graphs depends on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps_graph, self.meter = False, Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self.losses.append(loss if self.keeps_graph else loss.detach())
        value = loss.detach()
        if self.keeps_graph:
            value = loss
        self.losses.append(value)
        self.meter.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.clear()


class DetachedLoss(Lit):
    """It keeps values without graphs, and losses that are gone before the step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Tensor] = []
        self.bank = Bank()
        self.latest: deque[Tensor] = deque(maxlen=10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.parts.clear()
        loss = self._shared_step(batch)
        self.parts.append(loss)
        self.losses.append(loss.detach())
        self.latest.append(loss.detach())
        self.total += loss.detach()
        self.bank.append(loss)
        with torch.no_grad():
            self.losses.append(self(batch[0]).mean())
        return sum(self.parts)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.losses).mean())
        self.losses.clear()


class GrowingOutputs(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self(batch[0]))  # trap

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.cat(self.losses).mean())


class EmptiedOutputs(GrowingOutputs):
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.losses = []


class LatestOutputs(GrowingOutputs):
    def __init__(self) -> None:
        super().__init__()
        self.latest: deque[Tensor] = deque(maxlen=10)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.latest.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.cat(list(self.latest)).mean())


class UnreadOutputs(Lit):
    """A callback reads and empties them."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self(batch[0]))


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self._shared_step(batch)
        self.manual_backward(loss.square(), retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


class Retaining(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self._shared_step(batch), retain_graph=True)  # trap
        optimizer.step()


class RetainingFirst(Manual):
    """Backward passes of which another one follows, in another method, a loop or Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self._shared_step(batch)
        self._backward(loss)
        self.manual_backward(loss)
        optimizer.step()

    def _backward(self, loss: Tensor) -> None:
        self.manual_backward(loss, retain_graph=True)


class RetainingInLoop(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for loss in self._shared_step(batch).unbind():
            self.manual_backward(loss, retain_graph=True)
        optimizer.step()


class RetainingForLightning(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        loss.backward(retain_graph=True)
        return loss


class RetainingHook(Lit):
    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)  # trap


class GradientCycle(Lit):
    def backward(self, loss: Tensor) -> None:
        loss.backward(create_graph=True)  # trap


class GradientPenalty(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        loss = self(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
        return loss + gradient.square().mean()


class KeptGradients(Lit):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)  # trap


class FreedGradients(Lit):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class AddedGradients(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self._shared_step(batch))
        optimizer.step()  # trap


class HelpedOptimizer(Manual):
    """Another function may set the gradients to zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self._shared_step(batch))
        optimizer.step()
        forget_gradients(optimizer)


class ClearedGradients(AddedGradients):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.grad = None


class ResetSum(SummedLoss):
    """It sums up the losses of a window, and forgets them with it."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.total = 0.0


def forget_gradients(optimizer: Any) -> None:
    optimizer.zero_grad()


class Waiting(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        self.log("loss", loss.item())  # trap
        return loss


class Printing(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self._shared_step(batch)
        print(f"{batch_idx}: {loss:.3f}")  # trap # noqa: T201


class WaitingForPredictions(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.losses.extend(logits.argmax(-1).cpu())  # trap
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.clear()


class RarelyWaiting(Lit):
    """It reads values now and then, values that are no tensors, and values on the CPU."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._shared_step(batch)
        rate = float(self.hparams.get("rate", 0.1))
        print("step", batch_idx, rate, loss.shape)  # noqa: T201
        if batch_idx % 100 == 0:
            print(loss.item())  # noqa: T201
            self._show(loss)
        _ = batch_idx % 100 == 0 and self._show(loss.item())
        self.log("rare", loss.item() if batch_idx % 100 == 0 else 0.0)
        if batch_idx % 10:
            return loss
        self.log("value", float(loss))
        return loss

    def _show(self, value: Any) -> bool:
        print(value.cpu())  # noqa: T201
        return True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self._shared_step(batch).item())


class PrintingNames(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = step_of(self, batch)
        own = {"logits": self(batch[0]), "size": len(batch[0])}
        print(output["name"], own["size"], own.keys())  # noqa: T201
        return output


class Releasing(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.empty_cache()  # trap


class Collecting(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gc.collect()  # trap
        return self._shared_step(batch)


class RarelyReleasing(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 1000 == 0:
            torch.cuda.empty_cache()
        return self._shared_step(batch)

    def on_validation_epoch_end(self) -> None:
        torch.cuda.empty_cache()
        gc.collect()


class Pinning(Lit):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].pin_memory(), batch[1]  # trap


class PinningTensor(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.host = torch.empty(8, pin_memory=True)  # trap
        return self._shared_step(batch)


class PinnedOnce(Lit):
    def on_fit_start(self) -> None:
        self.host = torch.empty(8, pin_memory=torch.cuda.is_available())


class DoubleSoftmax(Lit):
    def _shared_step(self, batch: Any) -> Tensor:
        probabilities = F.softmax(self(batch[0]), dim=-1)  # trap
        return F.cross_entropy(probabilities.view(-1, 4), batch[1])


class SoftmaxLayer(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.classifier(batch[0]), batch[1])  # trap


class SoftmaxInForward(Lit):
    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x)
        return F.softmax(logits, -1)  # trap


class SoftmaxIfAsked(Lit):
    def forward(self, x: Tensor, *, asked: bool = False) -> Tensor:
        logits: Tensor = self.net(x)
        return F.softmax(logits, -1) if asked else logits


class SoftmaxInOneReturn(Lit):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        if self.training:
            return logits
        return F.softmax(logits, -1)


class SingleSoftmax(Lit):
    """Softmax for the accuracy, and for a loss that needs probabilities."""

    def _shared_step(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        probabilities = F.softmax(logits, dim=-1)
        self.log("confidence", probabilities.max())
        return F.cross_entropy(logits, batch[1]) + F.nll_loss(probabilities.log(), batch[1])


class WideHead(Lit):
    num_classes = 12_000

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, self.num_classes))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return F.cross_entropy(logits.float(), batch[1])  # trap


class PlainHead(WideHead):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


class LogSoftmax(WideHead):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        log_probabilities = self(batch[0]).log_softmax(-1)  # trap
        return F.cross_entropy(log_probabilities, batch[1])


class NllLoss(WideHead):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.nll_loss(F.log_softmax(self(batch[0]), -1), batch[1])


class NarrowHead(WideHead):
    num_classes = 9_000
