"""The rule that joins the tensors of Megatron's ranks. Pure: no data, no torch. See ``sluice.rules.megatron``.

Megatron-core divides over tensor ranks: embeddings, output layer, fused query, key and value and the first linear layer
of an MLP by rows, the projections after them by columns; everything else is repeated. A gated MLP has the rows of its
gate and then of its other half on every rank. The rows of attention are grouped: of each group its queries, its key and
its value. Pipeline ranks number their layers from 0; interleaved ones have several chunks of layers, dealt in turns.
The older names of Megatron-LM are translated first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec.structs import replace

from sluice._errors import MismatchError
from sluice.entries.assembly import join, narrow, permute
from sluice.entries.rules import Rule, RuleFindings
from sluice.records import Entry

__all__ = ["PREFIX", "Layout", "MegatronRule"]

Layout: TypeAlias = Literal["core", "gpt", "llama"]

PREFIX = re.compile(
    r"(?:mp_rank_(?P<tensor>\d{1,18})(?:_(?P<stage>\d{1,18}))?(?P<expert>_\d+)?"
    r"|tp_rank_(?P<tp>\d{1,18})_pp_rank_(?P<pp>\d{1,18}))"
    r"\.(?:model(?P<chunk>\d{1,18})\.)?(?:model\.|module\.)*(?P<name>.+)",
    re.ASCII | re.DOTALL,
)

#: Components of older names, and those of today.
_OLDER = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(?:encoder|transformer)\."), "decoder."),
    (re.compile(r"^word_embeddings_for_head\."), "output_layer."),
    (re.compile(r"\.(?:self_)?attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.(?:self_)?attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.linear_fc2."),
    (re.compile(r"\.input_norm\."), ".input_layernorm."),
    (re.compile(r"\.post_attention_(?:layer)?norm\."), ".pre_mlp_layernorm."),
    (re.compile(r"\.final_norm\."), ".final_layernorm."),
)

#: Dimension along which a tensor is divided, by the end of its name; None if every rank has all of it.
_DIVIDED = (
    (re.compile(r"(?:^|.*\.)(?:word_embeddings|output_layer)\.(?:weight|bias)"), 0),
    (re.compile(r".*\.linear_(?:qkv|fc1)\.(?:weight|bias)"), 0),
    (re.compile(r".*\.linear_(?:proj|fc2)\.weight"), 1),
    (re.compile(r".*\.linear_(?:proj|fc2)\.bias|(?:.*\.)?position_embeddings\.weight|.*\.inv_freq"), None),
    (re.compile(r".*(?:layernorm\.|layer_norm_)(?:weight|bias)"), None),
)

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)", re.DOTALL)
_VOCABULARY = re.compile(r"(?:embedding\.word_embeddings|output_layer)\.(?:weight|bias)")

#: Names outside of layers and in a layer, by those of Megatron-core; what follows the name is kept.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt": {
        "embedding.word_embeddings.": "transformer.wte.",
        "embedding.position_embeddings.": "transformer.wpe.",
        "decoder.final_layernorm.": "transformer.ln_f.",
        "output_layer.": "lm_head.",
        "input_layernorm.": "ln_1.",
        "self_attention.linear_qkv.layer_norm_": "ln_1.",
        "self_attention.linear_proj.": "attn.c_proj.",
        "pre_mlp_layernorm.": "ln_2.",
        "mlp.linear_fc1.layer_norm_": "ln_2.",
        "mlp.linear_fc1.": "mlp.c_fc.",
        "mlp.linear_fc2.": "mlp.c_proj.",
    },
    "llama": {
        "embedding.word_embeddings.": "model.embed_tokens.",
        "decoder.final_layernorm.": "model.norm.",
        "output_layer.": "lm_head.",
        "input_layernorm.": "input_layernorm.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "self_attention.linear_proj.": "self_attn.o_proj.",
        "self_attention.q_layernorm.": "self_attn.q_norm.",
        "self_attention.k_layernorm.": "self_attn.k_norm.",
        "pre_mlp_layernorm.": "post_attention_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
        "mlp.linear_fc2.": "mlp.down_proj.",
    },
}
_OUTSIDE = ("embedding.", "output_layer.", "decoder.final_layernorm.")
_LAYERS = {"gpt": "transformer.h", "llama": "model.layers"}

_QKV, _FC1 = "self_attention.linear_qkv.", "mlp.linear_fc1."

#: Chunk and stage of a rank's layers: interleaved chunks come first, in turns over the stages.
_Place: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRule(Rule):
    """See ``sluice.rules.megatron``."""

    layout: Layout
    heads: int | None
    vocabulary: int | None

    def __str__(self) -> str:
        return f"megatron({self.layout!r})"

    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the whole tensors of the model; nothing else is kept."""
        findings = RuleFindings(self)
        pieces: defaultdict[_Place, defaultdict[str, dict[int, tuple[str, Entry]]]]
        pieces = defaultdict(lambda: defaultdict(dict))
        for name, entry in entries.items():
            found = PREFIX.fullmatch(name)
            if found is None:
                continue
            findings.matched = True
            if found["expert"] or ".experts." in name:
                raise MismatchError(f"the rule {self} does not join expert-parallel ranks", tensor=name)
            place = int(found["chunk"] or 0), int(found["stage"] or found["pp"] or 0)
            today = found["name"]  # in place of an older name
            for pattern, new in _OLDER:
                today = pattern.sub(new, today)
            own = pieces[place][today]
            rank = int(found["tensor"] or found["tp"] or 0)
            if rank in own:
                findings.refuse(name, f"a rank has the same tensor as {own[rank][0]!r}")
            own[rank] = name, entry
        whole = self._whole(pieces, findings)
        result: dict[str, Entry] = {}
        for name, entry in whole.items():
            try:
                for new, made in self._named(name, entry, whole):
                    findings.add(result, new, made, name)
            except ValueError as error:
                findings.refuse(name, str(error))
        findings.raise_if_any(entries)
        return result

    def _whole(
        self, pieces: Mapping[_Place, Mapping[str, dict[int, tuple[str, Entry]]]], findings: RuleFindings
    ) -> dict[str, Entry]:
        """Return each tensor joined over the tensor ranks, under its name in the whole model."""
        whole: dict[str, Entry] = {}
        ranks = {rank for own in pieces.values() for of in own.values() for rank in of}
        first = 0
        for place in sorted(pieces):
            own = pieces[place]
            layers = {int(found[1]) for found in map(_LAYER.fullmatch, own) if found}
            if layers != set(range(len(layers))):
                findings.refuse(min(own), f"layers are missing: {sorted(layers)[:8]} do not count from 0")
            for name, of in own.items():
                layer = _LAYER.fullmatch(name)
                new = f"decoder.layers.{first + int(layer[1])}.{layer[2]}" if layer else name
                try:
                    if of.keys() != ranks:
                        raise ValueError(f"tensor ranks {sorted(ranks - of.keys())} do not have it")
                    joined = _joined(name, [of[rank] for rank in sorted(of)], own)
                except ValueError as error:
                    findings.refuse(of[min(of)][0], str(error))
                    continue
                if new not in whole or not new.startswith("embedding."):  # the last stage may repeat the embedding
                    findings.add(whole, new, self._cut(new, joined), of[min(of)][0])
            first += len(layers)
        return whole

    def _cut(self, name: str, entry: Entry) -> Entry:
        """Return the rows of a vocabulary without its padding."""
        if self.vocabulary is None or not _VOCABULARY.fullmatch(name) or entry.shape[0] <= self.vocabulary:
            return entry
        return replace(narrow(entry, 0, 0, self.vocabulary), origin=f"{entry.origin} cut to {self.vocabulary} rows")

    def _named(self, name: str, entry: Entry, whole: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
        """Return the tensors of the layout that one of Megatron-core becomes, by name."""
        if self.layout == "core":
            return [(name, entry)]
        layer = _LAYER.fullmatch(name)
        start = f"{_LAYERS[self.layout]}.{layer[1]}." if layer else ""
        short = layer[2] if layer else name
        last = short.rpartition(".")[2]
        if short in {f"{_QKV}weight", f"{_QKV}bias"}:
            columns = whole.get(f"{name[: -len(last)]}weight".replace("linear_qkv", "linear_proj"))
            if columns is None or len(columns.shape) != 2:
                raise ValueError("the layer has no linear_proj.weight, which tells the size of a head")
            three = self._attention(entry, columns.shape[1])
            if self.layout == "gpt":
                whole_qkv = replace(join([piece for _, piece in three], 0), origin=f"{entry.origin}, regrouped")
                return [(f"{start}attn.c_attn.{last}", _transposed(whole_qkv))]
            return [(f"{start}self_attn.{kind}_proj.{last}", piece) for kind, piece in three]
        second, has_gate = whole.get(_second(name)), self.layout == "llama"
        if second is not None and _is_gated(entry, second) is not has_gate:
            raise ValueError(f"the layout {self.layout!r} has {'a' if has_gate else 'no'} gate in its MLP")
        if short in {f"{_FC1}weight", f"{_FC1}bias"} and self.layout == "llama":
            half = entry.shape[0] // 2
            gate, up = narrow(entry, 0, 0, half), narrow(entry, 0, half, entry.shape[0] - half)
            return [
                (f"{start}mlp.gate_proj.{last}", replace(gate, origin=f"{entry.origin}, first half")),
                (f"{start}mlp.up_proj.{last}", replace(up, origin=f"{entry.origin}, second half")),
            ]
        for old, new in _NAMES[self.layout].items():
            if short.startswith(old) and bool(layer) is not old.startswith(_OUTSIDE):
                linear = self.layout == "gpt" and new.startswith(("attn.", "mlp."))
                return [(f"{start}{new}{short[len(old) :]}", _transposed(entry) if linear else entry)]
        raise ValueError(f"the layout {self.layout!r} has no name for it; 'core' keeps the names")

    def _attention(self, entry: Entry, columns: int) -> list[tuple[str, Entry]]:
        """Return the rows of queries, keys and values of all groups."""
        assert self.heads is not None
        size, rest = divmod(columns, self.heads)
        groups, more = divmod(entry.shape[0] - columns, 2 * size) if size and not rest else (0, 1)
        if more or groups < 1 or self.heads % groups:
            raise ValueError(f"{entry.shape[0]} rows of attention for {columns} columns do not fit {self.heads} heads")
        queries = self.heads // groups * size
        sizes = {"q": (0, queries), "k": (queries, size), "v": (queries + size, size)}
        return [
            (kind, replace(_of_groups(entry, groups, at, count), origin=f"{entry.origin}, rows of {kind}"))
            for kind, (at, count) in sizes.items()
        ]


def _joined(name: str, ranks: Sequence[tuple[str, Entry]], own: Mapping[str, dict[int, tuple[str, Entry]]]) -> Entry:
    """Return a tensor joined over its ranks, with its origin."""
    entries = [entry for _, entry in ranks]
    if any(entry.composite is not None for entry in entries):
        raise ValueError("it is sparse or quantized: rules can change only dense tensors")
    title = ranks[0][0] if len(ranks) == 1 else f"{ranks[0][0]} and {len(ranks) - 1} more"
    known = next((dim for pattern, dim in _DIVIDED if pattern.fullmatch(name)), "unknown")
    if known == 0 and not all(entry.shape for entry in entries):
        raise ValueError("it has no rows: its shape is []")
    if len(ranks) == 1:
        return replace(entries[0], origin=title)
    if known == "unknown":
        raise ValueError("how it is divided over tensor ranks is not known: join it with rules.concatenate")
    if known is None:
        if len({(entry.shape, entry.dtype) for entry in entries}) > 1:
            raise ValueError("the ranks have different shapes or dtypes of a tensor that each has whole")
        return replace(entries[0], origin=ranks[0][0])
    assert isinstance(known, int)
    second = own.get(_second(name))
    if second is not None and _is_gated(entries[0], next(iter(second.values()))[1]):
        halves = [entry.shape[0] // 2 for entry in entries]
        entries = [narrow(entry, 0, 0, half) for entry, half in zip(entries, halves, strict=True)] + [
            narrow(entry, 0, half, half) for entry, half in zip(entries, halves, strict=True)
        ]
    return replace(join(entries, known), origin=title)


def _second(name: str) -> str:
    """Return the name of the second weight of an MLP from that of the first weight or bias; empty for other names."""
    before, found, last = name.rpartition("linear_fc1.")
    return f"{before}linear_fc2.weight" if found and last in {"weight", "bias"} else ""


def _is_gated(first: Entry, second: Entry) -> bool:
    """Return whether the first layer of an MLP has a gate: it has twice as many rows as the second has columns."""
    columns = second.shape[1] if len(second.shape) == 2 else -1
    if not first.shape or first.shape[0] not in {columns, 2 * columns}:
        raise ValueError("its rows are neither the columns of linear_fc2.weight nor twice as many")
    return first.shape[0] == 2 * columns


def _of_groups(entry: Entry, groups: int, at: int, count: int) -> Entry:
    """Return ``count`` rows from ``at`` of each group of rows."""
    rows = entry.shape[0] // groups
    return join([narrow(entry, 0, group * rows + at, count) for group in range(groups)], 0)


def _transposed(entry: Entry) -> Entry:
    """Return the weight of one of GPT-2's linear layers, which has inputs first; a bias unchanged."""
    return permute(entry, (1, 0)) if len(entry.shape) == 2 else entry
