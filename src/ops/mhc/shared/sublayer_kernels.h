// The kernels of the operators that a sublayer's entry and exit stand for, as one implementation
// has them.
#pragma once

#include "ops/mhc/expand/expand_args.h"
#include "ops/mhc/head_mix/head_mix_args.h"
#include "ops/mhc/merge/merge_args.h"
#include "ops/mhc/norm_fn_bwd/norm_fn_bwd_args.h"
#include "ops/mhc/post/post_args.h"
#include "ops/mhc/pre/pre_args.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/amx_call.h"
#include "ops/mhc/sinkhorn/sinkhorn_args.h"
#include "ops/mhc/split/split_args.h"

namespace ehc::mhc {

struct SublayerKernels {
  static constexpr bool kIsDevice = false;

  template <class Args>
  using Range = void (*)(const Args&, int64_t begin, int64_t end);
  template <class Args>
  using OfTile = void (*)(const Args&, const Tile&);

  OfTile<ExpandForwardArgs> expand;
  Range<MergeForwardArgs> merge;
  void (*project)(const PrenormGemmArgs&, int64_t split, int64_t begin, int64_t end,
                  float* scratch);
  Range<ReducePartialsForwardArgs> reduce;
  Range<HeadMixForwardArgs> head_mix;
  Range<SplitForwardArgs> split;
  Range<SinkhornForwardArgs> sinkhorn;
  OfTile<PreApplyForwardArgs> collapse;
  Range<LayerNormArgs> normalise;
  OfTile<PostForwardArgs> post;

  void (*normalise_bwd)(const LayerNormBackwardArgs&, int64_t begin, int64_t end,
                        float* grad_weight);
  Range<GradPreArgs> grad_pre;
  Range<SinkhornBackwardArgs> sinkhorn_bwd;
  void (*split_bwd)(const SplitBackwardArgs&, const SplitPartial&, int64_t begin, int64_t end);
  void (*head_mix_bwd)(const HeadMixBackwardArgs&, int64_t begin, int64_t end, float* scale,
                       float* base);
  void (*add_partials)(const PartialSum&);
  Range<ReducePartialsBackwardArgs> reduce_bwd;
  void (*project_bwd)(const NormFnBackwardArgs&, const Tile&, float* scratch);
  Range<MergeBackwardArgs> merge_bwd;
  Range<PostBackwardArgs> post_bwd;
};

#define EHC_KERNELS(isa)                                                                \
  inline constexpr SublayerKernels kSublayer_##isa = {&isa::expand_fwd_tile,            \
                                                      &isa::merge_fwd_columns,          \
                                                      &isa::prenorm_gemm_block,         \
                                                      &isa::reduce_partials_fwd_tokens, \
                                                      &isa::head_mix_fwd_tokens,        \
                                                      &isa::split_fwd_tokens,           \
                                                      &isa::sinkhorn_fwd_tokens,        \
                                                      &isa::pre_apply_fwd_tile,         \
                                                      &isa::layer_norm_rows,            \
                                                      &isa::post_fwd_tile,              \
                                                      &isa::layer_norm_bwd_tokens,      \
                                                      &isa::grad_pre_tokens,            \
                                                      &isa::sinkhorn_bwd_tokens,        \
                                                      &isa::split_bwd_chunk,            \
                                                      &isa::head_mix_bwd_chunk,         \
                                                      &isa::add_partials,               \
                                                      &isa::reduce_partials_bwd_tokens, \
                                                      &isa::norm_fn_bwd_tile,           \
                                                      &isa::merge_bwd_columns,          \
                                                      &isa::post_bwd_tokens};
EHC_EACH_ISA(EHC_KERNELS)
#undef EHC_KERNELS

#if EHC_HAS_AMX
// Only the projection has a kernel on tiles.
inline constexpr SublayerKernels kSublayer_amx = [] {
  SublayerKernels kernels = kSublayer_avx512bf16;
  kernels.project = &amx::prenorm_gemm_block;
  return kernels;
}();
#endif

template <class Real>
inline constexpr SublayerKernels kSublayerReference = {&expand_fwd_reference,
                                                       &merge_fwd_reference<Real>,
                                                       &prenorm_gemm_reference<Real>,
                                                       &reduce_partials_fwd_reference<Real>,
                                                       &head_mix_fwd_reference<Real>,
                                                       &split_fwd_reference<Real>,
                                                       &sinkhorn_fwd_reference<Real>,
                                                       &pre_apply_fwd_reference<Real>,
                                                       &layer_norm_reference<Real>,
                                                       &post_fwd_reference<Real>,
                                                       &layer_norm_bwd_reference<Real>,
                                                       &grad_pre_reference<Real>,
                                                       &sinkhorn_bwd_reference<Real>,
                                                       &split_bwd_reference<Real>,
                                                       &head_mix_bwd_reference<Real>,
                                                       &add_partials_reference<Real>,
                                                       &reduce_partials_bwd_reference<Real>,
                                                       &norm_fn_bwd_reference<Real>,
                                                       &merge_bwd_reference<Real>,
                                                       &post_bwd_reference<Real>};

// --- operators that do their work with these kernels ---

// `Work<Kernels>(call, kernels, memory)` takes the arrays of a call from a workspace at `memory`,
// `run(kernels)` does it.
template <template <class> class Work, const SublayerKernels& kernels>
void run_sublayer(const Call& call) {
  Work<SublayerKernels>(call, kernels, call.context.workspace()).run(kernels);
}
template <template <class> class Work, const SublayerKernels& kernels>
size_t sublayer_workspace(const Call& call) {
  return Work<SublayerKernels>(call, kernels, nullptr).workspace.bytes();
}

}  // namespace ehc::mhc
