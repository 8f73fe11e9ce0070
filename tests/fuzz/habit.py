"""A habit of a user's code, and the one of all states: written at one place, read at another."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeVar

from tests.fuzz.places import ACTIVATIONS, FORWARD, OUTER, START_OF_FORWARD, STEP, owned_by
from tests.fuzz.script import Script, indented

T = TypeVar("T")

WAYS: dict[str, tuple[str, ...]] = {
    "mul_": ("{t}.mul_(0.9).add_({v}, alpha=0.1)",),
    "copy_": ("{t}.copy_({v})",),
    "lerp_": ("{t}.lerp_({v}, 0.3)",),
    "data.copy_": ("{t}.data.copy_({v})",),
    "data.mul_": ("{t}.data.mul_(0.9)",),
    "data=": ("{t}.data = {v}.clone()",),
    "set_": ("{t}.set_({v}.clone())",),
    "assign": ("{t} = {new}",),
    "foreach": ("torch._foreach_mul_([{t}], 0.9)", "torch._foreach_add_([{t}], [{v}], alpha=0.1)"),
    "foreach_copy": ("torch._foreach_copy_([{t}], [{v}])",),
    "alias": ("alias = {t}.detach()", "alias.mul_(0.9)"),
    "numpy": ("{t}.detach().numpy()[...] = {v}.numpy()",),
    # Through a view that was made when training began; at other places as "alias".
    "kept_alias": ("alias = {t}.detach()", "alias.mul_(0.9)"),
    "kept_numpy": ("alias = {t}.detach()", "alias.mul_(0.9)"),
    "clamp_": ("{t}.clamp_(-0.2, 0.2)",),
    "index": ("{t}[0] = {v}[0]",),
    "out=": ("torch.mul({t}, 0.9, out={t})",),
    "load_state_dict": ("{t}.copy_({v})",),  # of what no state dict holds
    "noise": ("{t}.add_(torch.randn_like({t}), alpha=0.01)",),
    "storage": ("{t}.untyped_storage().copy_({v}.contiguous().untyped_storage())",),
    "data[]": ("{t}.data[...] = {v}",),
    "vector": ("nn.utils.vector_to_parameters({v}.flatten(), [{t}])",),
}
"""Ways of writing a tensor `t`, with a new value `v`."""
READS = {
    "plain": "{t}.mean()",
    "data": "{t}.data.mean()",
    "detach": "{t}.detach().mean()",
    "clone": "{t}.detach().clone().mean()",
    "numpy": "float({t}.detach().numpy().mean())",
    "deepcopy": "copy.deepcopy({base}).{leaf}.mean()",
    "state_dict": "{base}.state_dict()['{leaf}'].mean()",
    "foreach_norm": "torch._foreach_norm([{t}.detach()])[0]",
}
PARAMETERS = {
    "sub": ("up.weight", "down.bias", "down.weight"),
    "block": ("norm.weight", "norm.bias"),
    "net": ("stem.weight", "head.weight", "head.bias"),
}
TRAINED_OR_FROZEN = ("param", "newparam", "frozen")
OF_A_STEP = ("grad", "optstate")
_KINDS = {
    "param": 5,
    "newparam": 2,
    "frozen": 2,
    "buffer": 3,
    "hidden_buffer": 2,
    "attr": 2,
    "list": 1,
    "dict": 1,
    "data": 1,
    "number": 2,
    "optstate": 2,
    "grad": 1,
    "lr": 1,
}


def pick(random: Random, weights: Mapping[T, int]) -> T:
    return random.choices(list(weights), list(weights.values()))[0]


@dataclass(frozen=True, kw_only=True)
class Habit:
    """Lines that a user writes at some places of a program."""

    choices: ClassVar[Mapping[str, Sequence[Any]]]

    number: int
    block: int
    registered: str
    """The method in which hooks of modules are registered."""

    @classmethod
    def by_chance(cls, random: Random, **common: Any) -> "Habit":
        return cls(**common, **{name: random.choice(v) for name, v in cls.choices.items()})

    def add_to(self, script: Script) -> None:
        raise NotImplementedError

    def places(self) -> tuple[str, ...]:
        """List the places of its lines, if it chooses them."""
        found = [getattr(self, name, "") for name in ("at", "read_at")]
        return tuple(place for place in found if place)

    def written_at(self) -> str:
        return str(getattr(self, "at", ""))

    def kind_of_state(self) -> str:
        return str(getattr(self, "kind", ""))

    def put(self, script: Script, place: str, lines: Sequence[str]) -> None:
        script.put(place, lines, self.block, self.registered)

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        shown = {n: getattr(self, n) for n in names if n not in ("number", "block")}
        if not any(str(value).startswith("hook:") for value in shown.values()):
            del shown["registered"]
        texts = {n: "-".join(v) if isinstance(v, tuple) else v for n, v in shown.items()}
        return f"{type(self).__name__}({', '.join(f'{n}={v}' for n, v in texts.items() if v)})"


@dataclass(frozen=True, kw_only=True)
class State(Habit):
    """A state of some kind, written in some way at a place and read at another."""

    kind: str
    owner: str
    path: str
    way: str
    at: str
    read: str
    read_at: str
    value: str
    use: str

    @classmethod
    def by_chance(cls, random: Random, **common: Any) -> "State":
        kind = pick(random, _KINDS)
        is_there = kind in ("param", *OF_A_STEP)
        owners = ("sub", "block", "net") if is_there else ("sub", "block", "block", "net", "lit")
        owner = "lit" if kind == "lr" else random.choice(owners)
        inner = {"sub": FORWARD, "block": FORWARD[2:], "net": FORWARD[2:], "lit": ()}[owner]
        in_forward = () if kind in ("lr", *OF_A_STEP) else inner
        places = (*OUTER, *STEP, *in_forward * 5)
        found: dict[str, Any] = {"kind": kind, "owner": owner}
        found["path"] = random.choice(PARAMETERS[owner]) if is_there else ""
        found["way"], found["at"] = random.choice([*WAYS]), random.choice(places)
        found["read"], found["read_at"] = random.choice([*READS]), random.choice(places)
        if in_forward and not is_there and random.random() < 0.5:
            found["read_at"] = random.choice(in_forward)
        found["value"] = random.choice(("self", "input"))
        return cls(**common, **found, use=random.choice(("note", "affect")))

    def add_to(self, script: Script) -> None:
        name, path = f"s{self.number}", self.path
        if self.kind not in ("param", "lr", *OF_A_STEP):
            value = f"torch.linspace(-0.5, 0.5, {script.model.width})"
            path = script.declare(self.owner, self.kind, name, value)
        if self.kind in ("newparam", "frozen"):
            self._use(script, path)
        self.put(script, self.at, self._guarded(script, self.at, path, self._write(script, path)))
        self._add_read(script, path)
        if self.kind not in ("lr", *OF_A_STEP):
            end = f"self.note('end {name}', {self._target(script, 'lit', path)})"
            script.lines["finish"].append(end)

    def _use(self, script: Script, path: str) -> None:
        place = START_OF_FORWARD.get(self.owner, "step.after")
        if v := ACTIVATIONS.get(place):
            script.lines[place].append(f"{v} = {v} + self.{path}")
        else:
            script.lines[place].append(f"loss = loss + 0.1 * self.{path}.pow(2).mean()")

    def _target(self, script: Script, place: str, path: str) -> str:
        optimizer = f"{owned_by(place)}.trainer.optimizers[0]"
        if self.kind == "lr":
            return f"{optimizer}.param_groups[0]['lr']"
        own = f"{script.path_to(place, self.owner, self.block)}.{path}"
        if self.kind == "optstate":
            return f"{optimizer}.state[{own}][{self._entry(script)!r}]"
        return f"{own}.grad" if self.kind == "grad" else own

    def _entry(self, script: Script) -> str:
        return "momentum_buffer" if script.model.optimizer == "sgd" else "exp_avg"

    def _guarded(self, script: Script, place: str, path: str, lines: list[str]) -> list[str]:
        if self.kind not in OF_A_STEP:
            return lines
        test = f"{self._target(script, place, path)} is not None"
        if self.kind == "optstate":
            own = f"{script.path_to(place, self.owner, self.block)}.{path}"
            state = f"{owned_by(place)}.trainer.optimizers[0].state"
            test = f"{self._entry(script)!r} in {state}.get({own}, ())"
        return [f"if {test}:", *indented(lines)]

    def _write(self, script: Script, path: str) -> list[str]:
        t = self._target(script, self.at, path)
        if self.kind in ("number", "lr"):
            return [f"{t} = {t} * 0.9 + 0.01"]
        v = f"({t}.detach() * 0.9 + 0.05)"
        can_read_input = self.at in FORWARD and self.kind not in ("param", *OF_A_STEP)
        if self.value == "input" and can_read_input:
            v = f"{ACTIVATIONS[self.at]}.detach().mean(0)"
        is_parameter = self.kind in TRAINED_OR_FROZEN
        if self.way == "load_state_dict" and (is_parameter or self.kind == "buffer"):
            base, _, leaf = t.rpartition(".")
            return [f"{base}.load_state_dict({{**{base}.state_dict(), {leaf!r}: {v}}})"]
        if self.way.startswith("kept") and self.at not in FORWARD and self.kind not in OF_A_STEP:
            return self._write_kept(script, path)
        new = f"{v}.clone()"
        if is_parameter:
            new = f"nn.Parameter({new}{', requires_grad=False' * (self.kind == 'frozen')})"
        return [line.format(t=t, v=v, new=new) for line in WAYS[self.way]]

    def _write_kept(self, script: Script, path: str) -> list[str]:
        kept = f"kept{self.number}"
        view = f"{self._target(script, 'lit', path)}.detach(){'.numpy()' * ('numpy' in self.way)}"
        script.lines["lit:on_train_start"].append(f"self.{kept} = [{view}]")
        test = f"if hasattr({owned_by(self.at)}, {kept!r}):"
        return [test, f"    L.{kept}[0][...] *= 0.9"]

    def _add_read(self, script: Script, path: str) -> None:
        place = self.read_at
        value = self._value(self._target(script, place, path))
        if place in FORWARD:
            v = ACTIVATIONS[place]
            script.lines[place].append(f"{v} = {v} * (1 + 0.3 * {value})")
        elif place == "step.after" and self.use == "affect" and self.kind not in OF_A_STEP:
            script.lines[place].append(f"loss = loss + 0.1 * {value}")
        else:
            note = f"L.note('{place} s{self.number}', {value})"
            self.put(script, place, self._guarded(script, place, path, [note]))

    def _value(self, t: str) -> str:
        form = self.read
        if self.kind in ("number", "lr"):
            return t
        if form == "state_dict" and self.kind not in ("buffer", *TRAINED_OR_FROZEN):
            form = "plain"
        if form == "deepcopy" and (self.kind in OF_A_STEP or self.read_at in FORWARD):
            form = "clone"
        base, _, leaf = t.rpartition(".")
        return READS[form].format(t=t, base=base, leaf=leaf)
