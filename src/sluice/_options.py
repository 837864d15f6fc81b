"""The one home of every default, each with its unit and its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sluice._public import public

__all__ = ["Limits", "MemoryLimits", "PageCache", "Place", "TransferOptions"]

#: ``auto``: direct reads for what is not cached, buffered reads for the rest. ``keep``: buffered reads only, so that
#: the next load finds the file cached. ``bypass``: direct reads, and what had to be buffered is dropped again.
PageCache = Literal["auto", "keep", "bypass"]

#: ``copy``: every tensor gets memory of its own. ``map``: tensors on the CPU that need no change are the file's pages.
Place = Literal["copy", "map"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that a hostile or damaged file meets before memory or time is spent on it.

    Each default is far above what real checkpoints need; raise one by name when you trust the file.

    Example:
        >>> Limits(entries=5_000_000).entries
        5000000
    """

    #: Tensors and zip records in one checkpoint. The largest models have under 200,000; a million takes 10 s.
    entries: int = 500_000
    #: Files in one checkpoint: a shard or a parameter each. Looking at this many takes about a second.
    files: int = 100_000
    #: Nested containers. Real training states nest about 10 deep.
    depth: int = 64
    #: Opcodes of one pickle, each of which builds at most one object; a tensor takes about 30.
    nodes: int = 16_000_000
    #: Values that stand at several places, because their containers do. Each further place counts, and once more for
    #: each 64 characters of its dotted name. A kilobyte can describe 2**40 places; listing so many takes about 64 MiB.
    #: An optimizer whose groups share their ``betas`` has three for each group.
    repeats: int = 250_000
    #: Bytes of one header: a safetensors header, data.pkl or a zip central directory. safetensors stops at 100 MB too.
    header_bytes: int = 100_000_000
    #: Bytes of one tensor or record name.
    name_bytes: int = 4_096
    #: Dimensions of a tensor; torch itself allows 64.
    dimensions: int = 64
    #: Bytes that a conversion may write beyond those that the file holds, because tensors are expanded or overlap. A
    #: few hundred bytes can describe a tensor of a terabyte.
    repeated_bytes: int = 16 << 30
    #: Whether files of a checkpoint directory may be symbolic links that lead outside it. Hugging Face snapshots are.
    symlinks_outside: bool = True


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """How much memory may grow, from the call on. Sizes are bytes or texts such as ``"2GiB"``.

    Example:
        >>> MemoryLimits(host="4GiB", staging="32MiB").staging
        '32MiB'
    """

    #: Growth of host memory, all kinds together; None takes the control group's limit or the free memory.
    host: int | str | None = None
    #: Growth of each accelerator's reserved memory: one size for all, or a size for each device name.
    device: int | str | Mapping[str, int | str] | None = None
    #: Reusable host buffers, all together. 64 MiB is 8 readers of 8 MiB, which saturated the disks measured.
    staging: int | str = "64MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How bytes get to where they stay; what the verbs hand down unchanged."""

    #: How much memory may grow; None for the defaults.
    memory: MemoryLimits | None = None
    #: How the page cache is used.
    page_cache: PageCache = "auto"
    #: Whether tensors may be pages of the files.
    place: Place = "copy"


#: Bytes of one read and of one staging buffer. Below 4 MiB direct reads lose bandwidth, above 16 MiB nothing is gained.
READ_BYTES = 8 << 20

#: Files smaller than this are always read buffered: the gain of direct reads is lost in their latency, and the next
#: load finds them cached.
DIRECT_FILE_BYTES = 64 << 20

#: Threads for reads that wait for a disk: a queue depth of 8 saturated NVMe and virtual disks; networks want as many.
WAITING_READERS = 8

#: The most of them, where reads are short: what counts is how many bytes are asked for at once. A small tensor between
#: large ones waits behind their reads as long as one of them, and its reader with it.
MOST_WAITING_READERS = 16

#: Alignment that direct reads need in file and memory. Python cannot ask for the device's own; 4096 covers all in use.
BLOCK_BYTES = 4096

#: Size of a huge page on x86-64 and arm64 with 4 KiB base pages.
HUGE_PAGE_BYTES = 2 << 20

#: Targets of at least this size get a mapping of their own and are read without staging. Smaller ones share arenas:
#: a mapping costs two kernel objects and up to 8 KiB of rounding, 0.8 % at this size.
OWN_MAPPING_BYTES = 1 << 20

#: Size of one arena. It lives until its last tensor dies, so it must stay small.
ARENA_BYTES = 1 << 20

#: An arena that holds at least this much is closed where another module begins: deleting a module frees its own.
ARENA_MODULE_BYTES = 64 << 10

#: Small neighbours in a file share one mapping up to this span. It lives until its last tensor dies, as an arena does.
MAPPED_RANGE_BYTES = 1 << 20

#: Mappings of one load, by which neighbours are joined further: Linux allows a process 65,530 of all kinds.
MAPPED_RANGES = 10_000

#: Staging below this cannot hold a block-aligned read of useful size.
SMALLEST_STAGING_BYTES = 1 << 20

#: Alignment of small targets in an arena and of targets that need no congruence: a cache line, torch's own choice.
TENSOR_ALIGNMENT_BYTES = 64

#: Neighbouring ranges closer than this are read as one: reading the gap takes less time than another request.
COALESCE_GAP_BYTES = 128 << 10

#: Bytes of one read of headers: the directory and the small records of a shard with two hundred tensors fit, and a disk
#: needs no longer for them than for one page.
HEADER_PIECE_BYTES = 16 << 10

#: Distance of page-cache probes: one for each read.
PROBE_STEP_BYTES = READ_BYTES

#: Bytes that a probe looks at, where the kernel counts cached pages.
PROBE_BYTES = 256 << 10

#: Probes of one file at most; larger files are probed at larger steps.
PROBES_PER_FILE = 4096

#: Elements of one piece of a cast. torch splits larger ones over its own thread pool, and a pool for every reader
#: would oversubscribe the machine (at::internal::GRAIN_SIZE is 32768).
CAST_PIECE_ELEMENTS = 32_767

#: Elements of such a piece along the dimension in which a transposed source is contiguous: some lines of the cache. The
#: piece is up to eight times as long in the other one, and three to five times as fast as whole rows.
TILE_ROWS = 64

#: Bytes that are moved at once where elements lie at addresses that their dtype cannot have: they stay in the cache of
#: a core, and the calls between cost little.
MOVED_BYTES = 256 << 10

#: Processors from which casts to a narrower dtype for an accelerator are made on the host: one casts about 3 GB/s, and
#: with fewer than 8 a bus of 25 GB/s carries the wider dtype sooner.
HOST_CAST_CORES = 8

#: Part of what an accelerator has free that ``device="auto"`` leaves for activations and the workspaces of kernels.
AUTO_RESERVE = 0.1

#: Interval of the sampler inside a load, in seconds. VmHWM holds the exact total; samples only split it by kind.
SAMPLE_SECONDS = 0.01

#: Seconds that a thread whose start was interrupted is waited for: longer than any system takes to run it.
THREAD_START_SECONDS = 5.0

#: Host memory that a load needs beside targets and staging: thread stacks, malloc arenas, torch's lazy parts.
OVERHEAD_BYTES = 16 << 20

#: Records of the plan for each tensor, in bytes.
OVERHEAD_PER_TENSOR_BYTES = 2 << 10

#: Index and layout of a conversion for each tensor, in bytes.
OVERHEAD_PER_CONVERTED_TENSOR_BYTES = 1 << 10

#: Host memory that the usual ways to load take beside tensors: the thread pool, objects, the heap's rest.
METHOD_OVERHEAD_BYTES = 16 << 20

#: Most that a read probe reads to tell how fast a load would be: a tenth of a second on a disk of 2 GB/s.
PROBE_READ_BYTES = 128 << 20

#: Boxes that reshaping one tensor may take where strides cannot express it. Each is a copy of its own: more of them
#: cost more than they move.
RESHAPE_BOXES = 4096

#: Virtual memory of one thread: a stack of 8 MiB and a malloc arena of 64 MiB. It only counts under RLIMIT_AS.
THREAD_ADDRESS_BYTES = 72 << 20

#: Virtual memory that a load needs beside weights, staging and threads, under RLIMIT_AS.
RESERVED_ADDRESS_BYTES = 64 << 20

#: Descriptors kept open at once, over all checkpoints of the process: four times what the readers use. Opening one
#: again costs microseconds on a local disk; the usual limit of a process is 1,024.
OPEN_FILES = 64

#: Threads that index the files of a directory. They wait for the disk or the network; parsing takes turns anyway.
INDEXING_THREADS = 8

#: Staging from which a conversion gives a share to direct writes: the reads need the rest.
SHARED_STAGING_BYTES = 16 << 20

#: Elements of a file under construction that come in shorter runs are put together in memory first, where they fit it:
#: a write takes as long as copying about this many bytes.
SHORTEST_RUN_BYTES = 64 << 10

#: Copies that one plan of a conversion holds at most: their records take about a kilobyte each.
STREAM_FILLS = 4096

#: Bytes of one piece that is cast or put in another order on its way to a file.
SCRATCH_BYTES = 512 << 10

#: Bytes of the buffers of a save, one for each writer. Everything goes through them that is not in host memory as the
#: file wants it, and all of what is written directly. Larger ones are no faster.
SAVE_STAGING_BYTES = 16 << 20

#: Threads that write a large file: 4 saturated the disks measured; they also compute the CRCs.
WRITERS = 4

#: Bytes of a tensor that one writer takes at once.
WRITE_BYTES = 8 << 20

#: Shorter writes go through the page cache, many together.
DIRECT_WRITE_BYTES = 256 << 10

#: Short writes of a directly written file that are held back at most, in bytes and in number.
SMALL_WRITES_BYTES = 2 << 20
SMALL_WRITES = 4096

#: Bytes of one batch of a scan. Two are held at once, and the staging of one plan beside them: 64 MiB together.
SCAN_BATCH_BYTES = 24 << 20

#: Staging of the plan of one batch; only what is small or strided goes through it.
SCAN_STAGING_BYTES = 16 << 20

#: Bytes of one range in which a scan reads a file: several of a batch are under way at once.
SCAN_WINDOW_BYTES = 4 << 20

#: Pieces of one batch: the records of a plan take about 2 KiB for each.
SCAN_BATCH_PIECES = 2_000

#: Bytes of a tensor that a verification holds to hash it in another order than that of the file. Larger ones are read
#: again: several of these can be half read at once.
SCAN_GATHERED_BYTES = 4 << 20

#: Bytes that are worth a job of their own: handing one to another thread takes about as long as hashing 64 KiB.
SCAN_JOB_BYTES = 1 << 20

#: How many times as large as its storage a tensor may be that a scan reads element by element. More is a stride of 0
#: that would make a small file endless work.
SCAN_REPEATS = 1_000
