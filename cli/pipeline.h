// The Engram forward path of one layer, chunk by chunk: map -> window -> hash -> gather ->
// projection -> gate -> convolution -> streams. Times every stage and compares samples of its
// outputs with the reference implementations. Weights, table and incoming streams are random
// numbers of a seed; what happens to the ids is real.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "cli/checked_rows.h"
#include "cli/host_tensor.h"
#include "cli/operator_call.h"
#include "cli/stage_time.h"
#include "ehc/context.h"
#include "ehc/table.h"
#include "ehc/tensor.h"
#include "ehc/text.h"

namespace ehc::cli {

struct PipelineConfig {
  int64_t chunk = 4096;  // most tokens per call
  int64_t streams = 4;   // n
  int64_t width = 1024;  // d
  uint64_t seed = 0;
};

class Pipeline {
 public:
  // `layer` is the position in the layout's list. The map and the layout must outlive this object.
  Pipeline(Context& context, const text::TokenMap& map, const tables::HashLayout& layout,
           size_t layer, const PipelineConfig& config);
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Takes the next T <= chunk raw ids of the text, I32 or I64[T]: map, window, hash.
  void address(const Tensor& ids);
  // The rest of the path for the tokens that `address` took last; may stop being called, but not
  // start again. `ids` as there.
  void update_streams(const Tensor& ids);
  // Runs `tokens` of the last chunk (at most its size) again with the reference implementations and
  // keeps the comparison. `dense`: also the stages of update_streams.
  void check(const Tensor& ids, int64_t tokens, bool dense);

  // Of the last chunk. [T, Nmax]; [T, C]; [T, n]; [T, n, d]
  [[nodiscard]] Tensor window() const { return rows_of(window_, tokens_); }
  [[nodiscard]] Tensor indices() const { return rows_of(indices_, tokens_); }
  [[nodiscard]] Tensor alpha() const { return own_outputs(tokens_).statistics.select(0, kAlpha); }
  [[nodiscard]] Tensor streams() const { return rows_of(streams_, tokens_); }

  [[nodiscard]] const std::vector<StageTime>& times() const { return times_; }
  [[nodiscard]] const CheckedRows& checks() const { return checks_; }

 private:
  // Position in the gate's statistics [4, T, n].
  static constexpr int64_t kDot = 0, kAlpha = 1, kRstdResidual = 2, kRstdKey = 3;

  // The tensors that a stage writes: those of the pipeline, or others for a check.
  struct Outputs {
    Tensor compressed, window, indices, embedding, kv, fused, gated, statistics, convolved,
        conv_state, streams, layer_state;
  };

  static Tensor rows_of(const HostTensor& host, int64_t count) {
    return host.tensor.slice(0, 0, count);
  }
  template <class Body>
  void timed(const char* stage, const Body& body);
  void add_stage(const char* name, const char* op, double bytes_per_token, double flop_per_token);
  [[nodiscard]] Outputs own_outputs(int64_t tokens) const;
  void compare_rows(const char* op, const char* output, const Tensor& fast, const Tensor& expected);

  // One stage for the first `tokens` tokens of the chunk. Inputs are always the pipeline's own.
  void compress(Context& context, const Tensor& ids, const Outputs& out);
  void make_window(Context& context, int64_t tokens, const Outputs& out);
  void hash_rows(Context& context, int64_t tokens, const Outputs& out);
  void gather(Context& context, int64_t tokens, const Outputs& out);
  void project(Context& context, int64_t tokens, const Outputs& out);
  void fuse_weights(Context& context, const Outputs& out);
  void gate(Context& context, int64_t tokens, const Outputs& out);
  void convolve(Context& context, int64_t tokens, const Outputs& out);
  void run_layer(Context& context, int64_t tokens, const Outputs& out);

  void fill_residual(const Tensor& ids);
  void advance_history();

  Context& context_;
  Context reference_;
  const text::TokenMap& map_;
  const tables::HashLayout& layout_;
  size_t layer_;
  PipelineConfig config_;
  int64_t tokens_ = 0;  // of the last chunk
  OperatorCall call_;

  // Constants: the table and the weights of the layer.
  HostTensor table_, projection_weight_, projection_bias_, weight_hidden_, weight_embed_,
      weight_fused_, conv_weight_, conv_norm_weight_;
  // Of one chunk.
  HostTensor compressed_, window_, indices_, embedding_, kv_, residual_, gated_, statistics_,
      convolved_, streams_;
  // Carried from chunk to chunk: ids before it, and the convolution's rows before and after it.
  HostTensor history_;
  std::array<HostTensor, 2> conv_state_, layer_state_;

  std::vector<StageTime> times_;
  CheckedRows checks_;
};

}  // namespace ehc::cli
