// Objects of Python, and who may touch them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace mixedopt {

using at::Tensor;

struct Released {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Object = std::unique_ptr<PyObject, Released>;

// Takes a reference that Python has just given.
inline Object own(PyObject* object) {
  if (!object) throw python_error();
  return Object(object);
}

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// A message is made a string here: where it was left to torch's macros, whose streams format the numbers, the process
// ended on one machine instead of raising.
using std::to_string;

inline void check_count(Py_ssize_t given, Py_ssize_t wanted) {
  TORCH_CHECK_TYPE(given == wanted, "takes " + to_string(wanted) + " arguments, given " + to_string(given));
}

inline const Tensor& tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), std::string("must be a tensor, not ") + Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

template <class T>
T& held_by(PyObject* capsule, const char* name) {
  auto* held = static_cast<T*>(PyCapsule_GetPointer(capsule, name));
  if (!held) throw python_error();
  return *held;
}

// Leaves a case to Python, errors and all.
inline PyObject* leave() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// Calls function(*tensors, more) and returns the tensors of the tuple that it returns, undefined for None. For threads
// of autograd, which hold no GIL.
inline std::vector<Tensor> call_python(PyObject* function, const std::vector<Tensor>& tensors, unsigned more) {
  const WithGil gil;
  const Object args = own(PyTuple_New(tensors.size() + 1));
  for (size_t index = 0; index < tensors.size(); ++index) {
    PyTuple_SET_ITEM(args.get(), index, own(THPVariable_Wrap(tensors[index])).release());
  }
  PyTuple_SET_ITEM(args.get(), tensors.size(), own(PyLong_FromUnsignedLong(more)).release());
  const Object made(PyObject_Call(function, args.get(), nullptr));
  if (!made) {
    python_error error;
    error.persist();
    throw error;
  }
  TORCH_CHECK_TYPE(PyTuple_Check(made.get()), "must return a tuple");
  std::vector<Tensor> found;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(made.get()); ++index) {
    PyObject* item = PyTuple_GET_ITEM(made.get(), index);
    found.push_back(item == Py_None ? Tensor() : tensor_of(item));
  }
  return found;
}

}  // namespace mixedopt
