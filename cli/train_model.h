// One Engram layer and a small softmax behind it, trained through the library's public calls:
//
//   ids -> window -> hash -> gather -> projection -> layer (gate + convolution)
//       -> mean over streams of what the layer added -> softmax over the classes of the next token
//
// The incoming streams are fixed random vectors, one per compressed id and stream: what the gate
// compares the memory with. Everything is fp32. The table learns by the Engram optimizer, all else
// by momentum and a plain step. No bit depends on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/host_tensor.h"
#include "cli/train_text.h"
#include "ehc/context.h"
#include "ehc/table.h"
#include "ehc/tensor.h"
#include "ehc/text.h"

namespace ehc::cli {

struct TrainConfig {
  int64_t tokens = 1024;  // T, of one step
  int64_t lanes = 8;      // places of the text that a step reads at, each T / lanes tokens
  int64_t streams = 4;    // n
  int64_t width = 64;     // d
  int64_t classes = 256;  // most frequent ids and one for the rest; even
  double table_rate = 0.1;
  double rate = 3;  // of all other parameters
  uint64_t seed = 0;
};

// What a step leaves behind. Both tensors have the shape [rows, columns].
struct Parameter {
  std::string name;
  HostTensor value, momentum;
};

class TrainModel {
 public:
  // `layer` is the position in the layout's list. Map and layout must outlive this object.
  // The softmax starts as the frequencies of the classes, so the first loss is the unigram loss.
  TrainModel(Context& context, const text::TokenMap& map, const tables::HashLayout& layout,
             size_t layer, const TrainConfig& config, const std::vector<double>& log_frequency);
  TrainModel(const TrainModel&) = delete;
  TrainModel& operator=(const TrainModel&) = delete;

  // Mean cross entropy over the batch, in nats.
  double forward(const Batch& batch);
  // Of the last forward pass: all gradients, then new parameters.
  void learn(const Batch& batch);

  // Gates of the last forward pass, F32[T, n].
  [[nodiscard]] Tensor alpha() const {
    return statistics_.tensor.slice(1, 0, tokens_).select(0, kAlpha);
  }
  // All that training changes; the table is the first.
  [[nodiscard]] std::vector<Parameter>& parameters() { return parameters_; }

 private:
  // Position in the statistics of the gate [4, T, n].
  static constexpr int64_t kDot = 0, kAlpha = 1, kRstdResidual = 2, kRstdKey = 3;
  enum Name : size_t {
    kTable,
    kProjection,
    kProjectionBias,
    kWeightHidden,
    kWeightEmbed,
    kConvWeight,
    kConvNormWeight,
    kSoftmax,
    kSoftmaxBias,
    kParameters
  };

  template <class Params>
  void call(void (*op)(Context&, const Params&), const Params& params);
  void add_parameter(Name name, const char* text, int64_t rows, int64_t columns, float mean,
                     float deviation);
  // A parameter or its gradient in the shape that an operator wants.
  [[nodiscard]] Tensor value(Name name, std::initializer_list<int64_t> shape) const;
  [[nodiscard]] Tensor gradient(Name name, std::initializer_list<int64_t> shape) const;

  void look_up(const Batch& batch);
  void fill_residual(const Batch& batch);
  void run_layer(const Batch& batch);
  void predict();
  double cross_entropy(const Batch& batch);
  void propagate(const Batch& batch);
  void update_table();
  void update_others();

  Context& context_;
  const text::TokenMap& map_;
  const tables::HashLayout& layout_;
  size_t layer_;
  TrainConfig config_;
  int64_t tokens_ = 0;  // of the last forward pass
  int64_t embed_ = 0;   // E
  std::vector<Parameter> parameters_;
  std::vector<HostTensor> gradients_;  // all but the table's

  // Of one batch, forward; the logits become their own gradients.
  HostTensor window_, indices_, embedding_, kv_, residual_, streams_, statistics_, features_,
      logits_, losses_;
  // Backward.
  HostTensor grad_features_, grad_streams_, grad_residual_, grad_kv_, grad_embedding_, unique_rows_,
      grad_rows_, update_;
  std::vector<std::byte> workspace_;
};

}  // namespace ehc::cli
