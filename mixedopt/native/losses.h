// Cross entropy of half logits: the kernels of loss_kernels.py, launched and put into autograd's graph.
//
// What is not the common case is left to Python: cross_entropy() returns None, and a backward that is itself to be
// differentiated calls a function of Python.
#pragma once

#include "kernel.h"
#include "node.h"

namespace mixedopt {

constexpr auto LOSSES = "mixedopt.Losses";

// How the logits of one kind become a loss; see loss_kernels.py. It lives as long as the process, as graphs of autograd
// point to it.
struct LossPlan {
  c10::DeviceIndex device;
  at::ScalarType dtype;
  int64_t size, ignored;
  std::string reduction;
  Kernel rows, reduce, slope;
  PyObject* python;  // (slope, x, target, stats, counted, 1) -> (dx,)
};

using Losses = std::vector<std::unique_ptr<LossPlan>>;

// What a forward makes beside its result, in one piece of memory: two numbers a row, the rows' losses, how many count.
struct Beside {
  Tensor memory;
  int64_t rows;

  static int64_t rounded(int64_t count) { return (count + 3) / 4 * 4; }  // so that each part begins at 16 bytes
  explicit Beside(const Tensor& x)
      : memory(at::empty({rounded(2 * x.size(0)) + rounded(x.size(0)) + 4}, x.options().dtype(at::kFloat))),
        rows(x.size(0)) {}
  Beside(const Tensor& x, Tensor kept) : memory(std::move(kept)), rows(x.size(0)) {}

  float* stats() const { return memory.data_ptr<float>(); }
  float* losses() const { return stats() + rounded(2 * rows); }
  float* counted() const { return losses() + rounded(rows); }
  Tensor shown_stats() const { return memory.narrow(0, 0, 2 * rows).view({rows, 2}); }
  Tensor shown_counted() const { return memory.select(0, memory.numel() - 4); }
};

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Tensor run(const Tensor& x, const Tensor& target, const LossPlan& plan, const Beside& beside) {
    const bool none = plan.reduction == "none";
    const Tensor result = at::empty(none ? at::IntArrayRef{beside.rows} : at::IntArrayRef{}, beside.memory.options());
    void* of_rows = none ? pointer_of(result) : beside.losses();
    void* reduced = none ? beside.losses() : pointer_of(result);  // that of "none" nobody reads
    plan.rows(beside.rows, pointer_of(x), pointer_of(target), of_rows, beside.stats());
    plan.reduce(1, pointer_of(target), of_rows, reduced, beside.counted(), static_cast<int32_t>(beside.rows));
    return result;
  }

  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& target, int64_t plan) {
    const Beside beside(x);
    context->save_for_backward({x, target, beside.memory});
    context->saved_data["plan"] = plan;
    return run(x, target, *reinterpret_cast<const LossPlan*>(plan), beside);
  }

  static variable_list backward(AutogradContext* context, variable_list slopes) {
    const auto& plan = *reinterpret_cast<const LossPlan*>(context->saved_data["plan"].toInt());
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &target = saved[1];
    const Beside beside(x, saved[2]);
    if (c10::GradMode::is_enabled() || !is_plain(slopes[0], true)) {
      const auto found = call_python(
          plan.python, {slopes[0], x, target, beside.shown_stats(), beside.shown_counted()}, 1);
      return {found.at(0), Tensor(), Tensor()};
    }
    Tensor slope = slopes[0].contiguous();
    if (!is_aligned(pointer_of(slope))) slope = slope.clone();
    const Tensor dx = at::empty_like(x);
    plan.slope(beside.rows, pointer_of(slope), pointer_of(x), pointer_of(target), beside.stats(), beside.counted(),
               pointer_of(dx));
    return {dx, Tensor(), Tensor()};
  }
};

inline const LossPlan* find(const Losses& losses, const Tensor& x, int64_t ignored, const std::string& reduction) {
  for (const auto& plan : losses) {
    if (plan->device == x.get_device() && plan->dtype == x.scalar_type() && plan->size == x.size(1) &&
        plan->ignored == ignored && plan->reduction == reduction) {
      return plan.get();
    }
  }
  return nullptr;
}

// cross_entropy(losses, x, target, ignored, reduction): the loss, or None if this is a case for Python.
inline PyObject* cross_entropy(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 5);
  if (!THPVariable_CheckExact(args[1]) || !THPVariable_CheckExact(args[2])) Py_RETURN_NONE;
  const Tensor &x = THPVariable_Unpack(args[1]), &target = THPVariable_Unpack(args[2]);
  if (x.device().type() != DEVICE || !is_plain(x, true) || !is_plain(target, true) || saves_by_hooks()) Py_RETURN_NONE;
  const auto local = c10::impl::VirtualGuardImpl(DEVICE).getDevice();
  const bool fits = x.dim() == 2 && x.numel() && target.dim() == 1 && target.size(0) == x.size(0) &&
                    target.scalar_type() == at::kLong && x.size(0) <= MOST && lies_well(x, local) &&
                    lies_well(target, local);
  if (!fits) Py_RETURN_NONE;
  const int64_t ignored = PyLong_AsLongLong(args[3]);
  const char* reduction = PyUnicode_Check(args[4]) ? PyUnicode_AsUTF8(args[4]) : nullptr;
  if (PyErr_Occurred() || !reduction) return leave();
  const LossPlan* plan = find(held_by<Losses>(args[0], LOSSES), x, ignored, reduction);
  if (!plan) Py_RETURN_NONE;
  Tensor loss;
  {
    const WithoutGil no_gil;
    loss = needs_node(x) ? CrossEntropy::apply(x, target, reinterpret_cast<int64_t>(plan))
                         : CrossEntropy::run(x, target, *plan, Beside(x));
  }
  return THPVariable_Wrap(std::move(loss));
  END_HANDLE_TH_ERRORS
}

// losses(): a place for plans, for ever, as they are.
inline PyObject* new_losses(PyObject*, PyObject*) { return PyCapsule_New(new Losses, LOSSES, nullptr); }

// add_loss(losses, device, is_bf16, size, ignored, reduction, kernels of rows, sum and slope, python)
inline PyObject* add_loss(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *losses, *rows, *reduce, *slope, *python;
  int device, brain;
  long long size, ignored;
  const char* reduction;
  if (!PyArg_ParseTuple(args, "OipLLsOOOO", &losses, &device, &brain, &size, &ignored, &reduction, &rows, &reduce,
                        &slope, &python)) {
    return nullptr;
  }
  held_by<Losses>(losses, LOSSES).push_back(std::unique_ptr<LossPlan>(
      new LossPlan{static_cast<c10::DeviceIndex>(device), brain ? at::kBFloat16 : at::kHalf, size, ignored, reduction,
                   kernel_of(rows), kernel_of(reduce), kernel_of(slope), Py_NewRef(python)}));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
