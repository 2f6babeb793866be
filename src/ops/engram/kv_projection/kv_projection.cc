#include "ehc/engram/kv_projection.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "backends/cpu/blas.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/kv_projection/kv_projection_args.h"

namespace ehc::engram {

void kv_projection_reference(const ProjectionArgs& args, int64_t begin, int64_t end);
void kv_projection_reference_f32(const ProjectionArgs& args, int64_t begin, int64_t end);

void kv_projection_cuda(const ProjectionArgs& args, int device, void* stream);

namespace {

using P = KvProjectionForward;

constexpr auto kTable =
    table("engram.kv_projection_fwd", "1.7", "keys and value of an embedding",
          in<&P::embedding>("embedding", "A[T,E]"), in<&P::weight>("weight", "A[n+1,d,E]"),
          in<&P::bias>("bias", "A[n+1,d]").optional(), out<&P::kv>("kv", "A[T,n+1,d]"),
          BatchDependent{}, flops("2*T*E*(n+1)*d"), flops("T*(n+1)*d", "bias"));

ProjectionArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  return {.embedding = p.embedding.data,
          .weight = p.weight.data,
          .bias = p.bias ? p.bias.data : nullptr,
          .kv = p.kv.data,
          .embedding_stride = p.embedding.stride[0],
          .weight_stride = p.weight.stride[0],
          .weight_row_stride = p.weight.stride[1],
          .bias_stride = p.bias.stride[0],
          .kv_token_stride = p.kv.stride[0],
          .kv_stride = p.kv.stride[1],
          .tokens = b["T"],
          .depth = b["E"],
          .branches = b["n"] + 1,
          .width = b["d"],
          .type = p.embedding.dtype};
}

ProjectionSteps steps_for(DType type) {
#define EHC_TRY(isa) \
  if (cpu_supports(Isa::isa)) return isa::projection_steps(type);
  EHC_EACH_ISA(EHC_TRY)
#undef EHC_TRY
  throw Error(ErrorKind::unavailable,
              "engram.kv_projection_fwd: this build has no kernels for this processor");
}

constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// The product is cut into blocks by shape alone, so threads change no bit. The tokens of a block
// are widened once for all; a column block belongs to one thread, which has a slot of its own for
// the widened weight and the sums.
struct Blocks {
  static constexpr int64_t kTokens = 480;    // a multiple of every row panel
  static constexpr int64_t kColumns = 256;   // and of every column panel
  static constexpr int64_t kAlignment = 16;  // floats: a cache line

  int64_t tokens;   // of a block, whole panels
  int64_t columns;  // of a block, whole panels
  int64_t column_blocks;
  int64_t slots;
  int64_t embedding_floats;
  int64_t weight_floats;  // per slot
  int64_t sums_floats;    // per slot

  Blocks(const ProjectionArgs& a, const ProjectionSteps& steps, int threads) {
    const int64_t all = a.branches * a.width;
    tokens = std::min(kTokens, round_up(a.tokens, steps.row_panel));
    columns = std::min(kColumns, round_up(all, steps.column_panel));
    column_blocks = (all + columns - 1) / columns;
    slots = std::min<int64_t>(threads, column_blocks);
    embedding_floats = round_up(tokens * a.depth, kAlignment);
    weight_floats = round_up(columns * a.depth, kAlignment);
    sums_floats = round_up(tokens * columns, kAlignment);
  }
  [[nodiscard]] size_t bytes() const {
    const int64_t floats = embedding_floats + slots * (weight_floats + sums_floats) + kAlignment;
    return tokens == 0 ? 0 : static_cast<size_t>(floats) * sizeof(float);
  }
};

size_t workspace(const Call& call) {
  const ProjectionArgs args = make_args(call);
  return Blocks(args, steps_for(args.type), call.context.executor().concurrency()).bytes();
}

enum class Product { openblas, builtin };

template <Product kProduct>
void run_blocked(const Call& call) {
  const ProjectionArgs a = make_args(call);
  const ProjectionSteps steps = steps_for(a.type);
  Executor& executor = call.context.executor();
  const Blocks blocks(a, steps, executor.concurrency());
  const auto address = reinterpret_cast<uintptr_t>(call.context.workspace());
  auto* embedding = reinterpret_cast<float*>((address + 63) / 64 * 64);
  float* slots = embedding + blocks.embedding_floats;
  const ProjectionRows token_rows = {a.embedding, a.tokens, a.embedding_stride, 0, a.depth, a.type};
  const ProjectionRows weight_rows = {a.weight,        a.width, a.weight_row_stride,
                                      a.weight_stride, a.depth, a.type};

  for (int64_t t = 0; t < a.tokens; t += blocks.tokens) {
    const int64_t tokens = std::min(blocks.tokens, a.tokens - t);
    const int64_t panels = (tokens + steps.row_panel - 1) / steps.row_panel;
    parallel_for(call.context, panels, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * steps.row_panel;
      const int64_t count = std::min(tokens, end * steps.row_panel) - first;
      float* to = embedding + first * a.depth;
      if constexpr (kProduct == Product::openblas) {
        steps.widen(token_rows, t + first, count, to);
      } else {
        steps.pack_row_panels(token_rows, t + first, count, to);
      }
    });
    std::atomic<int64_t> next = 0;
    executor.run(blocks.slots, [&](int64_t slot) {
      float* weight = slots + slot * (blocks.weight_floats + blocks.sums_floats);
      float* sums = weight + blocks.weight_floats;
      for (int64_t block = next++; block < blocks.column_blocks; block = next++) {
        const int64_t c = block * blocks.columns;
        const int64_t columns = std::min(blocks.columns, a.branches * a.width - c);
        const int64_t stride = round_up(columns, steps.column_panel);
        if constexpr (kProduct == Product::openblas) {
          steps.widen(weight_rows, c, columns, weight);
          for (int64_t k = 0; k < a.depth; k += kProjectionChain) {
            blas::multiply_openblas({embedding + k, weight + k, sums, a.depth, a.depth, stride,
                                     tokens, columns, std::min(kProjectionChain, a.depth - k),
                                     k > 0});
          }
        } else {
          steps.pack_column_panels(weight_rows, c, columns, weight);
          steps.multiply(embedding, weight, panels * steps.row_panel, stride, a.depth, false, sums);
        }
        steps.finish(a, sums, stride, t, tokens, c, columns);
      }
    });
  }
}

template <auto Rows>
void run_reference(const Call& call) {
  const ProjectionArgs args = make_args(call);
  parallel_for(call.context, args.tokens, 1,
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

#if EHC_HAS_OPENBLAS
std::string_view refuse_openblas(const Call& call) {
  if (call.bound["E"] > std::numeric_limits<int32_t>::max()) return "E is above 2^31 - 1";
  return blas::refuse_openblas(call.context);
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &kv_projection_cuda>, nullptr},
#endif
#if EHC_HAS_OPENBLAS
    {"cpu.openblas", Device::cpu, &refuse_openblas, &run_blocked<Product::openblas>, &workspace},
#endif
    {"cpu.builtin", Device::cpu, nullptr, &run_blocked<Product::builtin>, &workspace},
    {"reference", Device::cpu, nullptr, &run_reference<&kv_projection_reference>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_reference<&kv_projection_reference_f32>, nullptr},
};

constexpr Operator kKvProjectionForward = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(kv_projection_fwd, KvProjectionForward, kKvProjectionForward);
EHC_REGISTER(kv_projection, &kKvProjectionForward);

}  // namespace ehc::engram
