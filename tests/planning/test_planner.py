from __future__ import annotations

import pytest
from msgspec.structs import replace

import sluice
from sluice._dtypes import ITEM_BYTES
from sluice.planning.memory_layout import shared_targets
from sluice.planning.planner import plan_load
from sluice.planning.threads import reader_count
from sluice.records import Elements, Fill, Finisher, MachineFacts, Request, Target
from support.plans import FILE, MIB, entry, facts, index_of, request
from support.plans import planned as plan


def big(name: str = "w", *, storage: int = 0, mib: int = 20, **changes: object) -> Request:
    return request(name, entry((mib * MIB // 4,), storage=storage), **changes)


def test_cold_large_tensors_are_read_directly_into_congruent_mappings() -> None:
    made = plan([big()], [(8256, 20 * MIB)], facts(cached=False))
    assert {read.methods for read in made.reads} == {("direct", "buffered")}
    assert {read.into for read in made.reads} == {0}
    assert made.blocks[0].kind == "mapping"
    assert made.blocks[0].offset == 8256 % 4096
    assert made.staging_buffers == 0
    assert made.readers == 3  # three reads of 7 MiB; never more threads than reads
    for read in made.reads[1:]:
        assert read.offset % 4096 == 0
        assert (made.blocks[0].offset + read.into_offset) % 4096 == 0
    assert sum(read.nbytes for read in made.reads) == 20 * MIB


def test_cached_large_tensors_are_read_buffered_by_as_many_threads_as_cores() -> None:
    made = plan([big()], [(8256, 20 * MIB)], facts(cached=True, cores=2))
    assert {read.methods for read in made.reads} == {("buffered",)}
    assert made.blocks[0].offset == 0
    assert made.readers == 2


@pytest.mark.parametrize("machine", [facts(cached=None), facts(cached=False, direct_io=False)])
def test_unknown_cache_state_and_refused_direct_io_mean_buffered(machine: MachineFacts) -> None:
    assert {read.methods for read in plan([big()], [(0, 20 * MIB)], machine).reads} == {("buffered",)}


def test_page_cache_option_overrides_the_probes() -> None:
    kept = plan([big()], [(0, 20 * MIB)], facts(cached=False), page_cache="keep")
    bypassed = plan([big()], [(0, 20 * MIB)], facts(cached=True), page_cache="bypass")
    assert {read.methods[0] for read in kept.reads} == {"buffered"}
    assert {read.methods[0] for read in bypassed.reads} == {"direct"}
    assert bypassed.drop_behind
    assert not kept.drop_behind


def test_casts_go_through_staging_in_pieces_with_space_for_whole_blocks() -> None:
    made = plan([big(mib=2048, dtype="bfloat16")], [(8256, 2048 * MIB)], facts(cached=False))
    assert all(read.into is None and len(read.copies) == 1 for read in made.reads)
    assert all(read.nbytes + 2 * 4096 <= made.staging_buffer_bytes for read in made.reads)
    assert sum(copy.shape[0] for read in made.reads for copy in read.copies) == 512 * MIB
    assert made.predicted.total_bytes <= 1024 * MIB + 100 * MIB
    assert made.staging_buffers * made.staging_buffer_bytes <= 64 * MIB


@pytest.mark.parametrize(
    ("staging", "buffer", "count"),
    [(MIB, MIB, 1), (16 * MIB, 2 * MIB, 8), (64 * MIB, 4 * MIB, 16), (1024 * MIB, 8 * MIB, 16)],
)
def test_staging_is_divided_into_two_buffers_for_each_reader(staging: int, buffer: int, count: int) -> None:
    made = plan([big(mib=256, dtype="bfloat16")], [(0, 256 * MIB)], facts(cached=False), staging=staging)
    assert (made.staging_buffer_bytes, made.staging_buffers) == (buffer, count)
    assert all(read.nbytes <= buffer - 2 * 4096 for read in made.reads)
    assert made.copiers == min(2, count - 1)


@pytest.mark.parametrize(
    ("small", "dtype", "readers"),
    [
        (0, "float32", 8),  # reads of 8 MiB
        (16, "float32", 11),  # the same bytes in one and a half times as many reads
        (200, "float32", 16),
        (200, "bfloat16", 8),  # staged: more readers would only occupy buffers
    ],
)
def test_short_reads_get_more_readers(small: int, dtype: str, readers: int) -> None:
    """The bytes in flight do not depend on small tensors between large ones."""
    large = [big(f"w{i}", storage=i, mib=8, dtype=dtype) for i in range(32)]
    between = [request(f"b{i}", entry((1024,), storage=32 + i), dtype=dtype) for i in range(small)]
    storages = [(i * 16 * MIB, 8 * MIB) for i in range(32)] + [(i * MIB + 512 * MIB, 4096) for i in range(small)]
    made = plan(large + between, storages, facts(cached=False, cores=2))
    assert made.readers == readers
    assert made.staging_buffers <= 16


@pytest.mark.parametrize(
    ("mib", "cached", "serial", "readers"),
    [(8, False, 8, 0), (9, False, 8, 2), (32, True, 8, 0), (33, True, 8, 2), (8, True, 0, 1)],
)
def test_the_caller_reads_what_takes_less_time_than_threads(mib: int, cached: bool, serial: int, readers: int) -> None:
    read = plan([big(mib=mib)], [(0, mib * MIB)], facts(cached=cached, direct_io=False, cores=2))
    assert reader_count(read.reads, read.facts, serial_bytes=serial * MIB) == readers


def test_readers_that_never_wait_for_a_disk_copy_by_themselves() -> None:
    made = plan([big(mib=256, dtype="bfloat16")], [(0, 256 * MIB)], facts(cached=True, cores=2))
    assert (made.readers, made.copiers, made.staging_buffers) == (2, 0, 2)


def test_staging_below_the_minimum_is_refused() -> None:
    with pytest.raises(sluice.BudgetError, match=r"staging is too small; expected at least 1\.00 MiB; found 64\.0 KiB"):
        plan([big(dtype="bfloat16")], [(0, 20 * MIB)], facts(), staging=64 << 10)


def test_bytes_that_several_targets_need_are_read_once() -> None:
    requests = [big(), *(request(f"rows {i}", entry((MIB // 2,), start=i * MIB // 2)) for i in (0, 1))]
    made = plan(requests, [(0, 20 * MIB)], facts(cached=True))
    assert made.read_bytes == 20 * MIB
    assert {copy.target for read in made.reads for copy in read.copies} == {0, 1, 2}


def filled(offset: int, nbytes: int, *, dtype: str = "float32", swap_bytes: int = 0, device: str = "cpu") -> Target:
    item = ITEM_BYTES[dtype]
    fill = Fill(
        file=0,
        offset=offset,
        elements=Elements(dtype=dtype, swap_bytes=swap_bytes),
        shape=(nbytes // item,),
        source_stride=(1,),
        target_stride=(1,),
    )
    return Target(name="w", dtype=dtype, nbytes=nbytes, device=device, fills=(fill,))


def test_whole_weights_that_wait_for_finishers_count_on_their_device() -> None:
    finisher = Finisher(name="int8", shape=(5 * MIB,), finished_sizes=(5 * MIB,))
    targets = [replace(filled(0, 20 * MIB, device=f"cuda:{i}"), finisher=finisher) for i in (0, 1, 1)]
    made = plan_load(targets, (FILE,), facts(), staging_bytes=64 * MIB)
    assert [each.working_bytes for each in made.devices] == [20 * MIB, 40 * MIB]


def test_big_endian_numbers_are_read_alone() -> None:
    targets = [filled(0, 400, swap_bytes=4), filled(200, 400, dtype="uint8"), filled(600, 8), filled(608, 8)]
    made = plan_load(targets, (FILE,), facts(cached=True), staging_bytes=MIB)
    assert [([copy.target for copy in read.copies], read.swap_bytes) for read in made.reads] == [
        ([0], 4),
        ([1, 2, 3], 0),
    ]


def test_live_tensors_are_read_in_place_when_cached_and_through_staging_when_cold() -> None:
    live = big(existing=True, stride=(1,))
    assert {read.into for read in plan([live], [(0, 20 * MIB)], facts(cached=True)).reads} == {0}
    assert {read.into for read in plan([live], [(0, 20 * MIB)], facts(cached=False)).reads} == {None}
    assert plan([live], [(0, 20 * MIB)], facts(cached=True)).predicted.total_bytes < 20 * MIB


@pytest.mark.parametrize(
    ("requested", "offset", "cached"),
    [
        (big(), 8193, False),  # misaligned
        (request("w", entry((1024, 1024)), stride=(1, 1024), existing=True), 0, True),  # permuted
    ],
)
def test_what_cannot_be_read_in_place_goes_through_staging(requested: Request, offset: int, cached: bool) -> None:
    made = plan([requested], [(offset, 20 * MIB)], facts(cached=cached))
    assert all(read.into is None for read in made.reads)


def test_targets_of_several_fills_are_never_read_over_their_neighbors() -> None:
    parts = [filled(at, MIB).fills[0] for at in (100_000, 9_000_000)]
    fills = tuple(replace(fill, target_start=number * MIB // 4) for number, fill in enumerate(parts))
    target = Target(name="w", dtype="float32", nbytes=2 * MIB, device="cpu", fills=fills)
    made = plan_load([target], (FILE,), facts(cached=False), staging_bytes=64 * MIB)
    assert all(read.into is None for read in made.reads)


def test_small_targets_share_arenas_which_are_capped() -> None:
    requests = [request(f"t{i}", entry((100_000,), start=100_000 * i)) for i in range(9)]
    made = plan(requests, [(0, 3_600_000)], facts())
    assert all(arena <= MIB for arena in made.arenas)
    assert len(made.arenas) == 5
    assert all(block.offset % 64 == 0 for block in made.blocks)


def test_reads_are_in_file_order() -> None:
    requests = [big(f"w{i}", storage=i) for i in (2, 0, 1)]
    made = plan(requests, [(i * 21 * MIB, 20 * MIB) for i in range(3)], facts(cached=False))
    offsets = [read.offset for read in made.reads]
    assert offsets == sorted(offsets)


def test_views_of_one_storage_share_a_target_if_they_overlap_or_touch() -> None:
    requests = [
        request("a", entry((10,), start=0)),
        request("b", entry((10,), start=5)),
        request("c", entry((5,), start=15)),
        request("d", entry((5,), start=100)),
    ]
    targets, views = shared_targets(requests, index_of([(0, 4000)]), {})
    assert [target.nbytes for target in targets] == [80, 20]
    assert [(view.target, view.start) for view in views] == [(0, 0), (0, 5), (0, 15), (1, 0)]


def test_a_sparse_view_becomes_contiguous_and_an_expanded_one_stays_small() -> None:
    requests = [
        request("column", entry((1000,), stride=(1000,))),
        request("zero", entry((1 << 40,), storage=1, stride=(0,))),
    ]
    targets, views = shared_targets(requests, index_of([(0, 4_000_000), (4_000_000, 4)]), {})
    assert [target.nbytes for target in targets] == [4000, 4]
    assert [view.stride for view in views] == [(1,), (0,)]


def test_equal_views_are_one_tensor_and_casts_do_not_mix() -> None:
    requests = [
        request("a", entry((4, 4))),
        request("b", entry((4, 4))),
        request("c", entry((4, 4)), dtype="bfloat16"),
    ]
    targets, views = shared_targets(requests, index_of([(0, 64)]), {})
    assert len(targets) == 2
    assert views[0] == views[1]
    assert views[2].target == 1


def test_where_no_thread_may_start_the_caller_reads() -> None:
    made = plan([big(mib=40, dtype="bfloat16")], [(0, 40 * MIB)], replace(facts(cached=False), threads=False))
    assert (made.readers, made.copiers) == (0, 0)
