// Whether nothing stands between an operation on a tensor and its device.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace mixedopt {

// True iff there is no transform, trace, mode or derivative on the way forward; with `autocast` that may be there.
inline bool is_plain(const at::Tensor& x, bool autocast) {
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

}  // namespace mixedopt
