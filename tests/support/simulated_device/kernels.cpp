// Operators. Copies, fills and products run late on the current stream; the rest is computed by the CPU, after the
// current stream, on copies. Kernels keep addresses and no tensors: memory that is freed too early shows.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "allocator.h"
#include "device.h"

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr uint64_t kStagedBytes = 64 << 10;  // a pageable source up to this size is copied at once and sent late

// The state of the thread that happens to run an item does not matter: no autograd, no modes of Python.
struct Plain {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize})};
};

// A strided box of device memory, without a reference to it.
struct Box {
  explicit Box(const Tensor& tensor)
      : device(tensor.get_device()),
        address(static_cast<char*>(tensor.unsafeGetTensorImpl()->storage().data_ptr().get()) +
                tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        type(tensor.scalar_type()) {
    uint64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += static_cast<uint64_t>((sizes[i] - 1) * strides[i]);
    nbytes = tensor.numel() ? (last + 1) * tensor.itemsize() : 0;
  }
  Tensor seen_through(const Window& window) const {
    return at::from_blob(window.address(), sizes, strides, at::TensorOptions().dtype(type));
  }
  int device;
  char* address;
  uint64_t nbytes;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
};

char* address_of(const Tensor& tensor) { return Box(tensor).address; }

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         ((a.is_contiguous() && b.is_contiguous()) ||
          (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

void late(int device, std::function<void()> run, HostRange host = {}, bool is_copy = false) {
  enqueue(device, current_stream(device), std::move(run), host, is_copy);
}

// ---- copies

void send(char* to, const Tensor& source, bool non_blocking) {
  const char* from = static_cast<const char*>(source.data_ptr());
  const uint64_t nbytes = source.nbytes();
  const int device = device_of(to);
  if (is_page_locked(from, nbytes)) {
    late(device, [=] { write_device(to, from, nbytes); }, {from, nbytes}, true);
    if (!non_blocking) synchronize_stream(device, current_stream(device));
  } else if (nbytes <= kStagedBytes) {
    late(device, [to, staged = std::string(from, nbytes)] { write_device(to, staged.data(), staged.size()); }, {}, true);
    if (!non_blocking) synchronize_stream(device, current_stream(device));
  } else {
    synchronize_stream(device, current_stream(device));
    write_device(to, from, nbytes);
  }
}

void fetch(const Tensor& target, const char* from, bool non_blocking) {
  char* to = static_cast<char*>(target.data_ptr());
  const uint64_t nbytes = target.nbytes();
  const int device = device_of(from);
  late(device, [=] { read_device(to, from, nbytes); }, {to, nbytes}, true);
  if (!non_blocking || !is_page_locked(to, nbytes)) synchronize_stream(device, current_stream(device));
}

void copy_here(const Tensor& source, const Tensor& target) {
  const Box from(source), to(target);
  late(
      to.device,
      [from, to, conj = source.is_conj() != target.is_conj(), neg = source.is_neg() != target.is_neg()] {
        const Plain plain;
        const Window read(from.address, from.nbytes), written(to.address, to.nbytes);
        Tensor seen = from.seen_through(read);
        if (conj) seen = seen.conj();
        if (neg) seen = seen.neg();
        to.seen_through(written).copy_(seen);
      },
      {}, true);
}

void copy_across(const Tensor& source, const Tensor& target) {
  const int from = source.get_device(), to = target.get_device();
  enqueue_wait(from, current_stream(from), mark(to, current_stream(to)));
  const Box read(source), written(target);
  enqueue(
      from, current_stream(from),
      [read, written] {
        const Plain plain;
        const Window a(read.address, read.nbytes), b(written.address, written.nbytes);
        written.seen_through(b).copy_(read.seen_through(a));
      },
      {}, true);
  enqueue_wait(to, current_stream(to), mark(from, current_stream(from)));
}

Tensor without_math_bits(const Tensor& tensor) {
  if (!tensor.is_conj() && !tensor.is_neg()) return tensor;
  const Tensor plain = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  return plain.copy_(tensor);
}

// As torch does for CUDA: a cast runs on the device if the copy may continue after the call, else on the host.
Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  count_copy();
  if (self.device() != target.device() && (self.is_conj() || self.is_neg() || target.is_conj() || target.is_neg())) {
    target.copy_(without_math_bits(self).to(target.device()));
    return target;
  }
  const Tensor source = self.expand(target.sizes());
  const c10::OptionalDeviceGuard guard(target.is_cpu() ? source.device() : target.device());
  if (!source.is_cpu() && !target.is_cpu()) {
    if (source.device() == target.device()) copy_here(source, target);
    else copy_across(source, target);
  } else if (target.is_cpu()) {
    if (same_bytes(source, target)) {
      fetch(target, address_of(source), non_blocking);
    } else {
      const Tensor dense = (non_blocking ? source.to(target.scalar_type()) : source).contiguous();
      const Tensor received = at::empty_like(dense, dense.options().device(at::kCPU));
      fetch(received, address_of(dense), false);
      target.copy_(received);
    }
  } else if (same_bytes(source, target)) {
    send(address_of(target), source, non_blocking);
  } else {
    const Tensor dense = (non_blocking ? source : source.to(target.scalar_type())).contiguous();
    const Tensor arrived = at::empty_like(dense, dense.options().device(target.device()));
    send(address_of(arrived), dense, non_blocking);
    copy_here(arrived, target);
    if (!non_blocking) synchronize_stream(target.get_device(), current_stream(target.get_device()));
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  const Tensor value = at::empty_like(self, self.options().device(at::kCPU));
  copy_from(self, value, false);
  return value.item();
}

// ---- memory and views

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_with_strides(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type,
                          std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format) tensor->empty_tensor_restride(*format);
  const auto needed = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() && needed > tensor->storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), needed);
  return self;
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

void record_stream(Tensor& self, at::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

// ---- arithmetic that is late too

Tensor& fill(Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  late(self.get_device(), [box = Box(self), value] {
    const Plain plain;
    const Window window(box.address, box.nbytes);
    box.seen_through(window).fill_(value);
  });
  return self;
}

Tensor& zero(Tensor& self) { return fill(self, 0); }

Tensor& multiply_in_place(Tensor& self, const Tensor& other) {
  if (self.numel() == 0) return self;
  if (other.dim() == 0 && other.is_cpu()) {
    late(self.get_device(), [box = Box(self), factor = other.clone()] {
      const Plain plain;
      const Window window(box.address, box.nbytes);
      box.seen_through(window).mul_(factor);
    });
  } else {
    TORCH_CHECK(other.device() == self.device(), "simulated device: factors are on different devices");
    late(self.get_device(), [box = Box(self), factor = Box(other)] {
      const Plain plain;
      const Window window(box.address, box.nbytes), read(factor.address, factor.nbytes);
      box.seen_through(window).mul_(factor.seen_through(read));
    });
  }
  return self;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

void copy_on_device(char* to, const char* from, uint64_t nbytes) {
  if (nbytes == 0) return;
  late(device_of(to), [=] {
    const Window read(from, nbytes), written(to, nbytes);
    std::memcpy(written.address(), read.address(), nbytes);
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_with_strides);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("mul_.Tensor", multiply_in_place);
}

// copy_from looks at these bits itself; the fallback would clone first, which copies again, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

}  // namespace sim
