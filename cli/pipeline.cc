#include "cli/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "cli/case_random.h"
#include "cli/compare.h"
#include "cli/integers.h"
#include "cli/random_tensor.h"
#include "cli/text_inputs.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/tensor_bytes.h"
#include "ehc/engram/compress_ids.h"
#include "ehc/engram/conv.h"
#include "ehc/engram/fused_weight.h"
#include "ehc/engram/gate.h"
#include "ehc/engram/gather.h"
#include "ehc/engram/hash.h"
#include "ehc/engram/kv_projection.h"
#include "ehc/engram/layer.h"
#include "ehc/engram/window.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

// Constants of the public demo and the gate's usual ones.
constexpr double kEps = 1e-6;
constexpr double kClamp = 1e-6;
constexpr double kConvEps = 1e-5;
constexpr int64_t kTaps = 4;

}  // namespace

Pipeline::Pipeline(Context& context, const text::TokenMap& map, const tables::HashLayout& layout,
                   size_t layer, const PipelineConfig& config)
    : context_(context),
      reference_(context),
      map_(map),
      layout_(layout),
      layer_(layer),
      config_(config) {
  reference_.set_implementation("reference");

  const int64_t chunk = config.chunk;
  const int64_t n = config.streams;
  const int64_t d = config.width;
  const int64_t ngram = layout.config().max_ngram();
  const int64_t columns = layout.config().columns();
  const int64_t row_width = layout.config().row_width;
  const int64_t embed = columns * row_width;
  const auto bf16 = [&](std::initializer_list<int64_t> shape) {
    return HostTensor(context, DType::bf16, shape);
  };
  table_ = bf16({layout.rows()[layer], row_width});
  projection_weight_ = bf16({n + 1, d, embed});
  projection_bias_ = bf16({n + 1, d});
  weight_hidden_ = bf16({n, d});
  weight_embed_ = bf16({n, d});
  conv_weight_ = bf16({n, d, kTaps});
  conv_norm_weight_ = bf16({n, d});
  // Deviations keep the values of every stage near 1, so that the gates spread over their range.
  const auto embed_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(embed)));
  fill_random(context, table_.tensor, config.seed, "table", 0, 1);
  fill_random(context, projection_weight_.tensor, config.seed, "projection_weight", 0, embed_scale);
  fill_random(context, projection_bias_.tensor, config.seed, "projection_bias", 0, 0.1F);
  fill_random(context, weight_hidden_.tensor, config.seed, "weight_hidden", 1, 0.1F);
  fill_random(context, weight_embed_.tensor, config.seed, "weight_embed", 1, 0.1F);
  fill_random(context, conv_weight_.tensor, config.seed, "conv_weight", 0, 0.5F);
  fill_random(context, conv_norm_weight_.tensor, config.seed, "conv_norm_weight", 1, 0.1F);

  weight_fused_ = HostTensor(context, DType::f32, {n, d});
  compressed_ = HostTensor(context, DType::i32, {chunk});
  window_ = HostTensor(context, DType::i32, {chunk, ngram});
  indices_ = HostTensor(context, layout.index_dtype(), {chunk, columns});
  embedding_ = bf16({chunk, embed});
  kv_ = bf16({chunk, n + 1, d});
  residual_ = bf16({chunk, n, d});
  gated_ = bf16({chunk, n, d});
  convolved_ = bf16({chunk, n, d});
  streams_ = bf16({chunk, n, d});
  statistics_ = HostTensor(context, DType::f32, {4, chunk, n});
  history_ = HostTensor(context, DType::i32, {1, ngram - 1});
  std::fill_n(history_.tensor.as<int32_t>(), ngram - 1, -1);  // nothing before the text
  for (auto* state : {&conv_state_, &layer_state_}) {
    for (HostTensor& side : *state) {
      side = HostTensor(context, DType::f32, {1, (kTaps - 1) * ngram, n, d});
      std::memset(side.memory.data(), 0, side.memory.bytes());
    }
  }

  const auto index = static_cast<double>(size_of(layout.index_dtype()));
  const auto c = static_cast<double>(columns);
  const auto width = static_cast<double>(d);
  const auto nd = static_cast<double>(n * d);
  const auto e = static_cast<double>(embed);
  add_stage("map", "engram.compress_ids", 4 + 4 + 4, 0);
  add_stage("window", "engram.window", 4 + 4 * static_cast<double>(ngram), 0);
  add_stage("hash", "engram.hash", 4 * static_cast<double>(ngram) + index * c, 0);
  add_stage("gather", "engram.gather_fwd", e * (2 + 2) + index * c, 0);
  // The weight is read once per chunk.
  add_stage("projection", "engram.kv_projection_fwd",
            2 * e + 2 * (nd + width) + 2 * e * (nd + width) / static_cast<double>(chunk),
            2 * e * (nd + width));
  add_stage("gate", "engram.gate_fwd", 2 * (3 * nd + width) + 16 * static_cast<double>(n), 9 * nd);
  add_stage("convolution", "engram.conv_fwd", 4 * nd, 18 * nd);
  add_stage("layer", "engram.layer_fwd", 2 * (3 * nd + width), 27 * nd);

  fuse_weights(context_, own_outputs(0));
}

void Pipeline::add_stage(const char* name, const char* op, double bytes_per_token,
                         double flop_per_token) {
  times_.push_back({.name = name,
                    .op = op,
                    .implementation = {},
                    .bytes_per_token = bytes_per_token,
                    .flop_per_token = flop_per_token});
}

Pipeline::Outputs Pipeline::own_outputs(int64_t tokens) const {
  return {.compressed = rows_of(compressed_, tokens),
          .window = rows_of(window_, tokens),
          .indices = rows_of(indices_, tokens),
          .embedding = rows_of(embedding_, tokens),
          .kv = rows_of(kv_, tokens),
          .fused = weight_fused_.tensor,
          .gated = rows_of(gated_, tokens),
          .statistics = statistics_.tensor.slice(1, 0, tokens),
          .convolved = rows_of(convolved_, tokens),
          .conv_state = conv_state_[1].tensor,
          .streams = rows_of(streams_, tokens),
          .layer_state = layer_state_[1].tensor};
}

template <class Body>
void Pipeline::timed(const char* stage, const Body& body) {
  StageTime& time = *std::find_if(times_.begin(), times_.end(),
                                  [&](const StageTime& entry) { return entry.name == stage; });
  const auto start = std::chrono::steady_clock::now();
  body();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  time.implementation = call_.implementation();
  time.add(tokens_, seconds);
}

void Pipeline::compress(Context& context, const Tensor& ids, const Outputs& out) {
  const std::span<const int32_t> table = map_.table();
  call_(context, "engram.compress_ids",
        engram::CompressIds{.ids = ids,
                            .table = Tensor(table.data(), DType::i32, {map_.vocab_size()}),
                            .compressed_ids = out.compressed});
}

void Pipeline::make_window(Context& context, int64_t tokens, const Outputs& out) {
  const tables::HashLayoutConfig& config = layout_.config();
  call_(context, "engram.window",
        engram::Window{.ids = rows_of(compressed_, tokens),
                       .history = history_.tensor,
                       .max_ngram = config.max_ngram(),
                       .pad_id = mapped_id(map_, config.pad_id),
                       .reset_id = mapped_id(map_, config.reset_id),
                       .blocking = config.blocking,
                       .window = out.window});
}

void Pipeline::hash_rows(Context& context, int64_t tokens, const Outputs& out) {
  const auto layer = static_cast<int64_t>(layer_);
  const Tensor indices(out.indices.data, out.indices.dtype,
                       {tokens, 1, layout_.config().columns()});
  call_(context, "engram.hash",
        engram::Hash{.window = rows_of(window_, tokens),
                     .multipliers = layout_.multipliers_tensor().slice(0, layer, layer + 1),
                     .vocab_sizes = layout_.vocab_sizes_tensor().slice(0, layer, layer + 1),
                     .offsets = layout_.offsets_tensor().slice(0, layer, layer + 1),
                     .indices = indices,
                     .layout = engram::IndexLayout::tlc});
}

void Pipeline::gather(Context& context, int64_t tokens, const Outputs& out) {
  call_(context, "engram.gather_fwd",
        engram::GatherForward{.table = table_.tensor,
                              .indices = rows_of(indices_, tokens),
                              .embedding = out.embedding});
}

void Pipeline::project(Context& context, int64_t tokens, const Outputs& out) {
  call_(context, "engram.kv_projection_fwd",
        engram::KvProjectionForward{.embedding = rows_of(embedding_, tokens),
                                    .weight = projection_weight_.tensor,
                                    .bias = projection_bias_.tensor,
                                    .kv = out.kv});
}

void Pipeline::fuse_weights(Context& context, const Outputs& out) {
  call_(context, "engram.fused_weight",
        engram::FusedWeight{.weight_hidden = weight_hidden_.tensor,
                            .weight_embed = weight_embed_.tensor,
                            .weight_fused = out.fused});
}

void Pipeline::gate(Context& context, int64_t tokens, const Outputs& out) {
  call_(context, "engram.gate_fwd",
        engram::GateForward{.residual = rows_of(residual_, tokens),
                            .kv = rows_of(kv_, tokens),
                            .weight_fused = weight_fused_.tensor,
                            .out = out.gated,
                            .dot = out.statistics.select(0, kDot),
                            .alpha = out.statistics.select(0, kAlpha),
                            .rstd_residual = out.statistics.select(0, kRstdResidual),
                            .rstd_key = out.statistics.select(0, kRstdKey),
                            .eps = kEps,
                            .clamp = kClamp,
                            .mode = engram::GateForward::Mode::value});
}

void Pipeline::convolve(Context& context, int64_t tokens, const Outputs& out) {
  call_(context, "engram.conv_fwd",
        engram::ConvForward{.gated_value = rows_of(gated_, tokens),
                            .conv_weight = conv_weight_.tensor,
                            .conv_norm_weight = conv_norm_weight_.tensor,
                            .state = conv_state_[0].tensor,
                            .out = out.convolved,
                            .new_state = out.conv_state,
                            .dilation = layout_.config().max_ngram(),
                            .conv_eps = kConvEps});
}

void Pipeline::run_layer(Context& context, int64_t tokens, const Outputs& out) {
  call_(context, "engram.layer_fwd",
        engram::LayerForward{.residual = rows_of(residual_, tokens),
                             .kv = rows_of(kv_, tokens),
                             .weight_hidden = weight_hidden_.tensor,
                             .weight_embed = weight_embed_.tensor,
                             .conv_weight = conv_weight_.tensor,
                             .conv_norm_weight = conv_norm_weight_.tensor,
                             .state = layer_state_[0].tensor,
                             .out = out.streams,
                             .new_state = out.layer_state,
                             .eps = kEps,
                             .clamp = kClamp,
                             .dilation = layout_.config().max_ngram(),
                             .conv_eps = kConvEps});
}

// The last Nmax - 1 ids of history and chunk together, oldest first.
void Pipeline::advance_history() {
  const int64_t keep = history_.tensor.shape[1];
  auto* history = history_.tensor.as<int32_t>();
  const auto* ids = compressed_.tensor.as<int32_t>();
  const int64_t moved = std::max<int64_t>(0, keep - tokens_);
  std::copy(history + keep - moved, history + keep, history);
  std::copy(ids + tokens_ - (keep - moved), ids + tokens_, history + moved);
}

void Pipeline::address(const Tensor& ids) {
  if (tokens_ > 0) {
    advance_history();
    std::swap(conv_state_[0], conv_state_[1]);
    std::swap(layer_state_[0], layer_state_[1]);
  }
  tokens_ = ids.shape[0];
  const Outputs out = own_outputs(tokens_);
  timed("map", [&] { compress(context_, ids, out); });
  timed("window", [&] { make_window(context_, tokens_, out); });
  timed("hash", [&] { hash_rows(context_, tokens_, out); });
}

// What the layers below would hand over: one random row per token id and stream.
void Pipeline::fill_residual(const Tensor& ids) {
  const uint64_t stream = random_stream(config_.seed, "residual");
  const int64_t row = config_.streams * config_.width;
  auto* values = residual_.tensor.as<uint16_t>();
  parallel_for(context_, tokens_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = integer_at(ids, t) * row;
      for (int64_t i = 0; i < row; ++i) {
        values[t * row + i] = float_to_bf16(random_normal(random_bits(stream, first + i)));
      }
    }
  });
}

void Pipeline::update_streams(const Tensor& ids) {
  const Outputs out = own_outputs(tokens_);
  fill_residual(ids);
  timed("gather", [&] { gather(context_, tokens_, out); });
  timed("projection", [&] { project(context_, tokens_, out); });
  timed("gate", [&] { gate(context_, tokens_, out); });
  timed("convolution", [&] { convolve(context_, tokens_, out); });
  timed("layer", [&] { run_layer(context_, tokens_, out); });
}

void Pipeline::compare_rows(const char* op, const char* output, const Tensor& fast,
                            const Tensor& expected) {
  checks_.add(op, output, expected.shape[0],
              compare(fast, expected, default_tolerance(expected), false));
}

void Pipeline::check(const Tensor& ids, int64_t tokens, bool dense) {
  tokens = std::min(tokens, tokens_);
  const auto like = [&](const HostTensor& host) {
    Tensor shape = host.tensor;
    shape.shape[0] = tokens;
    HostTensor result;
    result.memory = Buffer(context_, bytes_of(shape));
    result.tensor = Tensor(result.memory.data(), shape.dtype, shape.shape, shape.rank);
    return result;
  };
  const Outputs fast = own_outputs(tokens);
  const HostTensor compressed = like(compressed_), window = like(window_), indices = like(indices_);
  Outputs out;
  out.compressed = compressed.tensor;
  out.window = window.tensor;
  out.indices = indices.tensor;
  compress(reference_, ids.slice(0, 0, tokens), out);
  make_window(reference_, tokens, out);
  hash_rows(reference_, tokens, out);
  compare_rows("engram.compress_ids", "compressed_ids", fast.compressed, out.compressed);
  compare_rows("engram.window", "window", fast.window, out.window);
  compare_rows("engram.hash", "indices", fast.indices, out.indices);
  if (!dense) return;

  const HostTensor embedding = like(embedding_), kv = like(kv_), gated = like(gated_),
                   convolved = like(convolved_), streams = like(streams_);
  const HostTensor fused(context_, DType::f32, {config_.streams, config_.width});
  const HostTensor statistics(context_, DType::f32, {4, tokens, config_.streams});
  const Tensor& state = conv_state_[0].tensor;
  const HostTensor next(context_, DType::f32, {1, state.shape[1], state.shape[2], state.shape[3]});
  out.embedding = embedding.tensor;
  out.kv = kv.tensor;
  out.fused = fused.tensor;
  out.gated = gated.tensor;
  out.statistics = statistics.tensor;
  out.convolved = convolved.tensor;
  out.streams = streams.tensor;
  out.conv_state = out.layer_state = next.tensor;  // ends elsewhere than the chunk: not compared
  gather(reference_, tokens, out);
  project(reference_, tokens, out);
  fuse_weights(reference_, out);
  gate(reference_, tokens, out);
  convolve(reference_, tokens, out);
  run_layer(reference_, tokens, out);
  compare_rows("engram.gather_fwd", "embedding", fast.embedding, out.embedding);
  compare_rows("engram.kv_projection_fwd", "kv", fast.kv, out.kv);
  compare_rows("engram.fused_weight", "weight_fused", fast.fused, out.fused);
  compare_rows("engram.gate_fwd", "out", fast.gated, out.gated);
  // Not alpha by itself: behind the root, a rounding of a dot near 0 is larger than the rule
  // allows.
  for (const auto& [name, at] :
       {std::pair{"dot", kDot}, {"rstd_residual", kRstdResidual}, {"rstd_key", kRstdKey}}) {
    compare_rows("engram.gate_fwd", name, fast.statistics.select(0, at),
                 out.statistics.select(0, at));
  }
  compare_rows("engram.conv_fwd", "out", fast.convolved, out.convolved);
  compare_rows("engram.layer_fwd", "out", fast.streams, out.streams);
}

}  // namespace ehc::cli
