// Kernels that Triton has compiled, launched by the driver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace mixedopt {

using at::Tensor;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int64_t MOST = INT32_MAX;  // a count that a kernel is given
constexpr size_t MOST_ARGUMENTS = 64;
constexpr size_t SCRATCH = 4;  // pointers that Triton may have added
constexpr auto KERNEL = "mixedopt.Kernel";

struct Released {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Object = std::unique_ptr<PyObject, Released>;

// Takes a reference that Python has just given.
inline Object own(PyObject* object) {
  if (!object) throw python_error();
  return Object(object);
}

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// cuLaunchKernel: function, grid, block, shared bytes, stream, arguments, nothing; returns 0 if all is well.
using Driver = int (*)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

struct Kernel {
  Driver driver;
  void* function;
  unsigned threads, shared;
  std::string takes;  // a letter for each argument: * for a pointer, i for int32, f for fp32

  // Launch on the current stream of the current device. The driver reads as many arguments as the kernel has, so the
  // pointers to scratch memory, of which ours use none, may be too many.
  void launch(int64_t programs, void** given) const {
    if (!programs) return;  // the driver takes none for a mistake
    const c10::impl::VirtualGuardImpl guard(CUDA);
    void* stream = guard.getStream(guard.getDevice()).native_handle();
    const int code =
        driver(function, static_cast<unsigned>(programs), 1, 1, threads, 1, 1, shared, stream, given, nullptr);
    TORCH_CHECK(code == 0, "the driver launched no kernel: CUDA error ", code);
  }

  template <class... Args>
  void operator()(int64_t programs, Args... args) const {
    void* nothing = nullptr;
    void* given[] = {&args..., &nothing, &nothing, &nothing, &nothing};
    launch(programs, given);
  }
};

inline void* place(const Tensor& tensor) { return tensor.data_ptr(); }

inline bool is_aligned(const void* pointer) { return !(reinterpret_cast<uintptr_t>(pointer) & 15); }

// True iff a kernel on this device can be given the tensor.
inline bool lies_well(const Tensor& tensor, c10::Device device) {
  return tensor.device() == device && tensor.is_contiguous() && is_aligned(tensor.const_data_ptr());
}

inline const Kernel& kernel_of(PyObject* capsule) {
  auto* kernel = static_cast<Kernel*>(PyCapsule_GetPointer(capsule, KERNEL));
  if (!kernel) throw python_error();
  return *kernel;
}

// kernel(driver, function, threads, shared, takes): a capsule. It lives as long as the process, as Triton's own do.
inline PyObject* kernel(PyObject*, PyObject* args) {
  unsigned long long driver, function;
  unsigned threads, shared;
  const char* takes;
  if (!PyArg_ParseTuple(args, "KKIIs", &driver, &function, &threads, &shared, &takes)) return nullptr;
  auto* made = new Kernel{reinterpret_cast<Driver>(driver), reinterpret_cast<void*>(function), threads, shared, takes};
  return PyCapsule_New(made, KERNEL, nullptr);
}

// launch(kernel, programs, tensors, scalars): whether it was; not if a tensor begins at an odd place, or a count is
// too large.
inline PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const Kernel& kernel = kernel_of(args[0]);
  const int64_t programs = PyLong_AsLongLong(args[1]);
  const Object tensors = own(PySequence_Fast(args[2], "tensors")), scalars = own(PySequence_Fast(args[3], "scalars"));
  union Slot {
    void* pointer;
    int32_t count;
    float number;
  } slots[MOST_ARGUMENTS];
  void* given[MOST_ARGUMENTS + SCRATCH];
  const size_t pointers = PySequence_Fast_GET_SIZE(tensors.get()), numbers = PySequence_Fast_GET_SIZE(scalars.get());
  TORCH_CHECK(pointers + numbers == kernel.takes.size() && pointers + numbers <= MOST_ARGUMENTS, "a kernel takes ",
              kernel.takes, ", given ", pointers, " tensors and ", numbers, " numbers");
  for (size_t index = 0; index < pointers + numbers; ++index) {
    Slot& slot = slots[index];
    given[index] = &slot;
    if (index < pointers) {
      PyObject* tensor = PySequence_Fast_GET_ITEM(tensors.get(), index);
      TORCH_CHECK_TYPE(THPVariable_Check(tensor), "a kernel takes tensors, not ", Py_TYPE(tensor)->tp_name);
      slot.pointer = place(THPVariable_Unpack(tensor));
      if (!is_aligned(slot.pointer)) Py_RETURN_FALSE;
      continue;
    }
    PyObject* number = PySequence_Fast_GET_ITEM(scalars.get(), index - pointers);
    if (kernel.takes[index] == 'f') {
      slot.number = static_cast<float>(PyFloat_AsDouble(number));
    } else {
      const int64_t count = PyLong_AsLongLong(number);
      if (count != static_cast<int32_t>(count)) Py_RETURN_FALSE;
      slot.count = static_cast<int32_t>(count);
    }
  }
  if (PyErr_Occurred()) throw python_error();
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
