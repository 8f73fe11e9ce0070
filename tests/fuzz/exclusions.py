"""Programs that are not compared, and why: the documentation says so, or an issue is open."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.fuzz.grammar import Program
from tests.fuzz.habit import OF_A_STEP, WAYS, Habit, State
from tests.fuzz.habits import Average, Extra, Gradients
from tests.fuzz.places import FORWARD, MODULE_HOOKS, STEP
from tests.fuzz.settings import (
    offloads_weights,
    recomputes,
    splits_batches,
    updates_in_backward,
)

MOST = 15
"""How many classes of programs may be excluded by the documentation."""


@dataclass(frozen=True)
class Exclusion:
    """A class of programs that can neither be right nor be found; the documentation says so."""

    name: str
    page: str
    sentence: str
    applies: Callable[[Program, str], bool]


@dataclass(frozen=True)
class ExpectedFailure:
    """A class of programs that disagree until an issue is closed, and one that does now."""

    name: str
    issue: int
    applies: Callable[[Habit, str], bool]
    example: Habit
    setting: str
    is_race: bool = False
    """Whether a thread of ours may have finished in time, so that the example passes at times."""


def _any(test: Callable[[Habit], bool], program: Program) -> bool:
    return any(test(habit) for habit in program.habits)


_DURING_BACKWARD = tuple(
    f"hook:{name}"
    for name in ("block_bwd", "block_bwd_pre", "head_bwd", "param", "post_acc", "act")
)
_OF_BLOCK = ("param", "newparam", "frozen", "buffer", "hidden_buffer")
_BEFORE_FORWARD = (
    *(*STEP, "lit:on_train_batch_start", "cb:on_train_batch_start", "loader"),
    "lit:on_after_batch_transfer",
)


def _uses_gradients_of_the_step_before(program: Program, setting: str) -> bool:
    def is_early(place: str) -> bool:
        return place in _BEFORE_FORWARD or place.endswith(("block_pre", "_fwd"))

    return _any(lambda h: h.kind_of_state() == "grad" and any(map(is_early, h.places())), program)


def _sets_rates_during_backward(program: Program, setting: str) -> bool:
    def is_one(h: Habit) -> bool:
        is_rate = h.kind_of_state() == "lr" or getattr(h, "what", "") == "group_lr"
        return is_rate and h.written_at() in _DURING_BACKWARD

    return updates_in_backward(setting) and _any(is_one, program)


def _uses_updated_parameters(program: Program, setting: str) -> bool:
    def is_one(h: Habit) -> bool:
        is_own = isinstance(h, Gradients) and h.at == "hook:param"
        kinds = ("param", "newparam", *OF_A_STEP)
        is_of_a_parameter = isinstance(h, Average) or h.kind_of_state() in kinds
        in_backward = not set(_DURING_BACKWARD).isdisjoint(h.places())
        return is_of_a_parameter and in_backward and not is_own

    return updates_in_backward(setting) and _any(is_one, program)


def _uses_hooks_in_blocks(program: Program, setting: str) -> bool:
    def is_one(h: Habit) -> bool:
        reads = h.places()[1:] == ("hook:sub_fwd",)
        is_of_block = getattr(h, "owner", "") in ("sub", "block") and h.kind_of_state() in _OF_BLOCK
        return reads or ("hook:sub_fwd" in h.places() and not is_of_block)

    return recomputes(setting) and _any(is_one, program)


def _draws_per_micro_batch(program: Program, setting: str) -> bool:
    source = program.source()
    draws = program.model.dropout or "randn_like" in source or "drop.p" in source
    return splits_batches(setting) and draws


def _has_batch_statistics(program: Program, setting: str) -> bool:
    has_them = "BatchNorm1d(" in program.source()
    return splits_batches(setting) and has_them


_CHECKPOINTING = "checkpointing_and_micro_batches.md"
EXCLUSIONS = (
    Exclusion(
        "gradients of the step before",
        "techniques.md",
        "A `training_step` that reads `param.grad` of the previous step finds `None`",
        _uses_gradients_of_the_step_before,
    ),
    Exclusion(
        "learning rates set while backward updates",
        "optimizer_and_precision.md",
        "Set learning rates, or skip a step, before backward.",
        _sets_rates_during_backward,
    ),
    Exclusion(
        "parameters in hooks that run while backward updates them",
        "optimizer_and_precision.md",
        "Backward, such hooks included, must not read or change other weights or their gradients:",
        _uses_updated_parameters,
    ),
    Exclusion(
        "hooks inside of recomputed blocks",
        _CHECKPOINTING,
        "Hooks inside a block run again in backward.",
        _uses_hooks_in_blocks,
    ),
    Exclusion(
        "random numbers of micro-batches",
        _CHECKPOINTING,
        "Dropout masks are those of a loop over the micro-batches, not those of the batch.",
        _draws_per_micro_batch,
    ),
    Exclusion(
        "statistics of micro-batches",
        _CHECKPOINTING,
        "BatchNorm computes statistics per micro-batch: *approximate*, with a warning;",
        _has_batch_statistics,
    ),
)


@dataclass(frozen=True)
class AllowedRefusal:
    """A refusal that ends a fit also where a preset chose the technique."""

    name: str
    page: str
    sentence: str
    words: str


ALLOWED_REFUSALS = (
    AllowedRefusal(
        "state of a block that changes between forward and recomputation",
        _CHECKPOINTING,
        "Weights, and tensors over 16 KiB, only if forward changes them: if others do before "
        "backward, the first step refuses them by name.",
        "changed between the forward pass of the block and its backward pass",
    ),
)


def excluded(program: Program, setting: str) -> str:
    """Return the name of the class that excludes a program beside a setting, or nothing."""
    return next((e.name for e in EXCLUSIONS if e.applies(program, setting)), "")


# ------------------------------------------------- weights on the host, until the block is the unit
_REPLACES = ("data=", "set_", "vector")
_THROUGH_DATA = ("data.copy_", "data.mul_", "data[]", "numpy", "kept_numpy", "storage")
_TRAINED = ("param", "newparam")
_BETWEEN = tuple(
    f"{owner}:{hook}"
    for owner in ("lit", "cb")
    for hook in ("on_after_backward", "on_before_optimizer_step")
)
_AFTER_THE_MODEL = (
    *("step.after", "net.after", "lit:on_before_backward", "cb:on_before_backward"),
    *("lit:backward", *(f"hook:{name}" for name in MODULE_HOOKS)),
)
_PARTS = ("", "epoch_", "batch_")
_ZERO_GRAD = (
    *("lit:on_before_zero_grad", "cb:on_before_zero_grad", "lit:optimizer_zero_grad"),
    "lit:optimizer_zero_grad.after",
)
_END_OF_VALIDATION = (
    *("lit:on_validation_model_train", "lit:on_validation_model_train.after"),
    *(f"{owner}:on_validation_{part}end" for owner in ("lit", "cb") for part in _PARTS),
)


def _way(habit: Habit) -> str:
    return str(getattr(habit, "way", ""))


def _is_written_at(habit: Habit, places: Collection[str], ways: Collection[str]) -> bool:
    is_offloaded = habit.kind_of_state() in _TRAINED or (
        habit.kind_of_state() == "frozen" and getattr(habit, "owner", "") in ("sub", "block")
    )
    return is_offloaded and habit.written_at() in places and _way(habit) in ways


def _replaced_before_the_step(habit: Habit, setting: str) -> bool:
    return _is_written_at(habit, _BETWEEN, _REPLACES)


def _in_the_loader(habit: Habit, setting: str) -> bool:
    if habit.kind_of_state() == "optstate":
        return "loader" in habit.places()
    return _is_written_at(habit, ("loader",), set(WAYS) - {"load_state_dict", "assign"})


def _in_a_wrapper(habit: Habit, setting: str) -> bool:
    if not any(place.startswith("wrap") for place in habit.places()):
        return False
    is_of_a_weight = habit.kind_of_state() in (*_TRAINED, *OF_A_STEP)
    return isinstance(habit, Average) or is_of_a_weight


def _after_the_model(habit: Habit, setting: str) -> bool:
    has_streams = setting.rpartition("+")[2] != "offload_optimizer"
    is_of_a_block = getattr(habit, "owner", "") in ("sub", "block")
    is_written = _is_written_at(habit, _AFTER_THE_MODEL, (*_THROUGH_DATA, "data=", "vector"))
    is_written = is_written or _is_written_at(habit, _ZERO_GRAD, ("data=", "vector"))
    return has_streams and is_of_a_block and is_written


def _before_recomputation(habit: Habit, setting: str) -> bool:
    places = (*FORWARD[:4], *_AFTER_THE_MODEL, *_ZERO_GRAD)
    return recomputes(setting) and _is_written_at(habit, places, set(WAYS) - {"assign"})


def _at_the_end_of_validation(habit: Habit, setting: str) -> bool:
    if isinstance(habit, Average):
        return bool(habit.swapped[0]) and habit.swap in ("data.copy_", "numpy")
    if isinstance(habit, Extra):
        return habit.what == "loop_in_validation"
    return _is_written_at(habit, _END_OF_VALIDATION, _THROUGH_DATA)


def _exchanges_data(habit: Habit, setting: str) -> bool:
    return isinstance(habit, Average) and habit.swap == "exchange"


def _during_backward(habit: Habit, setting: str) -> bool:
    is_there = not set(_DURING_BACKWARD).isdisjoint(habit.places())
    return is_there and habit.kind_of_state() in OF_A_STEP


def _through_kept_views(habit: Habit, setting: str) -> bool:
    places = (*_AFTER_THE_MODEL, *_DURING_BACKWARD)
    is_of_numpy = _is_written_at(habit, habit.places(), ("kept_numpy",))
    return is_of_numpy or _is_written_at(habit, places, ("kept_alias",))


_COMMON: dict[str, Any] = {"number": 0, "block": 1, "registered": "__init__"}
_STATE: dict[str, Any] = {
    "read": "plain",
    "read_at": "lit:on_train_end",
    "value": "self",
    "use": "note",
}


def _weight(at: str, way: str) -> Habit:
    return State(**_COMMON, **_STATE, kind="param", owner="sub", path="up.weight", way=way, at=at)


def _average(at: str, swapped: tuple[str, str], swap: str) -> Habit:
    return Average(**_COMMON, at=at, swapped=swapped, update="lerp_", keep="list", swap=swap)


_VALIDATION = ("lit:on_validation_start", "lit:on_validation_end")
EXPECTED_FAILURES = (
    ExpectedFailure(
        "weights replaced between backward and step",
        55,
        _replaced_before_the_step,
        _weight("lit:on_after_backward", "set_"),
        "offload_optimizer",
    ),
    ExpectedFailure(
        "weights, gradients or state used in the iterator of a loader",
        55,
        _in_the_loader,
        _weight("loader", "copy_"),
        "offload_optimizer",
        is_race=True,
    ),
    ExpectedFailure(
        "an optimizer that a callback wraps in on_fit_start",
        55,
        _in_a_wrapper,
        _weight("wrap:before", "copy_"),
        "offload_optimizer",
        is_race=True,
    ),
    ExpectedFailure(
        "weights of a block changed through data in hooks, or after the model has run",
        55,
        _after_the_model,
        _weight("step.after", "data.copy_"),
        "offload_parameters",
    ),
    ExpectedFailure(
        "weights that change between forward and recomputation",
        55,
        _before_recomputation,
        _weight("sub.before", "copy_"),
        "all+offload_parameters",
    ),
    ExpectedFailure(
        "weights changed through data at the end of validation",
        55,
        _at_the_end_of_validation,
        _average("lit:on_train_batch_end", _VALIDATION, "data.copy_"),
        "offload_optimizer",
    ),
    ExpectedFailure(
        "data of weights and averages exchanged",
        55,
        _exchanges_data,
        _average("lit:on_train_batch_end", _VALIDATION, "exchange"),
        "offload_optimizer",
    ),
    ExpectedFailure(
        "gradients or state used during backward",
        55,
        _during_backward,
        State(
            **_COMMON,
            **_STATE | {"read_at": "hook:head_bwd"},
            kind="grad",
            owner="net",
            path="head.weight",
            way="copy_",
            at="lit:on_validation_model_train",
        ),
        "offload_optimizer",
    ),
    ExpectedFailure(
        "weights written through views that were kept from before",
        55,
        _through_kept_views,
        _weight("lit:optimizer_zero_grad", "kept_numpy"),
        "offload_optimizer",
    ),
)


def expected_to_fail(program: Program, setting: str) -> str:
    """Return the name of the class of known failures that a program is in, or nothing."""
    for each in EXPECTED_FAILURES if offloads_weights(setting) else ():
        if any(each.applies(habit, setting) for habit in program.habits):
            return each.name
    return ""
