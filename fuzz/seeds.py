"""Write small valid files of each format, and a few unusual ones: ``PYTHONPATH=tests python -m fuzz.seeds``."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

from support.distributed_metadata import (
    chunk_metadata,
    distributed_metadata,
    index_key,
    place,
    tensor_metadata,
    value_metadata,
)
from support.hostile_archives import (
    ArchiveRecord,
    Call,
    Global,
    build_archive,
    legacy_file,
    legacy_storage,
    pickled,
    storage,
    tensor_call,
    torch_archive,
)

_SIX = {"7": (6, struct.pack("<6f", *range(6)))}


def _safetensors(header: object, nbytes: int) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


def _gguf() -> bytes:
    """Return a file with a number, texts, arrays, a plain tensor and one of packs."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    metadata = [
        text("n") + struct.pack("<If", 6, 0.5),
        text("s") + struct.pack("<I", 8) + text("\u00e9"),
        text("t") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text(""),
        text("i") + struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3),
    ]
    tensors = [
        text("w") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0),
        text("b") + struct.pack("<IQIQ", 1, 3, 0, 96),
    ]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + b"".join(metadata + tensors)
    return head + bytes(-len(head) % 32) + bytes(96 + 12)


def seeds() -> dict[str, list[bytes]]:
    """Return the seed inputs of each target."""
    pair = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    plain = {"a": [1, 2.5, None, True, "é", b"x", (1, (2,)), {3: 4}], "n": -(2**70)}
    state = {
        "w": tensor_call(storage("0", 6), shape=(2, 3)),
        "v": tensor_call(storage("0", 6), shape=(3,), stride=(2,)),
    }
    parameter = Call(
        Global("torch._utils", "_rebuild_parameter"), (state["w"], True, Call(Global("collections", "OrderedDict")))
    )
    records = [
        ArchiveRecord(name=b"a/data.pkl", data=pickled(state)),
        ArchiveRecord(name=b"a/data/0", data=bytes(24), local_extra=b"FB\4\0ZZZZ"),
        ArchiveRecord(name=b"a/version", data=b"3\n"),
    ]
    whole = tensor_call(legacy_storage("7", 6), shape=(6,))
    view = tensor_call(legacy_storage("7", 6, view=("9", 2, 4)), shape=(2, 2))
    boxes = [chunk_metadata((0, 0), (1, 3)), chunk_metadata((1, 0), (1, 3))]
    weight_map = {"a.w": "model-00001-of-00002.safetensors", "b": "sub/model-00002-of-00002.safetensors"}
    return {
        "safetensors_header": [
            _safetensors({"__metadata__": {"format": "pt"}, "a": pair}, 8),
            _safetensors({"\u00e9\n": pair, "e": {"dtype": "I64", "shape": [0, 3], "data_offsets": [8, 8]}}, 8),
            _safetensors({}, 0),
        ],
        "gguf_header": [_gguf(), struct.pack("<4sIQQ", b"GGUF", 2, 0, 0)],
        "zip_directory": [
            torch_archive(state, {"0": bytes(24)}, records={".format_version": b"1", ".storage_alignment": b"64"}),
            build_archive(records, zip64=True),
            build_archive([ArchiveRecord(name=b"a/b", data=b"x", method=8)]),
            build_archive([ArchiveRecord(name=b"\x95/b")]),  # raised a UnicodeDecodeError once
        ],
        "pickle_program": [
            pickled(state),
            pickled({"p": parameter, "o": Call(Global("os", "system"), ("true",)), "d": Global("torch", "bfloat16")}),
            *(pickle.dumps(plain, protocol) for protocol in (2, 4, 5)),
        ],
        "legacy_file": [
            legacy_file({"w": whole, "v": view}, _SIX),
            legacy_file(pickle.dumps(plain, 4)),
        ],
        "dcp_metadata": [
            distributed_metadata(
                {"w": tensor_metadata((2, 3), boxes), "step": value_metadata()},
                {
                    index_key("w", (0, 0)): place("__0_0.distcp", 0, 900),
                    index_key("w", (1, 0)): place("__1_0.distcp", 0, 900),
                    index_key("step", None): place("__0_0.distcp", 900, 500),
                },
                paths={"w": ("model", "w"), "step": ("step",)},
            ),
            distributed_metadata({}, {}),
        ],
        "shard_index": [
            json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}).encode(),
            json.dumps({"weight_map": {"\u00e9\\": "../x"}}).encode(),
            b'{"weight_map": {"a": "x", "a": "y"}, "metadata": {"total_size": 1e400, "n": NaN}}',
        ],
    }


def main() -> None:
    for target, contents in seeds().items():
        folder = Path(__file__).parent / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(contents):
            (folder / str(number)).write_bytes(content)


if __name__ == "__main__":
    main()
