"""Write a training program as a script: a skeleton, and lines of habits at places of it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.places import (
    FORWARD,
    HOOKS,
    MODULE_HOOKS,
    OPTIMIZER_HOOKS,
    OVERRIDES,
    owned_by,
)

SKELETON = Path(__file__).with_name("program.txt")

_NORMS = {"layer": "LayerNorm(", "batch": "BatchNorm1d(", "group": "GroupNorm(2, "}
_OPTIMIZERS = {
    "adamw": "AdamW(self.parameters(), lr=0.01, eps=1e-3)",
    "adam": "Adam(self.parameters(), lr=0.01, eps=1e-3)",
    "sgd": "SGD(self.parameters(), lr=0.05, momentum=0.9)",
}
_DECLARATIONS = {
    "newparam": "self.{name} = nn.Parameter({value})",
    "frozen": "self.{name} = nn.Parameter({value}, requires_grad=False)",
    "buffer": "self.register_buffer('{name}', {value})",
    "hidden_buffer": "self.register_buffer('{name}', {value}, persistent=False)",
    "attr": "self.{name} = {value}",
    "list": "self.{name} = [{value}]",
    "dict": "self.{name} = {{'v': {value}}}",
    "data": "self.{name} = Box({value})",
    "number": "self.{name} = 0.5",
}
_PATHS = {"list": "[0]", "dict": "['v']", "data": ".value"}


@dataclass(frozen=True)
class Model:
    """The model, optimizer and Trainer of a program; the defaults are the simplest ones."""

    blocks: int = 3
    width: int = 8
    dropout: bool = False
    tied: bool = False
    twice: bool = False
    clip: bool = False
    scheduler: bool = False
    manual: bool = False
    halfway: bool = False
    norm: str = "layer"
    accumulate: int = 1
    optimizer: str = "sgd"

    def __str__(self) -> str:
        names = ("dropout", "tied", "twice", "clip", "scheduler", "manual")
        found = [self.norm, self.optimizer, *(name for name in names if getattr(self, name))]
        return " ".join([*found, *["accumulate"] * (self.accumulate > 1)])


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


class Script:
    """Lines of code by place, and the script that holds them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.lines: dict[str, list[str]] = defaultdict(list)
        self._num_hooks = 0

    def put(self, place: str, lines: Iterable[str], block: int = 0, registered: str = "") -> None:
        """Add lines without gradients at a place; `L` in them is the LightningModule."""
        lit = owned_by(place)
        inner = indented(line.replace("L.", f"{lit}.") for line in lines)
        lines = ["with torch.no_grad():", *inner]
        kind, _, hook = place.partition(":")
        if kind in ("hook", "opt"):
            self._put_hook(hook, lines, block, registered if kind == "hook" else "")
        else:
            self.lines[place] += lines

    def _put_hook(self, hook: str, lines: list[str], block: int, registered: str) -> None:
        self._num_hooks += 1
        name = f"{hook}{self._num_hooks}"
        target, arguments = (MODULE_HOOKS | OPTIMIZER_HOOKS)[hook]
        where = f"lit:{registered or 'configure_optimizers'}"
        if hook == "act":
            where = "lit:__init__"
            self.lines["net:__init__"] += ["self.hooks = []"] * (not self.lines["act"])
            self.lines["act"] = [
                "for hook in self.hooks if h.requires_grad else ():",
                "    h.register_hook(hook)",
            ]
        register = f"{target.format(block=f'self.net.blocks[{block}]')}({name})"
        self.lines[where] += ["lit = self", f"def {name}({arguments}):", *indented(lines), register]

    def path_to(self, place: str, owner: str, block: int) -> str:
        """Return how a place reaches a module: the LightningModule, the network, a block."""
        inside = f".blocks[{block}]"
        outer = {"lit": "", "net": ".net", "block": f".net{inside}", "sub": f".net{inside}.sub"}
        if place not in FORWARD:
            return owned_by(place) + outer[owner]
        within = {
            "sub": {"sub": "self"},
            "block": {"block": "self", "sub": "self.sub", "net": "self.ref[0]"},
            "net": {"net": "self", "block": f"self{inside}", "sub": f"self{inside}.sub"},
        }
        return within[place.partition(".")[0]][owner]

    def declare(self, owner: str, kind: str, name: str, value: str) -> str:
        """Make a state in its owner; return the path to its tensor."""
        self.lines[f"{owner}:__init__"].append(_DECLARATIONS[kind].format(name=name, value=value))
        return name + _PATHS.get(kind, "")

    def text(self, title: str, seed: int, settings: str) -> str:
        self._add_methods()
        has, values = self._conditions(), self._values(title, seed) | {"SETTINGS": settings}
        found: list[str] = []
        for skeleton_line in SKELETON.read_text().splitlines():
            line, _, condition = skeleton_line.partition("  #?")
            if condition and not has[condition]:
                continue
            if line.lstrip().startswith("@@"):
                indent, place = line[: len(line) - len(line.lstrip())], line.strip()[2:]
                found += [indent + each if each else "" for each in self.lines[place]]
                continue
            for name, value in values.items():
                line = line.replace(f"<{name}>", value)
            found.append(line)
        return "\n".join(found) + "\n"

    def _add_methods(self) -> None:
        for hook, arguments in HOOKS.items():
            for kind, given in (("lit", "self"), ("cb", "self, trainer, pl_module")):
                if body := self.lines[f"{kind}:{hook}"]:
                    self.lines[f"{kind} methods"] += _method(hook, f"{given}, {arguments}", body)
        for name, (arguments, core) in OVERRIDES.items():
            if body := [*self._body_of_override(name, core)]:
                self.lines["lit methods"] += _method(name, f"self, {arguments}", body)

    def _body_of_override(self, name: str, core: str) -> Iterator[str]:
        before, after = self.lines[f"lit:{name}"], self.lines[f"lit:{name}.after"]
        inside = self.lines[f"lit:{name}.closure"]
        if not before and not after and not inside:
            return
        yield from before
        if inside:
            yield "def closure():"
            yield from indented(["loss = optimizer_closure()", *inside, "return loss"])
            core = "optimizer.step(closure=closure)"
        yield core
        yield from after

    def _conditions(self) -> dict[str, bool]:
        model, lines = self.model, self.lines
        has_own_schedule = lines["lit:lr_scheduler_step"] or lines["lit:lr_scheduler_step.after"]
        return {
            "tied": model.tied,
            "twice": model.twice,
            "manual": model.manual,
            "loader": bool(lines["loader"]),
            "own": bool(lines["cb methods"]),
            "wrapped": bool(lines["wrap:before"] or lines["wrap:after"]),
            "ref": "self.ref[0]" in str(lines.values()),
            "schedule": bool(model.scheduler or has_own_schedule),
        }

    def _values(self, title: str, seed: int) -> dict[str, str]:
        model, has = self.model, self._conditions()
        ends = ", val_check_interval=2" if model.halfway else ""
        if not model.manual:
            ends += ", gradient_clip_val=0.5" if model.clip else ""
            ends += f", accumulate_grad_batches={model.accumulate}"
        return {
            "TITLE": title,
            "SEED": str(seed % 1000),
            "NUMBER": str(model.blocks),
            "WIDTH": str(model.width),
            "WIDER": str(2 * model.width),
            "NORM": f"{_NORMS[model.norm]}{model.width})",
            "STEM": "Embedding(10" if model.tied else "Linear(6",
            "INPUTS": "randint(10, (16,))" if model.tied else "randn(16, 6)",
            "DROP": "0.2" if model.dropout else "0.0",
            "ENDS": ends,
            "OWN": "Own(), " * has["own"] + "Wrap(), " * has["wrapped"],
            "OPTIMIZER": _OPTIMIZERS[model.optimizer],
        }


def _method(name: str, arguments: str, body: Iterable[str]) -> list[str]:
    return [f"def {name}({arguments.removesuffix(', ')}):", *indented(body), ""]
