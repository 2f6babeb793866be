#include "ehc/mhc/split.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "core/token_chunks.h"
#include "ops/mhc/shared/stream_call.h"
#include "ops/mhc/shared/streams_of_mixes.h"
#include "ops/mhc/split/split_args.h"

namespace ehc::mhc {

void split_fwd_cuda(const SplitForwardArgs& args, int64_t tokens, int device, void* stream);
void split_bwd_cuda(const SplitBackwardArgs& args, const SplitPartials& partials, int64_t tokens,
                    int device, void* stream);
void add_partials_cuda(const char* name, const PartialSum& first, const PartialSum& second,
                       int device, void* stream);

namespace {

using F = SplitForward;
using B = SplitBackward;
using R = SplitBackwardReduce;

// --- forward ---

constexpr auto kForwardTable =
    table("mhc.split_fwd", "2.6", "mixes split into pre, post and comb",
          in<&F::mixes>("mixes", "F32[T,N]"), in<&F::scale>("scale", "F32[3]"),
          in<&F::base>("base", "F32[N]"), attribute<&F::pre_eps>("pre_eps").at_least(0),
          attribute<&F::post_mult>("post_mult").at_least(0), out<&F::pre>("pre", "F32[T,n]"),
          out<&F::post>("post", "F32[T,n]"), out<&F::comb_logits>("comb_logits", "F32[T,n,n]"),
          flops("4*T*N"));

void find_streams(Bound& bound, const void* params) {
  set_streams(kForwardTable.view(), bound, static_cast<const F*>(params)->mixes);
}

constexpr int64_t kGrain = 512;  // tokens

SplitForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  return {.streams = call.bound["n"],
          .mixes = coefficients(p.mixes),
          .scale = p.scale.as<float>(),
          .base = p.base.as<float>(),
          .pre_eps = static_cast<float>(*p.pre_eps),
          .post_mult = static_cast<float>(*p.post_mult),
          .pre = coefficients(p.pre),
          .post = coefficients(p.post),
          .comb_logits = coefficients(p.comb_logits)};
}

template <auto Tokens>
void run_forward(const Call& call) {
  const SplitForwardArgs args = forward_args(call);
  parallel_for(call.context, call.bound["T"], kGrain,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&forward_args, &split_fwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_forward<&isa::split_fwd_tokens>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&split_fwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&split_fwd_reference<float>>, nullptr},
};

constexpr Operator kSplitForward = [] {
  Operator op = make_operator<F>(kForwardTable, kForwardImplementations);
  op.derive = &find_streams;
  return op;
}();

// --- backward ---

constexpr auto kBackwardTable =
    table("mhc.split_bwd", "2.6", "gradients of the split",
          in<&B::grad_pre>("grad_pre", "F32[T,n]"), in<&B::grad_post>("grad_post", "F32[T,n]"),
          in<&B::grad_comb_logits>("grad_comb_logits", "F32[T,n,n]"),
          in<&B::mixes>("mixes", "F32[T,N]"), in<&B::scale>("scale", "F32[3]"),
          in<&B::base>("base", "F32[N]"), attribute<&B::post_mult>("post_mult").at_least(0),
          out<&B::grad_mixes>("grad_mixes", "F32[T,N]"),
          out<&B::grad_scale_partial>("grad_scale_partial", "F32[P,3]"),
          out<&B::grad_base_partial>("grad_base_partial", "F32[P,N]"), flops("T*n*(4*n+21)"));

void count_partials(Bound& bound, const void*) {
  bound.symbols.set(symbol("P"), chunks_of_tokens(bound["T"]));
}

SplitBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  return {.streams = call.bound["n"],
          .grad_pre = coefficients(p.grad_pre),
          .grad_post = coefficients(p.grad_post),
          .grad_comb_logits = coefficients(p.grad_comb_logits),
          .mixes = coefficients(p.mixes),
          .scale = p.scale.as<float>(),
          .base = p.base.as<float>(),
          .post_mult = static_cast<float>(*p.post_mult),
          .grad_mixes = coefficients(p.grad_mixes)};
}

template <auto Chunk>
void run_backward(const Call& call) {
  const SplitBackwardArgs args = backward_args(call);
  const B& p = *static_cast<const B*>(call.params);
  const int64_t tokens = call.bound["T"];
  parallel_chunks(call.context, tokens, tokens_of_chunk(tokens),
                  [&](int64_t chunk, int64_t begin, int64_t end) {
                    const SplitPartial partial = {
                        p.grad_scale_partial.as<float>() + chunk * p.grad_scale_partial.stride[0],
                        p.grad_base_partial.as<float>() + chunk * p.grad_base_partial.stride[0]};
                    Chunk(args, partial, begin, end);
                  });
}

#if EHC_HAS_CUDA
void run_backward_cuda(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  const SplitPartials partials = {p.grad_scale_partial.as<float>(), p.grad_base_partial.as<float>(),
                                  p.grad_scale_partial.stride[0], p.grad_base_partial.stride[0]};
  split_bwd_cuda(backward_args(call), partials, call.bound["T"], call.context.device_index(),
                 call.context.stream());
}
#endif

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_backward_cuda, nullptr},
#endif
#define EHC_LIST(isa)                                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_backward<&isa::split_bwd_chunk>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&split_bwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&split_bwd_reference<float>>, nullptr},
};

constexpr Operator kSplitBackward = [] {
  Operator op = make_operator<B>(kBackwardTable, kBackwardImplementations);
  op.derive = &count_partials;
  return op;
}();

// --- sums of the partials ---

constexpr auto kReduceTable =
    table("mhc.split_bwd_reduce", "2.6", "gradients of scale and base from partial sums",
          in<&R::grad_scale_partial>("grad_scale_partial", "F32[P,Q]"),
          in<&R::grad_base_partial>("grad_base_partial", "F32[P,N]"),
          in<&R::grad_scale_acc>("grad_scale_acc", "F32[Q]").optional(),
          in<&R::grad_base_acc>("grad_base_acc", "F32[N]").optional(),
          out<&R::grad_scale>("grad_scale", "F32[Q]").may_alias("grad_scale_acc"),
          out<&R::grad_base>("grad_base", "F32[N]").may_alias("grad_base_acc"), flops("P*(Q+N)"));

void check_scales(const Schema& schema, const Bound& bound, const void* params) {
  if (bound["Q"] == 1 || bound["Q"] == 3) return;
  fail_tensor(schema, "grad_scale_partial", "Q = 3 columns, or 1",
              describe(static_cast<const R*>(params)->grad_scale_partial));
}

PartialSum partial_sum(const Tensor& partial, const Tensor& accumulated, const Tensor& sum) {
  return {partial.shape[0],  partial.shape[1],        partial.as<float>(),
          partial.stride[0], accumulated.as<float>(), sum.as<float>()};
}

template <auto Add>
void run_reduce(const Call& call) {
  const R& p = *static_cast<const R*>(call.params);
  Add(partial_sum(p.grad_scale_partial, p.grad_scale_acc, p.grad_scale));
  Add(partial_sum(p.grad_base_partial, p.grad_base_acc, p.grad_base));
}

#if EHC_HAS_CUDA
void run_reduce_cuda(const Call& call) {
  const R& p = *static_cast<const R*>(call.params);
  add_partials_cuda("mhc.split_bwd_reduce",
                    partial_sum(p.grad_scale_partial, p.grad_scale_acc, p.grad_scale),
                    partial_sum(p.grad_base_partial, p.grad_base_acc, p.grad_base),
                    call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kReduceImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_reduce_cuda, nullptr},
#endif
#define EHC_LIST(isa)                                                                        \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_reduce<&isa::add_partials>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reduce<&add_partials_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_reduce<&add_partials_reference<float>>, nullptr},
};

constexpr Operator kSplitBackwardReduce = [] {
  Operator op = make_operator<R>(kReduceTable, kReduceImplementations);
  op.rules = &check_scales;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(split_fwd, SplitForward, kSplitForward);
EHC_DEFINE_CALLS(split_bwd, SplitBackward, kSplitBackward);
EHC_DEFINE_CALLS(split_bwd_reduce, SplitBackwardReduce, kSplitBackwardReduce);
EHC_REGISTER(split, &kSplitForward, &kSplitBackward, &kSplitBackwardReduce);

int64_t split_partials(int64_t tokens) { return tokens <= 0 ? 0 : chunks_of_tokens(tokens); }

}  // namespace ehc::mhc
