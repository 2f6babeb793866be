// Between the tensors of the C interface (DLPack's layout) and those of the library.
#pragma once

#include "core/schema.h"
#include "ehc/c_api.h"

namespace ehc::capi {

// All element types of the library; the index is that of ehc::DType, entry 0 is "none".
extern const ehc_dtype kDTypes[kDTypeCount];

// The view as the library sees it. Throws Error{contract} naming `op` and `name` for a type,
// device, rank or pointer that the library cannot take.
Tensor to_tensor(const ehc_tensor& tensor, const Schema& op, std::string_view name);

ehc_layout to_layout(const Tensor& tensor);

}  // namespace ehc::capi
