// mhc.plan_recompute: how many layers to recompute from one stored residual. Host only, exact.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// Layers are cut into blocks of block_length (the last of a stage may be shorter); blocks do not
// cross stages. A block keeps its first residual, n*d values a token, and while its backward pass
// runs, the residual, layer input and layer output of each of its layers, (n+2)*d values. So
//   terms[0] = n * d * (number of blocks)    terms[1] = (n+2) * d * block_length
// and block_length is the integer in 1 .. largest stage that makes their sum smallest, the smaller
// one of two. (Over the reals it would be sqrt(n * layers / (n+2)).) Throws Error{contract} when
// the stages do not add up to the layers, for more than 2^31-1 layers and for terms beyond 2^63-1.
// Determinism: exact. Contract 2.12.
struct PlanRecompute {
  std::optional<int64_t> layers{};    // >= 1, required
  std::optional<int64_t> n{};         // 1..8, required
  std::optional<int64_t> d{};         // >= 1, required
  std::span<const int64_t> stages{};  // layers of each stage, each >= 1; left out: one stage
  Tensor block_length{};              // out: I32[1]
  Tensor terms{};                     // out: I64[2]
  Tensor block_starts{};              // out: I32[blocks], the first layer of each block
};

// The number of blocks, for the size of block_starts. Throws what plan_recompute throws.
EHC_API int64_t count_recompute_blocks(const PlanRecompute& params);
EHC_API void plan_recompute(Context& context, const PlanRecompute& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const PlanRecompute& params);

}  // namespace ehc::mhc
