// The kernels of SublayerKernels on a device: a call enqueues the work of all tokens, or columns,
// and of all chunks of tokens.
#pragma once

#include "ops/mhc/seam/seam_args.h"
#include "ops/mhc/shared/sublayer_kernels.h"

namespace ehc::mhc {

void expand_fwd_cuda(const ExpandForwardArgs& args, int device, void* stream);
void merge_fwd_cuda(const MergeForwardArgs& args, int64_t columns, int device, void* stream);
void fn_sum_cuda(const FnSumArgs& args, int64_t mixes, int device, void* stream);
void prenorm_gemm_cuda(const PrenormGemmArgs& args, void* workspace, int device, void* stream);
size_t prenorm_gemm_cuda_workspace(const PrenormGemmArgs& args);
void reduce_partials_fwd_cuda(const ReducePartialsForwardArgs& args, int64_t tokens, int device,
                              void* stream);
void head_mix_fwd_cuda(const HeadMixForwardArgs& args, int64_t tokens, int device, void* stream);
void split_fwd_cuda(const SplitForwardArgs& args, int64_t tokens, int device, void* stream);
void sinkhorn_fwd_cuda(const SinkhornForwardArgs& args, int64_t tokens, int device, void* stream);
void pre_apply_fwd_cuda(const PreApplyForwardArgs& args, int device, void* stream);
void layer_norm_cuda(const LayerNormArgs& args, int device, void* stream);
void pre_big_fuse_cuda(const BigFuseArgs& args, int device, void* stream);
void post_fwd_cuda(const PostForwardArgs& args, int device, void* stream);

void fill_zeros_cuda(float* to, int64_t count, int device, void* stream);
// partial is F32[P,d], followed by room for F32[2,T].
void layer_norm_bwd_cuda(const LayerNormBackwardArgs& args, float* partial, int device,
                         void* stream);
void grad_pre_cuda(const GradPreArgs& args, int device, void* stream);
// sum += more, F32[T,n]
void add_coefficients_cuda(const Coefficients& more, const Coefficients& sum, int64_t tokens,
                           int64_t streams, int device, void* stream);
// sum[t] = pre[t,0] + pre[t,1] + ..., or 1 where pre has null data
void sum_coefficients_cuda(const Coefficients& pre, const Coefficients& sum, int64_t tokens,
                           int64_t streams, int device, void* stream);
void sinkhorn_bwd_cuda(const SinkhornBackwardArgs& args, int64_t tokens, int device, void* stream);
void split_bwd_cuda(const SplitBackwardArgs& args, const SplitPartials& partials, int64_t tokens,
                    int device, void* stream);
void head_mix_bwd_cuda(const HeadMixBackwardArgs& args, float* scale, float* base, int64_t tokens,
                       int device, void* stream);
void add_partials_cuda(const char* name, const PartialSum& first, const PartialSum& second,
                       int device, void* stream);
void reduce_partials_bwd_cuda(const ReducePartialsBackwardArgs& args, int64_t tokens, int device,
                              void* stream);
void norm_fn_bwd_cuda(const NormFnBackwardArgs& args, int device, void* stream);
void merge_bwd_cuda(const MergeBackwardArgs& args, int64_t columns, int device, void* stream);
// to = target + from for rows of `columns`; null data of the target: zeros
void copy_rows_cuda(const MixRows& from, const MixRows& target, const MixRows& to, int64_t rows,
                    int64_t columns, int device, void* stream);
void post_bwd_cuda(const PostBackwardArgs& args, int device, void* stream);

// Rows from a token on.
inline StreamRows from_token(StreamRows rows, int64_t token, DType type) {
  if (rows.data == nullptr) return rows;
  rows.data = static_cast<char*>(rows.data) +
              token * rows.token_stride * static_cast<int64_t>(size_of(type));
  return rows;
}
inline GradientRows from_token(GradientRows rows, int64_t token, DType type) {
  return {from_token(rows.rows, token - rows.first_token, rows.is_f32 ? DType::f32 : type),
          rows.is_f32, 0};
}
inline Coefficients from_token(Coefficients rows, int64_t token) {
  if (rows.data != nullptr) rows.data += token * rows.token_stride;
  return rows;
}
inline GroupRows from_token(GroupRows rows, int64_t token) {
  rows.data += token * rows.token_stride;
  return rows;
}

struct DeviceKernels {
  int device = 0;
  void* stream = nullptr;

  static constexpr bool kIsDevice = true;

  void expand(const ExpandForwardArgs& a, const Tile&) const { expand_fwd_cuda(a, device, stream); }
  void merge(const MergeForwardArgs& a, int64_t, int64_t columns) const {
    merge_fwd_cuda(a, columns, device, stream);
  }
  void fn_sum(const FnSumArgs& a, int64_t, int64_t mixes) const {
    fn_sum_cuda(a, mixes, device, stream);
  }
  void project(const PrenormGemmArgs& a, void* workspace) const {
    prenorm_gemm_cuda(a, workspace, device, stream);
  }
  void reduce(const ReducePartialsForwardArgs& a, int64_t, int64_t tokens) const {
    reduce_partials_fwd_cuda(a, tokens, device, stream);
  }
  void head_mix(const HeadMixForwardArgs& a, int64_t, int64_t tokens) const {
    head_mix_fwd_cuda(a, tokens, device, stream);
  }
  void split(const SplitForwardArgs& a, int64_t, int64_t tokens) const {
    split_fwd_cuda(a, tokens, device, stream);
  }
  void sinkhorn(const SinkhornForwardArgs& a, int64_t, int64_t tokens) const {
    sinkhorn_fwd_cuda(a, tokens, device, stream);
  }
  void collapse(const PreApplyForwardArgs& a, const Tile&) const {
    pre_apply_fwd_cuda(a, device, stream);
  }
  void normalise(const LayerNormArgs& a, int64_t, int64_t) const {
    layer_norm_cuda(a, device, stream);
  }
  void post(const PostForwardArgs& a, const Tile&) const { post_fwd_cuda(a, device, stream); }

  void normalise_bwd(const LayerNormBackwardArgs& a, int64_t, int64_t, float* partial) const {
    layer_norm_bwd_cuda(a, partial, device, stream);
  }
  void grad_pre(const GradPreArgs& a, int64_t, int64_t) const { grad_pre_cuda(a, device, stream); }
  void sinkhorn_bwd(const SinkhornBackwardArgs& a, int64_t, int64_t tokens) const {
    sinkhorn_bwd_cuda(a, tokens, device, stream);
  }
  // Partials of all chunks: scale F32[P,3], base F32[P,N].
  void split_bwd(const SplitBackwardArgs& a, const SplitPartial& p, int64_t, int64_t tokens) const {
    const int64_t mixes = a.streams * a.streams + 2 * a.streams;
    split_bwd_cuda(a, {p.scale, p.base, 3, mixes}, tokens, device, stream);
  }
  // scale F32[P], base F32[P,n].
  void head_mix_bwd(const HeadMixBackwardArgs& a, int64_t, int64_t tokens, float* scale,
                    float* base) const {
    head_mix_bwd_cuda(a, scale, base, tokens, device, stream);
  }
  void add_partials(const PartialSum& sum) const {
    add_partials_cuda("mhc.add_partials", sum, {}, device, stream);
  }
  void reduce_bwd(const ReducePartialsBackwardArgs& a, int64_t, int64_t tokens) const {
    reduce_partials_bwd_cuda(a, tokens, device, stream);
  }
  // All columns of the tile's tokens.
  void project_bwd(NormFnBackwardArgs a, const Tile& tile, float*) const {
    const int64_t first = tile.token_begin;
    const DType type = a.sizes.activation;
    a.sizes.tokens = tile.token_end - first;
    a.grad_mul = from_token(a.grad_mul, first);
    a.grad_sqr = from_token(a.grad_sqr, first);
    a.residual = from_token(a.residual, first, type);
    a.grad_residual_acc = from_token(a.grad_residual_acc, first, type);
    a.grad_residual = from_token(a.grad_residual, first, type);
    a.grad_row = from_token(a.grad_row, first, type);
    a.row_factor = from_token(a.row_factor, first);
    norm_fn_bwd_cuda(a, device, stream);
  }
  void merge_bwd(const MergeBackwardArgs& a, int64_t, int64_t columns) const {
    merge_bwd_cuda(a, columns, device, stream);
  }
  void post_bwd(PostBackwardArgs a, int64_t begin, int64_t end) const {
    const DType type = a.sizes.activation;
    a.sizes.tokens = end - begin;
    a.grad_new_residual = from_token(a.grad_new_residual, begin, type);
    a.layer_output = from_token(a.layer_output, begin, type);
    a.residual = from_token(a.residual, begin, type);
    a.post = from_token(a.post, begin);
    a.comb = from_token(a.comb, begin);
    a.grad_layer_output = from_token(a.grad_layer_output, begin, type);
    a.grad_residual = from_token(a.grad_residual, begin, type);
    a.grad_post = from_token(a.grad_post, begin);
    a.grad_comb = from_token(a.grad_comb, begin);
    post_bwd_cuda(a, device, stream);
  }
};

// --- operators that do their work with these kernels ---

template <template <class> class Work>
void run_sublayer_on_device(const Call& call) {
  const DeviceKernels kernels = {call.context.device_index(), call.context.stream()};
  Work<DeviceKernels>(call, kernels, call.context.workspace()).run(kernels);
}
template <template <class> class Work>
size_t device_workspace(const Call& call) {
  return Work<DeviceKernels>(call, DeviceKernels{}, nullptr).workspace.bytes();
}

}  // namespace ehc::mhc
