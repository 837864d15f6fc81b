# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Write the checkpoints of old torch in ``tests/support/old_files``: run with Python 2.7 and torch 1.0.0, then 1.4.0.

Python 2.7 is a package of Debian 11; the wheels of torch (``cp27mu``) are on PyPI and need numpy, typing and, for 1.4,
future. Two older releases have no wheels. Their way to pickle a tensor is replayed with the same pickler and torch
1.0.0, which writes the rest of the file as they did: torch 0.3 called ``_rebuild_tensor`` and pickled parameters with
their state; torch 0.4 passed None as hooks.

Usage: python2.7 write_old_files.py DIRECTORY
"""

import collections
import os
import pickle
import sys

import torch


def network():
    """Return a small network with all kinds of tensors of a state dict."""
    torch.manual_seed(1)
    layers = [("conv", torch.nn.Conv2d(2, 3, 2)), ("bn", torch.nn.BatchNorm2d(3))]
    return torch.nn.Sequential(collections.OrderedDict(layers))


def training_state(net):
    """Return what a training script saved: weights, optimizer and plain values of Python 2."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net(torch.ones(4, 2, 2, 2)).sum().backward()
    optimizer.step()
    state = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.5}
    state.update({"unicode": b"caf\xc3\xa9".decode("utf-8"), "huge": 2**70, "long": 2**70 // 2**68, "wide": 2**40})
    state["arch"] = "net"
    state.update({"flag": True, "none": None, "pair": (1, "a", ()), "nested": [1, [2]], "size": torch.Size([2, 3])})
    return state


def views():
    """Return views of a shared storage, a parameter under two names, and other dtypes."""
    base = torch.arange(12).float()
    tensors = collections.OrderedDict(part=base[2:5], transposed=base.view(3, 4).t(), empty=torch.empty(0))
    tensors.update({"long": torch.tensor([1, 2]), "half": torch.tensor([1.5]).half(), "byte": torch.ones(2).byte()})
    tensors["parameter"] = tensors["tied"] = torch.nn.Parameter(torch.ones(2))
    return tensors


def plain():
    """Return plain values that Python 2 pickles in its own way."""
    values = {"set": {1, 2}, "bytearray": bytearray(b"a\xff"), "complex": 1 + 2j, "device": torch.device("cpu")}
    return dict(values, weight=torch.ones(2))


def _hooks_of_none(self, _protocol):
    arguments = (self.storage(), self.storage_offset(), tuple(self.size()), self.stride(), self.requires_grad, None)
    return torch._utils._rebuild_tensor_v2, arguments  # noqa: SLF001


def _without_hooks(self, _protocol):
    arguments = (self.storage(), self.storage_offset(), tuple(self.size()), self.stride())
    return torch._utils._rebuild_tensor, arguments  # noqa: SLF001


def _parameter_with_state(self, _protocol):
    return torch.nn.Parameter, (self.data,), (self.requires_grad, False, collections.OrderedDict())


def replay(path, value, tensor, parameter=None):
    """Write a file in which tensors and parameters are pickled by these functions."""
    classes = {torch.Tensor: tensor, torch.nn.Parameter: parameter or torch.nn.Parameter.__reduce_ex__}
    known = {kind: kind.__dict__["__reduce_ex__"] for kind in classes}
    try:
        for kind, reduce in classes.items():
            kind.__reduce_ex__ = reduce
        torch.save(value, path)
    finally:
        for kind, reduce in known.items():
            kind.__reduce_ex__ = reduce


def main(directory):
    """Write the files of the installed torch."""

    def path(name, version=torch.__version__):
        return os.path.join(directory, "torch-%s-%s.pth" % (version, name))  # noqa: UP031

    state, training = network().state_dict(), training_state(network())
    torch.save(training, path("training"))
    if torch.__version__ >= "1.4":
        torch.save(training, path("protocol-1"), pickle_protocol=1)
        torch.save({"weight": torch.ones(2)}, path("zip"), _use_new_zipfile_serialization=True)
        return
    torch.save(state, path("state"))
    torch.save(torch.ones(3), path("tensor"))
    torch.save(views(), path("views"))
    torch.save(plain(), path("plain"))
    torch.save(training, path("pickle-module"), pickle_module=pickle)
    torch.save({"weight": torch.ones(2), "text": "x" * 300}, path("long-text"))
    torch.save({"weight": torch.ones(2), "text": b"caf\xc3\xa9"}, path("utf-8"))
    torch.save({b"caf\xe9.weight": torch.ones(2), "text": b"caf\xe9"}, path("latin-1"))
    replay(path("state", "0.4"), state, _hooks_of_none)
    replay(path("state", "0.3"), state, _without_hooks)
    replay(path("parameters", "0.3"), dict(network().named_parameters()), _without_hooks, _parameter_with_state)


if __name__ == "__main__":
    main(sys.argv[1])
