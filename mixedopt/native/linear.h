// torch's linear layer of batches as one node of autograd, where torch has four: two views, a transposition, a product.
//
// The products are those that torch's own nodes make, so the bits are torch's.
#pragma once

#include <optional>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "kernel.h"
#include "plain.h"

namespace mixedopt {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    // As torch does, keep what a gradient needs and no more.
    context->save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    std::vector<int64_t> about = x.sizes().vec();
    about.push_back(bias.has_value());
    context->saved_data["about"] = std::move(about);
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::linear(x, weight, bias);
  }

  static variable_list backward(AutogradContext* context, variable_list slopes) {
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!c10::GradMode::is_enabled()) below.emplace();  // else the gradients are themselves differentiated
    const variable_list saved = context->get_saved_variables();
    std::vector<int64_t> shape = context->saved_data["about"].toIntVector();
    const bool has_bias = shape.back();
    shape.pop_back();
    const Tensor dy = rows_of(slopes[0]);
    Tensor dx, dweight, dbias;
    if (context->needs_input_grad(0)) {
      dx = dy.mm(saved[1]);
      if (shape.size() != 2) dx = dx.view(shape);
    }
    if (context->needs_input_grad(1)) dweight = dy.t().mm(rows_of(saved[0]));
    if (has_bias && context->needs_input_grad(2)) dbias = dy.sum(0);
    return {dx, dweight, dbias};
  }

  static Tensor rows_of(const Tensor& tensor) {
    return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
  }
};

// linear(x, weight, bias): the result, or None if this is a case for Python.
inline PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const bool has_bias = args[2] != Py_None;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      (has_bias && !THPVariable_CheckExact(args[2])) || at::impl::torch_function_mode_enabled()) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[0]), &weight = THPVariable_Unpack(args[1]);
  const std::optional<Tensor> bias = has_bias ? std::optional(THPVariable_Unpack(args[2])) : std::nullopt;
  const bool wanted = x.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad());
  if (!c10::GradMode::is_enabled() || !wanted || saves_by_hooks() || !is_plain(x, false) || !is_plain(weight, false) ||
      (bias && !is_plain(*bias, false))) {
    Py_RETURN_NONE;
  }
  // A matrix needs no views, so there is little to save.
  const bool fits = x.dim() >= 3 && weight.dim() == 2 && x.size(-1) == weight.size(1) && x.is_contiguous() &&
                    x.numel() && weight.numel() && x.scalar_type() == weight.scalar_type() &&
                    x.device() == weight.device() && at::isFloatingType(x.scalar_type());
  if (!fits || (bias && (bias->scalar_type() != x.scalar_type() || bias->device() != x.device() || bias->dim() != 1 ||
                         bias->size(0) != weight.size(0)))) {
    Py_RETURN_NONE;
  }
  Tensor y;
  {
    const WithoutGil no_gil;
    y = Linear::apply(x, weight, bias);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace mixedopt
