// What the nodes of autograd that this library makes have in common.
#pragma once

#include <optional>
#include <vector>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "objects.h"

namespace mixedopt {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// True iff there is no transform, trace, mode or derivative on the way forward; with `autocast` that may be there.
inline bool is_plain(const Tensor& x, bool autocast) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = (x.key_set() | local.included_) - local.excluded_;
  auto usual = c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::AutogradFunctionality,
                                    c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
  if (autocast) usual = usual.add(c10::DispatchKey::AutocastCUDA);
  return !((keys - usual).raw_repr() & ~c10::full_backend_mask) && !x._fw_grad(0).defined();
}

// True iff somebody handles what is saved for backward. Checkpointing wants the same tensors to be saved when a forward
// runs again, under other modes perhaps, so what saves others than torch does must not be chosen by what is in force.
inline bool saves_by_hooks() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

inline bool wants_graph(const Tensor& x) { return x.requires_grad(); }
inline bool wants_graph(const std::optional<Tensor>& x) { return x && x->requires_grad(); }

// True iff a node is to be made for these.
template <class... Inputs>
bool needs_node(const Inputs&... inputs) {
  return c10::GradMode::is_enabled() && (wants_graph(inputs) || ...);
}

}  // namespace mixedopt
