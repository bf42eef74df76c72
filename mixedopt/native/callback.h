// A function of Python that autograd's threads call for what C++ leaves to it.
#pragma once

#include <vector>

#include "kernel.h"

namespace mixedopt {

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

// Calls function(*tensors, more) and returns the tensors of the tuple that it returns, undefined for None.
inline std::vector<Tensor> call_python(PyObject* function, const std::vector<Tensor>& tensors, uint64_t more) {
  const WithGil gil;
  const Object args = own(PyTuple_New(tensors.size() + 1));
  for (size_t index = 0; index < tensors.size(); ++index) {
    PyTuple_SET_ITEM(args.get(), index, own(THPVariable_Wrap(tensors[index])).release());
  }
  PyTuple_SET_ITEM(args.get(), tensors.size(), own(PyLong_FromUnsignedLongLong(more)).release());
  const Object made(PyObject_Call(function, args.get(), nullptr));
  if (!made) {
    python_error error;
    error.persist();
    throw error;
  }
  std::vector<Tensor> found;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(made.get()); ++index) {
    PyObject* item = PyTuple_GET_ITEM(made.get(), index);
    found.push_back(item == Py_None ? Tensor() : THPVariable_Unpack(item));
  }
  return found;
}

}  // namespace mixedopt
