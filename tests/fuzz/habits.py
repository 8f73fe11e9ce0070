"""Habits of public projects: averages of weights, gradients, codebooks, teachers, flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.fuzz.habit import Habit
from tests.fuzz.places import (
    ACTIVATIONS,
    AFTER_BACKWARD,
    AFTER_STEP,
    AROUND_VALIDATION,
    FORWARD,
    OUTER,
    START_OF_FORWARD,
    STEP,
)
from tests.fuzz.script import Script, indented

Choices = Mapping[str, Sequence[Any]]

_PARAMETERS = "[*L.net.parameters()]"
_NAMES = "[n for n, _ in L.net.named_parameters()]"
_UPDATES = {
    "lerp_": ("{loop}", "    a.lerp_(p.detach(), 0.3)"),
    "foreach": ("torch._foreach_lerp_(L.{name}, " + _PARAMETERS + ", 0.3)",),
    "mul_add": ("{loop}", "    a.mul_(0.7).add_(p, alpha=0.3)"),
    "state_dict": (
        "now = L.net.state_dict()",
        "for a, n in zip(L.{name}, " + _NAMES + "):",
        "    a.copy_(a * 0.7 + now[n] * 0.3)",
    ),
    "numpy": ("{loop}", "    a.lerp_(torch.from_numpy(p.detach().numpy()), 0.3)"),
    "data": ("{loop}", "    a.data.lerp_(p.data, 0.3)"),
}
_SWAPS = {
    "data.copy_": ("{loop}", "    p.data.copy_(v)"),
    "copy_": ("{loop}", "    p.copy_(v)"),
    "data=": ("{loop}", "    p.data = v.detach().clone()"),
    "exchange": ("{loop}", "    p.data, v.data = v.data, p.data"),
    "load_state_dict": (
        "L.net.load_state_dict(dict(zip(" + _NAMES + ", {values})), strict=False)",
    ),
    "foreach_copy": ("torch._foreach_copy_(" + _PARAMETERS + ", {values})",),
    "set_": ("{loop}", "    p.set_(v.detach().clone())"),
    "vector": (
        "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector({values}), "
        + _PARAMETERS
        + ")",
    ),
    "new_parameter": (
        "for n, v in zip(" + _NAMES + ", {values}):",
        "    path, _, leaf = n.rpartition('.')",
        "    setattr(L.net.get_submodule(path), leaf, {new})",
    ),
    "numpy": ("{loop}", "    p.detach().numpy()[...] = v.detach().numpy()"),
}


@dataclass(frozen=True, kw_only=True)
class Average(Habit):
    """An average of all weights, which takes their place during validation."""

    choices: ClassVar[Choices] = {
        "at": (*AFTER_STEP, "step.before", "lit:on_train_batch_start", "hook:post_acc"),
        "swapped": (*AROUND_VALIDATION, ("", "")),
        "update": tuple(_UPDATES),
        "keep": ("list", "module", "submodule"),
        "swap": tuple(_SWAPS),
    }

    at: str
    swapped: tuple[str, str]
    update: str
    keep: str
    swap: str

    def places(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.at, *self.swapped)))

    def add_to(self, script: Script) -> None:
        name = f"ema{self.number}"
        self._make(script, name)
        loop = f"for a, p in zip(L.{name}, L.net.parameters()):"
        update = [line.format(name=name, loop=loop) for line in _UPDATES[self.update]]
        self.put(script, self.at, update)
        total = f"sum(a.double().abs().sum() for a in self.{name})"
        script.lines["finish"].append(f"self.note('end {name}', {total})")
        kept = f"L.kept{self.number}"
        keep, back = [f"{kept} = [p.detach().clone() for p in L.net.parameters()]"], kept
        if self.swap == "new_parameter":
            keep = [f"{kept} = {_PARAMETERS}"]
        elif self.swap == "exchange":
            keep, back = [], f"L.{name}"
        pairs = zip(self.swapped, (keep, []), (f"L.{name}", back), strict=True)
        for place, first, values in pairs:
            if place:
                self.put(script, place, [*first, *self._replace_weights(values, kept)])

    def _make(self, script: Script, name: str) -> None:
        values = "p.detach().clone() for p in self.net.parameters()"
        if self.keep != "list":
            net = "copy.deepcopy(self.net).requires_grad_(False)"
            is_hidden = self.keep == "module"
            made = f"self.{name}_net = {f'[{net}]' if is_hidden else net}"
            script.lines["lit:__init__"].append(made)
            values = f"*self.{name}_net{'[0]' * is_hidden}.parameters()"
        script.lines["lit:__init__"].append(f"self.{name} = [{values}]")

    def _replace_weights(self, values: str, kept: str) -> list[str]:
        loop = f"for v, p in zip({values}, {_PARAMETERS}):"
        new = "v" if values == kept else "nn.Parameter(v.detach().clone())"
        return [line.format(loop=loop, values=values, new=new) for line in _SWAPS[self.swap]]


@dataclass(frozen=True, kw_only=True)
class Gradients(Habit):
    """Gradients that are changed, or whose norm is noted."""

    choices: ClassVar[Choices] = {
        "at": (
            *(*AFTER_BACKWARD, *AFTER_BACKWARD, *AFTER_STEP),
            *("lit:on_validation_start", "lit:on_train_epoch_end", "wrap:before"),
        ),
        "how": ("noise", "mask", "scale_data", "assign", "norm", "norm", "sum", "zero"),
        "path": ("net.blocks", "net", "net.head"),
    }
    _CHANGES: ClassVar[Mapping[str, str]] = {
        "noise": "p.grad.add_(torch.randn_like(p.grad), alpha=0.01)",
        "mask": "p.grad.mul_(p.grad > 0)",
        "scale_data": "p.grad.data.mul_(0.5)",
        "assign": "p.grad = p.grad * 0.5",
        "zero": "p.grad.zero_()",
    }

    at: str
    how: str
    path: str

    def kind_of_state(self) -> str:
        return "grad"

    def add_to(self, script: Script) -> None:
        note = f"L.note('{self.at} g', {{}})"
        is_read = self.how in ("norm", "sum")
        if self.at == "hook:param":
            changes = {"noise": "grad + 0.01 * torch.randn_like(grad)", "mask": "grad * (grad > 0)"}
            change = f"return {changes.get(self.how, 'grad * 0.5')}"
            self.put(script, self.at, [note.format("grad.abs().sum()") if is_read else change])
            return
        loop = [f"for p in L.{self.path}.parameters():", "    if p.grad is not None:"]
        if is_read:
            total = "p.grad.norm()" if self.how == "norm" else "p.grad.double().abs().sum()"
            add = f"        total += float({total})"
            self.put(script, self.at, ["total = 0.0", *loop, add, note.format("total")])
        else:
            self.put(script, self.at, [*loop, f"        {self._CHANGES[self.how]}"])


@dataclass(frozen=True, kw_only=True)
class Memory(Habit):
    """A codebook, queue or hidden state that follows the activations and is looked up."""

    choices: ClassVar[Choices] = {
        "owner": ("block", "net", "lit"),
        "kind": ("buffer", "attr", "list", "data", "hidden_buffer"),
        "what": ("queue", "hidden", "codebook", "counter", "running", "per_sample"),
        "when": ("before", "after"),
        "way": ("copy_", "data.copy_", "assign", "index", "lerp_", "foreach_copy", "data="),
        "reset": ("never", "never", "first_batch"),
    }
    _VALUES: ClassVar[Mapping[str, str]] = {
        "queue": "torch.cat([{v}.detach().mean(0, keepdim=True), {t}[:-1]])",
        "hidden": "{v}.detach().mean(0).expand(4, -1).clone()",
        "codebook": "{t} * 0.8 + 0.2 * torch.cdist({t}, {v}.detach()).softmax(1) @ {v}.detach()",
        "counter": "{t} + 0.1",
        "running": "{t} * 0.9 + 0.1 * {v}.detach().std()",
        "per_sample": "{v}.detach() * 0.9",
    }
    _WAYS: ClassVar[Mapping[str, str]] = {
        "copy_": "{t}.copy_(new)",
        "data.copy_": "{t}.data.copy_(new)",
        "assign": "{t} = new",
        "index": "{t}[:2] = new[:2]",
        "lerp_": "{t}.lerp_(new, 0.5)",
        "foreach_copy": "torch._foreach_copy_([{t}], [new])",
        "data=": "{t}.data = new",
    }

    owner: str
    kind: str
    what: str
    when: str
    way: str
    reset: str

    def places(self) -> tuple[str, ...]:
        return ({"block": "block", "net": "net", "lit": "step"}[self.owner] + f".{self.when}",)

    def add_to(self, script: Script) -> None:
        name, (place,), width = f"m{self.number}", self.places(), script.model.width
        first = f"torch.linspace(-1, 1, {4 * width}).view(4, {width})"
        path = script.declare(self.owner, self.kind, name, first)
        end = f"{script.path_to('lit', self.owner, self.block)}.{path}"
        script.lines["finish"].append(f"self.note('end {name}', {end})")
        if self.reset == "first_batch":
            own = script.path_to("step.before", self.owner, self.block)
            reset = f"    L{own.removeprefix('self')}.{path}.mul_(0.0)"
            self.put(script, "step.before", ["if batch_idx == 0:", reset])
        t, v = f"self.{path}", ACTIVATIONS.get(place, "self.net.last")
        new, write = self._VALUES[self.what].format(t=t, v=v), self._WAYS[self.way].format(t=t)
        save = ["with torch.no_grad():", f"    new = {new}", f"    {write}"]
        if self.owner != "lit":
            look_up = f"({v} @ {t}.clone().T).softmax(-1) @ {t}.clone()"
            script.lines[place] += [f"{v} = {v} + 0.3 * {look_up}", *save]
            return
        script.lines["net:__init__"].append("self.last = None")
        script.lines["net.after"].append("self.last = h.detach()")
        script.lines[place] += ["if self.net.last is not None:", *indented(save)]
        script.lines["step.after"].append(f"loss = loss * (1 + 0.1 * {t}.mean())")


@dataclass(frozen=True, kw_only=True)
class Flag(Habit):
    """A setting of a module or optimizer that changes as training goes on."""

    choices: ClassVar[Choices] = {
        "what": ("requires_grad", "eval_block", "dropout_p", "group_lr", "eps", "swap_block"),
        "at": (
            *(place for place in OUTER if not place.startswith("hook")),
            *(*STEP, "net.before", "net.after"),
        ),
    }
    _CHANGES: ClassVar[Mapping[str, str]] = {
        "requires_grad": "{block}.sub.up.weight.requires_grad_({count} % 4 != 2)",
        "eval_block": "{block}.train({count} % 3 != 1)",
        "dropout_p": "{block}.drop.p = 0.1 * ({count} % 3)",
        "eps": "{block}.norm.eps = 0.01 * ({count} % 3 + 1)",
        "group_lr": "L.trainer.optimizers[0].param_groups[0]['lr'] *= 0.9",
        "swap_block": "{net}.blocks[0], {net}.blocks[1] = {net}.blocks[1], {net}.blocks[0]",
    }

    what: str
    at: str

    def add_to(self, script: Script) -> None:
        net = "self" if self.at in FORWARD else "L.net"
        block, count = f"{net}.blocks[{self.block}]", f"{net}.count{self.number}"
        script.lines["net:__init__"].append(f"self.count{self.number} = 0")
        what = "eps" if self.at in FORWARD and self.what == "group_lr" else self.what
        change = self._CHANGES[what].format(net=net, block=block, count=count)
        self.put(script, self.at, [f"{count} += 1", change])


@dataclass(frozen=True, kw_only=True)
class Save(Habit):
    """A checkpoint that is saved at a place and read again."""

    choices: ClassVar[Choices] = {
        "at": tuple(
            place
            for place in OUTER
            if place.startswith(("lit:on_", "cb:on_", "opt")) and "checkpoint" not in place
        )
    }

    at: str

    def add_to(self, script: Script) -> None:
        weights = "sum(v.double().abs().sum() for v in saved['state_dict'].values())"
        states = "sorted(saved['optimizer_states'][0]['state'].items())"
        each = f"for _, s in {states} for v in s.values() if v is not None"
        state = f"sum(v.double().abs().sum() {each})"
        lines = ["L.trainer.save_checkpoint(PATH)", "saved = torch.load(PATH, weights_only=False)"]
        lines += [
            f"L.note('{self.at} {name}', {total})"
            for name, total in (("weights", weights), ("state", state))
        ]
        self.put(script, self.at, lines)


_PENALTY = "penalty = 0.01 * sum(p.pow(2).sum() for p in self.net.parameters())"
_TEACHER = "{to_eval}with torch.no_grad():\n    soft = self.net(x).softmax(-1){to_train}"
_DISTILL = "loss = loss + 0.1 * (self.net(x).softmax(-1) - soft).pow(2).sum()"
_EXTRAS: dict[str, tuple[tuple[str, str], ...]] = {
    "penalty_before": (("step.before", _PENALTY), ("step.after", "loss = loss + penalty")),
    "penalty_after": (("step.after", _PENALTY), ("step.after", "loss = loss + penalty")),
    "weight_grad": (
        (
            "step.after",
            "g, = torch.autograd.grad(loss, [{weight}], retain_graph=True)\n"
            "loss = loss * (1 + g.norm().detach())",
        ),
    ),
    "input_penalty": (
        (
            "step.after",
            "z = x.clone().requires_grad_(True)\n"
            "g, = torch.autograd.grad(self.net(z).sum(), [z], create_graph=True)\n"
            "loss = loss + 0.1 * g.pow(2).sum()",
        ),
    ),
    "teacher_before": (("step.before", _TEACHER), ("step.after", _DISTILL)),
    "teacher_after": (("step.after", _TEACHER), ("step.after", _DISTILL)),
    "generate": (
        (
            "lit:validation_step",
            "for _ in range(3):\n    self.note('lit:validation_step {name}', self.net(x))",
        ),
    ),
    "functional_teacher": (
        (
            "step.after",
            "weights = {{n: p.detach() * 0.9 for n, p in self.net.named_parameters()}}\n"
            "with torch.no_grad():\n"
            "    soft = torch.func.functional_call(self.net, weights, (x,))\n"
            "loss = loss + 0.1 * (self.net(x) - soft).pow(2).mean()",
        ),
    ),
    "loop_in_validation": (
        (
            "lit:validation_step",
            "for _ in range(3):\n"
            "    {weight}.data.mul_(0.99)\n"
            "    self.note('lit:validation_step {name}', self.net(x))",
        ),
    ),
    "backward_twice": (
        (
            "step.after",
            "self.zero_grad()\n"
            "loss.backward(retain_graph=True)\n"
            "g = {weight}.grad.norm()\n"
            "self.zero_grad()\n"
            "loss = loss * (1 + g)",
        ),
    ),
    "two_passes": (("step.after", "loss = loss + 0.5 * F.cross_entropy(self.net(x), y)"),),
    "own_backward": (
        (
            "step.before",
            "self.zero_grad()\n"
            "(0.1 * F.cross_entropy(self.net(x), y)).backward()\n"
            "g = {weight}.grad.abs().sum()",
        ),
        ("step.after", "loss = loss * (1 + g)"),
    ),
    "activations_kept": (
        ("net.after", "self.{name} = [h]"),
        ("lit:on_train_batch_end", "self.note('step.{name}', self.net.{name}[0])"),
    ),
    "reset_state": (),
    "grow_buffer": (
        ("{owner}:__init__", "self.register_buffer('{name}', torch.zeros(0))"),
        ("{first}", "if self.{name}.numel() == 0:\n    {grown}\n{v} = {v} + self.{name}"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Extra(Habit):
    """Another pass, another term of the loss, a reset, or a buffer that gets its size late."""

    choices: ClassVar[Choices] = {
        "what": (*_EXTRAS, "grow_buffer"),
        "owner": ("sub", "block", "net"),
        "at": ("lit:on_train_batch_end", *STEP),
    }

    what: str
    owner: str
    at: str

    def places(self) -> tuple[str, ...]:
        return (self.at,) if self.what == "reset_state" else ()

    def add_to(self, script: Script) -> None:
        weight = f"net.blocks[{self.block}].sub.up.weight"
        if self.what == "reset_state":
            reset = f"L.trainer.optimizers[0].state.pop(L.{weight}, None)"
            self.put(script, self.at, [reset])
        if self.what == "input_penalty" and script.model.tied:  # its inputs are integers
            return
        name, first = f"e{self.number}", START_OF_FORWARD[self.owner]
        is_eval, v, width = self.owner == "sub", ACTIVATIONS[first], script.model.width
        assigned = f"self.{name} = {v}.detach().mean(0)"
        resized = f"self.{name}.resize_({width}).fill_(0.1)"
        values = {
            "weight": f"self.{weight}",
            "name": name,
            "owner": self.owner,
            "first": first,
            "v": v,
            "grown": resized if self.block % 2 else assigned,
            "to_eval": "self.net.eval()\n" * is_eval,
            "to_train": "\nself.net.train()" * is_eval,
        }
        for place, text in _EXTRAS[self.what]:
            lines = text.format(**values).splitlines()
            script.lines[place.format(**values)] += lines
