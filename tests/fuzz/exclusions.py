"""Programs that are not compared, and why: the documentation says so, or an issue is open."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.grammar import Program
from tests.fuzz.habit import OF_A_STEP, TRAINED_OR_FROZEN, Habit, State
from tests.fuzz.habits import Average, Extra, Gradients, Memory
from tests.fuzz.places import STEP
from tests.fuzz.settings import (
    offloads_weights,
    proves_the_loss,
    recomputes,
    splits_batches,
    updates_in_backward,
)

MOST = 15
"""How many classes of programs may be excluded by the documentation."""
IN_A_BLOCK = ("sub.", "block.")


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


def _any(test: Callable[[Habit], bool], program: Program) -> bool:
    return any(test(habit) for habit in program.habits)


def _counts_in_python(program: Program, setting: str) -> bool:
    def is_one(h: Habit) -> bool:
        return h.kind_of_state() == "number" and h.written_at().startswith(IN_A_BLOCK)

    return recomputes(setting) and _any(is_one, program)


def _has_hooks_in_a_block(program: Program, setting: str) -> bool:
    return recomputes(setting) and _any(lambda h: "hook:sub_fwd" in h.places(), program)


_BEFORE_FORWARD = (
    *(*STEP, "lit:on_train_batch_start", "cb:on_train_batch_start", "loader"),
    "lit:on_after_batch_transfer",
)


def _uses_gradients_of_the_step_before(program: Program, setting: str) -> bool:
    def is_early(place: str) -> bool:
        return place in _BEFORE_FORWARD or place.endswith(("block_pre", "_fwd"))

    return _any(lambda h: h.kind_of_state() == "grad" and any(map(is_early, h.places())), program)


def _has_pre_hook(program: Program, setting: str) -> bool:
    def is_one(h: Habit) -> bool:
        return h.kind_of_state() == "grad" and "opt:pre" in h.places()

    return updates_in_backward(setting) and _any(is_one, program)


def _writes_an_own_object(program: Program, setting: str) -> bool:
    def is_one(h: Habit) -> bool:
        in_step = isinstance(h, Memory) or h.written_at().startswith(("step", "net"))
        return h.kind_of_state() == "data" and in_step

    return proves_the_loss(setting) and _any(is_one, program)


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
        "a block that counts in Python",
        _CHECKPOINTING,
        "A block that depends on state outside torch (a Python counter,",
        _counts_in_python,
    ),
    Exclusion(
        "hooks inside of a recomputed block",
        _CHECKPOINTING,
        "Hooks inside a block run again in backward.",
        _has_hooks_in_a_block,
    ),
    Exclusion(
        "gradients of the step before",
        "techniques.md",
        "A `training_step` that reads `param.grad` of the previous step finds `None`",
        _uses_gradients_of_the_step_before,
    ),
    Exclusion(
        "gradients in a pre hook of an optimizer that steps in backward",
        "optimizer_and_precision.md",
        "The same holds for loggers of gradient norms and for `register_step_pre_hook`.",
        _has_pre_hook,
    ),
    Exclusion(
        "objects of the user that the proof of the loss changes",
        _CHECKPOINTING,
        "Changes that `training_step` makes to files or objects outside of modules are not undone.",
        _writes_an_own_object,
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


def excluded(program: Program, setting: str) -> str:
    """Return the name of the class that excludes a program beside a setting, or nothing."""
    return next((e.name for e in EXCLUSIONS if e.applies(program, setting)), "")


# ------------------------------------------------- weights on the host, until the block is the unit
_REPLACES = ("data=", "set_", "vector")
_IN_PLACE_UNSEEN = (
    *("data.copy_", "data.mul_", "data=", "numpy", "kept_numpy", "kept_alias", "storage"),
    *("data[]", "vector"),
)
_SEEN = ("copy_", "load_state_dict", "foreach_copy", "new_parameter")
_BETWEEN = tuple(
    f"{owner}:{hook}"
    for owner in ("lit", "cb")
    for hook in ("on_after_backward", "on_before_optimizer_step")
)
_AFTER_THE_MODEL = (
    *("step.after", "net.after", "lit:on_before_backward", "cb:on_before_backward"),
    *("lit:on_before_zero_grad", "cb:on_before_zero_grad", "lit:optimizer_zero_grad"),
    *("lit:optimizer_zero_grad.after", "lit:backward", "hook:net_fwd"),
)
_END_OF_VALIDATION = tuple(
    f"{owner}:{hook}"
    for owner in ("lit", "cb")
    for hook in ("on_validation_end", "on_validation_epoch_end", "on_validation_model_train")
)


def _is_weight(habit: Habit) -> bool:
    return habit.kind_of_state() in TRAINED_OR_FROZEN


def _is_written_at(habit: Habit, places: tuple[str, ...]) -> bool:
    return isinstance(habit, State) and _is_weight(habit) and habit.at in places


def _replaced_before_the_step(habit: Habit, setting: str) -> bool:
    return _is_written_at(habit, _BETWEEN) and getattr(habit, "way", "") in _REPLACES


def _in_the_loader(habit: Habit, setting: str) -> bool:
    is_of_the_step = habit.kind_of_state() in (*TRAINED_OR_FROZEN, *OF_A_STEP)
    return "loader" in habit.places() and is_of_the_step


def _in_a_wrapper(habit: Habit, setting: str) -> bool:
    return any(place.startswith("wrap") for place in habit.places())


def _after_the_model(habit: Habit, setting: str) -> bool:
    has_streams = setting != "offload_optimizer" and not setting.endswith("+offload_optimizer")
    way = getattr(habit, "way", "")
    return has_streams and _is_written_at(habit, _AFTER_THE_MODEL) and way in _IN_PLACE_UNSEEN


def _at_the_end_of_validation(habit: Habit, setting: str) -> bool:
    if isinstance(habit, Average):
        is_seen = habit.swap in (*_SEEN, "exchange")
        return bool(habit.swapped[0]) and not is_seen
    if isinstance(habit, Extra):
        return habit.what == "loop_in_validation"
    is_there = _is_written_at(habit, _END_OF_VALIDATION)
    return is_there and getattr(habit, "way", "") in _IN_PLACE_UNSEEN


def _exchanges_data(habit: Habit, setting: str) -> bool:
    return isinstance(habit, Average) and habit.swap == "exchange"


def _writes_kept_views(habit: Habit, setting: str) -> bool:
    is_kept = getattr(habit, "way", "").startswith("kept") and _is_weight(habit)
    in_hook = any(place in ("hook:post_acc", "hook:param") for place in habit.places())
    return (is_kept or isinstance(habit, Gradients)) and in_hook


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
    ),
    ExpectedFailure(
        "an optimizer that a callback wraps in on_fit_start",
        55,
        _in_a_wrapper,
        _weight("wrap:before", "copy_"),
        "offload_optimizer",
    ),
    ExpectedFailure(
        "weights of a block changed through data after the model has run",
        55,
        _after_the_model,
        _weight("step.after", "data.copy_"),
        "offload_parameters",
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
        "hooks of one parameter that write through kept views or others' gradients",
        55,
        _writes_kept_views,
        _weight("hook:post_acc", "kept_alias"),
        "offload_optimizer",
    ),
)


def expected_to_fail(program: Program, setting: str) -> str:
    """Return the name of the class of known failures that a program is in, or nothing."""
    if not offloads_weights(setting):
        return ""
    for known in EXPECTED_FAILURES:
        if any(known.applies(habit, setting) for habit in program.habits):
            return known.name
    return ""
