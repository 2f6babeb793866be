#include "ehc/engram/hash.h"

#include <limits>

#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/hash/hash_args.h"

namespace ehc::engram {

void hash_reference(const HashArgs& args, int64_t begin, int64_t end);
void hash_cuda(const HashArgs& args, int device, void* stream);

namespace {

using P = Hash;

constexpr auto kTable =
    table("engram.hash", "1.5", "rows addressed by a window of token ids",
          in<&P::window>("window", "I32[T,Nmax]"),
          in<&P::multipliers>("multipliers", "I64[L,Nmax]").packed(),
          in<&P::vocab_sizes>("vocab_sizes", "I32[L,Nmax-1,Kh]").packed(),
          in<&P::offsets>("offsets", "I32/I64[L,C]").packed(),
          in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
          call_choice("index_dtype", "I32/I64", "I32"), attribute<&P::layout>("layout", "LTC/TLC"),
          out<&P::indices>("indices", "X:I32/I64[L,T,C]")
              .dtype_from("index_dtype")
              .or_shape("layout=TLC", "[T,L,C]"));

HashArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  const bool tokens_first = p.layout == IndexLayout::tlc;
  return {.window = p.window.as<int32_t>(),
          .multipliers = p.multipliers.as<int64_t>(),
          .sizes = p.vocab_sizes.as<int32_t>(),
          .offsets = p.offsets.data,
          .mask = p.image_token_mask.as<uint8_t>(),
          .indices = p.indices.data,
          .window_stride = p.window.stride[0],
          .layer_stride = p.indices.stride[tokens_first ? 1 : 0],
          .token_stride = p.indices.stride[tokens_first ? 0 : 1],
          .tokens = b["T"],
          .layers = b["L"],
          .heads = b["Kh"],
          .orders = static_cast<int32_t>(b["Nmax"] - 1),
          .offsets_are_64 = p.offsets.dtype == DType::i64,
          .indices_are_64 = p.indices.dtype == DType::i64};
}

// On the host the sizes and offsets can be read, so a table that cannot be addressed is refused.
void check_sizes(const Schema& schema, const Bound& b, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (p.window.device != Device::cpu) return;
  for (int64_t i = 0; i < b["L"] * b["C"]; ++i) {
    const int32_t size = p.vocab_sizes.as<int32_t>()[i];
    if (size <= 0) fail_tensor(schema, "vocab_sizes", "sizes > 0", std::to_string(size));
    const int64_t offset =
        p.offsets.dtype == DType::i64 ? p.offsets.as<int64_t>()[i] : p.offsets.as<int32_t>()[i];
    const int64_t most =
        p.indices.dtype == DType::i64 ? std::numeric_limits<int64_t>::max() : INT32_MAX;
    if (offset < 0 || offset > most - (size - 1)) {
      fail_tensor(schema, "offsets",
                  "offset + size - 1 in [0," + std::to_string(most) + "] (see index_dtype)",
                  std::to_string(offset) + " with size " + std::to_string(size));
    }
  }
}

template <auto Rows>
void run_cpu(const Call& call) {
  const HashArgs args = make_args(call);
  parallel_for(call.context, args.tokens, 256,
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

#if EHC_HAS_CUDA
void run_cuda(const Call& call) {
  hash_cuda(make_args(call), call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::hash_rows>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&hash_reference>, nullptr},
};

constexpr Operator kHash = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_sizes;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(hash, Hash, kHash);
EHC_REGISTER(hash, &kHash);

}  // namespace ehc::engram
