// Streams are queues, and nothing runs before something waits for it: no device is later. With a seed, some items also
// run at other moments, in an order between streams that the seed decides. The thread that waits runs the work.
#include "device.h"

#include <array>
#include <deque>
#include <random>
#include <stdexcept>
#include <utility>

namespace sim {
namespace {

struct Item {
  std::function<void()> run;
  HostRange host;
  std::optional<Point> wait;  // what has to run before
};

struct Stream {
  std::deque<Item> items;
  uint64_t done = 0;
  bool running = false;  // its first item, which waits for other streams
};

struct State {
  std::array<std::deque<Stream>, kDevices> streams;  // references stay valid
  std::array<std::optional<std::string>, kDevices> errors;  // of items that failed when they ran
  std::optional<std::mt19937_64> random;
  std::optional<uint64_t> copies_before_failure;
  bool fails_late = false, failed = false;
  std::vector<std::string> faults;
  State() {
    for (auto& streams_of_one : streams) streams_of_one.resize(1);
  }
};

State& state() {
  static auto* all = new State;
  return *all;
}

Stream& stream_of(int device, int stream) { return state().streams.at(device).at(stream); }

void run_first(int device, int number) {
  Stream& stream = stream_of(device, number);
  Item item = std::move(stream.items.front());
  stream.items.pop_front();
  stream.running = true;
  if (item.wait) run_until(*item.wait);
  try {
    if (item.run) item.run();
  } catch (const std::exception& error) {
    state().errors[device] = error.what();
  }
  stream.running = false;
  ++stream.done;
}

// Run the next item of a stream that the seed chooses among those of the devices from `first` to `last`.
bool run_any(int first, int last) {
  State& all = state();
  std::vector<std::pair<int, int>> ready;  // only these, so that the choice does not depend on streams of the past
  for (int device = first; device <= last; ++device)
    for (size_t number = 0; number < all.streams[device].size(); ++number)
      if (const Stream& stream = all.streams[device][number]; !stream.items.empty() && !stream.running)
        ready.emplace_back(device, static_cast<int>(number));
  if (ready.empty()) return false;
  const auto [device, number] = ready[(*all.random)() % ready.size()];
  run_first(device, number);
  return true;
}

// What a device may do at any moment, seen from the host. Mostly nothing: queues have to grow.
void run_some() {
  State& all = state();
  if (!all.random || (*all.random)() % 4) return;
  for (uint64_t count = (*all.random)() % 3; count && run_any(0, kDevices - 1);) --count;
}

void raise(int device) {
  auto& error = state().errors[device];
  if (!error) return;
  const std::string text = *std::exchange(error, std::nullopt);
  throw std::runtime_error(text);
}

}  // namespace

int new_stream(int device) {
  std::lock_guard guard(lock());
  state().streams.at(device).emplace_back();
  return static_cast<int>(state().streams[device].size()) - 1;
}

void enqueue(int device, int stream, std::function<void()> run, HostRange host, bool is_copy) {
  std::lock_guard guard(lock());
  State& all = state();
  if (is_copy && std::exchange(all.failed, false))
    run = [] { throw std::runtime_error("simulated device: a copy failed"); };
  stream_of(device, stream).items.push_back({std::move(run), host, std::nullopt});
  run_some();
}

void enqueue_wait(int device, int stream, Point point) {
  std::lock_guard guard(lock());
  if (point.device == device && point.stream == stream) return;
  stream_of(device, stream).items.push_back({nullptr, {}, point});
  run_some();
}

Point mark(int device, int stream) {
  std::lock_guard guard(lock());
  const Stream& queue = stream_of(device, stream);
  return {device, stream, queue.done + queue.items.size()};
}

bool is_done(Point point) {
  std::lock_guard guard(lock());
  run_some();
  return stream_of(point.device, point.stream).done >= point.sequence;
}

void run_until(Point point) {
  std::lock_guard guard(lock());
  if (stream_of(point.device, point.stream).done >= point.sequence) return;
  run_some();
  while (stream_of(point.device, point.stream).done < point.sequence &&
         !stream_of(point.device, point.stream).items.empty())
    run_first(point.device, point.stream);
}

void wait_for(Point point) {
  std::lock_guard guard(lock());
  run_until(point);
  raise(point.device);
}

void synchronize_stream(int device, int stream) { wait_for(mark(device, stream)); }

void synchronize_device(int device) {
  std::lock_guard guard(lock());
  while (state().random && run_any(device, device)) {
  }
  for (size_t stream = 0; stream < state().streams.at(device).size(); ++stream)
    run_until(mark(device, static_cast<int>(stream)));
  raise(device);
}

bool run_users_of(const void* address, uint64_t nbytes) {
  std::lock_guard guard(lock());
  const char* first = static_cast<const char*>(address);
  bool found = false;
  for (int device = 0; device < kDevices; ++device)
    for (size_t number = 0; number < state().streams[device].size(); ++number) {
      const Stream& stream = state().streams[device][number];
      uint64_t last = 0, position = stream.done;
      for (const Item& item : stream.items) {
        ++position;
        if (item.host.address < first + nbytes && first < item.host.address + item.host.nbytes) last = position;
      }
      if (last) run_until({device, static_cast<int>(number), last});
      found = found || last;
    }
  return found;
}

void set_schedule(std::optional<uint64_t> seed) {
  std::lock_guard guard(lock());
  if (seed) state().random.emplace(*seed);
  else state().random.reset();
}

void fail_copy(std::optional<uint64_t> count, bool late) {
  std::lock_guard guard(lock());
  state().copies_before_failure = count;
  state().fails_late = late;
  state().failed = false;
}

void count_copy() {
  std::lock_guard guard(lock());
  State& all = state();
  if (!all.copies_before_failure) return;
  if ((*all.copies_before_failure)--) return;
  all.copies_before_failure.reset();
  if (!all.fails_late) throw std::runtime_error("simulated device: a copy failed");
  all.failed = true;
}

void report_fault(const std::string& text) {
  std::lock_guard guard(lock());
  state().faults.push_back(text);
}

std::vector<std::string> take_faults() {
  std::lock_guard guard(lock());
  return std::exchange(state().faults, {});
}

}  // namespace sim
