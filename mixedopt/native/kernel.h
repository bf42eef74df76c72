// Kernels that Triton has compiled, launched by the driver.
#pragma once

#include <cstdint>
#include <string>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "objects.h"

namespace mixedopt {

#ifdef MIXEDOPT_ON_CPU  // for tests: all else is the same, with a driver of theirs, which knows no streams
constexpr auto DEVICE = c10::DeviceType::CPU;
inline void* current_stream(c10::DeviceIndex) { return nullptr; }
#else
constexpr auto DEVICE = c10::DeviceType::CUDA;
inline void* current_stream(c10::DeviceIndex device) {
  return c10::impl::VirtualGuardImpl(DEVICE).getStream(c10::Device(DEVICE, device)).native_handle();
}
#endif
constexpr int64_t MOST = INT32_MAX;  // programs of a launch, or a count that a kernel is given
constexpr size_t MOST_ARGUMENTS = 64;
// After its own arguments a kernel of Triton takes pointers to scratch memory: by the version none, one or two. Ours
// use no such memory, so they are null; and as the driver reads as many arguments as a kernel has, there may be more
// of them than it takes.
constexpr size_t SCRATCH = 4;
constexpr auto KERNEL = "mixedopt.Kernel";

// cuLaunchKernel: function, grid, block, shared bytes, stream, arguments, nothing; returns 0 if all is well.
using Driver = int (*)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

struct Kernel {
  Driver driver;
  void* function;
  c10::DeviceIndex device;
  unsigned threads, shared;
  std::string takes;  // a letter for each argument: * for a pointer, i for int32, f for fp32

  // Launch on the current stream of the kernel's device. Needs no GIL.
  void launch(int64_t programs, void** given) const {
    if (!programs) return;  // the driver takes none for a mistake
    TORCH_CHECK(programs > 0 && programs <= MOST, "a launch of " + to_string(programs) + " programs");
    const int code = driver(function, static_cast<unsigned>(programs), 1, 1, threads, 1, 1, shared,
                            current_stream(device), given, nullptr);
    TORCH_CHECK(!code, "cuLaunchKernel: CUDA error " + to_string(code) + ". An earlier kernel may have failed.");
  }

  template <class... Args>
  void operator()(int64_t programs, Args... args) const {
    void* nothing = nullptr;
    void* given[] = {&args..., &nothing, &nothing, &nothing, &nothing};
    static_assert(SCRATCH == 4, "as many as stand there");
    launch(programs, given);
  }
};

inline void* pointer_of(const Tensor& tensor) { return tensor.data_ptr(); }

inline bool is_aligned(const void* pointer) { return !(reinterpret_cast<uintptr_t>(pointer) & 15); }

// True iff a kernel on this device can be given the tensor.
inline bool lies_well(const Tensor& tensor, c10::Device device) {
  return tensor.device() == device && tensor.is_contiguous() && is_aligned(tensor.const_data_ptr());
}

inline const Kernel& kernel_of(PyObject* capsule) { return held_by<Kernel>(capsule, KERNEL); }

// kernel(driver, function, device, threads, shared, takes): a capsule. It lives as long as the process, as Triton's do.
inline PyObject* kernel(PyObject*, PyObject* args) {
  unsigned long long driver, function;
  int device;
  unsigned threads, shared;
  const char* takes;
  if (!PyArg_ParseTuple(args, "KKiIIs", &driver, &function, &device, &threads, &shared, &takes)) return nullptr;
  auto* made = new Kernel{reinterpret_cast<Driver>(driver), reinterpret_cast<void*>(function),
                          static_cast<c10::DeviceIndex>(device), threads, shared, takes};
  return PyCapsule_New(made, KERNEL, nullptr);
}

// launch(kernel, programs, tensors, scalars): whether it was; not if a tensor begins at an odd place, or a count is too
// large.
inline PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 4);
  const Kernel& kernel = kernel_of(args[0]);
  const int64_t programs = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) throw python_error();
  const Object tensors = own(PySequence_Fast(args[2], "tensors")), scalars = own(PySequence_Fast(args[3], "scalars"));
  union Slot {
    void* pointer;
    int32_t count;
    float number;
  } slots[MOST_ARGUMENTS];
  void* given[MOST_ARGUMENTS + SCRATCH];
  const size_t pointers = PySequence_Fast_GET_SIZE(tensors.get()), numbers = PySequence_Fast_GET_SIZE(scalars.get());
  TORCH_CHECK(pointers + numbers == kernel.takes.size() && pointers + numbers <= MOST_ARGUMENTS,
              "a kernel takes " + kernel.takes + ", given " + to_string(pointers) + " tensors and " +
                  to_string(numbers) + " numbers");
  for (size_t index = 0; index < pointers + numbers; ++index) {
    Slot& slot = slots[index];
    given[index] = &slot;
    if (index < pointers) {
      slot.pointer = pointer_of(tensor_of(PySequence_Fast_GET_ITEM(tensors.get(), index)));
      if (!is_aligned(slot.pointer)) Py_RETURN_FALSE;
      continue;
    }
    PyObject* scalar = PySequence_Fast_GET_ITEM(scalars.get(), index - pointers);
    if (kernel.takes[index] == 'f') {
      slot.number = static_cast<float>(PyFloat_AsDouble(scalar));
    } else {
      int beyond = 0;
      const int64_t count = PyLong_AsLongLongAndOverflow(scalar, &beyond);
      if (beyond || count != static_cast<int32_t>(count)) Py_RETURN_FALSE;
      slot.count = static_cast<int32_t>(count);
    }
    if (PyErr_Occurred()) throw python_error();
  }
  Slot nothing{nullptr};
  for (size_t index = 0; index < SCRATCH; ++index) given[pointers + numbers + index] = &nothing;
  {
    const WithoutGil no_gil;
    kernel.launch(programs, given);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
