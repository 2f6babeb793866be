// A stack of mHC sublayers over the streams of a text, forward and backward, chunk by chunk:
//   pre -> layer -> seam -> layer -> ... -> seam -> layer -> post
// Each seam is the exit of one sublayer and the entry of the next one. The layer stands for
// attention or feed-forward and is tanh of its input, which the entry has normalised and weighted.
// Weights are random numbers of a seed, and so is the gradient that the last streams get. Every
// step is timed, samples of its outputs are compared with the reference implementations. A token
// depends on itself alone; no bit depends on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/checked_rows.h"
#include "cli/host_tensor.h"
#include "cli/operator_call.h"
#include "cli/stage_time.h"
#include "ehc/context.h"
#include "ehc/mhc/presets.h"
#include "ehc/mhc/sublayer.h"
#include "ehc/tensor.h"
#include "tables/safetensors.h"

namespace ehc::cli {

struct StackConfig {
  int64_t sublayers = 24;     // L
  int64_t chunk = 1024;       // most tokens per call
  int64_t check_tokens = 16;  // of the first chunk, of every sublayer
  double spread = 1;          // deviation of the logits of the mixing maps
  mhc::MixPreset mix = mhc::kTrainMix;
  uint64_t seed = 0;
};

class Stack {
 public:
  // `streams`: BF16, F16 or F32[T, n, d], contiguous, T > 0; must outlive this object.
  Stack(Context& context, const Tensor& streams, const StackConfig& config);
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  // Forward and backward for the next tokens, until all are done. How many are.
  int64_t run_chunk();

  // Of all tokens: streams and grad_streams [T, n, d]; pre and post F32[L, T, n], comb_logits and
  // comb F32[L, T, n, n]; gradients of the parameters, summed over all tokens, F32[L, ...].
  [[nodiscard]] std::vector<tables::NamedTensor> results() const;
  [[nodiscard]] const Tensor& pre() const { return pre_.tensor; }
  [[nodiscard]] const Tensor& post() const { return post_.tensor; }
  [[nodiscard]] const Tensor& comb_logits() const { return comb_logits_.tensor; }
  [[nodiscard]] const Tensor& comb() const { return comb_.tensor; }

  [[nodiscard]] const std::vector<StageTime>& times() const { return times_; }
  // All operators of a direction together, without the layers: forward, backward.
  [[nodiscard]] const std::vector<StageTime>& passes() const { return passes_; }
  [[nodiscard]] const CheckedRows& checks() const { return checks_; }

 private:
  // Forward steps first. The layer is no operator.
  enum Stage : size_t {
    kEntry,
    kSeam,
    kExit,
    kLayer,
    kExitBackward,
    kSeamBackward,
    kEntryBackward,
    kLayerBackward,
    kStages
  };

  // Of the chunk that is being worked on.
  [[nodiscard]] Tensor tokens_of(const HostTensor& all, int64_t sublayer) const {
    return all.tensor.select(0, sublayer).slice(0, begin_, begin_ + tokens_);
  }
  [[nodiscard]] Tensor rows_of(const HostTensor& chunk, int64_t sublayer) const {
    return chunk.tensor.select(0, sublayer).slice(0, 0, tokens_);
  }
  [[nodiscard]] Tensor residual(int64_t sublayer) const;
  [[nodiscard]] mhc::MixWeights weights(int64_t sublayer) const;
  [[nodiscard]] mhc::MixGradients gradients(int64_t sublayer) const;
  [[nodiscard]] mhc::MixState state(int64_t sublayer) const;
  [[nodiscard]] mhc::MixRules rules() const;

  template <class Body>
  void timed(Stage stage, const Body& body);
  template <class Params>
  void call(Stage stage, const Params& params);
  template <class Params>
  void check(const Operator& op, const Params& params);
  void add_pass(StageTime& pass, size_t first, size_t end);
  void run_layer(int64_t sublayer);
  void run_layer_backward(int64_t sublayer);
  void forward();
  void backward();

  Context& context_;
  Context reference_;
  Tensor streams_;
  StackConfig config_;
  int64_t begin_ = 0;   // first token of the chunk
  int64_t tokens_ = 0;  // of the chunk

  // Parameters and their gradients, [L, ...].
  HostTensor fn_, scale_, base_, norm_weight_, layer_norm_weight_;
  HostTensor grad_fn_, grad_scale_, grad_base_, grad_norm_weight_, grad_layer_norm_weight_;
  // Of all tokens.
  HostTensor pre_, post_, comb_logits_, comb_, new_streams_, grad_streams_;
  // Of one chunk, [L, chunk, ...]; residuals_ are the streams behind each sublayer but the last.
  HostTensor residuals_, layer_input_, layer_output_, mixes_, mul_, sqr_;
  // Of one chunk, at the boundary that the gradient has reached and the next one, [2, chunk, ...].
  HostTensor grad_residual_, grad_post_, grad_comb_;
  HostTensor grad_layer_output_, grad_layer_input_;  // [1, chunk, d]

  OperatorCall call_;
  std::vector<StageTime> times_;
  std::vector<StageTime> passes_;
  std::vector<double> chunk_seconds_;  // by stage
  CheckedRows checks_;
};

}  // namespace ehc::cli
