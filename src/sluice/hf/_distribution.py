"""Models of transformers that are divided over the ranks of a process group, as its ``DistributedConfig`` says.

The library makes the meshes and divides the parameters of a model on meta: tensor parallelism, experts, and FSDP2. The
load then finds DTensors like in any other model.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from sluice._errors import UnsupportedError

__all__ = ["Ranks"]


class Ranks(Struct, frozen=True, kw_only=True):
    """How a model is divided."""

    #: The ``DistributedConfig``, with its defaults filled in.
    config: Any
    #: Device of this rank.
    device: Any
    #: The library's meshes; None if there is one rank.
    meshes: Any

    @classmethod
    def prepare(cls, library: Any, model_class: Any, config: Any, tp_plan: Any) -> Ranks | None:
        """Return how to divide the model, after the library has made its meshes; None for a whole model.

        Raises:
            UnsupportedError: The configuration asks for pipeline parallelism, which removes layers.
            ValueError: Both forms were given, or the library refuses the configuration.
        """
        if config is None and tp_plan is None:
            return None
        if config is not None and tp_plan is not None:
            raise ValueError("pass distributed_config= or tp_plan=, not both")
        kind = library.transformers.distributed.DistributedConfig
        if config is None:
            config = kind(tp_plan=tp_plan)
        elif isinstance(config, dict):
            config = kind.from_dict(config)
        if config.pp_size is not None and config.pp_size > 1:
            raise UnsupportedError("from_pretrained does not divide the layers of a model: pp_size must be 1")
        prepared, device, meshes = model_class.prepare_distribute_model(config)
        return cls(config=prepared, device=device, meshes=meshes)

    def divide(self, model: Any) -> Any:
        """Return the model with DTensors in place of the parameters that the configuration divides."""
        return type(model).maybe_distribute_model(model, self.config, self.meshes)
