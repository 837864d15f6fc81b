// The caching allocator: the documented rules of torch's CUDA allocator, without expandable segments, private pools and
// garbage collection. Requests are rounded to 512 bytes; those up to 1 MiB share segments of 2 MiB, those below 10 MiB
// segments of 20 MiB, larger ones get a segment of their own in steps of 2 MiB; a block belongs to its stream.
#include "allocator.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <optional>
#include <set>
#include <unordered_map>

#include "device.h"

namespace sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kSmallest = 512, kLargestSmall = kMiB, kSmallSegment = 2 * kMiB, kMediumSegment = 20 * kMiB;
constexpr uint64_t kLargestMedium = 10 * kMiB, kSegmentMultiple = 2 * kMiB;

uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Block {
  int device, stream;
  bool small;
  char* address;
  uint64_t size, requested = 0;
  bool allocated = false;
  Block *previous = nullptr, *next = nullptr;  // in the same segment
  std::set<int> users = {};                    // other streams, from record_stream
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};
using Pool = std::set<Block*, BySize>;

struct Waiting {  // a freed block whose other users have not finished
  Block* block;
  std::vector<Point> points;
};

struct DeviceMemory {
  Pool small, large;
  std::vector<Waiting> waiting;
  DeviceStats stats;
  double fraction = 1.0;
};

struct State {
  std::array<DeviceMemory, kDevices> devices;
  std::optional<uint64_t> allocations_before_failure;
};

State& state() {
  static auto* all = new State;
  return *all;
}

Pool& pool_of(const Block& block) {
  DeviceMemory& memory = state().devices[block.device];
  return block.small ? memory.small : memory.large;
}

void change(StatArray& stats, bool small, int64_t amount) {
  for (const StatType type : {StatType::AGGREGATE, small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    Stat& stat = stats[static_cast<size_t>(type)];
    if (amount >= 0) stat.increase(static_cast<size_t>(amount));
    else stat.decrease(static_cast<size_t>(-amount));
  }
}

// Count a free block as part of a segment that is in use elsewhere, or no longer.
void count_split(const Block& block, int sign) {
  if (!block.previous && !block.next) return;
  DeviceStats& stats = state().devices[block.device].stats;
  change(stats.inactive_split, block.small, sign);
  change(stats.inactive_split_bytes, block.small, sign * static_cast<int64_t>(block.size));
}

void count_use(const Block& block, int sign, bool allocated, bool active) {
  DeviceStats& stats = state().devices[block.device].stats;
  const auto size = sign * static_cast<int64_t>(block.size);
  if (allocated) {
    change(stats.allocation, block.small, sign);
    change(stats.allocated_bytes, block.small, size);
    change(stats.requested_bytes, block.small, sign * static_cast<int64_t>(block.requested));
  }
  if (active) {
    change(stats.active, block.small, sign);
    change(stats.active_bytes, block.small, size);
  }
}

void count_segment(const Block& block, int sign) {
  DeviceStats& stats = state().devices[block.device].stats;
  change(stats.segment, block.small, sign);
  change(stats.reserved_bytes, block.small, sign * static_cast<int64_t>(block.size));
  ++(sign > 0 ? stats.num_device_alloc : stats.num_device_free);
}

// Join a free block with a free neighbour, which disappears.
void merge(Block* block, Block* other) {
  if (!other || other->allocated || !pool_of(*other).count(other)) return;
  count_split(*other, -1);
  pool_of(*other).erase(other);
  if (other == block->previous) {
    block->address = other->address;
    block->previous = other->previous;
    if (block->previous) block->previous->next = block;
  } else {
    block->next = other->next;
    if (block->next) block->next->previous = block;
  }
  block->size += other->size;
  delete other;
}

void make_free(Block* block) {
  count_use(*block, -1, false, true);
  merge(block, block->previous);
  merge(block, block->next);
  count_split(*block, 1);
  pool_of(*block).insert(block);
}

void process_waiting(DeviceMemory& memory, bool wait) {
  auto& waiting = memory.waiting;
  for (size_t i = 0; i < waiting.size();) {
    bool done = true;
    for (const Point& point : waiting[i].points) {
      if (wait) run_until(point);
      done = done && is_done(point);
    }
    if (!done) {
      ++i;
      continue;
    }
    Block* block = waiting[i].block;
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    make_free(block);
  }
}

void release_cached(int device) {
  DeviceMemory& memory = state().devices[device];
  process_waiting(memory, true);
  bool synchronized = false;
  for (Pool* pool : {&memory.small, &memory.large})
    for (auto position = pool->begin(); position != pool->end();) {
      Block* block = *position;
      if (block->previous || block->next) {
        ++position;
        continue;
      }
      if (!std::exchange(synchronized, true)) synchronize_device(device);  // as cudaFree does
      position = pool->erase(position);
      count_segment(*block, -1);
      free_segment(device, block->address, block->size);
      delete block;
    }
}

Block* take_cached(DeviceMemory& memory, bool small, uint64_t size, int stream) {
  Pool& pool = small ? memory.small : memory.large;
  Block key{0, stream, small, nullptr, size};
  const auto found = pool.lower_bound(&key);
  if (found == pool.end() || (*found)->stream != stream) return nullptr;
  Block* block = *found;
  pool.erase(found);
  count_split(*block, -1);
  return block;
}

uint64_t allowed(int device) {
  return static_cast<uint64_t>(state().devices[device].fraction * static_cast<double>(capacity(device)));
}

Block* take_new(int device, bool small, uint64_t size, int stream) {
  const uint64_t segment = small                   ? kSmallSegment
                           : size < kLargestMedium ? kMediumSegment
                                                   : round_up(size, kSegmentMultiple);
  if (used(device) + segment > allowed(device)) return nullptr;
  char* address = take_segment(device, segment);
  if (!address) return nullptr;
  auto* block = new Block{device, stream, small, address, segment};
  count_segment(*block, 1);
  return block;
}

void split(Block* block, uint64_t size) {
  const uint64_t rest = block->size - size;
  if (block->small ? rest < kSmallest : rest <= kLargestSmall) return;
  auto* other = new Block{block->device, block->stream, block->small, block->address + size, rest};
  other->previous = block;
  other->next = block->next;
  if (other->next) other->next->previous = other;
  block->next = other;
  block->size = size;
  count_split(*other, 1);
  pool_of(*other).insert(other);
}

[[noreturn]] void out_of_memory(int device, uint64_t nbytes) {
  DeviceStats& stats = state().devices[device].stats;
  ++stats.num_ooms;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "Simulated device out of memory. Tried to allocate ", nbytes,
                   " bytes on sim:", device, ", which has a total capacity of ", capacity(device), " bytes of which ",
                   capacity(device) - used(device), " bytes are free; ", allowed(device), " bytes are allowed.");
}

Block* take(int device, uint64_t nbytes, int stream) {
  DeviceMemory& memory = state().devices[device];
  auto& countdown = state().allocations_before_failure;
  if (countdown && (*countdown)-- == 0) {
    countdown.reset();
    out_of_memory(device, nbytes);
  }
  process_waiting(memory, false);
  const uint64_t size = round_up(nbytes, kSmallest);
  const bool small = size <= kLargestSmall;
  Block* block = take_cached(memory, small, size, stream);
  if (!block) block = take_new(device, small, size, stream);
  if (!block) {
    ++memory.stats.num_alloc_retries;
    release_cached(device);
    block = take_new(device, small, size, stream);
  }
  if (!block) out_of_memory(device, nbytes);
  split(block, size);
  block->allocated = true;
  block->requested = nbytes;
  count_use(*block, 1, true, true);
  return block;
}

void give_back(void* context) {
  std::lock_guard guard(lock());
  auto* block = static_cast<Block*>(context);
  count_use(*block, -1, true, false);
  block->allocated = false;
  if (block->users.empty()) return make_free(block);
  Waiting waiting{block, {}};
  for (const int stream : std::exchange(block->users, {})) waiting.points.push_back(mark(block->device, stream));
  state().devices[block->device].waiting.push_back(std::move(waiting));
}

void check(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "simulated device: invalid device index ", static_cast<int>(device));
}

}  // namespace

c10::DataPtr Allocator::allocate(size_t nbytes) {
  std::lock_guard guard(lock());
  const int device = current_device();
  const c10::Device place(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  if (nbytes == 0) return {nullptr, nullptr, &give_back, place};
  Block* block = take(device, nbytes, current_stream(device));
  return {block->address, block, &give_back, place};
}

c10::DeleterFnPtr Allocator::raw_deleter() const { return nullptr; }

void Allocator::copy_data(void* to, const void* from, std::size_t nbytes) const {
  copy_on_device(static_cast<char*>(to), static_cast<const char*>(from), nbytes);
}

bool Allocator::initialized() { return true; }

void Allocator::emptyCache(c10::MempoolId_t) {
  std::lock_guard guard(lock());
  for (int device = 0; device < kDevices; ++device) release_cached(device);
}

void Allocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  std::lock_guard guard(lock());
  auto* block = static_cast<Block*>(pointer.get_context());
  if (block && block->stream != stream.id()) block->users.insert(static_cast<int>(stream.id()));
}

DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  check(device);
  std::lock_guard guard(lock());
  return state().devices[device].stats;
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  check(device);
  std::lock_guard guard(lock());
  DeviceStats& stats = state().devices[device].stats;
  for (StatArray* each : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                          &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                          &stats.inactive_split_bytes, &stats.requested_bytes})
    for (Stat& stat : *each) stat.reset_accumulated();
  stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  check(device);
  std::lock_guard guard(lock());
  DeviceStats& stats = state().devices[device].stats;
  for (StatArray* each : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                          &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                          &stats.inactive_split_bytes, &stats.requested_bytes})
    for (Stat& stat : *each) stat.reset_peak();
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex device) {
  check(device);
  std::lock_guard guard(lock());
  return {capacity(device) - used(device), capacity(device)};
}

void fail_allocation(std::optional<uint64_t> count) {
  std::lock_guard guard(lock());
  state().allocations_before_failure = count;
}

void set_fraction(int device, double fraction) {
  std::lock_guard guard(lock());
  state().devices.at(device).fraction = fraction;
}

double fraction(int device) { return state().devices.at(device).fraction; }

Allocator& allocator() {
  static auto* only = new Allocator;
  return *only;
}

}  // namespace sim
