"""How tensors without memory came to their values, and the values themselves if a constructor reads one.

Under ``empty_init`` a tensor can have a shape and no memory: a parameter, because the checkpoint will fill it, or a
tensor of a constant that nothing has read yet. A ``History`` belongs to the storage of such a tensor, which is on the
meta device. It has the call that created the tensor and every call that changed it since. A replay repeats these calls
on real memory, so a value that is read is a true initial value and not an invented one.

**Random values** are drawn from a generator of their own, with a seed for each call. All reads of a tensor therefore
agree with each other, and the state of the global generator does not change. The draw is not that of ordinary
construction, so a tensor that the module keeps is never computed from it: see ``Replay.determined``.

**Unknown values.** A call may depend on tensors whose values are not kept, because they are large. Then the values are
unknown until an initialiser overwrites all of them, and a read raises ``UnknownValuesError``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from msgspec import Struct, field

from sluice._geometry import contiguous_stride, is_dense
from sluice.modules.regions import Region

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["Call", "Histories", "History", "Replay", "UnknownValuesError", "empty_on_meta", "tensors_in"]

#: Largest real tensor, in bytes, of which a history keeps a copy; and all copies of one context together.
_KEPT_BYTES = 1 << 20
_ALL_KEPT_BYTES = 16 << 20

#: Lists longer than this are searched for tensors only if they start with one.
_LONG = 64

#: Functions that return memory without values.
_UNINITIALISED = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty})

_Function: TypeAlias = Callable[..., Any]


class UnknownValuesError(Exception):
    """The values of a tensor without memory cannot be computed again; ``history`` is that of the tensor, or None."""

    def __init__(self, history: History | None) -> None:
        super().__init__(history)
        self.history = history


class Call(Struct, eq=False):
    """A call whose tensors are frozen: ``Past`` for those without memory, copies for the others."""

    function: _Function
    args: Any
    options: Any
    #: Which of the tensors in its result is meant, and that tensor on meta; None for a call that changes a tensor.
    position: int = 0
    result: torch.Tensor | None = None


class Recipe(Struct, eq=False):
    """Values from one complete overwriting on: an origin and the calls that changed it."""

    #: The call or the real tensor that has the first values; None if they are unknown.
    origin: Call | torch.Tensor | None
    #: Whether the first call in ``steps`` writes every element.
    overwritten: bool = False
    steps: list[Call] = field(default_factory=list)
    #: Number of this recipe in its context, for seeds.
    number: int = 0


class Past(Struct, eq=False):
    """A tensor without memory as it was after some calls."""

    history: History
    recipe: Recipe
    steps: int
    #: A tensor on meta with its dtype, shape, strides and offset.
    view: torch.Tensor


class History(Struct, eq=False):
    """The values of one storage on meta."""

    #: The storage; keeping it keeps its address unique.
    storage: torch.UntypedStorage
    recipe: Recipe
    #: Device on which ordinary construction would have it.
    device: torch.device
    #: Whether it stays without memory: it belongs to a parameter or persistent buffer, or was computed from one.
    empty: bool
    #: Tensors over this storage that need memory unless they become parameters or persistent buffers.
    held: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    #: Whether a parameter that is not registered yet is over this storage.
    has_parameter: bool = False
    #: Module class and name under which it was registered, as ``"Linear.weight"``.
    owner: str = ""
    #: Empty tensors that were registered as persistent buffers in place of tensors over this storage.
    buffers: dict[Region, torch.Tensor] = field(default_factory=dict)

    def live(self) -> list[torch.Tensor]:
        """Return the held tensors that still exist."""
        return [tensor for tensor in (reference() for reference in self.held) if tensor is not None]

    def release(self, tensor: torch.Tensor) -> None:
        """Hold a tensor no longer; torch does not swap tensors to which weak references exist."""
        if self.held:
            self.held = [weakref.ref(other) for other in self.live() if other is not tensor]


class Histories:
    """The histories of one context."""

    def __init__(self) -> None:
        self._of: dict[int, History] = {}
        self._recipes = 0
        self._kept_bytes = 0

    def __iter__(self) -> Iterator[History]:
        """Iterate over all histories, oldest first."""
        return iter(list(self._of.values()))

    def of(self, tensor: torch.Tensor) -> History | None:
        """Return the history of a tensor; None if it has memory or was created on meta by the constructor itself."""
        if not tensor.is_meta:
            return None
        try:
            return self._of.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # tensors inside torch.func have no storage
            return None

    def start(
        self, tensor: torch.Tensor, origin: Call | torch.Tensor | None, device: torch.device, *, empty: bool
    ) -> History:
        """Start the history of a new tensor on meta."""
        storage = tensor.untyped_storage()
        history = History(storage=storage, recipe=self._recipe(origin), device=device, empty=empty)
        self._of[storage._cdata] = history
        return history

    def derive(self, tensor: torch.Tensor, call: Call | None, device: torch.device, *, empty: bool) -> History:
        """Start the history of the result of a call; None is a call that cannot be repeated."""
        if call is not None:
            call.result = tensor.detach()
        return self.start(tensor, call, device, empty=empty)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a real tensor, or None if it is too large to keep."""
        if tensor.nbytes > _KEPT_BYTES or self._kept_bytes + tensor.nbytes > _ALL_KEPT_BYTES:
            return None
        self._kept_bytes += tensor.nbytes
        return tensor.detach().to("cpu", copy=True)

    def freeze_call(self, function: _Function, args: Any, options: Any) -> Call | None:
        """Return a call as it is now, or None if it depends on a tensor that is not kept."""
        try:
            return Call(function, self._freeze(args), self._freeze(options) if options else options)
        except UnknownValuesError:
            return None

    def change(self, history: History, call: Call | None, *, overwrites: bool) -> None:
        """Record a call that changed values; None is a call that cannot be repeated."""
        if overwrites or call is None:
            history.recipe = self._recipe(None)
            history.recipe.overwritten = call is not None
        if call is not None:
            target = call.args[0] if call.args else call.options.get("tensor")
            if overwrites and isinstance(target, Past):
                target.recipe = history.recipe
            history.recipe.steps.append(call)

    def _recipe(self, origin: Call | torch.Tensor | None) -> Recipe:
        self._recipes += 1
        return Recipe(origin, number=self._recipes)

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            history = self.of(value)
            if history is not None:
                return Past(history, history.recipe, len(history.recipe.steps), value.detach())
            kept = None if value.is_meta else self.keep(value)
            if kept is None:
                raise UnknownValuesError(None)
            return kept
        if type(value) in {tuple, list}:
            return type(value)([self._freeze(member) for member in value])
        if type(value) is dict:
            return {key: self._freeze(member) for key, member in value.items()}
        return value


class Replay:
    """One computation of values.

    ``determined`` is False as soon as a value was drawn at random or comes from uninitialised memory: ordinary
    construction would have other values there.
    """

    def __init__(self, histories: Histories, *, seeded: bool = True) -> None:
        self.determined = True
        self._histories = histories
        self._seed = torch.initial_seed() if seeded else None
        self._done: dict[tuple[int, int], torch.UntypedStorage] = {}

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its present values, on the CPU.

        Raises:
            UnknownValuesError: The values cannot be computed.
        """
        history = self._histories.of(tensor)
        if history is None:
            if tensor.is_meta:
                raise UnknownValuesError(None)
            return tensor
        with self._private_generator(), torch.no_grad():
            recipe = history.recipe
            return _view(self._storage(Past(history, recipe, len(recipe.steps), tensor)), tensor)

    def values(self, value: Any) -> Any:
        """Return arguments of a call with the present values of their tensors."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) in {tuple, list}:
            return type(value)([self.values(member) for member in value])
        if type(value) is dict:
            return {key: self.values(member) for key, member in value.items()}
        return value

    def _storage(self, past: Past) -> torch.UntypedStorage:
        recipe, key = past.recipe, (id(past.recipe), past.steps)
        if key not in self._done:
            storage = self._origin(past)
            for number, call in enumerate(recipe.steps[: past.steps]):
                args, options = self._thaw(call.args, recipe, storage), self._thaw(call.options, recipe, storage)
                self._run(call.function, args, options, seed=recipe.number * 1009 + number + 1)
            self._done[key] = storage
        return self._done[key]

    def _origin(self, past: Past) -> torch.UntypedStorage:
        origin = past.recipe.origin
        if isinstance(origin, torch.Tensor):
            return origin.clone().untyped_storage()
        if origin is None:
            if not past.recipe.overwritten:
                raise UnknownValuesError(past.history)
            return _memory(past.history)
        assert origin.result is not None
        args, options = self._thaw(origin.args), self._thaw(origin.options)
        result = self._run(origin.function, args, options, seed=past.recipe.number * 1009)
        if origin.function in _UNINITIALISED:
            self.determined = False
        tensor = list(tensors_in(result))[origin.position].detach()
        if (tensor.dtype, tensor.shape) != (origin.result.dtype, origin.result.shape):
            raise UnknownValuesError(past.history)
        fresh = _memory(past.history)
        aliases = tensor.untyped_storage().nbytes() != fresh.nbytes() or tensor.stride() != origin.result.stride()
        if not aliases and not any(tensor.untyped_storage()._cdata == other._cdata for other in self._done.values()):
            return tensor.untyped_storage()
        _view(fresh, origin.result).copy_(tensor)
        return fresh

    def _thaw(self, value: Any, recipe: Recipe | None = None, storage: torch.UntypedStorage | None = None) -> Any:
        """Return frozen arguments with real tensors; those of ``recipe`` itself are in ``storage``."""
        if isinstance(value, Past):
            memory = storage if storage is not None and value.recipe is recipe else self._storage(value)
            return _view(memory, value.view)
        if type(value) in {tuple, list}:
            return type(value)([self._thaw(member, recipe, storage) for member in value])
        if type(value) is dict:
            return {key: self._thaw(member, recipe, storage) for key, member in value.items()}
        return value

    def _run(self, function: _Function, args: Any, options: Any, *, seed: int) -> Any:
        generator = torch.default_generator
        if options.get("generator") is not None:
            options = {**options, "generator": None}  # its state has moved on
        if self._seed is not None:
            generator.manual_seed((self._seed + seed) % (1 << 63))
        before = generator.get_state()
        result = function(*args, **options)
        self.determined &= torch.equal(generator.get_state(), before)
        return result

    @contextmanager
    def _private_generator(self) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        generator = torch.default_generator
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)


def _memory(history: History) -> torch.UntypedStorage:
    return torch.empty(history.storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()


def empty_on_meta(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return what ``torch.empty_like`` returns on meta, where it imports torch's compiler."""
    shape, stride = tuple(like.shape), like.stride()
    if not is_dense(shape, stride):
        stride = contiguous_stride(shape)
    return torch.empty_strided(shape, stride, dtype=dtype or like.dtype, device="meta")


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor over ``storage`` with the geometry of ``like``."""
    view = torch.empty(0, dtype=like.dtype, device="cpu")
    view.set_(storage, like.storage_offset(), like.shape, like.stride())
    view = view.conj() if like.is_conj() else view
    return torch._neg_view(view) if like.is_neg() else view


def tensors_in(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, in lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for member in value.values():
            yield from tensors_in(member, depth - 1)
    elif depth and isinstance(value, (tuple, list)):
        if len(value) > _LONG and not isinstance(value[0], (torch.Tensor, tuple, list)):
            return
        for member in value:
            yield from tensors_in(member, depth - 1)
