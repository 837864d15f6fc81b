"""Contents of the files of a DeepSpeed checkpoint, checked.

Model states (``mp_rank_00_model_states.pt``; in stage 3 one file for each rank)::

    module                   state dict; in stage 3 its parameters are empty
    param_shapes             for each flat vector: name and shape of its parameters, in order
    buffer_names             names in ``module`` that are not parameters
    shared_params            further names of parameters
    frozen_param_shapes, frozen_param_fragments    parameters that are not trained; in stage 3 a part for each rank

Optimizer states (one file for each rank) in ``optimizer_state_dict``::

    single_partition_of_fp32_groups, base_optimizer_state    stages 1 and 2: flat vectors, and the optimizer's own state
    fp32_flat_groups, optimizer_state_dict                   the same in stage 3
    partition_count          number of ranks, or that of each vector
    group_paddings           elements at the end of the optimizer's vectors that the fp32 vectors do not have
    param_alignment_paddings unused elements after each parameter

Refused: parameters that were divided in other ways as well (tensor, pipeline or expert parallelism).
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import prod
from typing import TypeGuard, TypeVar

from msgspec import Struct

from sluice._dtypes import MAX_SIGNED
from sluice._errors import FormatError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.records import Entry
from sluice.records.geometry import contiguous_stride

__all__ = ["ModelStates", "RankStates", "is_flat", "model_states", "rank_states", "universal_states"]

_Kind = TypeVar("_Kind")
_Shape = tuple[int, ...]

#: Options of each parameter group, with the number of its vectors.
_Options = tuple[tuple[dict[str, object], int], ...]

_WEIGHTS_12, _WEIGHTS_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"

#: Keys of model states that only models with experts have.
_EXPERTS = ("num_experts", "ds_autoep_layers", "autoep_layers")

_OTHERWISE = (
    "Only DeepSpeed can put it together: load it there, and save the model with save_16bit_model or torch.save."
)


class ModelStates(Struct, frozen=True, kw_only=True):
    """The checked contents of a file of model states."""

    file: str
    #: The state dict.
    module: dict[str, object]
    #: Shapes of the parameters in each flat vector, in order.
    shapes: tuple[dict[str, _Shape], ...]
    buffers: frozenset[str]
    #: The name of the stored parameter by each further name.
    shared: dict[str, str]
    frozen: dict[str, _Shape]
    #: Frozen parameters, or this rank's part of each.
    fragments: dict[str, Entry]
    #: Number of ranks; 0 if the file does not tell.
    world: int
    #: Version, step and numbers of ranks as text.
    facts: dict[str, str]


class RankStates(Struct, frozen=True, kw_only=True):
    """The checked contents of a file of optimizer states."""

    file: str
    #: Flat vectors with the weights.
    vectors: tuple[Entry, ...]
    #: Whether each parameter was divided over all ranks (stage 3), not each vector.
    by_parameter: bool
    #: Number of ranks.
    world: int
    #: Elements at the end of the vectors of the optimizer's state that the weights do not have, by vector.
    paddings: tuple[int, ...]
    #: Unused elements after each parameter, by vector; empty if there are none.
    gaps: tuple[tuple[int, ...], ...]
    #: State of the optimizer for each vector, by name; empty if the file has none.
    states: tuple[dict[str, object], ...]
    #: Options of each parameter group, with the number of its vectors; empty if the file has none.
    options: _Options


class _Fields:
    """The values of a dict of a file."""

    def __init__(self, value: object, where: str, file: str) -> None:
        self.where, self.file = where, file
        self.values = self._checked(value, dict, where)

    def get(self, name: str, kind: type[_Kind]) -> _Kind | None:
        """Return a value, or None if it is absent or None."""
        value = self.values.get(name)
        return None if value is None else self._checked(value, kind, name)

    def need(self, name: str, kind: type[_Kind]) -> _Kind:
        """Return a value that has to be there."""
        return self._checked(self.values.get(name), kind, name)

    def _checked(self, value: object, kind: type[_Kind], name: str) -> _Kind:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        found = "nothing" if value is None else type(value).__name__
        problem = f"{name!r} in a DeepSpeed checkpoint is not a {kind.__name__}"
        raise FormatError(problem, file=self.file, tensor=self.where, expected=kind.__name__, found=found)


def model_states(tree: object, file: str, limits: Limits) -> ModelStates:
    """Return the contents of a file of model states.

    Raises:
        FormatError: They violate the layout.
        UnsupportedError: The model was divided in other ways than by ZeRO, or not by ZeRO.
        LimitError: There are too many parameters, or a shape has too many dimensions.
    """
    fields = _Fields(tree, "", file)
    _refuse_other_divisions(fields)
    if fields.values.get("param_shapes") is None:
        problem = "a DeepSpeed checkpoint without ZeRO: it has no 'param_shapes'"
        raise UnsupportedError(problem, file=file, advice="Pass the path of this file: it holds the whole model.")
    groups = fields.values["param_shapes"]
    listed = fields.need("param_shapes", list) if not isinstance(groups, dict) else [groups]
    shapes = tuple(_shapes(group, "param_shapes", file, limits) for group in listed)
    [(often, times)] = Counter(chain.from_iterable(shapes)).most_common(1) or [("", 1)]
    if times > 1:
        raise FormatError("a parameter is in two flat vectors", file=file, tensor=often)
    fragments, shared = (fields.get(key, dict) or {} for key in ("frozen_param_fragments", "shared_params"))
    facts = ("ds_version", "global_steps", "dp_world_size")
    return ModelStates(
        file=file,
        module=fields.need("module", dict),
        shapes=shapes,
        buffers=frozenset(name for name in fields.get("buffer_names", list) or () if isinstance(name, str)),
        shared={name: other for name, other in shared.items() if isinstance(name, str) and isinstance(other, str)},
        frozen=_shapes(fields.get("frozen_param_shapes", dict) or {}, "frozen_param_shapes", file, limits),
        fragments={name: value for name, value in fragments.items() if isinstance(value, Entry)},
        world=fields.get("dp_world_size", int) or 0,
        facts={name: str(fields.values[name]) for name in facts if isinstance(fields.values.get(name), (int, str))},
    )


def _refuse_other_divisions(fields: _Fields) -> None:
    degrees = fields.get("checkpoint_parallel_dimensions", dict) or {}
    divided = {"mp_world_size": fields.get("mp_world_size", int) or 1, **degrees}
    for name, degree in divided.items():
        if isinstance(degree, int) and degree > 1:
            problem = "the model was divided by tensor or pipeline parallelism besides ZeRO"
            raise UnsupportedError(problem, file=fields.file, found=f"{name} = {degree}", advice=_OTHERWISE)
    experts = next((name for name in _EXPERTS if fields.values.get(name)), None)
    if experts is not None:
        problem = "the model has experts, which DeepSpeed divided over groups of ranks"
        raise UnsupportedError(problem, file=fields.file, found=experts, advice=_OTHERWISE)
    if fields.values.get("module") is None and "param_shapes" in fields.values:
        problem = "the layers of the model are in files of their own (DeepSpeed's pipeline)"
        raise UnsupportedError(problem, file=fields.file, advice=_OTHERWISE)


def _shapes(value: object, where: str, file: str, limits: Limits) -> dict[str, _Shape]:
    shapes = _Fields(value, where, file).values
    for name, shape in shapes.items():
        sizes = shape if isinstance(shape, (tuple, list)) else (None,)
        if not isinstance(name, str) or not all(type(size) is int and size >= 0 for size in sizes):
            raise FormatError("not a name and a shape", file=file, tensor=where, found=f"{name!r}: {shape!r}"[:80])
        check_limit(limits, "dimensions", len(sizes), "a shape", file=file, tensor=name)
        if prod(max(size, 1) for size in sizes) > MAX_SIGNED:
            raise FormatError("a shape has too many elements", file=file, tensor=name, found=list(sizes))
    check_limit(limits, "entries", len(shapes), "the number of parameters", file=file)
    return {name: tuple(shape) for name, shape in shapes.items()}


def rank_states(tree: object, file: str) -> RankStates:
    """Return the contents of a file of optimizer states.

    Raises:
        FormatError: They violate the layout.
        UnsupportedError: Expert parallelism divided the vectors over different numbers of ranks.
    """
    fields = _Fields(_Fields(tree, "", file).need("optimizer_state_dict", dict), "optimizer_state_dict", file)
    by_parameter = _WEIGHTS_3 in fields.values
    vectors = fields.need(_WEIGHTS_3 if by_parameter else _WEIGHTS_12, list)
    flat = tuple(_vector(vector, f"weights {number}", file) for number, vector in enumerate(vectors))
    counts = fields.values.get("partition_count")
    counted = counts if isinstance(counts, list) else [counts]
    if not counted or not all(type(count) is int and count > 0 for count in counted):
        raise FormatError("no valid number of ranks", file=file, tensor="partition_count", found=repr(counts)[:80])
    if len(set(counted)) > 1:
        problem = "the model has experts, whose vectors are divided over fewer ranks"
        raise UnsupportedError(problem, file=file, found=f"partition_count = {counted}"[:80], advice=_OTHERWISE)
    base = fields.values.get("optimizer_state_dict" if by_parameter else "base_optimizer_state")
    if isinstance(base, list):
        base = None  # an elastic checkpoint of old versions, which has no parameter groups
    states, options = ((), ()) if base is None else _states_and_options(_Fields(base, "optimizer", file))
    if base is not None and len(states) != len(flat):
        problem = "the optimizer does not have a state for each vector"
        raise FormatError(problem, file=file, expected=len(flat), found=len(states))
    paddings = fields.get("group_paddings", list) or []
    return RankStates(
        file=file,
        vectors=flat,
        by_parameter=by_parameter,
        world=max(counted),
        paddings=_numbers(paddings, "group_paddings", file) or (0,) * len(flat),
        gaps=tuple(
            _numbers(gap, "param_alignment_paddings", file)
            for gap in fields.get("param_alignment_paddings", list) or ()
        ),
        states=states,
        options=options,
    )


def is_flat(value: object) -> TypeGuard[Entry]:
    """Return whether a value is a dense tensor in row-major order."""
    if not isinstance(value, Entry) or value.composite is not None or value.parts or value.elements.computed:
        return False
    return value.numel <= 1 or value.stride == contiguous_stride(value.shape)


def _vector(value: object, where: str, file: str) -> Entry:
    if is_flat(value) and len(value.shape) == 1:
        return value
    found = str(getattr(value, "shape", type(value).__name__))
    raise FormatError("not a flat vector", file=file, tensor=where, found=found)


def _numbers(values: object, where: str, file: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise FormatError("not a list of numbers of elements", file=file, tensor=where, found=repr(values)[:80])
    return tuple(values)


def universal_states(tree: object, file: str) -> tuple[object, _Options]:
    """Return the step in the optimizer states of a universal checkpoint if they have it, else None; and the options.

    Raises:
        FormatError: They violate the layout.
    """
    fields = _Fields(tree, "", file)
    inner = fields.get("optimizer_state_dict", dict) or {}
    states, options = _states_and_options(_Fields({"state": {}, **inner, **fields.values}, "", file))
    return next((state["step"] for state in states if "step" in state), None), options


def _states_and_options(fields: _Fields) -> tuple[tuple[dict[str, object], ...], _Options]:
    saved, states, options = fields.need("state", dict), [], []
    for group in fields.need("param_groups", list):
        own = dict(_Fields(group, "param_groups", fields.file).values)
        numbers = _Fields(own, "param_groups", fields.file).need("params", list)
        # FusedAdam of old versions counts the steps of a group.
        first = {"step": own.pop("step")} if "step" in own else {}
        for number in numbers:
            if not isinstance(number, (int, str)):
                raise FormatError("a parameter of a group is not a number", file=fields.file, tensor="param_groups")
            state = _Fields(saved.get(number, {}), f"state {number}", fields.file).values
            states.append({**first, **state} if state else {})
        del own["params"]
        options.append((own, len(numbers)))
    return tuple(states), tuple(options)
