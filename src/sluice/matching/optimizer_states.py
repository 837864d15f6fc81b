"""Find the state of an optimizer in a checkpoint and match it to the parameters. Pure; no torch.

Numbered state (see ``optimizer_forms``) is matched by position, as torch does: the groups and their sizes must agree.
If the checkpoint names the parameters of a group (``param_names``) and the optimizer has the same names in a different
order, the names decide. Named state is matched by name, and each group of the optimizer must be one group of the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from msgspec import Struct, field
from msgspec.structs import replace

from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import SHOWN, section
from sluice.entries.lookup import subtree
from sluice.entries.tree import walk
from sluice.formats.divided import divided_state
from sluice.matching.name_fit import unwrap
from sluice.matching.optimizer_forms import ParameterNames, SavedState, as_list, saved_state, saved_states
from sluice.matching.renaming import Rename, Renaming
from sluice.records import Entry

__all__ = ["MatchedState", "OptimizerOutline", "ParameterOutline", "find_state"]

#: State of torch's own optimizers that has the shape of its parameter.
_PARAMETER_SHAPED = frozenset({
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "square_avg",
    "sum",
})  # fmt: skip

#: State that a parameter has after the first step, by class of ``torch.optim``: without one of these the next step, or
#: ``load_state_dict`` itself, raises KeyError. The other classes need none.
_NEEDED = {
    "ASGD": {"step", "eta", "mu", "ax"},
    "Adadelta": {"step", "square_avg", "acc_delta"},
    "Adafactor": {"step"},
    "Adagrad": {"step", "sum"},
    **{key: {"step", "exp_avg", "exp_avg_sq"} for key in ("Adam", "AdamW", "RAdam", "SparseAdam")},
    "Adamax": {"step", "exp_avg", "exp_inf"},
    "LBFGS": {"func_evals", "n_iter"},
    "NAdam": {"step", "exp_avg", "exp_avg_sq", "mu_product"},
    "RMSprop": {"step", "square_avg"},
    "Rprop": {"step", "prev", "step_size"},
}

#: Most parameters that a message names.
_NAMES_SHOWN = 3


class ParameterOutline(Struct, frozen=True, kw_only=True):
    """One parameter of the optimizer."""

    #: Its names in the model: several if it is tied, none if they are unknown.
    names: tuple[str, ...]
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]


class OptimizerOutline(Struct, frozen=True, kw_only=True):
    """The parameters of an optimizer."""

    #: Parameters of each group, in order.
    groups: tuple[tuple[ParameterOutline, ...], ...]
    #: Name of its class if it is one of torch's own, whose state is known.
    kind: str | None = None
    #: Options without which a group of it cannot be used.
    needed_options: frozenset[str] = frozenset()
    #: Whether a hook or an override may change the state before torch checks it: mismatches are then not refused here.
    adapts: bool = False

    @property
    def parameters(self) -> Iterator[ParameterOutline]:
        """The parameters of all groups, in order."""
        return chain.from_iterable(self.groups)


class MatchedState(Struct, frozen=True, kw_only=True):
    """The state of an optimizer in a checkpoint, in the form that torch loads."""

    #: Its dotted path in the checkpoint; None for the whole checkpoint.
    key: str | None
    #: State of each parameter, with ``Entry`` leaves, by the number or name of the parameter in the checkpoint.
    state: Mapping[object, object]
    #: Number or name in the checkpoint of each parameter, in the order of the optimizer's groups.
    ids: tuple[tuple[object, ...], ...]
    #: Options of each group, without its parameters; None if the checkpoint has none.
    options: tuple[Mapping[str, object] | None, ...]
    #: Number of tensors of the state in the checkpoint.
    saved: int = 0
    #: Number of these that belong to a parameter of the optimizer, or to none in particular.
    used: int = 0
    #: Values next to state and groups.
    rest: Mapping[object, object] = field(default_factory=dict)
    #: ParameterNames of the checkpoint that the optimizer does not have.
    unexpected: tuple[str, ...] = ()
    #: Notes for the report, one sentence each.
    notes: tuple[str, ...] = ()


class _ProblemsError(Exception):
    """A state does not fit the optimizer."""

    def __init__(self, *problems: str, missing: Sequence[str] = ()) -> None:
        super().__init__(*problems)
        self.problems = problems
        self.missing = tuple(missing)


def find_state(
    tree: object, outline: OptimizerOutline, *, key: str | None, file: str, rename: Rename | None = None
) -> MatchedState:
    """Find the state of an optimizer in a checkpoint and match it to the parameters.

    Args:
        tree: ``Index.tree``.
        outline: The optimizer.
        key: Path into the tree or prefix of flat names; None searches.
        file: The checkpoint, for messages.
        rename: New names for the parameters of the checkpoint.

    Raises:
        MismatchError: There is no state, none fits, or more than one fits.
        UnsupportedError: The state was divided over ranks, not over tensors.
    """
    known = frozenset(unwrap(name) for parameter in outline.parameters for name in parameter.names)
    names = ParameterNames(known=known, renaming=None if rename is None else Renaming(rename))
    divided = divided_state(tree if key is None else subtree(tree, key))
    if divided is not None:
        problem = f"the checkpoint holds {divided.what}"
        raise UnsupportedError(problem, file=file, tensor=key, advice=divided.advice)
    fitting: list[tuple[SavedState, MatchedState]] = []
    refused: list[tuple[SavedState, _ProblemsError]] = []
    for saved in _candidates(tree, key, names, file):
        try:
            fitting.append((saved, _matched(saved, outline, names)))
        except _ProblemsError as error:
            refused.append((saved, error))
    if len(fitting) == 1:
        [(saved, matched)] = fitting
        if names.renaming is not None:
            names.renaming.check(map(str, chain(saved.state, *saved.ids)))
        return matched
    if fitting:
        lines = [saved.describe() for saved, _ in fitting[:SHOWN]]
        text = f"more than one state of the checkpoint fits the optimizer\n{section('choose one', lines, fitting)}"
        raise MismatchError(f"{text}\nNothing was read", file=file)
    raise _misfit(refused, file)


def _candidates(tree: object, key: str | None, names: ParameterNames, file: str) -> list[SavedState]:
    """Return the state at ``key``, or every state of the checkpoint.

    Raises:
        MismatchError: There is none.
    """
    if key is None:
        states = list(saved_states(tree, names))
        if not states:
            raise MismatchError("the checkpoint holds no optimizer state", file=file)
        return states
    part = subtree(tree, key)
    saved = saved_state(part, key, names)
    if saved is None:
        problem = "this part of the checkpoint is not an optimizer state"
        raise MismatchError(problem, file=file, tensor=key, found=type(part).__name__)
    return [saved]


def _misfit(refused: Sequence[tuple[SavedState, _ProblemsError]], file: str) -> MismatchError:
    if len(refused) == 1:
        saved, error = refused[0]
        text = section("reasons", error.problems[:SHOWN], error.problems)
        problem = f"the state in the checkpoint does not fit the optimizer\n{text}\nNothing was read"
        return MismatchError(problem, file=file, tensor=saved.key or None, missing=error.missing)
    lines = [f"{saved.describe()}; {error.problems[0]}" for saved, error in refused[:SHOWN]]
    text = section("none of these", lines, refused)
    return MismatchError(f"no state in the checkpoint fits the optimizer\n{text}\nNothing was read", file=file)


def _matched(saved: SavedState, outline: OptimizerOutline, names: ParameterNames) -> MatchedState:
    """Match a state to the parameters.

    Raises:
        _ProblemsError: It does not fit.
    """
    matched = _counted((_by_name if saved.named else _by_number)(saved, outline, names), saved)
    if matched.saved and not matched.used and not outline.adapts:
        parameters = ", ".join(repr(owner) for owner in islice(saved.state, _NAMES_SHOWN))
        problem = f"none of its {matched.saved} tensors belongs to a parameter: it has state for {parameters}"
        raise _ProblemsError(problem)
    if outline.kind is not None and not outline.adapts:
        _check_kind(matched, outline)
    return matched


def _counted(matched: MatchedState, saved: SavedState) -> MatchedState:
    """Return a match with the numbers of tensors of its state; torch keeps state of unknown numbers, but unused."""
    known = set(chain.from_iterable(matched.ids))
    used = (value for owner, value in matched.state.items() if owner in known or not str(owner).isdecimal())
    return replace(matched, saved=_tensors(saved.state.values()), used=_tensors(used))


def _tensors(values: Iterable[object]) -> int:
    return sum(1 for value in values for _ in walk(value))


def _by_number(saved: SavedState, outline: OptimizerOutline, names: ParameterNames) -> MatchedState:
    if names.renaming is not None and not any(group.get("param_names") for group in saved.groups):
        raise _ProblemsError("its parameters are numbered, so rename= does not apply")
    ids = saved.ids
    if not outline.adapts:
        _check_groups(ids, outline)
    options, notes = [], []
    for number, group in enumerate(saved.groups):
        own = outline.groups[number] if number < len(outline.groups) else ()
        saved_names = as_list(group.get("param_names"))
        order = _order_by_names(own, saved_names, names)
        if order is not None and len(saved_names) == len(own) == len(ids[number]):
            ids[number] = [ids[number][position] for position in order]
            group = {**group, "param_names": [saved_names[position] for position in order]}  # noqa: PLW2901
            notes.append(f"group {number} was matched by param_names: their order differs from the optimizer's")
        options.append(_options(group))
    return MatchedState(
        key=saved.key or None,
        state=saved.state,
        ids=tuple(map(tuple, ids)),
        options=tuple(options),
        rest=saved.rest,
        notes=tuple(notes),
    )


def _check_groups(ids: Sequence[Sequence[object]], outline: OptimizerOutline) -> None:
    if len(ids) != len(outline.groups):
        raise _ProblemsError(
            "it has a different number of parameter groups: "
            f"{len(ids)} in the checkpoint, {len(outline.groups)} in the optimizer"
        )
    problems = [
        f"parameter group {number} has a different size: {len(group)} in the checkpoint, {len(own)} in the optimizer"
        for number, (group, own) in enumerate(zip(ids, outline.groups, strict=True))
        if len(group) != len(own)
    ]
    if problems:
        raise _ProblemsError(*problems)


def _order_by_names(
    own: Sequence[ParameterOutline], saved_names: Sequence[object], names: ParameterNames
) -> list[int] | None:
    """Return the position in the checkpoint of each parameter of a group; None unless names reorder the group."""
    position = {names.own(name): i for i, name in enumerate(saved_names) if isinstance(name, str)}
    order = [position[name] for name in (_first(parameter, position) for parameter in own) if name is not None]
    if len(set(order)) != len(own) or len(position) != len(own) or order == sorted(order):
        return None
    return order


def _by_name(saved: SavedState, outline: OptimizerOutline, names: ParameterNames) -> MatchedState:
    if not any(parameter.names for parameter in outline.parameters):
        raise _ProblemsError("its parameters are named and those of the optimizer are not: pass model=")
    id_of = _ids_by_name(chain(saved.state, *saved.ids), names)
    ids = [[id_of.get(_first(parameter, id_of)) for parameter in group] for group in outline.groups]
    covered = set(chain.from_iterable(ids))
    absent = [
        " = ".join(map(repr, parameter.names)) or f"a parameter {list(parameter.shape)} without a name"
        for parameter, saved_id in zip(outline.parameters, chain.from_iterable(ids), strict=True)
        if saved_id is None
    ]
    if absent:
        raise _ProblemsError(*(f"it has no state for {name}" for name in absent), missing=absent)
    options = [_merged_options(saved, number, group) for number, group in enumerate(ids)]
    if not saved.ungrouped:
        _check_partition(saved, ids)
    return MatchedState(
        key=saved.key or None,
        state={saved_id: value for saved_id, value in saved.state.items() if saved_id in covered},
        ids=tuple(map(tuple, ids)),
        options=tuple(options),
        unexpected=tuple(str(saved_id) for saved_id in id_of.values() if saved_id not in covered),
    )


def _ids_by_name(ids: Iterable[object], names: ParameterNames) -> dict[str | None, object]:
    """Return the id of each parameter in the checkpoint by its name in the model.

    Raises:
        _ProblemsError: The caller's renaming gives two parameters one name.
    """
    id_of: dict[str | None, object] = {}
    for saved_id in ids:
        name = names.own(str(saved_id))
        if name is None:
            continue
        if names.renaming is not None and id_of.get(name, saved_id) != saved_id:
            raise _ProblemsError(f"rename gives {id_of[name]!r} and {saved_id!r} the same name, {name!r}")
        id_of[name] = saved_id
    return id_of


def _first(parameter: ParameterOutline, known: Container[str | None]) -> str | None:
    """Return the first unwrapped name of a parameter that is known, or None."""
    return next((name for name in map(unwrap, parameter.names) if name in known), None)


def _check_partition(saved: SavedState, ids: Sequence[Sequence[object]]) -> None:
    """Refuse groups that are not the same sets as in the checkpoint: options would apply to the wrong parameters."""
    group_of = {saved_id: number for number, group in enumerate(saved.ids) for saved_id in group}
    holder: dict[int, int] = {}
    problems = []
    for number, group in enumerate(ids):
        origins = sorted({group_of[saved_id] for saved_id in group if saved_id in group_of})
        if len(origins) > 1:
            problems.append(f"the parameters of group {number} are in groups {origins} of the checkpoint")
        elif origins and holder.setdefault(origins[0], number) != number:
            pair = f"{holder[origins[0]]} and {number}"
            problems.append(f"the parameters of groups {pair} are one group, {origins[0]}, of the checkpoint")
    if problems:
        raise _ProblemsError(*problems)


def _merged_options(saved: SavedState, number: int, ids: Sequence[object]) -> Mapping[str, object] | None:
    """Return the options of the parameters of a group in the checkpoint; None if it has none."""
    merged: dict[str, object] = {}
    parameters = set(ids)
    for group, own in zip(saved.groups, saved.ids, strict=True):
        for name, value in _options(group).items() if parameters.intersection(own) else ():
            if name != "param_names" and not _agree(merged.setdefault(name, value), value):
                raise _ProblemsError(f"the parameters of group {number} differ in {name!r} in the checkpoint")
    return merged or None


def _agree(first: object, second: object) -> bool:
    if isinstance(first, Entry) and isinstance(second, Entry):  # saved once for each parameter of a group
        return (first.dtype, first.shape) == (second.dtype, second.shape)
    return type(first) is type(second) and first == second


def _check_kind(matched: MatchedState, outline: OptimizerOutline) -> None:
    """Refuse state of a different kind of optimizer, or of parameters of other shapes.

    Raises:
        _ProblemsError: It is one.
    """
    problems = [
        f"group {number} has no {', '.join(map(repr, absent))}, which {outline.kind} needs"
        for number, options in enumerate(matched.options)
        if options is not None and (absent := sorted(outline.needed_options - options.keys()))
    ]
    needed = _NEEDED.get(outline.kind or "", set())
    for parameter, saved_id in zip(outline.parameters, chain.from_iterable(matched.ids), strict=True):
        values = matched.state.get(saved_id)
        if not isinstance(values, dict) or not values:
            continue
        shown = repr(parameter.names[0] if parameter.names else saved_id)
        if absent := sorted(needed - values.keys()):
            problems.append(f"parameter {shown} has no {', '.join(map(repr, absent))}, which {outline.kind} needs")
        problems += [
            f"{name!r} of parameter {shown} is {list(value.shape)} in the checkpoint, the parameter is "
            f"{list(parameter.shape)}"
            for name, value in values.items()
            if name in _PARAMETER_SHAPED and isinstance(value, Entry) and value.shape != parameter.shape
        ]
    if problems:
        raise _ProblemsError(*problems)


def _options(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}
