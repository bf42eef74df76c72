// LayerNorm and RMSNorm of half activations: the kernels of norm_kernels.py, launched and put into autograd's graph.
//
// What is not the common case is left to Python: row_norm() returns None, and a backward that has no kernels yet, or
// is itself to be differentiated, calls a function of Python.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "kernel.h"
#include "node.h"

namespace mixedopt {

constexpr auto ROWS = "mixedopt.Rows";
constexpr auto ROW_PLAN = "mixedopt.RowPlan";
// Which gradients are wanted.
enum Needs : unsigned { INPUT = 1, WEIGHT = 2, BIAS = 4 };

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
  std::array<std::atomic<const RowBackward*>, 8> backward;  // by needs; autograd's threads read while Python may add
};

using Rows = std::vector<std::unique_ptr<RowPlan>>;

inline bool ends_in(const Tensor& x, at::IntArrayRef shape) {
  return static_cast<size_t>(x.dim()) >= shape.size() && x.sizes().slice(x.dim() - shape.size()).equals(shape);
}

struct RowNorm : torch::autograd::Function<RowNorm> {
  static Tensor run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const RowPlan& plan) {
    Tensor y = at::empty_like(x);
    const int64_t rows = x.numel() / plan.size;
    plan.launch((rows + plan.tile - 1) / plan.tile, pointer_of(x), pointer_of(weight),
                pointer_of(bias ? *bias : weight), pointer_of(y), static_cast<int32_t>(rows),
                static_cast<float>(plan.eps));
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
    const Tensor &x = saved[0], &weight = saved[1];
    unsigned needs = context->needs_input_grad(0) ? INPUT : 0;
    if (context->needs_input_grad(1)) needs |= WEIGHT;
    if (plan.bias && context->needs_input_grad(2)) needs |= BIAS;
    variable_list gradients;
    const RowBackward* known = plan.backward[needs];
    const bool fits = is_plain(slopes[0], true) && slopes[0].scalar_type() == plan.dtype &&
                      x.scalar_type() == plan.dtype && lies_well(x, slopes[0].device()) &&
                      lies_well(weight, slopes[0].device());  // hooks on saved tensors may have changed them
    if (known && fits && !c10::GradMode::is_enabled()) {
      Tensor dy = slopes[0].contiguous();
      if (!is_aligned(pointer_of(dy))) dy = dy.clone();
      gradients = launched(plan, *known, dy, x, weight, needs);
    } else {
      gradients = call_python(plan.python, {slopes[0], x, weight}, needs);
    }
    gradients.resize(4);  // the plan has none
    return gradients;
  }

  static variable_list launched(const RowPlan& plan, const RowBackward& kernels, const Tensor& dy, const Tensor& x,
                                const Tensor& weight, unsigned needs) {
    const int64_t rows = x.numel() / plan.size;
    const int64_t programs = std::min((rows + kernels.tile - 1) / kernels.tile, kernels.most);
    const int64_t width = plan.size * ((needs & WEIGHT ? 1 : 0) + (needs & BIAS ? 1 : 0));
    const Tensor dx = needs & INPUT ? at::empty_like(x) : Tensor();
    const Tensor dweight = needs & WEIGHT ? at::empty_like(weight) : Tensor();
    const Tensor dbias = needs & BIAS ? at::empty_like(weight) : Tensor();
    const Tensor partial = width ? at::empty({programs * width}, weight.options()) : weight;
    kernels.launch(programs, pointer_of(dy), pointer_of(x), pointer_of(weight), pointer_of(dx.defined() ? dx : x),
                   pointer_of(partial), static_cast<int32_t>(rows), static_cast<float>(plan.eps));
    if (width) {
      const Tensor &first = dweight.defined() ? dweight : dbias, &second = dbias.defined() ? dbias : dweight;
      kernels.sum((width + 31) / 32, pointer_of(partial), pointer_of(first), pointer_of(second),
                  static_cast<int32_t>(programs));
    }
    return {dx, dweight, dbias};
  }
};

inline const RowPlan* find(
    const Rows& rows, const Tensor& x, at::IntArrayRef shape, double eps, bool centred, bool bias) {
  for (const auto& plan : rows) {
    if (plan->device == x.get_device() && plan->dtype == x.scalar_type() && shape.equals(plan->shape) &&
        plan->eps == eps && plan->centred == centred && plan->bias == bias) {
      return plan.get();
    }
  }
  return nullptr;
}

// True iff these are the sizes of a tuple, which torch.Size is, or of a list.
inline bool says(PyObject* shape, at::IntArrayRef sizes) {
  if (!PyTuple_Check(shape) && !PyList_Check(shape)) return false;
  if (PySequence_Fast_GET_SIZE(shape) != static_cast<Py_ssize_t>(sizes.size())) return false;
  for (size_t index = 0; index < sizes.size(); ++index) {
    PyObject* size = PySequence_Fast_GET_ITEM(shape, index);
    int beyond = 0;
    if (!PyLong_CheckExact(size) || PyLong_AsLongLongAndOverflow(size, &beyond) != sizes[index]) return false;
  }
  return true;
}

// row_norm(rows, x, shape, weight, bias, eps, centred): the result, or None if this is a case for Python.
inline PyObject* row_norm(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 7);
  const bool has_bias = args[4] != Py_None, centred = args[6] == Py_True;
  if (!THPVariable_CheckExact(args[1]) || !THPVariable_CheckExact(args[3]) ||
      (has_bias && !THPVariable_CheckExact(args[4]))) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[1]), &weight = THPVariable_Unpack(args[3]);
  const std::optional<Tensor> bias = has_bias ? std::optional(THPVariable_Unpack(args[4])) : std::nullopt;
  const bool plain = is_plain(x, true) && is_plain(weight, true) && (!bias || is_plain(*bias, true));
  if (x.device().type() != DEVICE || !plain || !says(args[2], weight.sizes())) Py_RETURN_NONE;
  double eps = std::numeric_limits<float>::epsilon();  // what None means to an RMSNorm
  if (args[5] != Py_None || centred) eps = PyFloat_AsDouble(args[5]);
  if (PyErr_Occurred()) return leave();
  const RowPlan* plan = find(held_by<Rows>(args[0], ROWS), x, weight.sizes(), eps, centred, has_bias);
  const auto local = c10::impl::VirtualGuardImpl(DEVICE).getDevice();
  if (!plan || !lies_well(x, local) || !ends_in(x, weight.sizes()) || !x.numel() || x.numel() / plan->size > MOST) {
    Py_RETURN_NONE;
  }
  for (const Tensor* each : {&weight, bias ? &*bias : &weight}) {
    const bool fits = each->scalar_type() == at::kFloat && each->sizes().equals(weight.sizes());
    if (!fits || !lies_well(*each, local)) Py_RETURN_NONE;
  }
  Tensor y;
  {
    const WithoutGil no_gil;
    y = needs_node(x, weight, bias) ? RowNorm::apply(x, weight, bias, reinterpret_cast<int64_t>(plan))
                                    : RowNorm::run(x, weight, bias, *plan);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// rows(): a place for plans, for ever, as they are.
inline PyObject* new_rows(PyObject*, PyObject*) { return PyCapsule_New(new Rows, ROWS, nullptr); }

// add_rows(rows, device, is_bf16, shape, eps, centred, bias, kernel, tile, python): a capsule of the plan
inline PyObject* add_rows(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *rows, *shape, *kernel, *python;
  int device, brain, centred, bias;
  long long tile;
  double eps;
  if (!PyArg_ParseTuple(args, "OipO!dppOLO", &rows, &device, &brain, &PyTuple_Type, &shape, &eps, &centred, &bias,
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
  if (PyErr_Occurred()) throw python_error();
  plan->eps = eps, plan->centred = centred, plan->bias = bias;
  plan->launch = kernel_of(kernel), plan->tile = tile;
  plan->python = Py_NewRef(python);
  auto& known = held_by<Rows>(rows, ROWS);
  known.push_back(std::move(plan));
  return PyCapsule_New(known.back().get(), ROW_PLAN, nullptr);
  END_HANDLE_TH_ERRORS
}

// add_rows_backward(plan, needs, kernel, kernel of the sums or None, tile, most): whether it was new, else nothing is
// changed.
inline PyObject* add_rows_backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *plan, *kernel, *sum;
  int needs;
  long long tile, most;
  if (!PyArg_ParseTuple(args, "OiOOLL", &plan, &needs, &kernel, &sum, &tile, &most)) return nullptr;
  auto made = std::make_unique<RowBackward>(
      RowBackward{kernel_of(kernel), sum == Py_None ? Kernel{} : kernel_of(sum), tile, most});
  const RowBackward* none = nullptr;
  const bool fresh = held_by<RowPlan>(plan, ROW_PLAN).backward.at(needs).compare_exchange_strong(none, made.get());
  if (fresh) made.release();
  return PyBool_FromLong(fresh);
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
