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
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(args[1], &bytes, &size) < 0) throw python_error();
  std::vector<int64_t> versions(size / sizeof(int64_t));
  if (size) std::memcpy(versions.data(), bytes, versions.size() * sizeof(int64_t));
  for_each(args[0], [](const Tensor& param) { param.unsafeGetTensorImpl()->bump_version(); });
  for (int64_t& version : versions) ++version;
  return bytes_of(versions);
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
