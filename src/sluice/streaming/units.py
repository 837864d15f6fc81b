"""Weights of a streamed model that are read together, and where they are at present."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from msgspec import Struct
from torch import nn

from sluice.engine.host_memory import HostMemory, RecycledMemory
from sluice.engine.running_plan import RunningPlan, SessionEndedError
from sluice.engine.targets import Targets
from sluice.modules.collect import Owner
from sluice.modules.install import hold, registered
from sluice.modules.unloaded import ParkedParameter
from sluice.quantizing.inner_tensors import assemble
from sluice.reading.reader import CheckpointReader
from sluice.reading.transfer import Prepared

__all__ = ["HeldParameter", "StreamedWeight", "Unit", "UnitPlan"]


class HeldParameter(Struct, frozen=True, kw_only=True, eq=False):
    """A parameter of the model, and what fills it."""

    #: Positions of its requests: one, or those of the plain tensors of a quantized weight.
    positions: tuple[int, ...]
    #: Whether it consists of what they bring, as a quantized weight does.
    assembled: bool
    #: Its name in the model, for messages.
    path: str
    #: The parameter, which may be a buffer.
    tensor: torch.Tensor
    #: The modules that hold it.
    owners: tuple[Owner, ...]


class StreamedWeight(Struct, frozen=True, kw_only=True, eq=False):
    """One parameter of a unit."""

    #: Positions of its tensors in the unit: one, or the plain tensors of a quantized weight.
    parts: tuple[int, ...]
    #: The parameter that the model held before.
    held: HeldParameter
    #: Its replacement while it is not in memory.
    parked: ParkedParameter

    def made_of(self, tensors: Sequence[torch.Tensor]) -> nn.Parameter:
        """Return the parameter that has the tensors of the unit."""
        own = [tensors[part] for part in self.parts]
        data = assemble(self.held.tensor.detach(), own) if self.held.assembled else own[0]
        # As the original: torch chooses some kernels by it, which differ in the last bit.
        return nn.Parameter(data, requires_grad=self.parked.requires_grad)

    def exchange(self, held: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put a tensor where the owners hold another one. What the caller put there instead stays."""
        swapped = held is self.parked and type(held) is not ParkedParameter  # by torch.utils.swap_tensors
        for owner in self.held.owners if not swapped else ():
            found = registered(owner).get(owner.name)
            if found is held or (tensor is self.held.tensor and type(found) is ParkedParameter):  # or a tied one
                hold([owner], tensor)


class UnitPlan(Struct, frozen=True, kw_only=True, eq=False):
    """The decision about one unit."""

    #: Bytes in memory.
    nbytes: int
    #: How it is read; one view for each of its tensors.
    prepared: Prepared
    #: Its parameters.
    weights: tuple[StreamedWeight, ...]


class Unit:
    """One unit: not in memory, being read, or in memory; and in use or not."""

    def __init__(self, plan: UnitPlan, reader: CheckpointReader, memory: RecycledMemory) -> None:
        self.plan, self._reader, self._memory = plan, reader, memory
        self.nbytes = plan.nbytes
        #: Running blocks that use it, and others that hold it in memory.
        self.users = 0
        #: Running blocks whose modules have its weights.
        self.calls = 0
        #: How often a block began to use it.
        self.uses = 0
        self._running: RunningPlan | None = None
        self._targets: Targets | None = None
        self._taken: list[HostMemory] = []
        self._parameters: list[nn.Parameter] | None = None
        #: Its tensors while it is in memory.
        self.tensors: Sequence[torch.Tensor] = ()

    @property
    def ready(self) -> bool:
        """Whether it is in memory."""
        return self._parameters is not None

    @property
    def held(self) -> bool:
        """Whether it is in memory or being read."""
        return self.ready or self._running is not None

    def start(self) -> None:
        """Begin to read it."""
        taken, memory = list[HostMemory](), self._memory

        def take(nbytes: int) -> HostMemory:  # refers to no unit: readers hold it, and a dropped stream must end
            taken.append(memory.take(nbytes))
            return taken[-1]

        self._taken = taken
        try:
            self._targets = Targets(self.plan.prepared.plan, take_memory=take)
            self._running = self._reader.begin(self.plan.prepared.plan, self._targets)
        except BaseException:
            self.drop()
            raise

    def finish(self) -> None:
        """Return when it is in memory; its reads have begun.

        Raises:
            ReadError: The operating system or a server failed a read.
            SourceChangedError: A file is no longer the one that was indexed.
        """
        try:
            self.settle()
        except SessionEndedError:  # a different unit failed, whose own caller sees it
            self.start()
            self.settle()

    def settle(self) -> None:
        """Return when its reads, which have begun, have ended.

        Raises:
            SessionEndedError: Another unit failed. This one is not in memory.
            SluiceError: As ``finish``.
        """
        assert self._running is not None
        assert self._targets is not None
        try:
            self._running.wait()
            with torch.inference_mode(mode=False), torch.no_grad():
                self.tensors = self._targets.take(self.plan.prepared.views)
                self._parameters = [weight.made_of(self.tensors) for weight in self.plan.weights]
        except BaseException:
            self._targets.discard()
            self.drop()
            raise
        self._running = self._targets = None

    def install(self) -> None:
        """Give the modules the weights, for one call of a block."""
        assert self._parameters is not None
        if not self.calls:
            for weight, parameter in zip(self.plan.weights, self._parameters, strict=True):
                weight.exchange(weight.parked, parameter)
        self.calls += 1

    def parameter(self, position: int) -> nn.Parameter:
        """Return one of its parameters, which are in memory."""
        assert self._parameters is not None
        return self._parameters[position]

    def park(self) -> None:
        """Take the weights from the modules after the last of these calls."""
        assert self._parameters is not None
        self.calls -= 1
        if not self.calls:
            self._withdraw()
            if torch.is_autocast_cache_enabled() and any(parameter.requires_grad for parameter in self._parameters):
                torch.clear_autocast_cache()  # it holds copies of weights that are not frozen

    def _withdraw(self) -> None:
        if self._parameters is not None:
            for weight, parameter in zip(self.plan.weights, self._parameters, strict=True):
                weight.exchange(parameter, weight.parked)

    def drop(self) -> None:
        """Give the memory back. Nothing may be reading into it."""
        self.calls = 0
        self._withdraw()  # modules have some of them still after an interrupt
        self._parameters = self._running = self._targets = None
        self.tensors = ()
        taken, self._taken = self._taken, []
        self._memory.give_back(taken)

    def attach(self, lend: Callable[[int], AbstractContextManager[torch.Tensor]]) -> None:
        """Park the parameters of the modules; ``lend`` reads one by its position."""
        for position, weight in enumerate(self.plan.weights):
            hold(weight.held.owners, weight.parked)
            weight.parked.lend = partial(lend, position)

    def restore(self) -> None:
        """Give the modules the parameters that they had before, frozen if the caller froze them since."""
        with torch.inference_mode():  # in which the model may have been built
            for weight in self.plan.weights:
                weight.parked.lend = None
                weight.exchange(weight.parked, weight.held.tensor.requires_grad_(weight.parked.requires_grad))
