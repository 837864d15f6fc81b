"""Write small valid files of each format, and a few unusual ones: ``PYTHONPATH=tests python -m fuzz.seeds``."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zlib
from pathlib import Path

from support.hostile_archives import (
    ArchiveRecord,
    Call,
    Global,
    Raw,
    build_archive,
    chunk_metadata,
    distributed_metadata,
    encode,
    index_key,
    legacy_file,
    legacy_storage,
    pickled,
    place,
    storage,
    tensor_call,
    tensor_metadata,
    torch_archive,
    value_metadata,
)

_SIX = {"7": (6, struct.pack("<6f", *range(6)))}


def _safetensors(header: object, nbytes: int) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


def _built(module: str, name: str, state: object) -> Raw:
    return Raw(encode(Global(module, name)) + b")\x81" + encode(state) + b"b")


def _divided(tensor: Call) -> Call:
    """Return a tensor of FSDP1 with one shard."""
    sharded, kind = "torch.distributed._shard.sharded_tensor", "torch.distributed._shard.metadata"
    place = _built(kind, "ShardMetadata", (None, {"shard_offsets": [2, 0], "shard_sizes": [2, 3]}))
    shard = _built(f"{sharded}.shard", "Shard", (None, {"tensor": tensor, "metadata": place}))
    size = Call(Global("torch", "Size"), ((4, 3),))
    whole = _built(f"{sharded}.metadata", "ShardedTensorMetadata", {"size": size, "shards_metadata": [place]})
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass"), Global(f"{sharded}.api", "ShardedTensor")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (*wrapper, (), ([shard], whole, None, None, False)))


def _script(state: object) -> bytes:
    """Return a TorchScript archive with compressed code."""
    code = b'class Net(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = []\n'
    packed = zlib.compress(code, wbits=-15)
    plain = {b"data.pkl": pickled(_built("__torch__", "Net", state)), b"data/0": bytes(24), b"constants.pkl": b"N."}
    return build_archive(
        [
            *(ArchiveRecord(name=b"a/" + name, data=data) for name, data in {**plain, b"version": b"3"}.items()),
            ArchiveRecord(name=b"a/code/__torch__.py", data=packed, method=8, nbytes=len(code), crc=zlib.crc32(code)),
        ]
    )


def _program() -> bytes:
    """Return an archive of ``torch.export``."""
    number = {"as_int": 2}
    meta = {"dtype": 7, "layout": 7, "sizes": [number] * 2, "strides": [number, {"as_int": 1}]}
    meta |= {"storage_offset": {"as_int": 0}, "requires_grad": True}
    payload = {"path_name": "w0", "is_param": True, "use_pickle": False, "tensor_meta": meta}
    config = json.dumps({"config": {"a.w": payload}}).encode()
    records = {"archive_format": b"pt2", "data/weights/m_weights_config.json": config, "data/weights/w0": bytes(16)}
    return torch_archive({}, records={**records, "data.pkl": None})


def _tar(form: int) -> bytes:
    """Return a tar archive with a long name, a directory and a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, kind in ((f"a/{101 * 'n'}", tarfile.REGTYPE), ("d", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, 5 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"hello"))
    return buffer.getvalue().rstrip(b"\0") + bytes(1024)


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
            _script({**state, "training": True}),
            _program(),
        ],
        "pickle_program": [
            pickled(state),
            pickled({"p": parameter, "o": Call(Global("os", "system"), ("true",)), "d": Global("torch", "bfloat16")}),
            *(pickle.dumps(plain, protocol) for protocol in (2, 4, 5)),
            pickled({"w": _divided(state["w"])}),
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
        "tar_archive": [_tar(tarfile.PAX_FORMAT), _tar(tarfile.GNU_FORMAT)],
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
