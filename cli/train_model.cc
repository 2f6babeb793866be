#include "cli/train_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "cli/case_random.h"
#include "cli/random_tensor.h"
#include "cli/text_inputs.h"
#include "core/parallel.h"
#include "ehc/engram/gather.h"
#include "ehc/engram/gather_bwd.h"
#include "ehc/engram/hash.h"
#include "ehc/engram/kv_projection.h"
#include "ehc/engram/kv_projection_bwd.h"
#include "ehc/engram/layer.h"
#include "ehc/engram/layer_bwd.h"
#include "ehc/engram/momentum_update.h"
#include "ehc/engram/optimizer_step.h"
#include "ehc/engram/window.h"

namespace ehc::cli {

namespace {

constexpr double kEps = 1e-6;
constexpr double kClamp = 1e-6;
constexpr double kConvEps = 1e-5;
constexpr double kOptimizerEps = 1e-20;
constexpr double kBeta = 0.9;  // of the momentum of all but the table
constexpr int64_t kTaps = 4;
// Rows that nothing was learned about say little, but enough to tell the gates apart.
constexpr float kTableDeviation = 0.02F;

}  // namespace

TrainModel::TrainModel(Context& context, const text::TokenMap& map,
                       const tables::HashLayout& layout, size_t layer, const TrainConfig& config,
                       const std::vector<double>& log_frequency)
    : context_(context), map_(map), layout_(layout), layer_(layer), config_(config) {
  const int64_t tokens = config.tokens;
  const int64_t n = config.streams;
  const int64_t d = config.width;
  const int64_t columns = layout.config().columns();
  const int64_t row_width = layout.config().row_width;
  embed_ = columns * row_width;
  const auto f32 = [&](std::initializer_list<int64_t> shape) {
    return HostTensor(context, DType::f32, shape);
  };
  const auto spread = [](int64_t summands) { return 1 / std::sqrt(static_cast<float>(summands)); };
  parameters_.resize(kParameters);
  gradients_.resize(kParameters);
  add_parameter(kTable, "table", layout.rows()[layer], row_width, 0, kTableDeviation);
  add_parameter(kProjection, "projection", (n + 1) * d, embed_, 0, spread(embed_));
  add_parameter(kProjectionBias, "projection_bias", n + 1, d, 0, 0);
  add_parameter(kWeightHidden, "weight_hidden", n, d, 1, 0);
  add_parameter(kWeightEmbed, "weight_embed", n, d, 1, 0);
  add_parameter(kConvWeight, "conv_weight", n * d, kTaps, 0, 0);
  add_parameter(kConvNormWeight, "conv_norm_weight", n, d, 1, 0);
  add_parameter(kSoftmax, "softmax", config.classes, d, 0, spread(d));
  add_parameter(kSoftmaxBias, "softmax_bias", 1, config.classes, 0, 0);
  std::transform(log_frequency.begin(), log_frequency.end(),
                 parameters_[kSoftmaxBias].value.tensor.as<float>(),
                 [](double x) { return static_cast<float>(x); });

  window_ = HostTensor(context, DType::i32, {tokens, layout.config().max_ngram()});
  indices_ = HostTensor(context, layout.index_dtype(), {tokens, columns});
  embedding_ = f32({tokens, embed_});
  kv_ = f32({tokens, n + 1, d});
  residual_ = f32({tokens, n, d});
  streams_ = f32({tokens, n, d});
  statistics_ = f32({4, tokens, n});
  features_ = f32({tokens, d});
  logits_ = f32({tokens, 2, config.classes / 2});
  losses_ = f32({tokens});
  grad_features_ = f32({tokens, d});
  grad_streams_ = f32({tokens, n, d});
  grad_residual_ = f32({tokens, n, d});
  grad_kv_ = f32({tokens, n + 1, d});
  grad_embedding_ = f32({tokens, embed_});
  unique_rows_ = HostTensor(context, layout.index_dtype(), {tokens * columns});
  grad_rows_ = f32({tokens * columns, row_width});
}

void TrainModel::add_parameter(Name name, const char* text, int64_t rows, int64_t columns,
                               float mean, float deviation) {
  Parameter& parameter = parameters_[name];
  parameter.name = text;
  parameter.value = HostTensor(context_, DType::f32, {rows, columns});
  parameter.momentum = HostTensor(context_, DType::f32, {rows, columns});
  fill_random(context_, parameter.value.tensor, config_.seed, text, mean, deviation);
  std::memset(parameter.momentum.memory.data(), 0, parameter.momentum.memory.bytes());
  if (name == kTable) return;
  gradients_[name] = HostTensor(context_, DType::f32, {rows, columns});
  if (update_.memory.bytes() < parameter.value.memory.bytes()) {
    update_ = HostTensor(context_, DType::f32, {rows, columns});
  }
}

Tensor TrainModel::value(Name name, std::initializer_list<int64_t> shape) const {
  return {parameters_[name].value.memory.data(), DType::f32, shape};
}
Tensor TrainModel::gradient(Name name, std::initializer_list<int64_t> shape) const {
  return {gradients_[name].memory.data(), DType::f32, shape};
}

template <class Params>
void TrainModel::call(void (*op)(Context&, const Params&), const Params& params) {
  const size_t needed = engram::workspace_bytes(context_, params);
  if (workspace_.size() < needed) workspace_.resize(needed);
  context_.set_workspace(workspace_.data(), workspace_.size());
  op(context_, params);
}

double TrainModel::forward(const Batch& batch) {
  tokens_ = batch.ids.shape[0];
  look_up(batch);
  fill_residual(batch);
  run_layer(batch);
  predict();
  return cross_entropy(batch);
}

// From ids to the rows of the table, side by side.
void TrainModel::look_up(const Batch& batch) {
  const tables::HashLayoutConfig& config = layout_.config();
  const auto layer = static_cast<int64_t>(layer_);
  call<engram::Window>(engram::window, {.ids = batch.ids,
                                        .cu_seqlens = batch.cu_seqlens,
                                        .history = batch.history,
                                        .max_ngram = config.max_ngram(),
                                        .pad_id = mapped_id(map_, config.pad_id),
                                        .reset_id = mapped_id(map_, config.reset_id),
                                        .blocking = config.blocking,
                                        .window = window_.rows(tokens_)});
  const Tensor indices = indices_.rows(tokens_);
  call<engram::Hash>(
      engram::hash, {.window = window_.rows(tokens_),
                     .multipliers = layout_.multipliers_tensor().slice(0, layer, layer + 1),
                     .vocab_sizes = layout_.vocab_sizes_tensor().slice(0, layer, layer + 1),
                     .offsets = layout_.offsets_tensor().slice(0, layer, layer + 1),
                     .indices = Tensor(indices.data, indices.dtype, {tokens_, 1, config.columns()}),
                     .layout = engram::IndexLayout::tlc});
  call<engram::GatherForward>(engram::gather_fwd, {.table = parameters_[kTable].value.tensor,
                                                   .indices = indices,
                                                   .embedding = embedding_.rows(tokens_)});
}

void TrainModel::fill_residual(const Batch& batch) {
  const uint64_t stream = random_stream(config_.seed, "residual");
  const int64_t row = config_.streams * config_.width;
  const auto* ids = batch.ids.as<int32_t>();
  auto* values = residual_.tensor.as<float>();
  parallel_for(context_, tokens_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < row; ++i) {
        values[t * row + i] = random_normal(random_bits(stream, ids[t] * row + i));
      }
    }
  });
}

// Updated streams, and as features the mean over streams of what they gained.
void TrainModel::run_layer(const Batch& batch) {
  const int64_t n = config_.streams;
  const int64_t d = config_.width;
  call<engram::KvProjectionForward>(engram::kv_projection_fwd,
                                    {.embedding = embedding_.rows(tokens_),
                                     .weight = value(kProjection, {n + 1, d, embed_}),
                                     .bias = value(kProjectionBias, {n + 1, d}),
                                     .kv = kv_.rows(tokens_)});
  const Tensor statistics = statistics_.tensor.slice(1, 0, tokens_);
  call<engram::LayerForward>(engram::layer_fwd,
                             {.residual = residual_.rows(tokens_),
                              .kv = kv_.rows(tokens_),
                              .weight_hidden = value(kWeightHidden, {n, d}),
                              .weight_embed = value(kWeightEmbed, {n, d}),
                              .conv_weight = value(kConvWeight, {n, d, kTaps}),
                              .conv_norm_weight = value(kConvNormWeight, {n, d}),
                              .cu_seqlens = batch.cu_seqlens,
                              .out = streams_.rows(tokens_),
                              .dot = statistics.select(0, kDot),
                              .alpha = statistics.select(0, kAlpha),
                              .rstd_residual = statistics.select(0, kRstdResidual),
                              .rstd_key = statistics.select(0, kRstdKey),
                              .eps = kEps,
                              .clamp = kClamp,
                              .dilation = layout_.config().max_ngram(),
                              .conv_eps = kConvEps});
  const auto* before = residual_.tensor.as<float>();
  const auto* after = streams_.tensor.as<float>();
  auto* features = features_.tensor.as<float>();
  const float share = 1 / static_cast<float>(n);
  parallel_for(context_, tokens_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < d; ++i) {
        float sum = 0;
        for (int64_t h = 0; h < n; ++h) {
          const int64_t at = (t * n + h) * d + i;
          sum += after[at] - before[at];
        }
        features[t * d + i] = share * sum;
      }
    }
  });
}

// A linear layer is a projection whose "keys and value" are the two halves of the classes.
void TrainModel::predict() {
  const int64_t half = config_.classes / 2;
  call<engram::KvProjectionForward>(engram::kv_projection_fwd,
                                    {.embedding = features_.rows(tokens_),
                                     .weight = value(kSoftmax, {2, half, config_.width}),
                                     .bias = value(kSoftmaxBias, {2, half}),
                                     .kv = logits_.rows(tokens_)});
}

// Mean of -log p(class). Replaces the logits by their gradient, (p - [class]) / T.
double TrainModel::cross_entropy(const Batch& batch) {
  const int64_t classes = config_.classes;
  const auto* expected = batch.classes.as<int32_t>();
  auto* losses = losses_.tensor.as<float>();
  const float share = 1 / static_cast<float>(tokens_);
  parallel_for(context_, tokens_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = logits_.tensor.as<float>() + t * classes;
      const float largest = *std::max_element(row, row + classes);
      const float wanted = row[expected[t]] - largest;
      double sum = 0;
      for (int64_t c = 0; c < classes; ++c) {
        row[c] = std::exp(row[c] - largest);
        sum += static_cast<double>(row[c]);
      }
      losses[t] = static_cast<float>(std::log(sum)) - wanted;
      const float scale = share / static_cast<float>(sum);
      for (int64_t c = 0; c < classes; ++c) row[c] *= scale;
      row[expected[t]] -= share;
    }
  });
  double sum = 0;  // in the order of the tokens
  for (int64_t t = 0; t < tokens_; ++t) sum += static_cast<double>(losses[t]);
  return sum / static_cast<double>(tokens_);
}

void TrainModel::learn(const Batch& batch) {
  propagate(batch);
  update_table();
  update_others();
}

// All gradients but the table's.
void TrainModel::propagate(const Batch& batch) {
  const int64_t n = config_.streams;
  const int64_t d = config_.width;
  const int64_t half = config_.classes / 2;
  call<engram::KvProjectionBackward>(engram::kv_projection_bwd,
                                     {.grad_kv = logits_.rows(tokens_),
                                      .embedding = features_.rows(tokens_),
                                      .weight = value(kSoftmax, {2, half, d}),
                                      .grad_embedding = grad_features_.rows(tokens_),
                                      .grad_weight = gradient(kSoftmax, {2, half, d}),
                                      .grad_bias = gradient(kSoftmaxBias, {2, half})});
  const auto* grad_features = grad_features_.tensor.as<float>();
  auto* grad_streams = grad_streams_.tensor.as<float>();
  const float share = 1 / static_cast<float>(n);
  parallel_for(context_, tokens_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * n; row < end * n; ++row) {
      for (int64_t i = 0; i < d; ++i) {
        grad_streams[row * d + i] = share * grad_features[row / n * d + i];
      }
    }
  });
  call<engram::LayerBackward>(engram::layer_bwd,
                              {.grad_out = grad_streams_.rows(tokens_),
                               .residual = residual_.rows(tokens_),
                               .kv = kv_.rows(tokens_),
                               .weight_hidden = value(kWeightHidden, {n, d}),
                               .weight_embed = value(kWeightEmbed, {n, d}),
                               .conv_weight = value(kConvWeight, {n, d, kTaps}),
                               .conv_norm_weight = value(kConvNormWeight, {n, d}),
                               .cu_seqlens = batch.cu_seqlens,
                               .grad_residual = grad_residual_.rows(tokens_),
                               .grad_kv = grad_kv_.rows(tokens_),
                               .grad_weight_hidden = gradient(kWeightHidden, {n, d}),
                               .grad_weight_embed = gradient(kWeightEmbed, {n, d}),
                               .grad_conv_weight = gradient(kConvWeight, {n, d, kTaps}),
                               .grad_conv_norm_weight = gradient(kConvNormWeight, {n, d}),
                               .eps = kEps,
                               .clamp = kClamp,
                               .dilation = layout_.config().max_ngram(),
                               .conv_eps = kConvEps});
  call<engram::KvProjectionBackward>(engram::kv_projection_bwd,
                                     {.grad_kv = grad_kv_.rows(tokens_),
                                      .embedding = embedding_.rows(tokens_),
                                      .weight = value(kProjection, {n + 1, d, embed_}),
                                      .grad_embedding = grad_embedding_.rows(tokens_),
                                      .grad_weight = gradient(kProjection, {n + 1, d, embed_}),
                                      .grad_bias = gradient(kProjectionBias, {n + 1, d})});
}

void TrainModel::update_table() {
  const Parameter& table = parameters_[kTable];
  const int64_t most = tokens_ * layout_.config().columns();
  int64_t count = 0;
  call<engram::GatherBackward>(engram::gather_bwd, {.grad_embedding = grad_embedding_.rows(tokens_),
                                                    .indices = indices_.rows(tokens_),
                                                    .rows = table.value.tensor.shape[0],
                                                    .unique_rows = unique_rows_.rows(most),
                                                    .grad_rows = grad_rows_.rows(most),
                                                    .unique_count = &count});
  call<engram::OptimizerStepSparse>(engram::optimizer_step_sparse,
                                    {.weight = table.value.tensor,
                                     .unique_rows = unique_rows_.rows(count),
                                     .grad_rows = grad_rows_.rows(count),
                                     .momentum = table.momentum.tensor,
                                     .new_weight = table.value.tensor,
                                     .new_momentum = table.momentum.tensor,
                                     .lr = config_.table_rate,
                                     .eps = kOptimizerEps});
}

void TrainModel::update_others() {
  const auto rate = static_cast<float>(config_.rate);
  for (size_t name = kTable + 1; name < kParameters; ++name) {
    const Parameter& parameter = parameters_[name];
    const Tensor& shape = parameter.value.tensor;
    const Tensor update(update_.memory.data(), DType::f32, shape.shape, shape.rank);
    call<engram::MomentumUpdate>(engram::momentum_update,
                                 {.grad = gradients_[name].tensor,
                                  .momentum = parameter.momentum.tensor,
                                  .update = update,
                                  .new_momentum = parameter.momentum.tensor,
                                  .beta = kBeta,
                                  .nesterov = true});
    auto* values = shape.as<float>();
    const auto* steps = update.as<float>();
    parallel_for(context_, shape.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = std::fma(-rate, steps[i], values[i]);
    });
  }
}

}  // namespace ehc::cli
