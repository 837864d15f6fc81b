"""Which state of a checkpoint belongs to an optimizer, and what of it to which parameter. Pure; no torch.

Numbers (``_optimizer_forms``) are matched by position, as torch does: groups and their sizes have to agree. Where the
checkpoint names the parameters of a group (``param_names``), and the optimizer's have the same names in another order,
the names decide. Named state is matched by name, and each group of the optimizer has to be one group of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import SHOWN, section
from sluice.entries.lookup import subtree
from sluice.formats.divided import divided_state
from sluice.matching.name_fit import unwrap
from sluice.matching.optimizer_forms import Names, SavedState, as_list, saved_state, saved_states
from sluice.matching.renaming import Rename
from sluice.records import Entry

__all__ = ["MatchedState", "OptimizerOutline", "ParameterOutline", "find_state"]

#: What torch's own optimizers keep in the shape of the parameter.
_PARAMETER_SHAPED = frozenset(
    {
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "sum",
    }
)

_NO_GROUPS = "the checkpoint has no parameter groups: the optimizer's options stay as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterOutline:
    """One parameter of the optimizer."""

    #: Names that it has in the model; a tied one has several, and none are known without a model.
    names: tuple[str, ...]
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOutline:
    """The parameters of an optimizer."""

    #: Those of each group, in order.
    groups: tuple[tuple[ParameterOutline, ...], ...]
    #: Whether it is one of torch's own, whose state has the shapes that torch gives it.
    known_shapes: bool = False
    #: Whether code of its owner may change the state before torch looks at it: then that is no reason to refuse it.
    adapts: bool = False

    @property
    def parameters(self) -> Iterator[ParameterOutline]:
        """The parameters of all groups, in order."""
        return chain.from_iterable(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedState:
    """The state that was found for an optimizer, in the form that torch loads."""

    #: Where it lies in the checkpoint, as a dotted path; None is the whole.
    key: str | None
    #: What it has for each parameter, by what the checkpoint calls that; ``Entry`` leaves.
    state: Mapping[object, object]
    #: What the checkpoint calls the parameters, in the order of the groups of the optimizer.
    ids: tuple[tuple[object, ...], ...]
    #: Options of each group, without its parameters; None where the checkpoint has none for it.
    options: tuple[Mapping[str, object] | None, ...]
    #: What else stands beside state and groups.
    rest: Mapping[object, object] = field(default_factory=dict)
    #: Parameters that the checkpoint says nothing of, where that is no reason to refuse it.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the optimizer does not have.
    unexpected: tuple[str, ...] = ()
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...] = ()


class _ProblemsError(Exception):
    """Why a state does not fit the optimizer."""

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
        MismatchError: There is no state, more than one that fits, or it does not fit.
        UnsupportedError: The state was divided over ranks, not over tensors.
    """
    names = {unwrap(name) for parameter in outline.parameters for name in parameter.names}
    known = Names(known=frozenset(names), rename=rename)
    divided = divided_state(tree if key is None else subtree(tree, key))
    if divided is not None:
        problem = f"the checkpoint holds {divided.what}"
        raise UnsupportedError(problem, file=file, tensor=key, advice=divided.advice)
    if key is None:
        candidates = list(saved_states(tree, known))
        if not candidates:
            raise MismatchError("the checkpoint holds no state of an optimizer", file=file)
    else:
        part = subtree(tree, key)
        named = saved_state(part, key, known)
        if named is None:
            problem = "this part of the checkpoint is not the state of an optimizer"
            raise MismatchError(problem, file=file, tensor=key, found=type(part).__name__)
        candidates = [named]
    fitting: list[tuple[SavedState, MatchedState]] = []
    refused: list[tuple[SavedState, _ProblemsError]] = []
    for saved in candidates:
        try:
            fitting.append((saved, _matched(saved, outline, known)))
        except _ProblemsError as error:
            refused.append((saved, error))
    if len(fitting) == 1:
        return fitting[0][1]
    if fitting:
        lines = [saved.describe() for saved, _ in fitting[:SHOWN]]
        text = f"more than one state of the checkpoint fits the optimizer\n{section('choose one', lines, fitting)}"
        raise MismatchError(f"{text}\nNothing was read", file=file)
    raise _misfit(refused, file)


def _misfit(refused: Sequence[tuple[SavedState, _ProblemsError]], file: str) -> MismatchError:
    if len(refused) == 1:
        _, why = refused[0]
        text = section("reasons", why.problems[:SHOWN], why.problems)
        problem = f"the state in the checkpoint does not fit the optimizer\n{text}\nNothing was read"
        return MismatchError(problem, file=file, tensor=refused[0][0].key or None, missing=why.missing)
    lines = [f"{saved.describe()}; {why.problems[0]}" for saved, why in refused[:SHOWN]]
    text = section("none of these", lines, refused)
    return MismatchError(f"no state in the checkpoint fits the optimizer\n{text}\nNothing was read", file=file)


def _matched(saved: SavedState, outline: OptimizerOutline, names: Names) -> MatchedState:
    """Match a state to the parameters.

    Raises:
        _ProblemsError: It does not fit.
    """
    found = (_by_name if saved.named else _by_number)(saved, outline, names)
    if outline.known_shapes and not outline.adapts:
        _check_shapes(found, outline)
    return found


def _by_number(saved: SavedState, outline: OptimizerOutline, names: Names) -> MatchedState:
    if names.rename is not None and not any(group.get("param_names") for group in saved.groups or ()):
        raise _ProblemsError("its parameters are numbered: there is nothing to rename")
    if saved.groups is None:
        return _without_options(saved, outline)
    ids = saved.ids
    if not outline.adapts:
        _check_groups(ids, outline)
    options, notes = [], []
    for number, group in enumerate(saved.groups):
        own = outline.groups[number] if number < len(outline.groups) else ()
        order = _order_by_names(own, group.get("param_names"), names)
        if order is not None:
            ids[number] = [ids[number][position] for position in order]
            called = as_list(group["param_names"])
            group = {**group, "param_names": [called[position] for position in order]}  # noqa: PLW2901
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


def _without_options(saved: SavedState, outline: OptimizerOutline) -> MatchedState:
    """Match numbered state that comes without groups: its numbers are positions."""
    numbers = iter(range(sum(map(len, outline.groups))))
    ids = tuple(tuple(next(numbers) for _ in group) for group in outline.groups)
    beyond = saved.state.keys() - set(chain.from_iterable(ids))
    if beyond and not outline.adapts:
        raise _ProblemsError(f"it has state of parameter {beyond.pop()}, the optimizer {sum(map(len, ids))} parameters")
    return MatchedState(
        key=saved.key or None,
        state=saved.state,
        ids=ids,
        options=(None,) * len(ids),
        rest=saved.rest,
        notes=(_NO_GROUPS,),
    )


def _check_groups(ids: Sequence[Sequence[object]], outline: OptimizerOutline) -> None:
    if len(ids) != len(outline.groups):
        raise _ProblemsError(
            "it has a different number of parameter groups: "
            f"{len(ids)} in the checkpoint, {len(outline.groups)} in the optimizer"
        )
    problems = [
        f"parameter group {number} has another size: {len(found)} in the checkpoint, {len(own)} in the optimizer"
        for number, (found, own) in enumerate(zip(ids, outline.groups, strict=True))
        if len(found) != len(own)
    ]
    if problems:
        raise _ProblemsError(*problems)


def _order_by_names(own: Sequence[ParameterOutline], called: object, names: Names) -> list[int] | None:
    """Return the position in the checkpoint of each parameter of a group, where names give another order; else None."""
    position = {names.own(name): i for i, name in enumerate(as_list(called)) if isinstance(name, str)}
    order = [next((position[unwrap(n)] for n in one.names if unwrap(n) in position), None) for one in own]
    found = [place for place in order if place is not None]
    if len(set(found)) != len(own) or len(position) != len(own) or found == sorted(found):
        return None
    return found


def _by_name(saved: SavedState, outline: OptimizerOutline, names: Names) -> MatchedState:
    if not any(parameter.names for parameter in outline.parameters):
        raise _ProblemsError("its parameters have names, those of the optimizer have none: pass model=")
    spelling = _spelling(chain(saved.state, *saved.ids), names)
    ids = [[_spelled(parameter, spelling) for parameter in group] for group in outline.groups]
    covered = set(chain.from_iterable(ids))
    absent = [
        " = ".join(map(repr, parameter.names)) or f"a parameter {list(parameter.shape)} without a name"
        for parameter, one in zip(outline.parameters, chain.from_iterable(ids), strict=True)
        if one is None
    ]
    if absent and (saved.groups is not None or covered == {None}):
        # Without groups nothing tells a parameter that never had state from one that is missing.
        raise _ProblemsError(*(f"it has nothing for {name}" for name in absent), missing=absent)
    if saved.groups is None:
        options: list[Mapping[str, object] | None] = [None] * len(ids)
    else:
        options = [_merged_options(saved, number, found) for number, found in enumerate(ids)]
        if not saved.ungrouped:
            _check_partition(saved, ids)
    # An id that the state does not have stands for a parameter without state.
    fallback = ((("absent", i) if one is None else one for one in found) for i, found in enumerate(ids))
    return MatchedState(
        key=saved.key or None,
        state={one: value for one, value in saved.state.items() if one in covered},
        ids=tuple(map(tuple, fallback)),
        options=tuple(options),
        missing=tuple(absent),
        unexpected=tuple(str(one) for one in spelling.values() if one not in covered),
        notes=(_NO_GROUPS,) if saved.groups is None else (),
    )


def _spelling(saved: Iterable[object], names: Names) -> dict[str, object]:
    """Return what the checkpoint calls each parameter, by the name in the model.

    Raises:
        _ProblemsError: The caller's renaming gives two parameters one name.
    """
    spelling: dict[str, object] = {}
    for one in saved:
        name = names.own(str(one))
        if name is None:
            continue
        if names.rename is not None and spelling.get(name, one) != one:
            raise _ProblemsError(f"rename gives {spelling[name]!r} and {one!r} the same name, {name!r}")
        spelling[name] = one
    return spelling


def _spelled(parameter: ParameterOutline, spelling: Mapping[str, object]) -> object:
    """Return what the checkpoint calls a parameter, or None."""
    return next((spelling[unwrap(name)] for name in parameter.names if unwrap(name) in spelling), None)


def _check_partition(saved: SavedState, ids: Sequence[Sequence[object]]) -> None:
    """Refuse groups that are no longer the same sets: the options of one would silently apply to another's."""
    group_of = {one: number for number, found in enumerate(saved.ids) for one in found}
    holder: dict[int, int] = {}
    problems = []
    for number, found in enumerate(ids):
        origins = sorted({group_of[one] for one in found if one in group_of})
        if len(origins) > 1:
            problems.append(f"the parameters of group {number} are in groups {origins} of the checkpoint")
        elif origins and holder.setdefault(origins[0], number) != number:
            pair = f"{holder[origins[0]]} and {number}"
            problems.append(f"the parameters of groups {pair} are one group, {origins[0]}, of the checkpoint")
    if problems:
        raise _ProblemsError(*problems)


def _merged_options(saved: SavedState, number: int, ids: Sequence[object]) -> Mapping[str, object] | None:
    """Return the options that the parameters of a group have in the checkpoint, or None where it has none."""
    merged: dict[str, object] = {}
    wanted = set(ids)
    for group, own in zip(saved.groups or (), saved.ids, strict=True):
        for name, value in _options(group).items() if wanted.intersection(own) else ():
            if name != "param_names" and not _agree(merged.setdefault(name, value), value):
                raise _ProblemsError(f"the parameters of group {number} differ in {name!r} in the checkpoint")
    return merged or None


def _agree(one: object, other: object) -> bool:
    if isinstance(one, Entry) and isinstance(other, Entry):  # written once for each parameter of a group
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    return type(one) is type(other) and one == other


def _check_shapes(found: MatchedState, outline: OptimizerOutline) -> None:
    problems = []
    for parameter, one in zip(outline.parameters, chain.from_iterable(found.ids), strict=True):
        values = found.state.get(one)
        for name, value in values.items() if isinstance(values, dict) else ():
            wrong = name in _PARAMETER_SHAPED and isinstance(value, Entry) and value.shape != parameter.shape
            if wrong:
                called = parameter.names[0] if parameter.names else one
                problems.append(
                    f"{name!r} of parameter {called!r} is {list(value.shape)} in the checkpoint, the parameter is "
                    f"{list(parameter.shape)}"
                )
    if problems:
        raise _ProblemsError(*problems)


def _options(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}
