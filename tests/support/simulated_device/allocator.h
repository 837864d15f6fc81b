// The caching allocator, the current device and stream of each thread, and the copies that kernels and storages share.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <optional>

namespace sim {

using c10::CachingDeviceAllocator::DeviceStats;

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t nbytes) const override;
  bool initialized() override;
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
};

Allocator& allocator();

// The allocation after `count` further ones is refused.
void fail_allocation(std::optional<uint64_t> count);
void set_fraction(int device, double fraction);
double fraction(int device);

// registration.cpp: of the calling thread.
int current_device();
int current_stream(int device);

// kernels.cpp: bytes, on the current stream of the device of `to`.
void copy_on_device(char* to, const char* from, uint64_t nbytes);

}  // namespace sim
