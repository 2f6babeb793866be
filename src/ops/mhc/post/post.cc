#include "ehc/mhc/post.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "ops/mhc/post/post_args.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

void post_fwd_cuda(const PostForwardArgs& args, int device, void* stream);
void post_bwd_cuda(const PostBackwardArgs& args, int device, void* stream);

namespace {

using F = PostForward;
using B = PostBackward;

constexpr auto kForwardTable = table(
    "mhc.post_fwd", "2.10", "a layer's output put back into the streams",
    in<&F::layer_output>("layer_output", "A[T,d]"), in<&F::residual>("residual", "A[T,n,d]"),
    in<&F::post>("post", "F32[T,n]"), in<&F::comb>("comb", "F32[T,n,n]"), call_flag("inplace"),
    out<&F::new_residual>("new_residual", "A[T,n,d]").exact().may_alias("residual"),
    flops("T*d*(2*n*n+n)"));

constexpr auto kBackwardTable =
    table("mhc.post_bwd", "2.10", "gradients of post",
          in<&B::grad_new_residual>("grad_new_residual", "A[T,n,d]"),
          in<&B::layer_output>("layer_output", "A[T,d]"), in<&B::residual>("residual", "A[T,n,d]"),
          in<&B::post>("post", "F32[T,n]"), in<&B::comb>("comb", "F32[T,n,n]"),
          out<&B::grad_layer_output>("grad_layer_output", "A[T,d]").exact(),
          out<&B::grad_residual>("grad_residual", "A[T,n,d]").exact(),
          out<&B::grad_post>("grad_post", "F32[T,n]"),
          out<&B::grad_comb>("grad_comb", "F32[T,n,n]"), flops("4*T*d*n*(n+1)"));

PostForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  const bool in_place = p.new_residual.data == p.residual.data;
  return {.sizes = sizes,
          .layer_output = stream_rows(p.layer_output),
          .residual = stream_rows(p.residual),
          .post = coefficients(p.post),
          .comb = coefficients(p.comb),
          .new_residual = stream_rows(p.new_residual),
          .streaming = !in_place && exceeds_cache(sizes, 2 * sizes.streams + 1)};
}

template <auto Kernel>
void run_forward(const Call& call) {
  const PostForwardArgs args = forward_args(call);
  for_each_tile(call.context, args.sizes, [&](const Tile& tile) { Kernel(args, tile); });
}

PostBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  return {.sizes = sizes,
          .grad_new_residual = {stream_rows(p.grad_new_residual)},
          .layer_output = stream_rows(p.layer_output),
          .residual = stream_rows(p.residual),
          .post = coefficients(p.post),
          .comb = coefficients(p.comb),
          .grad_layer_output = stream_rows(p.grad_layer_output),
          .grad_residual = stream_rows(p.grad_residual),
          .grad_post = coefficients(p.grad_post),
          .grad_comb = coefficients(p.grad_comb),
          .streaming = exceeds_cache(sizes, 3 * sizes.streams + 2)};
}

template <auto Tokens>
void run_backward(const Call& call) {
  const PostBackwardArgs args = backward_args(call);
  parallel_for(call.context, args.sizes.tokens, tokens_of_grain(args.sizes),
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&forward_args, &post_fwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                          \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_forward<&isa::post_fwd_tile>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&post_fwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&post_fwd_reference<float>>, nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&backward_args, &post_bwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_backward<&isa::post_bwd_tokens>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&post_bwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&post_bwd_reference<float>>, nullptr},
};

constexpr Operator kPostForward = make_operator<F>(kForwardTable, kForwardImplementations);
constexpr Operator kPostBackward = make_operator<B>(kBackwardTable, kBackwardImplementations);

}  // namespace

EHC_DEFINE_CALLS(post_fwd, PostForward, kPostForward);
EHC_DEFINE_CALLS(post_bwd, PostBackward, kPostBackward);
EHC_REGISTER(post, &kPostForward, &kPostBackward);

}  // namespace ehc::mhc
