"""The defaults of sluice, each with its unit and its reason."""

from __future__ import annotations

#: Bytes of one read and of one staging buffer. Direct reads lose bandwidth below 4 MiB and gain none above 16 MiB.
READ_BYTES = 8 << 20

#: Smaller files are always read buffered: latency cancels the gain of direct reads, and the next load finds the file
#: cached.
DIRECT_FILE_BYTES = 64 << 20

#: Most bytes of local files that are read in the thread of the caller. Two threads start in the time in which it copies
#: two megabytes, and for many small tensors they would wait for each other's interpreter lock.
SERIAL_BYTES = READ_BYTES

#: Most such bytes if all of them are in the page cache: one thread copies them in the time in which two start.
CACHED_SERIAL_BYTES = 32 << 20

#: Copies out of staging that are smaller on average take longer in the interpreter than in the processor's memory.
SMALL_COPY_BYTES = 64 << 10

#: Threads for reads that wait for a disk: a queue depth of 8 saturated NVMe and virtual disks, and suits networks.
WAITING_READERS = 8

#: Most such threads if reads are short: throughput depends on the bytes in flight. A small read queued among large ones
#: takes as long as a large one.
MOST_WAITING_READERS = 16

#: Alignment of direct reads in file and memory. Python cannot query that of the device; 4096 suits all common devices.
BLOCK_BYTES = 4096

#: Size of a huge page on x86-64 and arm64 with 4 KiB base pages.
HUGE_PAGE_BYTES = 2 << 20

#: Processor time of the first touch of a huge page from which on it counts as slow. Measured: 0.2 to 0.4 ms where the
#: memory is there, 4.5 to 7 ms where the host has taken it; 512 touches of 4 KiB pages take 1 to 1.4 ms in both cases.
SLOW_HUGE_PAGE_SECONDS = 0.002

#: Most huge pages in whose place 4 KiB pages are used, after slow touches, before another one is touched: 512 MiB.
MOST_UNTOUCHED_PAGES = 256

#: Targets of at least this size get their own mapping and are read without staging. Smaller targets share arenas: a
#: mapping costs two kernel objects and up to 8 KiB of rounding, which is 0.8 % at this size.
OWN_MAPPING_BYTES = 1 << 20

#: Size of one arena. It is freed with its last tensor, so it must be small.
ARENA_BYTES = 1 << 20

#: An arena with at least this many bytes is closed at the next module, so that deleting a module frees its memory.
ARENA_MODULE_BYTES = 64 << 10

#: Longest range of a file in which small tensors share one mapping. It is freed with its last tensor, like an arena.
MAPPED_RANGE_BYTES = 1 << 20

#: Most file mappings of one load; beyond this, longer ranges share a mapping. Linux allows a process 65,530 mappings.
MAPPED_RANGES = 10_000

#: Least staging, in bytes: less cannot hold a block-aligned read of useful size.
SMALLEST_STAGING_BYTES = 1 << 20

#: Alignment of small targets in an arena and of targets without congruence: a cache line, as in torch.
TENSOR_ALIGNMENT_BYTES = 64

#: Neighboring ranges closer than this are read as one: reading the gap takes less time than another request.
COALESCE_GAP_BYTES = 128 << 10

#: Bytes of one read of headers: enough for the directory and the small records of a shard with 200 tensors, and as fast
#: to read as one page.
HEADER_PIECE_BYTES = 16 << 10

#: Bytes between page-cache probes: one probe per read.
PROBE_STEP_BYTES = READ_BYTES

#: Most bytes that a probe examines, on kernels that count cached pages: a whole step of files up to 32 GiB. Counting
#: the pages of 1 GiB takes a few milliseconds if all of them are cached.
PROBE_BYTES = READ_BYTES

#: Seconds for which the control groups of a process without a limit are not asked again: it takes as long as reading a
#: small file.
UNLIMITED_SECONDS = 1.0

#: Cached share of a range from which it is read through the page cache. Reading the missing pages that way takes
#: several times as long as a direct read, in pieces as small as the gaps.
CACHED_SHARE = 0.85

#: Most probes of one file; larger files are probed at larger steps.
PROBES_PER_FILE = 4096

#: Elements of packs that all threads of torch together decode at a time: temporary memory of about 2 MiB. A decoder
#: makes some 40 calls for a piece, so that larger pieces are faster, but malloc keeps their memory in each thread.
DECODED_ELEMENTS = 1 << 17

#: Elements of one piece of a cast. torch splits larger casts over its own thread pool, and one pool per reader would
#: oversubscribe the machine (at::internal::GRAIN_SIZE is 32768).
CAST_PIECE_ELEMENTS = 32_767

#: Elements of such a piece along the dimension in which a transposed source is contiguous: several cache lines. The
#: piece is up to eight times as long in the other dimension, and three to five times as fast as whole rows.
TILE_ROWS = 64

#: Bytes that are moved at once if elements are at addresses that are misaligned for their dtype: they fit the cache of
#: a core, and the cost of each call is small in comparison.
MOVED_BYTES = 256 << 10

#: Share of the free memory of an accelerator that ``device="auto"`` leaves for activations and kernel workspaces.
AUTO_RESERVE = 0.1

#: Interval of the memory sampler, in seconds. VmHWM has the exact total; samples only divide it by kind.
SAMPLE_SECONDS = 0.01

#: Seconds to wait for a thread whose start was interrupted: longer than any system takes to start one.
THREAD_START_SECONDS = 5.0

#: Host memory of a load in addition to targets and staging: thread stacks, malloc arenas, lazily initialized torch.
OVERHEAD_BYTES = 16 << 20

#: Host memory per tensor, besides its bytes: the records of index, module and plan, and torch's own for the new tensor.
#: Measured between 10,000 and 100,000 small tensors with short names; ``OVERHEAD_BYTES`` has room for longer ones.
OVERHEAD_PER_TENSOR_BYTES = 2200

#: Bytes of the index and layout of a conversion per tensor.
OVERHEAD_PER_CONVERTED_TENSOR_BYTES = 1 << 10

#: Host memory of other loading methods in addition to tensors: thread pool, Python objects, unused heap.
METHOD_OVERHEAD_BYTES = 16 << 20

#: Most boxes for reshaping one tensor if strides cannot express the result. Each box is one copy; the overhead of more
#: boxes exceeds the time of moving their bytes.
RESHAPE_BOXES = 4096

#: Most descriptors open at once in all checkpoints of the process: four times the number that readers use. Reopening a
#: file costs microseconds on a local disk; the usual limit of a process is 1,024. Files of a cache that are in use are
#: open besides, because they are locked: at most half of what the process may have, and this number.
OPEN_FILES, CACHED_OPEN_FILES = 64, 16384

#: Threads that index the files of a directory. They wait for the disk or the network; the GIL serializes parsing.
INDEXING_THREADS = 8

#: Recycled memory has sizes that are multiples of this, so that tensors of one size fit although each begins at another
#: offset of a page.
RECYCLED_STEP_BYTES = 64 << 10

#: Smaller parameters of a streamed model stay in memory: reading one takes as long as reading this many bytes.
STREAMED_BYTES = 256 << 10

#: Largest share of the memory of a streamed model that its small parameters take; if they need more, they are streamed.
SMALL_WEIGHTS_SHARE = 0.25

#: Largest share of what calls of a streamed model would read for which smaller parts than usual are its blocks.
SMALLER_BLOCKS_SHARE = 0.85

#: Most bytes of the rows of an embedding that are read at once.
LOOKUP_BYTES = 8 << 20

#: Bytes of all buffers of a save. Direct writes use them, and tensors that are not in host memory in the form that the
#: file requires. Larger buffers are not faster.
SAVE_STAGING_BYTES = 16 << 20

#: Number of these buffers, and so of direct writes at once: 4 saturated the measured disks.
SAVE_BUFFERS = 4

#: Threads that write a large file: more than buffers, so that writes stay in flight while others compute CRCs.
WRITERS = 6

#: Bytes of a tensor that one writer takes at once.
WRITE_BYTES = 8 << 20

#: Shorter writes go through the page cache, in groups.
DIRECT_WRITE_BYTES = 256 << 10

#: Most short writes that a directly written file defers, in bytes and in number.
SMALL_WRITES_BYTES = 2 << 20
SMALL_WRITES = 4096

#: Bytes of one batch of a scan. Two batches and the staging of one plan are held at once: 64 MiB in total.
SCAN_BATCH_BYTES = 24 << 20

#: Staging of the plan of one batch, in bytes; only small or strided tensors need it.
SCAN_STAGING_BYTES = 16 << 20

#: Bytes of one range that a scan reads; several ranges of a batch are in flight at once.
SCAN_WINDOW_BYTES = 4 << 20

#: Most pieces of one batch: the records of a plan take about 2 KiB per piece.
SCAN_BATCH_PIECES = 2_000

#: Least bytes of a task for another thread: handing over a task takes about as long as hashing 64 KiB.
SCAN_JOB_BYTES = 1 << 20

#: Largest ratio of the bytes of a tensor to those of its storage that a scan reads element by element. Beyond it, a
#: stride of 0 in a small file would take unbounded time.
SCAN_REPEATS = 1_000

#: Seconds between two looks at the other ranks of a load, while this one reads or waits: whether one has failed.
RANK_LOOK_SECONDS = 1.0

#: Seconds between two questions where a rank is that has not joined the call.
RANK_SEEK_SECONDS = 0.25

#: Seconds after which a rank that waits says for whom; each further time after twice as many.
RANK_WORD_SECONDS = 10.0

#: Seconds between two signs of life of a rank that reads or waits.
RANK_PULSE_SECONDS = 5.0

#: Seconds without a sign of life after which a rank counts as stuck. Planning gives none, and indexing a thousand files
#: of a slow network disk takes minutes.
RANK_PATIENCE_SECONDS = 300.0

#: Seconds for which the process of a rank must be stopped (SIGSTOP) to count as failed: a debugger attaches faster.
RANK_STOPPED_SECONDS = 5.0

#: Seconds that a failed load waits for ranks that have not noticed: each notices between two reads.
RANK_FAREWELL_SECONDS = 10.0

#: Bytes of the first request for a remote object: the headers of most files, or their beginning.
REMOTE_FIRST_BYTES = 64 << 10

#: Bytes of any other request for a part of a header: the directory of a zip file with 2,000 records takes 160 KiB.
REMOTE_HEADER_BYTES = 256 << 10

#: Remote files whose first bytes are kept for the reading of their headers: 2 MiB of them.
REMOTE_FIRST_BYTES_KEPT = 32

#: Largest request for a remote object where the latency is short, as object stores recommend; largest one where it is
#: long; and bytes per second of a line that requests should keep busy: 10 Gbit/s.
REMOTE_READ_BYTES = 8 << 20
REMOTE_MOST_BYTES = 32 << 20
REMOTE_LINE_BYTES = 1_250_000_000

#: Bytes of a body that a client of an object store hands over at once: held in addition to the memory of the caller.
REMOTE_PIECE_BYTES = 128 << 10

#: Requests for one object of a store in flight at once: obstore holds about 2 MiB for each.
STORE_REQUESTS = 8

#: Largest gap between two ranges of a remote object that are read in one request: a request takes as long as the
#: transfer of about 1 MiB, which the Rust crate object_store uses as well.
REMOTE_GAP_BYTES = 1 << 20

#: Requests for one remote object in flight at once.
REMOTE_REQUESTS = 16

#: The same of files that fsspec reads. Each request is a bytes object of its own, and some file systems join it from
#: pieces. A load of 320 MiB grew by 30 MiB more than its tensors; with 8 requests by 52 MiB.
FSSPEC_READ_BYTES = 2 << 20
FSSPEC_GAP_BYTES = 256 << 10
FSSPEC_REQUESTS = 4

#: Seconds of attempts at one range after which it is given up; fewer of a server to which no connection was ever made,
#: because its address may be wrong. An attempt that brought this many bytes begins the time anew.
REMOTE_PATIENCE_SECONDS = 120.0
REMOTE_UNREACHED_SECONDS = 10.0
REMOTE_PROGRESS_BYTES = 64 << 10

#: Answers in a row that contradict the request after which a range is given up: a proxy may fail once, a server that
#: does not understand ranges fails always.
REMOTE_WRONG_ANSWERS = 3

#: Answers for each permitted connection after which one more is tried, once a server has refused some.
REMOTE_ANSWERS_FOR_MORE = 4

#: Longest wait for one of the connections that a busy server permits. The thread that holds it may wait for memory that
#: the waiting request has.
REMOTE_TURN_SECONDS = 5.0

#: Longest pauses before the first repeated attempt and before any; each is drawn between zero and its limit, which
#: doubles ("full jitter", Marc Brooker, Exponential Backoff and Jitter, AWS Architecture Blog, 2015).
REMOTE_FIRST_PAUSE, REMOTE_LONGEST_PAUSE = 0.2, 10.0

#: Seconds without a byte after which a request counts as failed.
REMOTE_TIMEOUT_SECONDS = 30.0

#: Seconds in which the headers of an answer have to arrive, from their first byte on.
REMOTE_HEADERS_SECONDS = 30.0

#: Bytes per second below which an answer counts as failed, and seconds for which it has to stay there. Sixteen
#: requests that share a line of 1 Mbit/s get twice as much each.
REMOTE_SLOWEST_BYTES, REMOTE_SLOW_SECONDS = 4 << 10, 20.0

#: Redirects that are followed for one request.
REMOTE_REDIRECTS = 5

#: Smallest part of an upload to an object store, the most parts that stores take, and parts under way at once.
UPLOAD_PART_BYTES, UPLOAD_PARTS, UPLOADS = 8 << 20, 9000, 3

#: Bytes that are handed over at once to an upload, and how many such pieces wait for it.
UPLOAD_PIECE_BYTES, UPLOAD_PIECES = 1 << 20, 4

#: Bytes of a file that a download into a cache requests and checks together.
CACHE_PIECE_BYTES = 8 << 20

#: Bytes of a cache directory if the user names no bound, and bytes that stay free on its file system.
CACHE_BYTES = 50 << 30
CACHE_FREE_BYTES = 1 << 30
