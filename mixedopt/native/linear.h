// torch's linear layer of batches as one node of autograd, where torch has four: two views, a transposition, a product.
//
// The products are those that torch's own nodes make of tensors that lie in memory as these must, so the bits are
// torch's.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>

#include "node.h"

namespace mixedopt {

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    // As torch does, keep what a gradient needs and no more.
    context->save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    context->saved_data["shape"] = x.sizes();
    context->saved_data["bias"] = bias.has_value();
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::linear(x, weight, bias);
  }

  static variable_list backward(AutogradContext* context, variable_list slopes) {
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    const bool differentiated = c10::GradMode::is_enabled() || slopes[0]._fw_grad(0).defined();
    if (!differentiated) below.emplace();
    const variable_list saved = context->get_saved_variables();
    const auto shape = context->saved_data["shape"].toIntVector();
    const Tensor dy = rows_of(slopes[0]);
    Tensor dx, dweight, dbias;
    if (context->needs_input_grad(0)) dx = dy.mm(saved[1]).view(shape);
    if (context->needs_input_grad(1)) dweight = dy.t().mm(rows_of(saved[0]));
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) dbias = dy.sum(0);
    return {dx, dweight, dbias};
  }

  static Tensor rows_of(const Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }
};

// True iff it lies in memory as if it had just been made. (A size of 1 may have any stride, and torch's choice of a
// product looks at it.)
inline bool lies_as_new(const Tensor& tensor) {
  int64_t stride = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    if (tensor.stride(dim) != stride) return false;
    stride *= tensor.size(dim);
  }
  return true;
}

// linear(x, weight, bias): the result, or None if this is a case for Python.
inline PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  check_count(number, 3);
  const bool has_bias = args[2] != Py_None;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      (has_bias && !THPVariable_CheckExact(args[2])) || at::impl::torch_function_mode_enabled()) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[0]), &weight = THPVariable_Unpack(args[1]);
  const std::optional<Tensor> bias = has_bias ? std::optional(THPVariable_Unpack(args[2])) : std::nullopt;
  if (!needs_node(x, weight, bias) || saves_by_hooks() || !is_plain(x, false) || !is_plain(weight, false) ||
      (bias && !is_plain(*bias, false))) {
    Py_RETURN_NONE;
  }
  // A matrix needs no views, so there is little to save; of one value torch makes another product.
  const bool fits = x.dim() >= 3 && x.numel() > 1 && weight.dim() == 2 && weight.numel() &&
                    x.size(-1) == weight.size(1) && x.scalar_type() == weight.scalar_type() &&
                    x.device() == weight.device() && at::isFloatingType(x.scalar_type()) && lies_as_new(x) &&
                    lies_as_new(weight);
  if (!fits || (bias && (bias->scalar_type() != x.scalar_type() || bias->device() != x.device() || bias->dim() != 1 ||
                         bias->size(0) != weight.size(0) || !lies_as_new(*bias)))) {
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
