// What the projection on AMX tiles asks of a call.
#pragma once

#include "backends/cpu/isa.h"
#include "ehc/dtype.h"

namespace ehc::mhc {

inline std::string_view refuse_amx(const Call& call) {
  if (call.bound.activation != DType::bf16) return "tiles of amx multiply BF16 activations alone";
  return missing_isa(Isa::amx);
}

}  // namespace ehc::mhc
