// Device memory is a file in memory that the process maps only while an operation runs: it is not part of the host's
// memory, and no pointer to it can be followed. Its addresses lie in a range that nobody may access.
#include "device.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>

namespace sim {
namespace {

constexpr uint64_t kPage = 4096;
constexpr unsigned char kUntouched = 0xA5;
constexpr int kInvalidValue = 1, kAlreadyRegistered = 712, kNotRegistered = 713;  // of the CUDA runtime

struct Memory {
  char* base = nullptr;
  int file = -1;
  uint64_t next = 0, capacity = uint64_t{8} << 30, used = 0;
};

[[noreturn]] void fail(const char* what) {
  throw std::runtime_error(std::string("simulated device: ") + what + ": " + std::strerror(errno));
}

std::array<Memory, kDevices> make_memories() {
  std::array<Memory, kDevices> memories;
  for (Memory& memory : memories) {
    void* base = mmap(nullptr, kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) fail("no address space");
    memory.base = static_cast<char*>(base);
    memory.file = memfd_create("simulated-device", MFD_CLOEXEC);
    if (memory.file < 0) fail("no memory file");
  }
  return memories;
}

std::array<Memory, kDevices>& memories() {
  static auto* all = new std::array<Memory, kDevices>(make_memories());  // lives as long as the process
  return *all;
}

struct Pages {
  std::map<const char*, uint64_t> locked;
  uint64_t total = 0, peak = 0;
  bool refused = false;
};

Pages& pages() {
  static auto* all = new Pages;
  return *all;
}

uint64_t offset_of(const void* address, int& device) {
  device = device_of(address);
  if (device < 0) throw std::runtime_error("simulated device: a host address was used as a device address");
  return static_cast<uint64_t>(static_cast<const char*>(address) - memories()[device].base);
}

struct sigaction previous_action;

void put(char*& at, const char* text) {
  while (*text) *at++ = *text++;
}

void put_hex(char*& at, uint64_t value) {
  char digits[16];
  int count = 0;
  do digits[count++] = "0123456789abcdef"[value & 15];
  while (value >>= 4);
  while (count) *at++ = digits[--count];
}

void on_fault(int, siginfo_t* info, void* context) {
  const int device = device_of(info->si_addr);
  if (device >= 0) {
#if defined(__x86_64__)
    const bool writes = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
    const char* access = writes ? "wrote to" : "read";
#else
    const char* access = "accessed";
#endif
    char line[128], *at = line;
    put(at, "simulated device: the host ");
    put(at, access);
    put(at, device == 0 ? " memory of sim:0 at 0x" : " memory of sim:1 at 0x");
    put_hex(at, static_cast<uint64_t>(static_cast<char*>(info->si_addr) - memories()[device].base));
    put(at, "\n");
    if (write(2, line, static_cast<size_t>(at - line)) < 0) _exit(127);
  }
  sigaction(SIGSEGV, &previous_action, nullptr);  // the access is repeated and ends the process, or gets a traceback
}

}  // namespace

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

int device_of(const void* address) {
  for (int device = 0; device < kDevices; ++device) {
    const char* base = memories()[device].base;
    if (address >= base && address < base + kSpan) return device;
  }
  return -1;
}

char* take_segment(int device, uint64_t nbytes) {
  Memory& memory = memories()[device];
  if (nbytes > memory.capacity || memory.used > memory.capacity - nbytes) return nullptr;
  const uint64_t offset = memory.next;
  memory.next += (nbytes + kPage - 1) / kPage * kPage + kPage;  // a gap: an overrun leaves the segment's file pages
  memory.used += nbytes;
  if (ftruncate(memory.file, static_cast<off_t>(memory.next)) != 0) fail("no memory");
  const std::vector<unsigned char> pattern(std::min<uint64_t>(nbytes, 1 << 20), kUntouched);
  for (uint64_t at = 0; at < nbytes; at += pattern.size())
    write_device(memory.base + offset + at, pattern.data(), std::min<uint64_t>(pattern.size(), nbytes - at));
  return memory.base + offset;
}

void free_segment(int device, char* address, uint64_t nbytes) {
  Memory& memory = memories()[device];
  memory.used -= nbytes;
  const auto offset = static_cast<off_t>(address - memory.base);
  fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(nbytes));
}

void set_capacity(int device, uint64_t nbytes) { memories()[device].capacity = nbytes; }
uint64_t capacity(int device) { return memories()[device].capacity; }
uint64_t used(int device) { return memories()[device].used; }

void write_device(char* to, const void* from, uint64_t nbytes) {
  int device;
  uint64_t offset = offset_of(to, device);
  const char* bytes = static_cast<const char*>(from);
  while (nbytes) {
    const ssize_t written = pwrite(memories()[device].file, bytes, nbytes, static_cast<off_t>(offset));
    if (written <= 0) fail("write");
    bytes += written, offset += written, nbytes -= written;
  }
}

void read_device(void* to, const char* from, uint64_t nbytes) {
  int device;
  uint64_t offset = offset_of(from, device);
  char* bytes = static_cast<char*>(to);
  while (nbytes) {
    const ssize_t count = pread(memories()[device].file, bytes, nbytes, static_cast<off_t>(offset));
    if (count <= 0) fail("read");
    bytes += count, offset += count, nbytes -= count;
  }
}

Window::Window(const void* address, uint64_t nbytes) {
  if (nbytes == 0) return;
  int device;
  const uint64_t offset = offset_of(address, device), first = offset / kPage * kPage;
  mapped_bytes_ = offset + nbytes - first;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memories()[device].file,
                  static_cast<off_t>(first));
  if (mapping_ == MAP_FAILED) fail("no window");
  address_ = static_cast<char*>(mapping_) + (offset - first);
}

Window::~Window() {
  if (mapping_) munmap(mapping_, mapped_bytes_);
}

int lock_pages(void* address, uint64_t nbytes) {
  std::lock_guard guard(lock());
  Pages& all = pages();
  const char* first = static_cast<const char*>(address);
  if (all.refused || nbytes == 0) return kInvalidValue;
  for (const auto& [start, size] : all.locked)
    if (first < start + size && start < first + nbytes) return kAlreadyRegistered;
  all.locked[first] = nbytes;
  all.total += nbytes;
  all.peak = std::max(all.peak, all.total);
  return 0;
}

int unlock_pages(void* address) {
  std::lock_guard guard(lock());
  Pages& all = pages();
  const auto found = all.locked.find(static_cast<const char*>(address));
  if (found == all.locked.end()) return kNotRegistered;
  if (run_users_of(address, found->second)) report_fault("page-locked memory was released while a copy still used it");
  all.total -= found->second;
  all.locked.erase(found);
  return 0;
}

void refuse_page_locking(bool refuse) {
  std::lock_guard guard(lock());
  pages().refused = refuse;
}

bool is_page_locked(const void* address, uint64_t nbytes) {
  std::lock_guard guard(lock());
  const auto& locked = pages().locked;
  const char* first = static_cast<const char*>(address);
  auto after = locked.upper_bound(first);
  if (after == locked.begin()) return false;
  --after;
  return first + nbytes <= after->first + after->second;
}

uint64_t page_locked_bytes() { return pages().total; }
uint64_t peak_page_locked_bytes() { return pages().peak; }
void reset_peak_page_locked_bytes() { pages().peak = pages().total; }

void name_host_accesses() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace sim
