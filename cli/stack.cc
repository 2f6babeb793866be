#include "cli/stack.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>

#include "cli/random_tensor.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/tensor_bytes.h"
#include "ehc/mhc/post.h"
#include "ehc/mhc/pre.h"
#include "ehc/mhc/seam.h"

namespace ehc::cli {

namespace {

constexpr double kLayerNormEps = 1e-6;

// Bytes that a call must move: every input once, every output once.
template <class Params>
double bytes_of_call(const Operator& op, Params params) {
  size_t bytes = 0;
  for (const TensorSpec& spec : op.schema.tensors) bytes += bytes_of(spec.access(&params));
  return static_cast<double>(bytes);
}

template <class Params>
double flops_of_call(const Operator& op, const Params& params) {
  const Arguments args{&params, nullptr, nullptr};
  FrontDoor door(op.schema, args);
  door.bind_inputs(op.derive);
  return static_cast<double>(door.flops());
}

// calc_diff (a share of the energy) that may come of a value that was rounded the other way inside
// an operator, and of what follows from it.
double allowed_difference(DType activation) { return activation == DType::f32 ? 1e-10 : 1e-6; }

}  // namespace

Stack::Stack(Context& context, const Tensor& streams, const StackConfig& config)
    : context_(context), reference_(context), streams_(streams), config_(config) {
  reference_.set_implementation("reference");
  config_.chunk = std::min(config.chunk, streams.shape[0]);
  const DType type = streams.dtype;
  const int64_t sublayers = config_.sublayers;
  const int64_t chunk = config_.chunk;
  const int64_t total = streams.shape[0];
  const int64_t n = streams.shape[1];
  const int64_t d = streams.shape[2];
  const int64_t mixes = n * n + 2 * n;
  // Zeros: gradients are added up, and memory that nothing was written to yet is slow.
  const auto zeros = [&](DType dtype, std::initializer_list<int64_t> shape) {
    HostTensor host(context, dtype, shape);
    if (host.memory.bytes() > 0) std::memset(host.memory.data(), 0, host.memory.bytes());
    return host;
  };
  const auto f32 = [&](std::initializer_list<int64_t> shape) { return zeros(DType::f32, shape); };
  const auto random = [&](const char* name, std::initializer_list<int64_t> shape, float mean,
                          float deviation) {
    HostTensor host = f32(shape);
    fill_random(context, host.tensor, config.seed, name, mean, deviation);
    return host;
  };
  // The rows that meet fn have a mean square of 1, so mixes have about that too.
  const float fn_deviation = 1 / std::sqrt(static_cast<float>(n * d));
  fn_ = random("fn", {sublayers, mixes, n * d}, 0, fn_deviation);
  norm_weight_ = random("norm_weight", {sublayers, n * d}, 1, 0.1F);
  layer_norm_weight_ = random("layer_norm_weight", {sublayers, d}, 0, 1);
  scale_ = f32({sublayers, 3});
  base_ = f32({sublayers, mixes});
  for (int64_t l = 0; l < sublayers; ++l) {
    auto* scale = scale_.tensor.as<float>() + 3 * l;
    scale[0] = scale[1] = 1;
    scale[2] = static_cast<float>(config.spread);
    // By which a stream mostly stays where it is.
    for (int64_t i = 0; i < n; ++i) {
      base_.tensor.as<float>()[l * mixes + 2 * n + i * n + i] = 1;
    }
  }
  grad_fn_ = f32({sublayers, mixes, n * d});
  grad_scale_ = f32({sublayers, 3});
  grad_base_ = f32({sublayers, mixes});
  grad_norm_weight_ = f32({sublayers, n * d});
  grad_layer_norm_weight_ = f32({sublayers, d});

  pre_ = f32({sublayers, total, n});
  post_ = f32({sublayers, total, n});
  comb_logits_ = f32({sublayers, total, n, n});
  comb_ = f32({sublayers, total, n, n});
  new_streams_ = zeros(type, {total, n, d});
  // Until the backward pass has used it up: stands for what the head of a model would hand back.
  grad_streams_ = zeros(type, {total, n, d});
  fill_random(context, grad_streams_.tensor, config.seed, "grad_streams", 0, 1);

  residuals_ = zeros(type, {sublayers - 1, chunk, n, d});
  layer_input_ = zeros(type, {sublayers, chunk, d});
  layer_output_ = zeros(type, {sublayers, chunk, d});
  mixes_ = f32({sublayers, chunk, mixes});
  mul_ = f32({sublayers, chunk, mixes});
  sqr_ = f32({sublayers, chunk});
  grad_residual_ = zeros(type, {2, chunk, n, d});
  grad_post_ = f32({2, chunk, n});
  grad_comb_ = f32({2, chunk, n, n});
  grad_layer_output_ = zeros(type, {1, chunk, d});
  grad_layer_input_ = zeros(type, {1, chunk, d});

  times_.resize(kStages);
  const auto name = [&](Stage stage, const char* text, const char* op) {
    times_[stage].name = text;
    times_[stage].op = op;
  };
  name(kEntry, "entry", "mhc.pre_fwd");
  name(kSeam, "seam", "mhc.seam_classic_fwd");
  name(kExit, "exit", "mhc.post_fwd");
  name(kLayer, "layer", "");
  name(kExitBackward, "exit back", "mhc.post_bwd");
  name(kSeamBackward, "seam back", "mhc.seam_classic_bwd");
  name(kEntryBackward, "entry back", "mhc.pre_bwd");
  name(kLayerBackward, "layer back", "");
  const auto row = static_cast<double>(d) * static_cast<double>(size_of(type));
  times_[kLayer].bytes_per_token = 2 * row;
  times_[kLayerBackward].bytes_per_token = 3 * row;
  passes_.resize(2);
  passes_[0].name = "forward";
  passes_[1].name = "backward";
}

Tensor Stack::residual(int64_t sublayer) const {
  return sublayer == 0 ? streams_.slice(0, begin_, begin_ + tokens_)
                       : rows_of(residuals_, sublayer - 1);
}

mhc::MixWeights Stack::weights(int64_t sublayer) const {
  return {.fn = fn_.tensor.select(0, sublayer),
          .scale = scale_.tensor.select(0, sublayer),
          .base = base_.tensor.select(0, sublayer),
          .norm_weight = norm_weight_.tensor.select(0, sublayer)};
}

mhc::MixGradients Stack::gradients(int64_t sublayer) const {
  return {.grad_fn = grad_fn_.tensor.select(0, sublayer),
          .grad_scale = grad_scale_.tensor.select(0, sublayer),
          .grad_base = grad_base_.tensor.select(0, sublayer),
          .grad_norm_weight = grad_norm_weight_.tensor.select(0, sublayer)};
}

mhc::MixState Stack::state(int64_t sublayer) const {
  return {.pre = tokens_of(pre_, sublayer),
          .mixes = rows_of(mixes_, sublayer),
          .mul = rows_of(mul_, sublayer),
          .sqr = rows_of(sqr_, sublayer),
          .comb_logits = tokens_of(comb_logits_, sublayer),
          .comb = tokens_of(comb_, sublayer)};
}

mhc::MixRules Stack::rules() const {
  return {.norm_eps = config_.mix.norm_eps,
          .pre_eps = config_.mix.pre_eps,
          .post_mult = config_.mix.post_mult,
          .repeat = config_.mix.repeat,
          .sinkhorn_eps = config_.mix.sinkhorn_eps,
          .convention = config_.mix.convention};
}

template <class Body>
void Stack::timed(Stage stage, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  times_[stage].add(tokens_, seconds);
  chunk_seconds_[stage] += seconds;
}

template <class Params>
void Stack::call(Stage stage, const Params& params) {
  StageTime& time = times_[stage];
  timed(stage, [&] { call_(context_, time.op, params); });
  time.implementation = call_.implementation();
  if (begin_ > 0) return;
  const Operator& op = *find_operator(time.op);
  time.bytes_per_token = bytes_of_call(op, params) / static_cast<double>(tokens_);
  time.flop_per_token = flops_of_call(op, params) / static_cast<double>(tokens_);
  check(op, params);
}

// The first tokens once more, by the reference. Sums over tokens are not compared: it has fewer.
template <class Params>
void Stack::check(const Operator& op, const Params& params) {
  const int64_t count = std::min(config_.check_tokens, tokens_);
  if (count == 0) return;
  struct Output {
    std::string name;
    Tensor fast, expected;
  };
  Params sample = params;
  std::vector<Output> outputs;
  std::deque<Buffer> memory;
  for (const TensorSpec& spec : op.schema.tensors) {
    Tensor& t = spec.access(&sample);
    if (!t) continue;
    const bool is_per_token = spec.shape.leads_with_tokens();
    if (is_per_token) t = t.slice(0, 0, count);
    if (!spec.is_output) continue;
    const Tensor fast = t;
    memory.emplace_back(context_, bytes_of(fast));
    t = Tensor(memory.back().data(), fast.dtype, fast.shape, fast.rank);
    if (is_per_token) outputs.push_back({std::string(spec.name), fast, t});
  }
  call_(reference_, op.schema.name, sample);
  for (const Output& output : outputs) {
    Comparison result =
        compare(output.fast, output.expected, default_tolerance(output.expected), false);
    result.equal = result.calc_diff <= allowed_difference(streams_.dtype);
    checks_.add(std::string(op.schema.name), output.name, count, result);
  }
}

// layer_output = tanh(layer_input)
void Stack::run_layer(int64_t sublayer) {
  const Tensor input = rows_of(layer_input_, sublayer);
  const Tensor output = rows_of(layer_output_, sublayer);
  timed(kLayer, [&] {
    parallel_for(context_, input.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float x = load_float(input.data, input.dtype, i);
        store_float(output.data, output.dtype, i, std::tanh(x));
      }
    });
  });
}

void Stack::run_layer_backward(int64_t sublayer) {
  const Tensor output = rows_of(layer_output_, sublayer);
  const Tensor grad_output = rows_of(grad_layer_output_, 0);
  const Tensor grad_input = rows_of(grad_layer_input_, 0);
  timed(kLayerBackward, [&] {
    parallel_for(context_, output.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float y = load_float(output.data, output.dtype, i);
        const float g = load_float(grad_output.data, grad_output.dtype, i);
        store_float(grad_input.data, grad_input.dtype, i, g * (1 - y * y));
      }
    });
  });
}

void Stack::forward() {
  const int64_t last = config_.sublayers - 1;
  call<mhc::PreForward>(kEntry, {.residual = residual(0),
                                 .weights = weights(0),
                                 .layer_norm_weight = layer_norm_weight_.tensor.select(0, 0),
                                 .layer_input = rows_of(layer_input_, 0),
                                 .post = tokens_of(post_, 0),
                                 .state = state(0),
                                 .layer_norm_eps = kLayerNormEps,
                                 .rules = rules()});
  run_layer(0);
  for (int64_t l = 1; l <= last; ++l) {
    call<mhc::SeamClassicForward>(kSeam,
                                  {.layer_output = rows_of(layer_output_, l - 1),
                                   .residual = residual(l - 1),
                                   .post = tokens_of(post_, l - 1),
                                   .comb = tokens_of(comb_, l - 1),
                                   .weights = weights(l),
                                   .layer_norm_weight = layer_norm_weight_.tensor.select(0, l),
                                   .new_residual = residual(l),
                                   .layer_input = rows_of(layer_input_, l),
                                   .next_post = tokens_of(post_, l),
                                   .next_state = state(l),
                                   .layer_norm_eps = kLayerNormEps,
                                   .rules = rules()});
    run_layer(l);
  }
  call<mhc::PostForward>(kExit,
                         {.layer_output = rows_of(layer_output_, last),
                          .residual = residual(last),
                          .post = tokens_of(post_, last),
                          .comb = tokens_of(comb_, last),
                          .new_residual = new_streams_.tensor.slice(0, begin_, begin_ + tokens_)});
}

void Stack::backward() {
  const int64_t last = config_.sublayers - 1;
  int64_t at = 0;  // which half of the gradients is that of the boundary last reached
  const Tensor start = grad_streams_.tensor.slice(0, begin_, begin_ + tokens_);
  call<mhc::PostBackward>(kExitBackward, {.grad_new_residual = start,
                                          .layer_output = rows_of(layer_output_, last),
                                          .residual = residual(last),
                                          .post = tokens_of(post_, last),
                                          .comb = tokens_of(comb_, last),
                                          .grad_layer_output = rows_of(grad_layer_output_, 0),
                                          .grad_residual = rows_of(grad_residual_, at),
                                          .grad_post = rows_of(grad_post_, at),
                                          .grad_comb = rows_of(grad_comb_, at)});
  for (int64_t l = last; l > 0; --l, at = 1 - at) {
    run_layer_backward(l);
    const Tensor grad_layer_norm = grad_layer_norm_weight_.tensor.select(0, l);
    call<mhc::SeamClassicBackward>(kSeamBackward,
                                   {.grad_new_residual = rows_of(grad_residual_, at),
                                    .grad_layer_input = rows_of(grad_layer_input_, 0),
                                    .grad_next_post = rows_of(grad_post_, at),
                                    .grad_next_comb = rows_of(grad_comb_, at),
                                    .layer_output = rows_of(layer_output_, l - 1),
                                    .residual = residual(l - 1),
                                    .post = tokens_of(post_, l - 1),
                                    .comb = tokens_of(comb_, l - 1),
                                    .weights = weights(l),
                                    .layer_norm_weight = layer_norm_weight_.tensor.select(0, l),
                                    .targets = gradients(l),
                                    .grad_layer_norm_weight_acc = grad_layer_norm,
                                    .new_residual = residual(l),
                                    .next_state = state(l),
                                    .grad_layer_output = rows_of(grad_layer_output_, 0),
                                    .grad_residual = rows_of(grad_residual_, 1 - at),
                                    .grad_post = rows_of(grad_post_, 1 - at),
                                    .grad_comb = rows_of(grad_comb_, 1 - at),
                                    .gradients = gradients(l),
                                    .grad_layer_norm_weight = grad_layer_norm,
                                    .layer_norm_eps = kLayerNormEps,
                                    .rules = rules()});
  }
  run_layer_backward(0);
  const Tensor grad_layer_norm = grad_layer_norm_weight_.tensor.select(0, 0);
  call<mhc::PreBackward>(kEntryBackward,
                         {.grad_layer_input = rows_of(grad_layer_input_, 0),
                          .grad_post = rows_of(grad_post_, at),
                          .grad_comb = rows_of(grad_comb_, at),
                          .residual = residual(0),
                          .weights = weights(0),
                          .layer_norm_weight = layer_norm_weight_.tensor.select(0, 0),
                          .grad_residual_acc = rows_of(grad_residual_, at),
                          .targets = gradients(0),
                          .grad_layer_norm_weight_acc = grad_layer_norm,
                          .state = state(0),
                          .grad_residual = start,
                          .gradients = gradients(0),
                          .grad_layer_norm_weight = grad_layer_norm,
                          .layer_norm_eps = kLayerNormEps,
                          .rules = rules()});
}

int64_t Stack::run_chunk() {
  begin_ += tokens_;
  tokens_ = std::min(config_.chunk, streams_.shape[0] - begin_);
  chunk_seconds_.assign(kStages, 0);
  forward();
  backward();
  add_pass(passes_[0], kEntry, kLayer);
  add_pass(passes_[1], kExitBackward, kLayerBackward);
  return begin_ + tokens_;
}

// Stages [first, end) as one, for the chunk that is done.
void Stack::add_pass(StageTime& pass, size_t first, size_t end) {
  double seconds = 0;
  pass.bytes_per_token = 0;
  pass.flop_per_token = 0;
  for (size_t stage = first; stage < end; ++stage) {
    const StageTime& time = times_[stage];
    const double calls = static_cast<double>(time.tokens) / static_cast<double>(begin_ + tokens_);
    seconds += chunk_seconds_[stage];
    pass.bytes_per_token += calls * time.bytes_per_token;
    pass.flop_per_token += calls * time.flop_per_token;
  }
  pass.add(tokens_, seconds);
}

std::vector<tables::NamedTensor> Stack::results() const {
  return {{"streams", new_streams_.tensor},
          {"grad_streams", grad_streams_.tensor},
          {"pre", pre_.tensor},
          {"post", post_.tensor},
          {"comb_logits", comb_logits_.tensor},
          {"comb", comb_.tensor},
          {"grad_fn", grad_fn_.tensor},
          {"grad_scale", grad_scale_.tensor},
          {"grad_base", grad_base_.tensor},
          {"grad_norm_weight", grad_norm_weight_.tensor},
          {"grad_layer_norm_weight", grad_layer_norm_weight_.tensor}};
}

}  // namespace ehc::cli
