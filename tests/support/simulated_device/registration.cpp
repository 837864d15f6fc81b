// What torch asks of a device: the guard (devices, streams, events), the hooks, and the functions that the tests call.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "allocator.h"
#include "device.h"

namespace sim {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
thread_local int this_device = 0;
thread_local std::array<int, kDevices> this_stream = {};
bool plugged = false;

c10::Device place(int device) { return {kType, static_cast<c10::DeviceIndex>(device)}; }

int index_of(c10::Device device) {
  const int index = device.has_index() ? device.index() : this_device;
  TORCH_CHECK(index < kDevices, "simulated device: there is no sim:", index);
  return index;
}

c10::Stream stream(int device, int number) { return c10::Stream(c10::Stream::UNSAFE, place(device), number); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return place(std::exchange(this_device, index_of(device)));
  }
  c10::Device getDevice() const override { return place(this_device); }
  void setDevice(c10::Device device) const override { this_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < kDevices) this_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return stream(index, this_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_of(device);
    return stream(index, new_stream(index));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int index = index_of(next.device());
    return stream(index, std::exchange(this_stream[index], static_cast<int>(next.id())));
  }
  // Always both: torch sizes the queues of autograd once, whether the devices are plugged in or not.
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Point;
    *static_cast<Point*>(*event) = mark(index_of(on.device()), static_cast<int>(on.id()));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) enqueue_wait(index_of(on.device()), static_cast<int>(on.id()), *static_cast<Point*>(event));
  }
  bool queryEvent(void* event) const override { return !event || is_done(*static_cast<Point*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(*static_cast<Point*>(event));
  }
  bool queryStream(const c10::Stream& on) const override {
    return is_done(mark(index_of(on.device()), static_cast<int>(on.id())));
  }
  void synchronizeStream(const c10::Stream& on) const override {
    wait_for(mark(index_of(on.device()), static_cast<int>(on.id())));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(index_of(place(device))); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    allocator().recordStream(pointer, on);
  }
};

// Host memory for `pin_memory()`: locked when it is made, released once no copy uses it, as torch's own does.
struct PinnedAllocator final : c10::Allocator {
  static void give_back(void* address) {
    run_users_of(address, 1);
    unlock_pages(address);
    std::free(address);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096 + 4096);
    TORCH_CHECK(address && lock_pages(address, nbytes + 1) == 0, "simulated device: page-locking was refused");
    return {address, address, &give_back, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return plugged; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return plugged; }
  c10::DeviceIndex deviceCount() const override { return plugged ? kDevices : 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override { this_device = index_of(place(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(this_device, index_of(place(device))));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_page_locked(data, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* only = new PinnedAllocator;
    return only;
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of(data);
    TORCH_CHECK(device >= 0, "simulated device: not an address of a device");
    return place(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = allocator().allocate(nbytes);
    copy_on_device(static_cast<char*>(data.get()), static_cast<const char*>(storage.data()),
                   std::min(nbytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

c10::impl::DeviceGuardImplRegistrar register_guard(kType, new Guard);

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &allocator());
  return true;
}();

std::optional<uint64_t> count_or_never(int64_t count) {
  return count < 0 ? std::nullopt : std::optional<uint64_t>(static_cast<uint64_t>(count));
}

}  // namespace

int current_device() { return this_device; }
int current_stream(int device) { return this_stream.at(device); }

}  // namespace sim

// Called by name from Python; none of them throws.
extern "C" {
void sim_plug(int in) { sim::plugged = in != 0; }
void sim_set_device(int device) { sim::this_device = device; }
void sim_set_capacity(int device, uint64_t nbytes) { sim::set_capacity(device, nbytes); }
void sim_set_fraction(int device, double fraction) { sim::set_fraction(device, fraction); }
double sim_fraction(int device) { return sim::fraction(device); }
void sim_set_schedule(int64_t seed) { sim::set_schedule(sim::count_or_never(seed)); }
void sim_fail_allocation(int64_t count) { sim::fail_allocation(sim::count_or_never(count)); }
void sim_fail_copy(int64_t count, int late) { sim::fail_copy(sim::count_or_never(count), late != 0); }
void sim_refuse_page_locking(int refuse) { sim::refuse_page_locking(refuse != 0); }
int sim_lock_pages(void* address, uint64_t nbytes) { return sim::lock_pages(address, nbytes); }
int sim_unlock_pages(void* address) { return sim::unlock_pages(address); }
uint64_t sim_page_locked() { return sim::page_locked_bytes(); }
uint64_t sim_peak_page_locked() { return sim::peak_page_locked_bytes(); }
void sim_reset_peak_page_locked() { sim::reset_peak_page_locked_bytes(); }
void sim_name_host_accesses() { sim::name_host_accesses(); }
// Copy the faults to `text`, one a line, and forget them.
void sim_take_faults(char* text, uint64_t nbytes) {
  std::string all;
  for (const std::string& fault : sim::take_faults()) all += fault + "\n";
  std::strncpy(text, all.c_str(), nbytes - 1);
}
}
