#include "ehc/engram/kv_projection_bwd.h"

#include <algorithm>
#include <atomic>

#include "backends/cpu/blas.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/engram/kv_projection_bwd/kv_projection_bwd_args.h"

namespace ehc::engram {

void kv_projection_bwd_tokens(const ProjectionBackwardArgs& args, int64_t begin, int64_t end);
void kv_projection_bwd_tokens_f32(const ProjectionBackwardArgs& args, int64_t begin, int64_t end);
void kv_projection_bwd_parameters(const ProjectionBackwardArgs& args, int64_t begin, int64_t end);
void kv_projection_bwd_parameters_f32(const ProjectionBackwardArgs& args, int64_t begin,
                                      int64_t end);

void kv_projection_bwd_cuda(const ProjectionBackwardArgs& args, int device, void* stream);

namespace {

using P = KvProjectionBackward;

constexpr auto kTable =
    table("engram.kv_projection_bwd", "1.7", "gradients of the projection to keys and value",
          in<&P::grad_kv>("grad_kv", "A[T,n+1,d]"), in<&P::embedding>("embedding", "A[T,E]"),
          in<&P::weight>("weight", "A[n+1,d,E]"),
          in<&P::grad_weight_acc>("grad_weight_acc", "F32[n+1,d,E]").optional(),
          in<&P::grad_bias_acc>("grad_bias_acc", "F32[n+1,d]").optional(),
          out<&P::grad_embedding>("grad_embedding", "A[T,E]"),
          out<&P::grad_weight>("grad_weight", "F32[n+1,d,E]").may_alias("grad_weight_acc"),
          out<&P::grad_bias>("grad_bias", "F32[n+1,d]").may_alias("grad_bias_acc"),
          flops("4*T*E*(n+1)*d"), flops("T*(n+1)*d"));

ProjectionBackwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  return {.grad_kv = p.grad_kv.data,
          .embedding = p.embedding.data,
          .weight = p.weight.data,
          .grad_weight_acc = p.grad_weight_acc ? p.grad_weight_acc.as<const float>() : nullptr,
          .grad_bias_acc = p.grad_bias_acc ? p.grad_bias_acc.as<const float>() : nullptr,
          .grad_embedding = p.grad_embedding.data,
          .grad_weight = p.grad_weight.as<float>(),
          .grad_bias = p.grad_bias.as<float>(),
          .grad_kv_token_stride = p.grad_kv.stride[0],
          .grad_kv_stride = p.grad_kv.stride[1],
          .embedding_stride = p.embedding.stride[0],
          .weight_stride = p.weight.stride[0],
          .weight_row_stride = p.weight.stride[1],
          .grad_weight_acc_stride = p.grad_weight_acc.stride[0],
          .grad_weight_acc_row_stride = p.grad_weight_acc.stride[1],
          .grad_bias_acc_stride = p.grad_bias_acc.stride[0],
          .grad_embedding_stride = p.grad_embedding.stride[0],
          .grad_weight_stride = p.grad_weight.stride[0],
          .grad_weight_row_stride = p.grad_weight.stride[1],
          .grad_bias_stride = p.grad_bias.stride[0],
          .tokens = b["T"],
          .depth = b["E"],
          .branches = b["n"] + 1,
          .width = b["d"],
          .type = p.embedding.dtype};
}

struct Steps {
  ProjectionSteps forward;
  ProjectionBackwardSteps backward;
};

Steps steps_for(DType type) {
#define EHC_TRY(isa)                                                            \
  if (cpu_supports(Isa::isa)) {                                                 \
    return {isa::projection_steps(type), isa::projection_backward_steps(type)}; \
  }
  EHC_EACH_ISA(EHC_TRY)
#undef EHC_TRY
  throw Error(ErrorKind::unavailable,
              "engram.kv_projection_bwd: this build has no kernels for this processor");
}

constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

enum class Product { openblas, builtin };

// A result of rows x columns, cut into blocks by shape alone, so threads change no bit. A thread
// has a slot of its own for the packed operands and the sums of a block. The summation index is
// taken in pieces of kDepth, whole chains.
struct Blocks {
  static constexpr int64_t kRows = 240;     // a multiple of every row panel
  static constexpr int64_t kColumns = 512;  // and of every column panel
  static constexpr int64_t kDepth = 4 * kProjectionChain;

  int64_t total_rows, total_columns;
  int64_t rows, columns;  // of a block, whole panels
  int64_t row_blocks, column_blocks;

  Blocks(int64_t all_rows, int64_t all_columns, const ProjectionSteps& steps)
      : total_rows(all_rows), total_columns(all_columns) {
    // Blocks of about the same size.
    const auto even = [](int64_t total, int64_t most, int64_t panel) {
      const int64_t blocks = std::max<int64_t>(1, (total + most - 1) / most);
      return std::max(panel, round_up((total + blocks - 1) / blocks, panel));
    };
    rows = even(all_rows, kRows, steps.row_panel);
    columns = even(all_columns, kColumns, steps.column_panel);
    row_blocks = (all_rows + rows - 1) / rows;
    column_blocks = (all_columns + columns - 1) / columns;
  }
  [[nodiscard]] int64_t count() const { return row_blocks * column_blocks; }
  [[nodiscard]] ProjectionBlock at(int64_t index) const {
    const int64_t row = index % row_blocks * rows;
    const int64_t column = index / row_blocks * columns;
    return {row, std::min(rows, total_rows - row), column,
            std::min(columns, total_columns - column)};
  }
};

struct Slot {
  float* a;
  float* b;
  float* sums;
};

// A slot serves the blocks of both products.
class Slots {
 public:
  Slots(const Call& call, const Blocks& tokens, const Blocks& weights, int64_t branches,
        Workspace& workspace)
      : count_(std::min<int64_t>(call.context.executor().concurrency(),
                                 std::max(tokens.count(), branches * weights.count()))) {
    const int64_t rows = std::max(tokens.rows, weights.rows);
    const int64_t columns = std::max(tokens.columns, weights.columns);
    sizes_[0] = round_up(rows * Blocks::kDepth, kLine);
    sizes_[1] = round_up(columns * Blocks::kDepth, kLine);
    sizes_[2] = round_up(rows * columns, kLine);
    data_ = workspace.take<float>(count_ * (sizes_[0] + sizes_[1] + sizes_[2]));
  }
  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] Slot at(int64_t index) const {
    float* a = data_ + index * (sizes_[0] + sizes_[1] + sizes_[2]);
    return {a, a + sizes_[0], a + sizes_[0] + sizes_[1]};
  }

 private:
  static constexpr int64_t kLine = 16;
  int64_t count_;
  int64_t sizes_[3];
  float* data_;
};

// Both products, on the arguments of one call.
template <Product kProduct>
class Gradients {
 public:
  Gradients(const Call& call, void* workspace)
      : call_(call),
        a_(make_args(call)),
        steps_(steps_for(a_.type)),
        tokens_(a_.tokens, a_.depth, steps_.forward),
        weights_(a_.width, a_.depth, steps_.forward),
        workspace_(workspace),
        slots_(call, tokens_, weights_, a_.branches, workspace_) {}

  [[nodiscard]] size_t bytes() const { return workspace_.bytes(); }

  void run() const {
    each_block(tokens_.count(), [&](int64_t index, const Slot& slot) { token_block(index, slot); });
    each_block(a_.branches * weights_.count(),
               [&](int64_t index, const Slot& slot) { weight_block(index, slot); });
    const int64_t columns = 128;
    const int64_t pieces = (a_.width + columns - 1) / columns;
    parallel_for(call_.context, a_.branches * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % pieces * columns;
        steps_.backward.sum_bias(a_, i / pieces, first, std::min(first + columns, a_.width));
      }
    });
  }

 private:
  template <class Body>
  void each_block(int64_t count, const Body& body) const {
    std::atomic<int64_t> next = 0;
    call_.context.executor().run(std::min(slots_.count(), count), [&](int64_t index) {
      const Slot slot = slots_.at(index);
      for (int64_t block = next++; block < count; block = next++) body(block, slot);
    });
  }

  // grad_embedding = grad_kv * weight, summed over (j, i).
  void token_block(int64_t index, const Slot& slot) const {
    const ProjectionBlock block = tokens_.at(index);
    const ProjectionRows weight = {a_.weight,        a_.width, a_.weight_row_stride,
                                   a_.weight_stride, a_.depth, a_.type};
    const int64_t all = a_.branches * a_.width;
    for (int64_t k = 0; k < all; k += Blocks::kDepth) {
      const int64_t depth = std::min(Blocks::kDepth, all - k);
      pack_grad_kv(block, k, depth, slot.a);
      pack_columns(weight, k, depth, block, slot.b);
      multiply(block, depth, /*a_by_depth=*/false, k > 0, slot);
    }
    steps_.backward.finish_embedding(a_, block, slot.sums, stride_of(block));
  }

  // grad_weight[j] = grad_kv[:, j]^T * embedding, summed over t.
  void weight_block(int64_t index, const Slot& slot) const {
    const int64_t branch = index / weights_.count();
    const ProjectionBlock block = weights_.at(index % weights_.count());
    const ProjectionRows grad_kv = {branch_of(branch), a_.tokens, a_.grad_kv_token_stride, 0,
                                    a_.width,          a_.type};
    const ProjectionRows embedding = {a_.embedding, a_.tokens, a_.embedding_stride, 0,
                                      a_.depth,     a_.type};
    if (a_.tokens == 0) std::fill_n(slot.sums, block.rows * stride_of(block), 0.0F);
    for (int64_t t = 0; t < a_.tokens; t += Blocks::kDepth) {
      const int64_t depth = std::min(Blocks::kDepth, a_.tokens - t);
      const int64_t panel = kProduct == Product::openblas ? block.rows : steps_.forward.row_panel;
      steps_.backward.pack_by_depth(grad_kv, t, depth, block.row, block.rows, panel, slot.a);
      pack_columns(embedding, t, depth, block, slot.b);
      multiply(block, depth, /*a_by_depth=*/true, t > 0, slot);
    }
    steps_.backward.finish_weight(a_, branch, block, slot.sums, stride_of(block));
  }

  [[nodiscard]] const void* branch_of(int64_t branch, int64_t column = 0) const {
    const int64_t at = branch * a_.grad_kv_stride + column;
    return static_cast<const char*>(a_.grad_kv) + at * static_cast<int64_t>(size_of(a_.type));
  }

  // Tokens of the block, (j, i) = [k, k + depth): as panels, or as rows for OpenBLAS.
  void pack_grad_kv(const ProjectionBlock& block, int64_t k, int64_t depth, float* out) const {
    const bool as_rows = kProduct == Product::openblas;
    const int64_t panel = as_rows ? 1 : steps_.forward.row_panel;
    for (int64_t done = 0; done < depth;) {
      const int64_t branch = (k + done) / a_.width;
      const int64_t column = (k + done) % a_.width;
      const int64_t some = std::min(depth - done, a_.width - column);
      const ProjectionRows rows = {
          branch_of(branch, column), a_.tokens, a_.grad_kv_token_stride, 0, some, a_.type};
      for (int64_t r = 0; r < block.rows; r += panel) {
        float* to = out + r * depth + done * panel;
        const int64_t count = std::min(panel, block.rows - r);
        if (as_rows) {
          steps_.forward.widen(rows, block.row + r, count, to);
        } else {
          steps_.forward.pack_row_panels(rows, block.row + r, count, to);
        }
      }
      done += some;
    }
  }

  // Rows k of an operand that lies by depth, columns of the block.
  void pack_columns(const ProjectionRows& rows, int64_t k, int64_t depth,
                    const ProjectionBlock& block, float* out) const {
    const int64_t panel =
        kProduct == Product::openblas ? block.columns : steps_.forward.column_panel;
    steps_.backward.pack_by_depth(rows, k, depth, block.column, block.columns, panel, out);
  }

  void multiply(const ProjectionBlock& block, int64_t depth, bool a_by_depth, bool accumulate,
                const Slot& slot) const {
    if constexpr (kProduct == Product::builtin) {
      steps_.forward.multiply(slot.a, slot.b, round_up(block.rows, steps_.forward.row_panel),
                              stride_of(block), depth, accumulate, slot.sums);
      return;
    }
    for (int64_t k = 0; k < depth; k += kProjectionChain) {
      blas::multiply_openblas({.a = slot.a + (a_by_depth ? k * block.rows : k),
                               .b = slot.b + k * block.columns,
                               .c = slot.sums,
                               .a_stride = a_by_depth ? block.rows : depth,
                               .b_stride = block.columns,
                               .c_stride = stride_of(block),
                               .rows = block.rows,
                               .columns = block.columns,
                               .depth = std::min(kProjectionChain, depth - k),
                               .accumulate = accumulate || k > 0,
                               .a_by_depth = a_by_depth,
                               .b_by_depth = true});
    }
  }

  // Of the sums.
  [[nodiscard]] int64_t stride_of(const ProjectionBlock& block) const {
    return round_up(block.columns, steps_.forward.column_panel);
  }

  const Call& call_;
  ProjectionBackwardArgs a_;
  Steps steps_;
  Blocks tokens_;
  Blocks weights_;
  Workspace workspace_;
  Slots slots_;
};

template <Product kProduct>
size_t workspace(const Call& call) {
  return Gradients<kProduct>(call, nullptr).bytes();
}

template <Product kProduct>
void run_blocked(const Call& call) {
  Gradients<kProduct>(call, call.context.workspace()).run();
}

template <auto Tokens, auto Parameters>
void run_reference(const Call& call) {
  const ProjectionBackwardArgs args = make_args(call);
  parallel_for(call.context, args.tokens, 1,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
  parallel_for(call.context, args.branches * args.width, 1,
               [&](int64_t begin, int64_t end) { Parameters(args, begin, end); });
}

#if EHC_HAS_OPENBLAS
std::string_view refuse_openblas(const Call& call) { return blas::refuse_openblas(call.context); }
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &kv_projection_bwd_cuda>, nullptr},
#endif
#if EHC_HAS_OPENBLAS
    {"cpu.openblas", Device::cpu, &refuse_openblas, &run_blocked<Product::openblas>,
     &workspace<Product::openblas>},
#endif
    {"cpu.builtin", Device::cpu, nullptr, &run_blocked<Product::builtin>,
     &workspace<Product::builtin>},
    {"reference", Device::cpu, nullptr,
     &run_reference<&kv_projection_bwd_tokens, &kv_projection_bwd_parameters>, nullptr},
    {"reference.f32", Device::cpu, nullptr,
     &run_reference<&kv_projection_bwd_tokens_f32, &kv_projection_bwd_parameters_f32>, nullptr},
};

constexpr Operator kKvProjectionBackward = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(kv_projection_bwd, KvProjectionBackward, kKvProjectionBackward);
EHC_REGISTER(kv_projection_bwd, &kKvProjectionBackward);

}  // namespace ehc::engram
