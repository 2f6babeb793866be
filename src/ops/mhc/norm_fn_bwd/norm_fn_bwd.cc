#include "ehc/mhc/norm_fn_bwd.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/mhc/norm_fn_bwd/norm_fn_bwd_args.h"
#include "ops/mhc/shared/group_call.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

void norm_fn_bwd_cuda(const NormFnBackwardArgs& args, int device, void* stream);

namespace {

using P = NormFnBackward;

constexpr auto kTable = table(
    "mhc.norm_fn_bwd", "2.5", "gradients of the projection",
    in<&P::grad_mul>("grad_mul", "F32[T,G?,M]"), in<&P::grad_sqr>("grad_sqr", "F32[T,G?]"),
    in<&P::residual>("residual", "A[T,n,d]"), in<&P::fn>("fn", "F32[M,K]"),
    in<&P::grad_residual_acc>("grad_residual_acc", "A[T,n,d]").optional(),
    in<&P::grad_fn_acc>("grad_fn_acc", "F32[M,K]").optional(),
    attribute<&P::precision>("precision", "fp32/tf32"),
    out<&P::grad_residual>("grad_residual", "A[T,n,d]").exact().may_alias("grad_residual_acc"),
    out<&P::grad_fn>("grad_fn", "F32[M,K]").exact().may_alias("grad_fn_acc"), flops("T*K*(4*M+2)"));

void check_groups(const Schema& schema, const Bound& bound, const void* params) {
  if (bound["K"] % bound["G"] == 0) return;
  fail_tensor(schema, "grad_mul", "G that divides K = " + std::to_string(bound["K"]),
              describe(static_cast<const P*>(params)->grad_mul));
}

NormFnBackwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  const bool in_place = p.grad_residual.data == p.grad_residual_acc.data;
  const int64_t rows = (p.grad_residual_acc ? 3 : 2) * sizes.streams;
  return {.sizes = sizes,
          .mixes = call.bound["M"],
          .groups = call.bound["G"],
          .grad_mul = group_rows(p.grad_mul, 3),
          .grad_sqr = group_rows(p.grad_sqr, 2),
          .residual = stream_rows(p.residual),
          .fn = mix_rows(p.fn),
          .tf32 = p.precision == Precision::tf32,
          .grad_residual_acc = stream_rows(p.grad_residual_acc),
          .grad_fn_acc = mix_rows(p.grad_fn_acc),
          .grad_residual = {stream_rows(p.grad_residual)},
          .grad_fn = mix_rows(p.grad_fn),
          .streaming = !in_place && exceeds_cache(sizes, rows)};
}

// Threads take whole strips of columns, over all tokens: so sums over tokens need no partials.
Pieces cut_columns(const Call& call) {
  return Pieces(call.context, (call.bound["K"] + kNormFnStrip - 1) / kNormFnStrip, 1);
}

size_t workspace(const Call& call) {
  Workspace arrays(nullptr);
  arrays.take<float>(cut_columns(call).count * norm_fn_scratch_floats(call.bound["M"]));
  return arrays.bytes();
}

template <auto Kernel, bool kHasScratch>
void run_cpu(const Call& call) {
  const NormFnBackwardArgs args = make_args(call);
  const Pieces pieces = cut_columns(call);
  const int64_t floats = kHasScratch ? norm_fn_scratch_floats(args.mixes) : 0;
  float* scratch = Workspace(call.context.workspace()).take<float>(pieces.count * floats);
  pieces.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    const Tile tile = {0, args.sizes.tokens, begin * kNormFnStrip,
                       std::min(call.bound["K"], end * kNormFnStrip)};
    Kernel(args, tile, scratch + piece * floats);
  });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &norm_fn_bwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_cpu<&isa::norm_fn_bwd_tile, true>, &workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&norm_fn_bwd_reference<double>, false>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_cpu<&norm_fn_bwd_reference<float>, false>,
     nullptr},
};

constexpr Operator kNormFnBackward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_groups;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(norm_fn_bwd, NormFnBackward, kNormFnBackward);
EHC_REGISTER(norm_fn_bwd, &kNormFnBackward);

}  // namespace ehc::mhc
