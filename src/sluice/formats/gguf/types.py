"""The types of tensors in GGUF files, by their number."""

from __future__ import annotations

from msgspec import Struct

from sluice.records import Elements, Packing, elements_of

__all__ = ["TYPES", "TensorType"]


class TensorType(Struct, frozen=True):
    """One type of tensors."""

    #: Name, as ggml spells it.
    name: str
    #: Elements of one pack; 1 if each element is stored by itself.
    elements: int
    #: Bytes of one pack.
    nbytes: int
    #: Stored form; None if sluice does not read the type.
    stored: Elements | None = None
    #: Whether the package gguf decodes it.
    package: bool = False


def _plain(name: str, dtype: str, nbytes: int) -> TensorType:
    return TensorType(name, 1, nbytes, elements_of(dtype))


def _packed(name: str, elements: int, nbytes: int, *, package: bool = False) -> TensorType:
    packing = Packing(name=name, elements=elements, nbytes=nbytes)
    return TensorType(name, elements, nbytes, Elements(dtype="float32", packing=packing), package)


#: Types by number. Those without a stored form are intermediate results of computations.
TYPES = {
    0: _plain("F32", "float32", 4),
    1: _plain("F16", "float16", 2),
    2: _packed("Q4_0", 32, 18),
    3: _packed("Q4_1", 32, 20),
    6: _packed("Q5_0", 32, 22),
    7: _packed("Q5_1", 32, 24),
    8: _packed("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: _packed("Q2_K", 256, 84),
    11: _packed("Q3_K", 256, 110),
    12: _packed("Q4_K", 256, 144),
    13: _packed("Q5_K", 256, 176),
    14: _packed("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: _packed("IQ2_XXS", 256, 66, package=True),
    17: _packed("IQ2_XS", 256, 74, package=True),
    18: _packed("IQ3_XXS", 256, 98, package=True),
    19: _packed("IQ1_S", 256, 50, package=True),
    20: _packed("IQ4_NL", 32, 18, package=True),
    21: _packed("IQ3_S", 256, 110, package=True),
    22: _packed("IQ2_S", 256, 82, package=True),
    23: _packed("IQ4_XS", 256, 136, package=True),
    24: _plain("I8", "int8", 1),
    25: _plain("I16", "int16", 2),
    26: _plain("I32", "int32", 4),
    27: _plain("I64", "int64", 8),
    28: _plain("F64", "float64", 8),
    29: _packed("IQ1_M", 256, 56, package=True),
    30: _plain("BF16", "bfloat16", 2),
    34: _packed("TQ1_0", 256, 54, package=True),
    35: _packed("TQ2_0", 256, 66, package=True),
    39: _packed("MXFP4", 32, 17, package=True),
    40: _packed("NVFP4", 64, 36, package=True),
}
