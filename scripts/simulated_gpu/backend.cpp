// Two devices that are host memory behind torch's PrivateUse1 key: see backend.py.
//
// Every operator is computed by the CPU's kernel, at once. What differs from the CPU is what code for a GPU can get wrong:
// - a non-blocking copy to pinned memory is made as late as possible: when its stream, or its device, is waited for
// - an operator with tensors on two devices is an error
// - fresh memory holds garbage
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using namespace at;

constexpr int num_devices = 2;
constexpr auto kind = DeviceType::PrivateUse1;

thread_local int current_device = 0;
// Stream 0 is the default one, in which everything computes.
thread_local int64_t current_streams[num_devices] = {0, 0};

struct LateCopy {
  Tensor to;
  Tensor from;
  int device;
  int64_t stream;
};

std::mutex mutex;
std::vector<LateCopy> late_copies;
std::map<uintptr_t, size_t> pinned;
std::atomic<long> num_to_host{0};
std::atomic<long> num_to_device{0};

// --- Devices and streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return kind;
  }
  Device exchangeDevice(Device device) const override {
    auto before = current_device;
    current_device = device.index();
    return Device(kind, before);
  }
  Device getDevice() const override {
    return Device(kind, current_device);
  }
  void setDevice(Device device) const override {
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  Stream getStream(Device device) const noexcept override {
    int index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kind, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, 0);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto index = stream.device_index();
    auto before = current_streams[index];
    current_streams[index] = stream.id();
    return Stream(Stream::UNSAFE, stream.device(), before);
  }
  DeviceIndex deviceCount() const noexcept override {
    return num_devices;
  }
  // Work is done at once, so that events have nothing to wait for; late copies are waited for in backend.py.
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- Memory

struct DeviceMemory final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    if (size) {
      memory = malloc(size);
      TORCH_CHECK(memory, "the simulated GPU is out of memory");
      memset(memory, 0xA5, size);
    }
    return {memory, memory, &free, Device(kind, current_device)};
  }
  DeleterFnPtr raw_deleter() const override {
    return &free;
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    memcpy(to, from, size);
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(kind, &device_memory);

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    pinned.erase(reinterpret_cast<uintptr_t>(memory));
  }
  free(memory);
}

struct PinnedMemory final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    size = std::max<size_t>(size, 1);
    void* memory = malloc(size);
    TORCH_CHECK(memory, "out of memory");
    std::lock_guard<std::mutex> guard(mutex);
    pinned[reinterpret_cast<uintptr_t>(memory)] = size;
    return {memory, memory, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    memcpy(to, from, size);
  }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(mutex);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) {
    return false;
  }
  auto block = std::prev(after);
  return address < block->first + block->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return num_devices;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    current_device = index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = current_device;
    current_device = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(kind, current_device);
  }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator generator = make_generator<CPUGeneratorImpl>(1);
    return generator;
  }
  void init() const override {}
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto memory = device_memory.allocate(size);
    memcpy(memory.get(), impl->data(), std::min<size_t>(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};
bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// --- Copies

Tensor on_host(const Tensor& tensor) {  // the same memory as a tensor of the CPU
  if (tensor.is_cpu()) {
    return tensor;
  }
  auto options = tensor.options().device(kCPU).requires_grad(false);
  void* memory = tensor.storage().data_ptr().get() ? tensor.data_ptr() : nullptr;
  auto alias = at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) {
    alias._set_conj(true);
  }
  if (tensor.is_neg()) {
    alias._set_neg(true);
  }
  return alias;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.is_cpu() && !from.is_cpu()) {
    num_to_host++;
    if (non_blocking && is_pinned(to.data_ptr())) {
      int device = from.device().index();
      auto stream = current_streams[device];
      // In the stream that computes, later work on the tensor comes after the copy; beside that stream it may be before.
      auto read = stream == 0 ? from.clone() : from;
      std::lock_guard<std::mutex> guard(mutex);
      late_copies.push_back({to, read, device, stream});
      return to;
    }
  }
  if (from.is_cpu() && !to.is_cpu()) {
    num_to_device++;
  }
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

Scalar local_scalar_dense(const Tensor& tensor) {
  num_to_host++;
  return at::_local_scalar_dense(on_host(tensor));
}

// --- Tensors

Device with_index(std::optional<Device> device) {
  auto given = device_or_default(device);
  return given.has_index() ? given : Device(kind, current_device);
}

Tensor empty_memory_format(
    IntArrayRef size,
    std::optional<ScalarType> dtype,
    std::optional<Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef strides,
    std::optional<ScalarType> dtype,
    std::optional<Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(with_index(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, strides, &device_memory, keys, dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

Tensor as_strided(
    const Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef strides,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) {
    at = offset->guard_int(__FILE__, __LINE__);
  }
  return native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), at);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef strides) {
  return native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor& set_storage_at(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

Tensor& set_storage(Tensor& self, Storage storage) {
  int64_t size = storage.nbytes() / self.itemsize();
  return set_storage_at(self, storage, 0, {size}, {1});
}

// --- All other operators

void check_devices(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  bool any_on_host = false;
  std::set<int> devices;
  auto note = [&](const Tensor& tensor) {
    if (!tensor.defined() || tensor.dim() == 0) {
      return;  // numbers may be anywhere
    }
    if (tensor.is_cpu()) {
      any_on_host = true;
    } else {
      devices.insert(tensor.device().index());
    }
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      note(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const auto& tensor : argument.toTensorVector()) {
        note(tensor);
      }
    }
  }
  // The indices of a GPU's tensor may be on the CPU.
  bool may_mix = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  bool mixes = devices.size() > 1 || (!devices.empty() && any_on_host && !may_mix);
  TORCH_CHECK(!mixes, "Expected all tensors to be on the same device, in ", name);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op.schema().name(), torch::jit::last(*stack, op.schema().arguments().size()));
  native::cpu_fallback(op, stack, false);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_.source_Storage", set_storage);
}

}  // namespace

// --- For backend.py

extern "C" {

int gpu_current() {
  return current_device;
}

void gpu_set_current(int device) {
  current_device = device;
}

int64_t gpu_stream(int device) {
  return current_streams[device];
}

void gpu_set_stream(int device, int64_t stream) {
  current_streams[device] = stream;
}

// Make the late copies of one stream of a device, or of all (-1).
void gpu_synchronize(int device, int64_t stream) {
  std::vector<LateCopy> due;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto is_later = [&](const LateCopy& copy) {
      return copy.device != device || (stream >= 0 && copy.stream != stream);
    };
    auto later = std::stable_partition(late_copies.begin(), late_copies.end(), is_later);
    due.assign(later, late_copies.end());
    late_copies.erase(later, late_copies.end());
  }
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  for (auto& copy : due) {
    on_host(copy.to).copy_(on_host(copy.from));
  }
}

long gpu_num_late() {
  std::lock_guard<std::mutex> guard(mutex);
  return static_cast<long>(late_copies.size());
}

long gpu_num_to_host() {
  return num_to_host;
}

long gpu_num_to_device() {
  return num_to_device;
}
}
