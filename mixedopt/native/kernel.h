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

union Slot {
  void* pointer;
  int32_t count;
  float number;
};

// What the driver is given: a pointer to each argument. May not be moved.
struct Arguments {
  Slot slots[MOST_ARGUMENTS];
  Slot nothing{nullptr};
  void* given[MOST_ARGUMENTS + SCRATCH];
  Py_ssize_t open = -1;  // place of the tensor that is given later: None stands for it

  // False for what is left to Triton: a tensor that begins at an odd place, a count that is too large.
  bool read(const Kernel& kernel, PyObject* tensors, PyObject* scalars) {
    const size_t pointers = PySequence_Fast_GET_SIZE(tensors), numbers = PySequence_Fast_GET_SIZE(scalars);
    TORCH_CHECK(pointers + numbers == kernel.takes.size() && pointers + numbers <= MOST_ARGUMENTS,
                "a kernel takes " + kernel.takes + ", given " + to_string(pointers) + " tensors and " +
                    to_string(numbers) + " numbers");
    for (size_t index = 0; index < pointers + numbers; ++index) {
      given[index] = &slots[index];
      PyObject* item = index < pointers ? PySequence_Fast_GET_ITEM(tensors, index)
                                        : PySequence_Fast_GET_ITEM(scalars, index - pointers);
      if (!(index < pointers ? read_tensor(index, item) : read_number(index, kernel.takes[index], item))) return false;
    }
    for (size_t index = 0; index < SCRATCH; ++index) given[pointers + numbers + index] = &nothing;
    return true;
  }

  bool read_tensor(size_t index, PyObject* tensor) {
    if (tensor == Py_None && open < 0) {
      open = static_cast<Py_ssize_t>(index);
      return true;
    }
    slots[index].pointer = pointer_of(tensor_of(tensor));
    return is_aligned(slots[index].pointer);
  }

  bool read_number(size_t index, char kind, PyObject* number) {
    Slot& slot = slots[index];
    if (kind == 'f') {
      slot.number = static_cast<float>(PyFloat_AsDouble(number));
    } else {
      int beyond = 0;
      const int64_t count = PyLong_AsLongLongAndOverflow(number, &beyond);
      if (beyond || count != static_cast<int32_t>(count)) return false;
      slot.count = static_cast<int32_t>(count);
    }
    if (PyErr_Occurred()) throw python_error();
    return true;
  }
};

inline int64_t count_of(PyObject* number) {
  const int64_t count = PyLong_AsLongLong(number);
  if (PyErr_Occurred()) throw python_error();
  return count;
}

// launch(kernel, programs, tensors, scalars): whether it was; not if that is left to Triton.
inline PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 4);
  const Kernel& kernel = kernel_of(args[0]);
  const int64_t programs = count_of(args[1]);
  const Object tensors = own(PySequence_Fast(args[2], "tensors")), scalars = own(PySequence_Fast(args[3], "scalars"));
  Arguments arguments;
  if (!arguments.read(kernel, tensors.get(), scalars.get())) Py_RETURN_FALSE;
  TORCH_CHECK_TYPE(arguments.open < 0, "must be a tensor, not NoneType");
  {
    const WithoutGil no_gil;
    kernel.launch(programs, arguments.given);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// A launch to be made again and again. It keeps its tensors.
struct Ready {
  const Kernel& kernel;
  int64_t programs;
  Object tensors;
  Arguments arguments;
};
constexpr auto READY = "mixedopt.Ready";

inline void forget_ready(PyObject* capsule) { delete static_cast<Ready*>(PyCapsule_GetPointer(capsule, READY)); }

// ready(kernel, programs, tensors, scalars): a capsule; None if that is left to Triton. One of the tensors may be None.
inline PyObject* ready(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 4);
  const Object scalars = own(PySequence_Fast(args[3], "scalars"));
  std::unique_ptr<Ready> made(new Ready{kernel_of(args[0]), count_of(args[1]), own(PySequence_Tuple(args[2])), {}});
  if (!made->arguments.read(made->kernel, made->tensors.get(), scalars.get())) Py_RETURN_NONE;
  return PyCapsule_New(made.release(), READY, forget_ready);
  END_HANDLE_TH_ERRORS
}

// relaunch(ready) or relaunch(ready, tensor in the place of None): whether it was launched, as of launch.
inline PyObject* relaunch(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(number > 0, "takes a launch");
  auto& ready = held_by<Ready>(args[0], READY);
  Arguments& arguments = ready.arguments;
  check_count(number, arguments.open < 0 ? 1 : 2);
  if (number == 2) {
    void* pointer = pointer_of(tensor_of(args[1]));
    if (!is_aligned(pointer)) Py_RETURN_FALSE;
    arguments.slots[arguments.open].pointer = pointer;
  }
  {
    const WithoutGil no_gil;
    ready.kernel.launch(ready.programs, arguments.given);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
