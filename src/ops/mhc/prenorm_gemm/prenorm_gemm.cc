#include "ehc/mhc/prenorm_gemm.h"

#include "core/registry.h"
#include "core/workspace.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/amx_call.h"
#include "ops/mhc/shared/group_call.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

void prenorm_gemm_cuda(const PrenormGemmArgs& args, void* workspace, int device, void* stream);
size_t prenorm_gemm_cuda_workspace(const PrenormGemmArgs& args);

namespace {

using P = PrenormGemm;

constexpr auto kTable = table(
    "mhc.prenorm_gemm", "2.3", "streams projected to mixes, in splits and groups of columns",
    in<&P::residual>("residual", "A[T,n,d]"), in<&P::fn>("fn", "F32[M,K]"),
    attribute<&P::splits>("splits").between(0, 1024), attribute<&P::groups>("groups").at_least(1),
    attribute<&P::precision>("precision", "fp32/tf32"),
    out<&P::mul_partial>("mul_partial", "F32[S,T,G?,M]"),
    out<&P::sqr_partial>("sqr_partial", "F32[S,T,G?]"), flops("2*T*K*(M+1)"));

void set_splits_and_groups(Bound& bound, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (bound["K"] % p.groups != 0) {
    fail_attribute(kTable.view(), "groups", "a divisor of K = " + std::to_string(bound["K"]),
                   std::to_string(p.groups));
  }
  bound.optional_axis = p.groups > 1 ? 1 : 0;
  bound.symbols.set(symbol("G"), p.groups);
  bound.symbols.set(symbol("S"), p.splits > 0 ? p.splits : prenorm_splits(bound["T"], bound["K"]));
}

PrenormGemmArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.sizes = stream_sizes(call.bound),
          .residual = stream_rows(p.residual),
          .fn = mix_rows(p.fn),
          .mixes = call.bound["M"],
          .groups = p.groups,
          .splits = call.bound["S"],
          .automatic = p.splits == 0,
          .tf32 = p.precision == Precision::tf32,
          .mul_partial = partial_rows(p.mul_partial, 4),
          .sqr_partial = partial_rows(p.sqr_partial, 3)};
}

// Blocks of tokens, each once for every split. Large ones make more of a chunk of fn that has been
// prepared, but every thread should have some.
struct Blocks {
  int64_t tokens;  // of a block
  int64_t rows;    // of blocks
  int64_t count;

  Blocks(const PrenormGemmArgs& a, const Context& context) : tokens(kPrenormTokens) {
    const auto cut = [&] { rows = (a.sizes.tokens + tokens - 1) / tokens; };
    for (cut(); tokens > 32 && rows * a.splits < 2 * context.executor().concurrency(); cut()) {
      tokens /= 2;
    }
    count = rows * a.splits;
  }
};

size_t workspace(const Call& call) {
  const PrenormGemmArgs args = make_args(call);
  const Blocks blocks(args, call.context);
  if (blocks.count == 0) return 0;
  Workspace arrays(nullptr);
  const Pieces pieces(call.context, blocks.count, 1);
  arrays.take<float>(pieces.count * prenorm_scratch(args, blocks.tokens).total);
  return arrays.bytes();
}

template <auto Block, bool kHasScratch>
void run_cpu(const Call& call) {
  const PrenormGemmArgs args = make_args(call);
  const Blocks blocks(args, call.context);
  const Pieces pieces(call.context, blocks.count, 1);
  const int64_t floats = kHasScratch ? prenorm_scratch(args, blocks.tokens).total : 0;
  float* scratch = Workspace(call.context.workspace()).take<float>(pieces.count * floats);
  pieces.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block % blocks.rows * blocks.tokens;
      const int64_t last = std::min(args.sizes.tokens, first + blocks.tokens);
      Block(args, block / blocks.rows, first, last, scratch + piece * floats);
    }
  });
}

#if EHC_HAS_CUDA
void run_cuda(const Call& call) {
  prenorm_gemm_cuda(make_args(call), call.context.workspace(), call.context.device_index(),
                    call.context.stream());
}
size_t cuda_workspace(const Call& call) { return prenorm_gemm_cuda_workspace(make_args(call)); }
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, &cuda_workspace},
#endif
#if EHC_HAS_AMX
    {"cpu.amx", Device::cpu, &refuse_amx, &run_cpu<&amx::prenorm_gemm_block, true>, &workspace},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_cpu<&isa::prenorm_gemm_block, true>, &workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&prenorm_gemm_reference<double>, false>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_cpu<&prenorm_gemm_reference<float>, false>,
     nullptr},
};

constexpr Operator kPrenormGemm = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.derive = &set_splits_and_groups;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(prenorm_gemm, PrenormGemm, kPrenormGemm);
EHC_REGISTER(prenorm_gemm, &kPrenormGemm);

int64_t prenorm_splits(int64_t tokens, int64_t columns) {
  return automatic_splits(tokens, columns);
}

}  // namespace ehc::mhc
