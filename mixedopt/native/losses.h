// Cross entropy of half logits: the kernels of loss_kernels.py, launched and put into autograd's graph.
//
// As in norms.h, what is not the common case is left to Python.
#pragma once

#include <atomic>
#include <memory>
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

struct Losses {
  std::vector<std::unique_ptr<LossPlan>> plans;
};

// What a forward leaves for backward, in one piece of memory: two numbers a row, their losses, and how many count.
struct Kept {
  Tensor memory;
  int64_t rows;

  static int64_t rounded(int64_t count) { return (count + 3) / 4 * 4; }  // so that each part begins at 16 bytes
  static Kept make(const Tensor& x, int64_t rows) {
    return {at::empty({rounded(2 * rows) + rounded(rows) + 4}, x.options().dtype(at::kFloat)), rows};
  }
  float* stats() const { return memory.data_ptr<float>(); }
  float* losses() const { return stats() + rounded(2 * rows); }
  float* counted() const { return losses() + rounded(rows); }
  Tensor shown_stats() const { return memory.narrow(0, 0, 2 * rows).view({rows, 2}); }
  Tensor shown_counted() const { return memory.select(0, memory.numel() - 4); }
};

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Tensor run(const Tensor& x, const Tensor& target, const LossPlan& plan, Kept& kept) {
    kept = Kept::make(x, x.size(0));
    const bool none = plan.reduction == "none";
    Tensor result = at::empty(none ? at::IntArrayRef{kept.rows} : at::IntArrayRef{}, kept.memory.options());
    void* losses = none ? place(result) : kept.losses();
    plan.rows(kept.rows, place(x), place(target), losses, static_cast<void*>(kept.stats()));
    plan.reduce(1, place(target), losses, none ? static_cast<void*>(kept.losses()) : place(result),
                static_cast<void*>(kept.counted()), static_cast<int32_t>(kept.rows));
    return result;
  }

  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& target, int64_t plan) {
    Kept kept;
    Tensor result = run(x, target, *reinterpret_cast<const LossPlan*>(plan), kept);
    context->save_for_backward({x, target, kept.memory});
    context->saved_data["plan"] = plan;
    return result;
  }

  static variable_list backward(AutogradContext* context, variable_list slopes) {
    const auto& plan = *reinterpret_cast<const LossPlan*>(context->saved_data["plan"].toInt());
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &target = saved[1], &slope = slopes[0];
    const Kept kept{saved[2], x.size(0)};
    if (c10::GradMode::is_enabled() || !slope.is_contiguous() || !is_aligned(place(slope))) {
      const auto found =
          call_python(plan.python, {slope, x, target, kept.shown_stats(), kept.shown_counted()}, 1);
      return {found.at(0), Tensor(), Tensor()};
    }
    Tensor dx = at::empty_like(x);
    plan.slope(kept.rows, place(slope), place(x), place(target), static_cast<void*>(kept.stats()),
               static_cast<void*>(kept.counted()), place(dx));
    return {dx, Tensor(), Tensor()};
  }
};

inline Losses* losses_of(PyObject* capsule) {
  auto* losses = static_cast<Losses*>(PyCapsule_GetPointer(capsule, LOSSES));
  if (!losses) throw python_error();
  return losses;
}

// cross_entropy(losses, x, target, ignored, reduction): the loss, or None if this is a case for Python.
inline PyObject* cross_entropy(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(args[1]) || !THPVariable_CheckExact(args[2]) || !PyUnicode_Check(args[4])) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[1]), &target = THPVariable_Unpack(args[2]);
  if (!x.is_cuda() || !is_plain(x, true) || !is_plain(target, true) || saves_by_hooks()) Py_RETURN_NONE;
  const auto local = c10::impl::VirtualGuardImpl(CUDA).getDevice();
  const bool fits = x.dim() == 2 && x.numel() && target.dim() == 1 && target.size(0) == x.size(0) &&
                    target.scalar_type() == at::kLong && x.size(0) <= MOST && lies_well(x, local) &&
                    lies_well(target, local);
  if (!fits) Py_RETURN_NONE;
  const int64_t ignored = PyLong_AsLongLong(args[3]);
  const char* reduction = PyUnicode_AsUTF8(args[4]);
  if (PyErr_Occurred()) return PyErr_Clear(), Py_NewRef(Py_None);
  for (const auto& plan : losses_of(args[0])->plans) {
    if (plan->device != local.index() || plan->dtype != x.scalar_type() || plan->size != x.size(1) ||
        plan->ignored != ignored || plan->reduction != reduction) {
      continue;
    }
    Tensor loss;
    {
      const WithoutGil no_gil;
      Kept kept;
      const bool graph = c10::GradMode::is_enabled() && x.requires_grad();
      loss = graph ? CrossEntropy::apply(x, target, reinterpret_cast<int64_t>(plan.get()))
                   : CrossEntropy::run(x, target, *plan, kept);
    }
    return THPVariable_Wrap(std::move(loss));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* new_losses(PyObject*, PyObject*) {
  return PyCapsule_New(new Losses, LOSSES, nullptr);  // for ever, as its plans are
}

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
  losses_of(losses)->plans.push_back(std::unique_ptr<LossPlan>(
      new LossPlan{static_cast<c10::DeviceIndex>(device), brain ? at::kBFloat16 : at::kHalf, size, ignored, reduction,
                   kernel_of(rows), kernel_of(reduce), kernel_of(slope), Py_NewRef(python)}));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
