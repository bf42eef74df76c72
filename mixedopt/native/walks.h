// What a step looks at, and does, for every parameter.
//
// They are many and each is little, so the interpreter would cost more than the work. walks.py says what each
// function means, and does the same in Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "objects.h"

namespace mixedopt {

constexpr auto KEPT = "mixedopt.Kept";
constexpr int64_t NOWHERE = 16;  // the address of a gradient of no values

template <class Visit>
void for_each(PyObject* params, Visit visit) {
  const Object items = own(PySequence_Fast(params, "parameters are a list"));
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.get());
  for (Py_ssize_t index = 0; index < size; ++index) {
    visit(tensor_of(PySequence_Fast_GET_ITEM(items.get(), index)));
  }
}

inline PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
}

// Numbers that bytes_of has packed; valid as long as the object.
struct Numbers {
  const char* bytes;
  size_t size;

  explicit Numbers(PyObject* packed) {
    char* begin;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(packed, &begin, &length) < 0) throw python_error();
    bytes = begin, size = static_cast<size_t>(length) / sizeof(int64_t);
  }

  int64_t operator[](size_t place) const {  // bytes need not be aligned
    int64_t number;
    std::memcpy(&number, bytes + place * sizeof number, sizeof number);
    return number;
  }
};

inline int64_t address_of(const Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.data_ptr()); }

inline PyObject* pointers(PyObject*, PyObject* params) {
  HANDLE_TH_ERRORS
  std::vector<int64_t> found;
  for_each(params, [&](const Tensor& param) { found.push_back(address_of(param)); });
  return bytes_of(found);
  END_HANDLE_TH_ERRORS
}

inline PyObject* versions(PyObject*, PyObject* params) {
  HANDLE_TH_ERRORS
  std::vector<int64_t> found;
  for_each(params, [&](const Tensor& param) { found.push_back(param._version()); });
  return bytes_of(found);
  END_HANDLE_TH_ERRORS
}

// stand(params, pointers, versions or None): whether each lies there, and has that version.
inline PyObject* stand(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 3);
  const Numbers pointers(args[1]), versions(args[2] == Py_None ? args[1] : args[2]);
  const bool any_version = args[2] == Py_None;
  size_t place = 0;
  bool all = true;
  for_each(args[0], [&](const Tensor& param) {
    all = all && place < pointers.size && place < versions.size && address_of(param) == pointers[place] &&
          (any_version || static_cast<int64_t>(param._version()) == versions[place]);
    ++place;
  });
  return PyBool_FromLong(all && place == pointers.size && place == versions.size);
  END_HANDLE_TH_ERRORS
}

inline bool lies_as(const Tensor& grad, const Tensor& param) {
  return grad.defined() && grad.layout() == at::kStrided && grad.scalar_type() == param.scalar_type() &&
         grad.device() == param.device() && grad.sizes().equals(param.sizes()) &&
         (grad.strides().equals(param.strides()) || (grad.is_contiguous() && param.is_contiguous()));
}

inline PyObject* gradients(PyObject*, PyObject* params) {
  HANDLE_TH_ERRORS
  std::vector<int64_t> found;
  bool all = true;
  for_each(params, [&](const Tensor& param) {
    const Tensor& grad = param.grad();
    all = all && lies_as(grad, param);
    if (all) found.push_back(grad.numel() ? address_of(grad) : NOWHERE);
  });
  if (!all) Py_RETURN_NONE;
  return bytes_of(found);
  END_HANDLE_TH_ERRORS
}

inline void forget(PyObject* capsule) { delete static_cast<std::vector<Tensor>*>(PyCapsule_GetPointer(capsule, KEPT)); }

inline PyObject* take(PyObject*, PyObject* params) {
  HANDLE_TH_ERRORS
  auto kept = std::make_unique<std::vector<Tensor>>();
  for_each(params, [&](const Tensor& param) {
    if (param.grad().defined()) kept->push_back(std::move(param.mutable_grad()));
  });
  return PyCapsule_New(kept.release(), KEPT, forget);
  END_HANDLE_TH_ERRORS
}

inline PyObject* bump(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 2);
  const Numbers versions(args[1]);
  std::vector<int64_t> raised(versions.size);
  for (size_t place = 0; place < versions.size; ++place) raised[place] = versions[place] + 1;
  for_each(args[0], [](const Tensor& param) { param.unsafeGetTensorImpl()->bump_version(); });
  return bytes_of(raised);
  END_HANDLE_TH_ERRORS
}

template <class Visit>
void for_each_value(PyObject* dict, Visit visit) {
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value);) visit(value);
}

inline PyObject* held(PyObject*, PyObject* state) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyDict_Check(state), std::string("state must be a dict, not ") + Py_TYPE(state)->tp_name);
  std::vector<int64_t> found;
  for_each_value(state, [&](PyObject* entry) {
    if (!PyDict_Check(entry)) return;
    for_each_value(entry, [&](PyObject* value) { found.push_back(reinterpret_cast<int64_t>(value)); });
  });
  return bytes_of(found);
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
