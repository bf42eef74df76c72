// LayerNorm and RMSNorm of half activations: the kernels of norm_kernels.py, launched and put into autograd's graph.
//
// What is not the common case is left to Python: row_norm() returns None, and a backward that has no kernels yet, or
// is itself to be differentiated, calls a function of Python.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "callback.h"
#include "kernel.h"
#include "plain.h"

namespace mixedopt {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto PLANS = "mixedopt.Plans";
struct RowBackward {
  Kernel launch, sum;
  int64_t tile, most;
};

// How rows of one kind are normalised; see RowPlan in norm_kernels.py. It lives as long as the process, as graphs of
// autograd point to it.
struct RowPlan {
  c10::DeviceIndex device;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  int64_t size;
  double eps;
  bool centred, bias;
  Kernel launch;
  int64_t tile;
  PyObject* python;  // (dy, x, weight, needs) -> gradients of x, weight and bias
  // By what is needed: 1 for x, 2 for weight, 4 for bias. Autograd's threads read while Python may add.
  std::array<std::atomic<const RowBackward*>, 8> backward;
};

struct Plans {
  std::vector<std::unique_ptr<RowPlan>> rows;
};

inline bool ends_in(const Tensor& x, at::IntArrayRef shape) {
  return static_cast<size_t>(x.dim()) >= shape.size() && x.sizes().slice(x.dim() - shape.size()).equals(shape);
}

struct RowNorm : torch::autograd::Function<RowNorm> {
  static Tensor run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const RowPlan& plan) {
    Tensor y = at::empty_like(x);
    const int64_t rows = x.numel() / plan.size;
    plan.launch((rows + plan.tile - 1) / plan.tile, place(x), place(weight), place(bias ? *bias : weight), place(y),
                static_cast<int32_t>(rows), static_cast<float>(plan.eps));
    return y;
  }

  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, int64_t plan) {
    context->save_for_backward({x, weight});
    context->saved_data["plan"] = plan;
    return run(x, weight, bias, *reinterpret_cast<const RowPlan*>(plan));
  }

  static variable_list backward(AutogradContext* context, variable_list slopes) {
    const auto& plan = *reinterpret_cast<const RowPlan*>(context->saved_data["plan"].toInt());
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &dy = slopes[0];
    const unsigned needs = context->needs_input_grad(0) | context->needs_input_grad(1) << 1 |
                           (plan.bias && context->needs_input_grad(2)) << 2;
    variable_list gradients;
    const RowBackward* known = plan.backward[needs];
    if (known && !c10::GradMode::is_enabled() && dy.scalar_type() == plan.dtype && lies_well(dy, x.device())) {
      gradients = launched(plan, *known, dy, x, weight, needs);
    } else {
      gradients = call_python(plan.python, {dy, x, weight}, needs);
    }
    gradients.resize(4);  // the plan has none
    return gradients;
  }

  static variable_list launched(const RowPlan& plan, const RowBackward& kernels, const Tensor& dy, const Tensor& x,
                                const Tensor& weight, unsigned needs) {
    const int64_t rows = x.numel() / plan.size;
    const int64_t programs = std::min((rows + kernels.tile - 1) / kernels.tile, kernels.most);
    const int64_t width = plan.size * ((needs >> 1 & 1) + (needs >> 2 & 1));
    Tensor dx = needs & 1 ? at::empty_like(x) : Tensor(), dweight = needs & 2 ? at::empty_like(weight) : Tensor(),
           dbias = needs & 4 ? at::empty_like(weight) : Tensor();
    const Tensor partial = width ? at::empty({programs * width}, weight.options()) : weight;
    kernels.launch(programs, place(dy), place(x), place(weight), place(dx.defined() ? dx : x), place(partial),
                   static_cast<int32_t>(rows), static_cast<float>(plan.eps));
    if (width) {
      const Tensor &first = dweight.defined() ? dweight : dbias, &second = dbias.defined() ? dbias : dweight;
      kernels.sum((width + 31) / 32, place(partial), place(first), place(second), static_cast<int32_t>(programs));
    }
    return {dx, dweight, dbias};
  }
};

inline Plans* plans_of(PyObject* capsule) { return static_cast<Plans*>(PyCapsule_GetPointer(capsule, PLANS)); }

inline const RowPlan* find(
    const Plans& plans, const Tensor& x, at::IntArrayRef shape, double eps, bool centred, bool bias) {
  for (const auto& plan : plans.rows) {
    if (plan->device == x.get_device() && plan->dtype == x.scalar_type() && shape.equals(plan->shape) &&
        plan->eps == eps && plan->centred == centred && plan->bias == bias) {
      return plan.get();
    }
  }
  return nullptr;
}

// True iff the sizes of a tuple, list or torch.Size are these.
inline bool says(PyObject* shape, at::IntArrayRef sizes) {
  const Object items(PySequence_Fast(shape, "a shape is a sequence"));
  if (!items || PySequence_Fast_GET_SIZE(items.get()) != static_cast<Py_ssize_t>(sizes.size())) {
    return PyErr_Clear(), false;
  }
  for (size_t index = 0; index < sizes.size(); ++index) {
    PyObject* size = PySequence_Fast_GET_ITEM(items.get(), index);
    if (!PyLong_CheckExact(size) || PyLong_AsLongLong(size) != sizes[index]) return PyErr_Clear(), false;
  }
  return true;
}

// row_norm(plans, x, shape, weight, bias, eps, centred): the result, or None if this is a case for Python.
inline PyObject* row_norm(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const bool has_bias = args[4] != Py_None, centred = args[6] == Py_True;
  if (!THPVariable_CheckExact(args[1]) || !THPVariable_CheckExact(args[3]) ||
      (has_bias && !THPVariable_CheckExact(args[4]))) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[1]), &weight = THPVariable_Unpack(args[3]);
  const std::optional<Tensor> bias = has_bias ? std::optional(THPVariable_Unpack(args[4])) : std::nullopt;
  if (!x.is_cuda() || !is_plain(x, true)) Py_RETURN_NONE;
  const auto shape = weight.sizes();
  double eps = std::numeric_limits<float>::epsilon();  // what None means to an RMSNorm
  if (args[5] != Py_None || centred) eps = PyFloat_AsDouble(args[5]);
  if (PyErr_Occurred()) return PyErr_Clear(), Py_NewRef(Py_None);
  const auto local = c10::impl::VirtualGuardImpl(CUDA).getDevice();
  if (x.device() != local || !says(args[2], shape) || !lies_well(x, local)) Py_RETURN_NONE;
  const RowPlan* plan = find(*plans_of(args[0]), x, shape, eps, centred, has_bias);
  if (!plan || !x.numel() || x.numel() / plan->size > MOST || !ends_in(x, shape)) Py_RETURN_NONE;
  for (const Tensor* each : {&weight, bias ? &*bias : &weight}) {
    if (each->scalar_type() != at::kFloat || !each->sizes().equals(shape) || !lies_well(*each, local) ||
        !is_plain(*each, true)) {
      Py_RETURN_NONE;
    }
  }
  Tensor y;
  {
    const WithoutGil no_gil;
    const bool graph = c10::GradMode::is_enabled() &&
                       (x.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad()));
    y = graph ? RowNorm::apply(x, weight, bias, reinterpret_cast<int64_t>(plan)) : RowNorm::run(x, weight, bias, *plan);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

inline PyObject* new_plans(PyObject*, PyObject*) {
  return PyCapsule_New(new Plans, PLANS, nullptr);  // for ever, as its plans are
}

// add_rows(plans, device, is_bf16, shape, eps, centred, bias, kernel, tile, python) -> number
inline PyObject* add_rows(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *plans, *shape, *kernel, *python;
  int device, brain, centred, bias;
  long long tile;
  double eps;
  if (!PyArg_ParseTuple(args, "OipO!dppOLO", &plans, &device, &brain, &PyTuple_Type, &shape, &eps, &centred, &bias,
                        &kernel, &tile, &python)) {
    return nullptr;
  }
  auto plan = std::make_unique<RowPlan>();
  plan->device = static_cast<c10::DeviceIndex>(device);
  plan->dtype = brain ? at::kBFloat16 : at::kHalf;
  plan->size = 1;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(shape); ++index) {
    plan->shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape, index)));
    plan->size *= plan->shape.back();
  }
  plan->eps = eps, plan->centred = centred, plan->bias = bias;
  plan->launch = kernel_of(kernel), plan->tile = tile;
  plan->python = Py_NewRef(python);
  auto& rows = plans_of(plans)->rows;
  rows.push_back(std::move(plan));
  return PyLong_FromSize_t(rows.size() - 1);
  END_HANDLE_TH_ERRORS
}

// add_rows_backward(plans, number, needs, kernel, kernel of the sums or None, tile, most)
inline PyObject* add_rows_backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *plans, *kernel, *sum;
  Py_ssize_t number;
  int needs;
  long long tile, most;
  if (!PyArg_ParseTuple(args, "OniOOLL", &plans, &number, &needs, &kernel, &sum, &tile, &most)) return nullptr;
  plans_of(plans)->rows.at(number)->backward.at(needs) =
      new RowBackward{kernel_of(kernel), sum == Py_None ? Kernel{} : kernel_of(sum), tile, most};
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
