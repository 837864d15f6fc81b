"""Files with one sparse tensor, ``w``, with any indices."""

from __future__ import annotations

import struct

from support.hostile_archives import Call, Global, storage, tensor_call, torch_archive


def coo(indices: list[list[int]], shape: tuple[int, ...], *, coalesced: bool | None = False) -> bytes:
    count = len(indices[0])
    data = {
        "i": struct.pack(f"<{len(indices) * count}q", *(number for row in indices for number in row)),
        "v": bytes(4 * count),
    }
    held = tensor_call(storage("i", len(indices) * count, kind="LongStorage"), shape=(len(indices), count))
    values = tensor_call(storage("v", count), shape=(count,))
    return _file("sparse_coo", (held, values, Call(Global("torch", "Size"), (shape,)), coalesced), data)


def compressed(layout: str, compressed: list[int], plain: list[int], shape: tuple[int, ...]) -> bytes:
    tensors = []
    data = {"v": bytes(4 * len(plain))}
    for key, numbers in (("c", compressed), ("p", plain)):
        data[key] = struct.pack(f"<{len(numbers)}q", *numbers)
        tensors.append(tensor_call(storage(key, len(numbers), kind="LongStorage"), shape=(len(numbers),)))
    block = (len(plain), 1, 1) if layout in {"sparse_bsr", "sparse_bsc"} else (len(plain),)
    values = tensor_call(storage("v", len(plain)), shape=block)
    return _file(layout, (*tensors, values, Call(Global("torch", "Size"), (shape,))), data)


def _file(layout: str, data: tuple[object, ...], storages: dict[str, bytes]) -> bytes:
    kind = Call(Global("torch.serialization", "_get_layout"), (f"torch.{layout}",))
    return torch_archive({"w": Call(Global("torch._utils", "_rebuild_sparse_tensor"), (kind, data))}, storages)
