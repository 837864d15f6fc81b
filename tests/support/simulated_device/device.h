// The simulated device: memory apart from the host's, and streams whose work runs late. No torch in here.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace sim {

constexpr int kDevices = 2;

// Address space of each device, in bytes. Addresses are never used twice, so that a stale pointer never looks valid.
constexpr uint64_t kSpan = uint64_t{1} << 42;

// One lock for everything: the simulator is about order, not about speed.
std::recursive_mutex& lock();

// ---- memory.cpp

// Where the device of an address lies, or -1 for host memory.
int device_of(const void* address);

// Take physical memory and return its device address, or null if the device has less left.
char* take_segment(int device, uint64_t nbytes);
void free_segment(int device, char* address, uint64_t nbytes);
void set_capacity(int device, uint64_t nbytes);
uint64_t capacity(int device);
uint64_t used(int device);

// Bytes between host and device memory.
void write_device(char* to, const void* from, uint64_t nbytes);
void read_device(void* to, const char* from, uint64_t nbytes);

// Host addresses of a range of device memory while an operation runs.
class Window {
 public:
  Window(const void* address, uint64_t nbytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  char* address() const { return address_; }

 private:
  void* mapping_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  char* address_ = nullptr;
};

// Page-locked host memory. Both return 0 or the number of a CUDA runtime error.
int lock_pages(void* address, uint64_t nbytes);
int unlock_pages(void* address);
void refuse_page_locking(bool refuse);
bool is_page_locked(const void* address, uint64_t nbytes);
uint64_t page_locked_bytes();
uint64_t peak_page_locked_bytes();
void reset_peak_page_locked_bytes();

// Print the kind of access and the place when the host touches device memory, before the process dies.
void name_host_accesses();

// ---- streams.cpp

// A point in the work of a stream: the first `sequence` items.
struct Point {
  int device = 0;
  int stream = 0;
  uint64_t sequence = 0;
};

// Host memory that an item reads or writes when it runs.
struct HostRange {
  const char* address = nullptr;
  uint64_t nbytes = 0;
};

int new_stream(int device);
// `is_copy`: whether a planted failure of copies may hit it.
void enqueue(int device, int stream, std::function<void()> run, HostRange host = {}, bool is_copy = false);
void enqueue_wait(int device, int stream, Point point);
Point mark(int device, int stream);
bool is_done(Point point);
void run_until(Point point);
void wait_for(Point point);  // and raise what failed on its device
void synchronize_stream(int device, int stream);
void synchronize_device(int device);

// Run everything that uses a range of host memory; return whether there was any.
bool run_users_of(const void* address, uint64_t nbytes);

// As late as possible, or in an order and at moments that the seed decides.
void set_schedule(std::optional<uint64_t> seed);

// Let the copy after `count` further ones fail: when it is started, or when it runs, which a later wait reports.
void fail_copy(std::optional<uint64_t> count, bool late);
void count_copy();

// Faults of the program that did not stop it, one a line.
void report_fault(const std::string& text);
std::vector<std::string> take_faults();

}  // namespace sim
