#include "ehc/mhc/multilayer_recompute.h"

#include "backends/cpu/isa.h"
#include "core/registry.h"
#include "ops/mhc/multilayer_recompute/multilayer_recompute_args.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

template <class Real>
void recompute_reference(const RecomputeArgs& args, const Tile& tile);

void recompute_cuda(const RecomputeArgs& args, int device, void* stream);

namespace {

using P = MultilayerRecompute;

constexpr auto kTable =
    table("mhc.multilayer_recompute", "2.12", "residuals and layer inputs of a block of layers",
          in<&P::residual>("residual", "A[T,n,d]"), in<&P::pre>("pre.L", "F32[T,n]").counts("L"),
          in<&P::layer_output>("layer_output.L", "A[T,d]").counts("Lp").optional(),
          in<&P::post>("post.L", "F32[T,n]").counts("Lp").optional(),
          in<&P::comb>("comb.L", "F32[T,n,n]").counts("Lp").optional(),
          all_or_none("layer_output.L post.L comb.L"), default_symbol("Lp", 0, "layer_output.L"),
          out<&P::layer_input>("layer_input.L", "A[T,d]").exact().counts("L"),
          out<&P::new_residual>("new_residual.L", "A[T,n,d]").exact().counts("Lp"),
          flops("2*L*T*n*d"), flops("Lp*T*d*(2*n*n+n)"));

void check_lengths(const Schema& schema, const Bound& bound, const void*) {
  const int64_t layers = bound["L"];
  const int64_t posts = bound["Lp"];
  if (posts == layers || posts == layers - 1) return;
  fail_tensor(schema, "layer_output.L",
              std::to_string(layers - 1) + " or " + std::to_string(layers) + " tensors for " +
                  std::to_string(layers) + " of 'pre.L'",
              std::to_string(posts));
}

RecomputeLayer layer_of(const P& p, size_t l, int lead) {
  const auto rows = [&](const Tensor& t) { return stream_rows(flattened(t, lead)); };
  const auto values = [&](const Tensor& t) { return coefficients(flattened(t, lead)); };
  RecomputeLayer layer;
  layer.pre = values(p.pre[l]);
  layer.layer_input = rows(p.layer_input[l]);
  if (l >= p.layer_output.size()) return layer;
  layer.has_post = true;
  layer.layer_output = rows(p.layer_output[l]);
  layer.post = values(p.post[l]);
  layer.comb = values(p.comb[l]);
  layer.new_residual = rows(p.new_residual[l]);
  return layer;
}

// A fixed number of layers at a time: they are described on the stack, and a block that goes on
// starts from the last residual of the one before.
template <class Recompute>
void run_blocks(const Call& call, const Recompute& recompute) {
  const P& p = *static_cast<const P*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  const int64_t layers = call.bound["L"];
  const int64_t posts = call.bound["Lp"];
  RecomputeLayer block[kRecomputedTogether];
  RecomputeArgs args = {
      .sizes = sizes,
      .residual = stream_rows(p.residual),
      .layers = block,
      .streaming = exceeds_cache(sizes, sizes.streams + layers + posts * (sizes.streams + 1))};
  for (size_t first = 0; first < p.pre.size(); first += kRecomputedTogether) {
    const size_t count = std::min(kRecomputedTogether, p.pre.size() - first);
    for (size_t k = 0; k < count; ++k) {
      block[k] = layer_of(p, first + k, call.bound.lead_rank);
    }
    args.layer_count = static_cast<int64_t>(count);
    recompute(args);
    args.residual = block[count - 1].new_residual;
  }
}

template <auto Kernel>
void run(const Call& call) {
  run_blocks(call, [&](const RecomputeArgs& args) {
    for_each_tile(call.context, args.sizes, [&](const Tile& tile) { Kernel(args, tile); });
  });
}

#if EHC_HAS_CUDA
void run_cuda(const Call& call) {
  run_blocks(call, [&](const RecomputeArgs& args) {
    recompute_cuda(args, call.context.device_index(), call.context.stream());
  });
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run<&isa::recompute_tile>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run<&recompute_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run<&recompute_reference<float>>, nullptr},
};

constexpr Operator kMultilayerRecompute = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_lengths;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(multilayer_recompute, MultilayerRecompute, kMultilayerRecompute);
EHC_REGISTER(multilayer_recompute, &kMultilayerRecompute);

}  // namespace ehc::mhc
